//! The small disk: a file system in memory on the control plane's node, which the schedule leaves on, as a local volume
//! that the servers of one kind of job keep their checkpoints in.

use anyhow::{Context, Result};
use serde_json::json;

use crate::command::run;
use crate::namespace::TestNamespace;
use crate::nodes;

/// Name of the volume claim.
pub const CLAIM: &str = "small-disk";
/// Name of the volume, and of the storage class that only it has.
const VOLUME: &str = "psjobs-soak-small-disk";
/// Its folder on the node.
const FOLDER: &str = "/mnt/psjobs-soak";
/// Room for the checkpoints of a job and those of the next, as Kubernetes and as mount write it.
const SIZE: &str = "64Mi";
const BYTES: &str = "64m";

/// The small disk.
#[derive(Debug)]
pub struct Disk {
    node: String,
}

impl Disk {
    /// Makes the disk, with a claim in the namespace; the one of an earlier soak is made anew.
    ///
    /// # Errors
    /// If the node or the cluster refuses.
    pub async fn make(namespace: &TestNamespace) -> Result<Self> {
        let disk = Self { node: nodes::control_plane(&namespace.cluster).await? };
        disk.remove(namespace).await?;
        let mount = format!("mkdir -p {FOLDER} && mount -t tmpfs -o size={BYTES},mode=1777 tmpfs {FOLDER}");
        disk.shell(&mount).await?;
        let capacity = json!({"storage": SIZE});
        let here = json!({"key": "kubernetes.io/hostname", "operator": "In", "values": [disk.node]});
        let volume = json!({
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": VOLUME},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "capacity": capacity,
                "storageClassName": VOLUME,
                "local": {"path": FOLDER},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
            },
        });
        let claim = json!({
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": CLAIM},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": capacity},
                "storageClassName": VOLUME,
                "volumeName": VOLUME,
            },
        });
        namespace.cluster.kubectl_with_input(&["apply", "--filename", "-"], &volume.to_string()).await?;
        namespace.apply_text(&claim.to_string()).await?;
        Ok(disk)
    }

    /// Fills the disk to its last byte.
    ///
    /// # Errors
    /// If the node does not answer.
    pub async fn fill(&self) -> Result<()> {
        // dd ends with an error when no room is left.
        self.shell(&format!("dd if=/dev/zero of={FOLDER}/full bs=64k 2>/dev/null; test -e {FOLDER}/full")).await
    }

    /// Gives the room back.
    ///
    /// # Errors
    /// If the node does not answer.
    pub async fn mend(&self) -> Result<()> {
        self.shell(&format!("rm -f {FOLDER}/full")).await
    }

    /// Removes a deleted job's folder: the claim outlives the job.
    ///
    /// # Errors
    /// If the node does not answer.
    pub async fn forget(&self, job: &str) -> Result<()> {
        self.shell(&format!("rm -rf {FOLDER}/{job}")).await
    }

    /// Removes claim, volume and file system, as far as they are there.
    ///
    /// # Errors
    /// If the node or the cluster refuses.
    pub async fn remove(&self, namespace: &TestNamespace) -> Result<()> {
        namespace.kubectl(&["delete", "pvc", CLAIM, "--ignore-not-found"]).await?;
        namespace.cluster.kubectl(&["delete", "pv", VOLUME, "--ignore-not-found"]).await?;
        self.shell(&format!("! mountpoint --quiet {FOLDER} || umount {FOLDER}")).await
    }

    async fn shell(&self, command: &str) -> Result<()> {
        let done = run("docker", &["exec", &self.node, "sh", "-c", command]).await;
        done.map(drop).with_context(|| format!("the small disk of {}", self.node))
    }
}
