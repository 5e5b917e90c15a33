//! `spec.checkpoint`: where the servers keep the job's state, how often, and how much of it.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::names;
use crate::checkpoint::CheckpointPolicy;

/// Where and how the servers keep parameters, optimizer state and every trainer's position. A server
/// that is lost then takes the job back to the newest checkpoint instead of losing its part.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CheckpointSpec {
    /// A volume claim that the operator makes, named after the job; it goes with the job. Give this,
    /// existingClaim or objectStore.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_claim: Option<VolumeClaim>,
    /// Name of a volume claim that exists; it outlives the job, so that another job can go on from
    /// the checkpoints in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub existing_claim: Option<String>,
    /// A folder in an object store, which outlives the job and needs no volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object_store: Option<ObjectStore>,
    /// Folder in the volume or in the object store's folder. Default: the job's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024), regex(pattern = r"^[^/].*$"))]
    pub path: Option<String>,
    /// Seconds between two checkpoints. Training goes on while one is written. Default 60.
    #[serde(default = "default_interval")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub interval_seconds: u64,
    /// Complete checkpoints to keep; older ones are removed. Default 3.
    #[serde(default = "default_keep")]
    #[schemars(range(min = 1, max = 10_000))]
    pub keep: u32,
    /// Begin from the newest checkpoint that another job has left in the folder, if there is one. A job with checkpoints of
    /// its own goes on with those in any case. Default true.
    #[serde(default = "default_resume")]
    pub resume: bool,
}

/// A claim that the operator makes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VolumeClaim {
    /// Size, for example 10Gi: (keep + 1) x parameters x 4 bytes x (1 + the optimizer's slots).
    #[schemars(regex(pattern = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$"))]
    pub size: String,
    /// Storage class. Default: the cluster's default class.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage_class_name: Option<String>,
    /// ReadWriteOnce (default) keeps all servers on one node; ReadWriteMany lets them spread, where the
    /// storage class can do it.
    #[serde(default)]
    pub access_mode: AccessMode,
}

/// A folder in a bucket of S3, Google Cloud Storage or Azure Blob Storage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ObjectStore {
    /// s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or az://CONTAINER/FOLDER. The bucket must exist.
    #[schemars(length(max = 1024), regex(pattern = r"^(s3|gs|az)://[^/?#@]+(/[^/?#@]+)*/?$"))]
    pub url: String,
    /// Name of a Secret whose keys become variables of the servers: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION,
    /// AWS_ENDPOINT; GOOGLE_SERVICE_ACCOUNT_KEY; AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY. Default: none, for
    /// workload identity by the service account of ps.template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub secret: Option<String>,
}

/// Who may mount the volume at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum AccessMode {
    /// The pods of one node.
    #[default]
    ReadWriteOnce,
    /// All pods.
    ReadWriteMany,
}

impl AccessMode {
    /// The name that Kubernetes knows.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ReadWriteOnce => "ReadWriteOnce",
            Self::ReadWriteMany => "ReadWriteMany",
        }
    }
}

impl CheckpointSpec {
    /// Returns the part that the servers receive.
    #[must_use]
    pub fn policy(&self) -> CheckpointPolicy {
        CheckpointPolicy { interval_seconds: self.interval_seconds, keep: self.keep, resume: self.resume }
    }

    /// Returns the name of the volume claim of `job`: the one that the user brings, or the one that is made for it; none if
    /// its checkpoints are in an object store.
    #[must_use]
    pub fn claim(&self, job: &str) -> Option<String> {
        let made = || self.object_store.is_none().then(|| names::claim(job));
        self.existing_claim.clone().or_else(made)
    }

    /// Returns the URL of the folder of `job`, if its checkpoints are in an object store.
    #[must_use]
    pub fn object_store_folder(&self, job: &str) -> Option<String> {
        let store = self.object_store.as_ref()?;
        Some(format!("{}/{}", store.url.trim_end_matches('/'), self.folder(job).trim_matches('/')))
    }

    /// Returns the folder of `job` in the volume, or in the folder of checkpoints on a machine.
    #[must_use]
    pub fn folder<'a>(&'a self, job: &'a str) -> &'a str {
        self.path.as_deref().unwrap_or(job)
    }
}

fn default_interval() -> u64 {
    CheckpointPolicy::default().interval_seconds
}
fn default_keep() -> u32 {
    CheckpointPolicy::default().keep
}
fn default_resume() -> bool {
    CheckpointPolicy::default().resume
}
