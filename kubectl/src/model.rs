//! `kubectl psjob model`: fetches the trained model from the job's volume.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use kube::runtime::conditions::is_pod_running;
use kube::runtime::wait::await_condition;
use psjobs::BadInput;
use psjobs_api::crd::{ParameterServerJob, names};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::Command;

use crate::connection::{Cluster, ConnectionArgs};

/// Where the pod that reads has the volume.
const MOUNT: &str = "/checkpoints";
/// Time for that pod to start, in which its image may have to be pulled.
const START: Duration = Duration::from_secs(120);
/// Seconds after which it ends by itself.
const LIFE: u32 = 3600;

/// Fetch the trained model of a job as a safetensors file
///
/// A pod of the job's own image reads it from the volume of the checkpoints, and is deleted afterwards. The job may have
/// ended, and its pods may be gone. Needs the rights to create pods and to exec in them.
#[derive(Debug, Args)]
pub struct ModelArgs {
    /// Name of the job
    name: String,
    /// The file to write; by default NAME.safetensors
    #[arg(long, short)]
    output: Option<PathBuf>,
    /// Replace the file if it is there
    #[arg(long)]
    force: bool,
}

impl ModelArgs {
    pub async fn run(self, connection: &ConnectionArgs) -> anyhow::Result<u8> {
        let file = self.output.clone().unwrap_or_else(|| PathBuf::from(format!("{}.safetensors", self.name)));
        if file.exists() && !self.force {
            return Err(BadInput::new(format!("{} is there already; --force replaces it", file.display())).into());
        }
        let cluster = connection.open().await?;
        let job = cluster.job(&self.name).await?;
        let Some(model) = job.status.as_ref().and_then(|status| status.model.as_ref()) else {
            return Err(BadInput::new(format!(
                "{0} has no model to fetch: a job exports one when it succeeds, if it keeps checkpoints \
                 (spec.checkpoint); `kubectl psjob why {0}{1}` says how far it is",
                self.name,
                connection.as_flags()
            ))
            .into());
        };
        let pods = Api::<Pod>::namespaced(cluster.client.clone(), &cluster.namespace);
        let pod: Pod = serde_json::from_value(reader(&self.name, &job)?)?;
        let pod =
            pods.create(&PostParams::default(), &pod).await.map_err(|error| cluster.explain(error, &self.name))?;
        let pod = pod.metadata.name.context("a pod that was created has a name")?;
        let fetched = tokio::select! {
            fetched = fetch(connection, &cluster, &pods, &pod, &model.path, &file) => fetched,
            _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted; {} is not written", file.display())),
        };
        // It ends by itself where the cluster does not answer.
        pods.delete(&pod, &DeleteParams::background()).await.ok();
        println!("{} has the model of {}, {} bytes", file.display(), self.name, fetched?);
        Ok(0)
    }
}

/// Waits for the pod and copies the file; returns its size. The file is there as a whole or not at all.
async fn fetch(
    connection: &ConnectionArgs,
    cluster: &Cluster,
    pods: &Api<Pod>,
    pod: &str,
    path: &str,
    file: &Path,
) -> anyhow::Result<u64> {
    eprintln!("waiting for pod {pod}, which reads the volume");
    let runs = tokio::time::timeout(START, await_condition(pods.clone(), pod, is_pod_running())).await;
    let Ok(runs) = runs else { bail!("{}", late(pods, pod).await) };
    runs.context("the cluster did not answer as it should")?;
    // Says the size first, by which a copy that was cut off is told from a whole one.
    let script = "stat -c %s \"$1\" && exec cat \"$1\"";
    let mut kubectl = Command::new("kubectl")
        .args(["exec", pod, "--namespace", &cluster.namespace])
        .args(connection.place())
        .args(["--", "sh", "-c", script, "sh", &format!("{MOUNT}/{path}")])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .context("kubectl does not start; put it on PATH")?;
    let mut stream = BufReader::with_capacity(1 << 20, kubectl.stdout.take().context("standard output is piped")?);
    let mut size = String::new();
    stream.read_line(&mut size).await?;
    let part = file.with_extension("part");
    let copied = copy(&mut stream, &part, size.trim().parse().ok()).await;
    let ended = kubectl.wait().await?;
    let result = match copied {
        Ok(size) if ended.success() => {
            tokio::fs::rename(&part, file).await.map(|()| size).context("cannot name the file")
        }
        Ok(_) => Err(anyhow::anyhow!("kubectl exec ended with {ended}; its words are above")),
        Err(error) => Err(error),
    };
    if result.is_err() {
        tokio::fs::remove_file(&part).await.ok();
    }
    result
}

/// Copies a stream of `size` bytes into a file.
async fn copy(stream: &mut (impl tokio::io::AsyncRead + Unpin), file: &Path, size: Option<u64>) -> anyhow::Result<u64> {
    let size = size.context("the model cannot be read in the pod")?;
    let mut out = tokio::fs::File::create(file).await.with_context(|| format!("cannot create {}", file.display()))?;
    let mut buffer = vec![0; 1 << 20];
    let (mut copied, mut shown) = (0, std::time::Instant::now());
    loop {
        let count = stream.read(&mut buffer).await?;
        if count == 0 {
            break;
        }
        out.write_all(&buffer[..count]).await.with_context(|| format!("cannot write {}", file.display()))?;
        copied += count as u64;
        if shown.elapsed() > Duration::from_secs(2) {
            eprintln!("{} of {} MB", copied / 1_000_000, size / 1_000_000);
            shown = std::time::Instant::now();
        }
    }
    out.sync_all().await?;
    ensure!(copied == size, "the connection broke after {copied} of {size} bytes; try again");
    Ok(size)
}

/// Why a pod has not started.
async fn late(pods: &Api<Pod>, pod: &str) -> String {
    let found = pods.get_opt(pod).await.ok().flatten();
    let messages = found.and_then(|found| found.status).map(|status| {
        let conditions = status.conditions.unwrap_or_default().into_iter().filter_map(|condition| condition.message);
        let containers = status.container_statuses.unwrap_or_default();
        let waiting = containers.into_iter().filter_map(|container| container.state?.waiting?.message);
        conditions.chain(waiting).collect::<Vec<_>>().join("; ")
    });
    format!(
        "pod {pod}, which reads the volume, has not started in {} s: {}",
        START.as_secs(),
        messages.filter(|messages| !messages.is_empty()).unwrap_or_else(|| "no reason is known".into())
    )
}

/// A pod with the volume of the job's checkpoints, which ends by itself, and with the job.
fn reader(name: &str, job: &ParameterServerJob) -> anyhow::Result<Value> {
    let checkpoint = job.spec.checkpoint.as_ref().context("a job with a model has checkpoints")?;
    let claim = checkpoint.existing_claim.clone().unwrap_or_else(|| names::claim(name));
    let template = job.spec.trainer.template.spec.as_ref().context("the template has a spec")?;
    let image = template
        .containers
        .first()
        .and_then(|container| container.image.clone())
        .context("the trainer has an image")?;
    let mount = json!({"name": "checkpoints", "mountPath": MOUNT, "readOnly": true});
    // The strictest of Kubernetes' pod security standards asks for these.
    let security = json!({
        "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": true,
        "seccompProfile": {"type": "RuntimeDefault"},
    });
    let container = json!({
        "name": "read", "image": image, "command": ["sleep", LIFE.to_string()], "volumeMounts": [mount], "securityContext": security,
    });
    let owner = json!({
        "apiVersion": format!("{}/{}", psjobs_api::crd::GROUP, psjobs_api::crd::VERSION),
        "kind": psjobs_api::crd::KIND, "name": name, "uid": job.metadata.uid,
    });
    Ok(json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"generateName": format!("{name}-read-"), "ownerReferences": [owner]},
        "spec": {
            "restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "activeDeadlineSeconds": LIFE,
            "imagePullSecrets": template.image_pull_secrets, "containers": [container],
            "volumes": [{"name": "checkpoints", "persistentVolumeClaim": {"claimName": claim}}],
        },
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_copy_that_was_cut_off_is_an_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("model.part");
        assert_eq!(copy(&mut &b"model"[..], &file, Some(5)).await.expect("whole"), 5);
        assert_eq!(std::fs::read(&file).expect("written"), b"model");
        let cut = copy(&mut &b"mod"[..], &file, Some(5)).await.expect_err("cut off");
        assert!(cut.to_string().contains("after 3 of 5 bytes"), "{cut}");
        assert!(copy(&mut &b""[..], &file, None).await.is_err(), "no size was said");
    }
}
