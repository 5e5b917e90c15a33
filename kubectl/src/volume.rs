//! Reads the volume of a job's checkpoints, through a pod of the job's own image that is there for the time of a command.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use kube::runtime::conditions::is_pod_running;
use kube::runtime::wait::await_condition;
use psjobs::BadInput;
use psjobs_api::crd::ParameterServerJob;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::Command;

use crate::connection::{Cluster, ConnectionArgs};

/// Where the pod has the volume.
const MOUNT: &str = "/checkpoints";
/// Time for the pod to start, in which its image may have to be pulled.
const START: Duration = Duration::from_secs(120);
/// Seconds after which the pod ends by itself.
const LIFE: u32 = 3600;
/// Pause between two lines about a long copy.
const PROGRESS: Duration = Duration::from_secs(2);

/// The volume of a job's checkpoints, in a pod that runs.
pub struct Volume<'a> {
    connection: &'a ConnectionArgs,
    namespace: &'a str,
    pod: String,
}

/// Starts a pod that reads the volume of `job`, does `work`, and deletes the pod.
///
/// # Errors
/// [`BadInput`] if the job keeps no checkpoints or the cluster refuses the pod; if the pod does not start, `work` fails, or
/// Ctrl-C ends it.
pub async fn with_volume<T>(
    connection: &ConnectionArgs,
    cluster: &Cluster,
    job: &ParameterServerJob,
    work: impl AsyncFnOnce(&Volume<'_>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let name = job.metadata.name.clone().unwrap_or_default();
    let pods = Api::<Pod>::namespaced(cluster.client.clone(), &cluster.namespace);
    let pod: Pod = serde_json::from_value(reader(&name, job)?)?;
    let pod = pods.create(&PostParams::default(), &pod).await.map_err(|error| cluster.explain(error, &name))?;
    let pod = pod.metadata.name.context("a pod that was created has a name")?;
    let volume = Volume { connection, namespace: &cluster.namespace, pod };
    let done = tokio::select! {
        done = async {
            volume.start(&pods).await?;
            work(&volume).await
        } => done,
        _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
    };
    // It ends by itself where the cluster does not answer.
    pods.delete(&volume.pod, &DeleteParams::background()).await.ok();
    done
}

impl Volume<'_> {
    async fn start(&self, pods: &Api<Pod>) -> anyhow::Result<()> {
        eprintln!("waiting for pod {}, which reads the volume", self.pod);
        let runs = tokio::time::timeout(START, await_condition(pods.clone(), &self.pod, is_pod_running())).await;
        let Ok(runs) = runs else { bail!("{}", late(pods, &self.pod).await) };
        runs.map(drop).context("the cluster did not answer as it should")
    }

    /// Runs a script of the shell with `arguments` in the folder of the volume; returns what it prints.
    ///
    /// # Errors
    /// If it fails.
    pub async fn run(&self, script: &str, arguments: &[&str]) -> anyhow::Result<String> {
        let ended = self.shell(script, arguments).output().await.context("kubectl does not start; put it on PATH")?;
        ensure!(ended.status.success(), "kubectl exec ended with {}; its words are above", ended.status);
        String::from_utf8(ended.stdout).context("the pod printed something that is no text")
    }

    /// Copies the file at `path` in the volume to `file`, which is then there as a whole or not at all. Returns its size.
    ///
    /// # Errors
    /// If it cannot be read or written, or the connection breaks.
    pub async fn copy(&self, path: &str, file: &Path) -> anyhow::Result<u64> {
        // Says the size first, which distinguishes a copy that was cut off from a whole one.
        let mut shell = self.shell("stat -c %s \"$1\" && exec cat \"$1\"", &[path]);
        let mut kubectl = shell.spawn().context("kubectl does not start; put it on PATH")?;
        let mut stream = BufReader::with_capacity(1 << 20, kubectl.stdout.take().context("standard output is piped")?);
        let mut size = String::new();
        stream.read_line(&mut size).await?;
        let part = file.with_added_extension("part");
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

    fn shell(&self, script: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new("kubectl");
        command.args(["exec", &self.pod, "--namespace", self.namespace]).args(self.connection.place());
        command.args(["--", "sh", "-c", &format!("cd {MOUNT} && {script}"), "sh"]).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).kill_on_drop(true);
        command
    }
}

/// Copies a stream of `size` bytes into a file.
async fn copy(stream: &mut (impl tokio::io::AsyncRead + Unpin), file: &Path, size: Option<u64>) -> anyhow::Result<u64> {
    let size = size.context("the file cannot be read in the pod")?;
    let mut out = tokio::fs::File::create(file).await.with_context(|| format!("cannot create {}", file.display()))?;
    let mut buffer = vec![0; 1 << 20];
    let (mut copied, mut shown) = (0, Instant::now());
    loop {
        let count = stream.read(&mut buffer).await?;
        if count == 0 {
            break;
        }
        out.write_all(&buffer[..count]).await.with_context(|| format!("cannot write {}", file.display()))?;
        copied += count as u64;
        if shown.elapsed() > PROGRESS {
            eprintln!("{} of {} MB", copied / 1_000_000, size / 1_000_000);
            shown = Instant::now();
        }
    }
    out.sync_all().await?;
    ensure!(copied == size, "the connection broke after {copied} of {size} bytes; try again");
    Ok(size)
}

/// Returns why a pod has not started.
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

/// Says how to read the checkpoints of a job that are in an object store.
fn in_object_store(name: &str, folder: &str) -> String {
    let (scheme, rest) = folder.split_once("://").unwrap_or_default();
    let command = match scheme {
        "s3" => format!(
            "aws s3 cp --recursive {folder} {name}-checkpoints (with --endpoint-url for a store that is not Amazon's)"
        ),
        "gs" => format!("gcloud storage cp --recursive {folder} {name}-checkpoints"),
        _ => {
            let (container, below) = rest.split_once('/').unwrap_or((rest, ""));
            format!(
                "az storage blob download-batch --source {container} --pattern '{below}/*' --destination {name}-checkpoints"
            )
        }
    };
    format!(
        "the checkpoints and the model of {name} are on no volume but in an object store, {folder}; fetch them with its own \
         program: {command}"
    )
}

/// Returns a pod with the volume of the job's checkpoints, which ends by itself, and with the job.
fn reader(name: &str, job: &ParameterServerJob) -> anyhow::Result<Value> {
    let Some(checkpoint) = &job.spec.checkpoint else {
        return Err(
            BadInput::new(format!("{name} keeps no checkpoints; spec.checkpoint says where a job keeps them")).into()
        );
    };
    if let Some(folder) = checkpoint.object_store_folder(name) {
        return Err(BadInput::new(in_object_store(name, &folder)).into());
    }
    let claim = checkpoint.claim(name).context("checkpoints that are in no object store have a claim")?;
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
