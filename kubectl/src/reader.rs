//! Reads what a job keeps, its checkpoints and its model, through a pod that is there for the time of a command: one that mounts
//! the volume, or has the credentials of the object store.

mod catalog;
mod place;
mod stream;

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use kube::runtime::conditions::is_pod_running;
use kube::runtime::wait::await_condition;
use psjobs_api::Role;
use psjobs_api::crd::{ParameterServerJob, names, store_pod};
use tokio::io::{AsyncReadExt as _, BufReader};
use tokio::process::Command;

pub use self::catalog::Checkpoint;
use self::place::Place;
use self::stream::{Failure, receive};
use crate::connection::{Cluster, ConnectionArgs};

/// Time for the pod to start, in which its image may have to be pulled.
const START: Duration = Duration::from_secs(120);
/// Time for kubectl to end when what it has sent is not right.
const END: Duration = Duration::from_secs(5);

/// A pod that runs, and can read what a job keeps.
pub struct Reader<'a> {
    connection: &'a ConnectionArgs,
    namespace: &'a str,
    pod: String,
    place: Place,
}

/// Starts a pod that reads what `job` keeps, does `work`, and deletes the pod. `image` is that of the pod, if the user names one.
///
/// # Errors
/// [`BadInput`](psjobs::BadInput) if the job keeps no checkpoints or the cluster refuses the pod; if the pod does not start,
/// `work` fails, or Ctrl-C ends it.
pub async fn with_reader<T>(
    connection: &ConnectionArgs,
    cluster: &Cluster,
    job: &ParameterServerJob,
    image: Option<&str>,
    work: impl AsyncFnOnce(&Reader<'_>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let name = job.metadata.name.clone().unwrap_or_default();
    let pods = Api::<Pod>::namespaced(cluster.client.clone(), &cluster.namespace);
    let (place, pod) = place::of(job, image, image_of_server(&pods, &name).await)?;
    let pod: Pod = serde_json::from_value(pod).context("the template of the servers cannot be used")?;
    let pod = pods.create(&PostParams::default(), &pod).await.map_err(|error| cluster.explain(error, &name))?;
    let pod = pod.metadata.name.context("a pod that was created has a name")?;
    let reader = Reader { connection, namespace: &cluster.namespace, pod, place };
    let done = tokio::select! {
        done = async {
            reader.start(&pods).await?;
            work(&reader).await
        } => done,
        _ = tokio::signal::ctrl_c() => Err(anyhow!("interrupted")),
    };
    // It ends by itself where the cluster does not answer.
    pods.delete(&reader.pod, &DeleteParams::background()).await.ok();
    done
}

/// Returns the image of a job's server 0, if its pod is there. Without the right to look it is not known.
async fn image_of_server(pods: &Api<Pod>, job: &str) -> Option<String> {
    let server = pods.get_opt(&names::pod(job, Role::Server, 0)).await.ok().flatten()?;
    server.spec?.containers.into_iter().next()?.image
}

impl Reader<'_> {
    async fn start(&self, pods: &Api<Pod>) -> anyhow::Result<()> {
        eprintln!("waiting for pod {}, which reads {}", self.pod, self.kept_in());
        let runs = tokio::time::timeout(START, await_condition(pods.clone(), &self.pod, is_pod_running())).await;
        let Ok(runs) = runs else { bail!("{}", late(pods, &self.pod, self.kept_in()).await) };
        runs.map(drop).context("the cluster did not answer as it should")
    }

    /// Says where the job keeps its checkpoints.
    pub fn kept_in(&self) -> &'static str {
        match self.place {
            Place::Volume => "the volume",
            Place::Store { .. } => "the object store",
        }
    }

    /// Returns the complete checkpoints in the job's folder, the newest run and step first.
    ///
    /// # Errors
    /// With the words of the pod, if the folder cannot be read.
    pub async fn checkpoints(&self, folder: &str) -> anyhow::Result<Vec<Checkpoint>> {
        let ended = self.exec(self.place.list(folder)).output().await.context(NO_KUBECTL)?;
        ensure!(ended.status.success(), "{}", said(&ended.stderr, &ended.status.to_string()));
        let printed = String::from_utf8(ended.stdout).context("the pod printed something that is no text")?;
        match self.place {
            Place::Volume => catalog::of_lines(&printed),
            Place::Store { .. } => catalog::of_json(&printed),
        }
    }

    /// Copies the file at `path` to `file`, which is then there as a whole or not at all. Returns its size.
    ///
    /// # Errors
    /// With the words of the pod, if it cannot be read; if it cannot be written, or the connection breaks.
    pub async fn copy(&self, path: &str, file: &Path) -> anyhow::Result<u64> {
        let mut kubectl = self.exec(self.place.read(path)).spawn().context(NO_KUBECTL)?;
        let mut stream = BufReader::with_capacity(1 << 20, kubectl.stdout.take().context("standard output is piped")?);
        let mut errors = kubectl.stderr.take().context("standard error is piped")?;
        let errors = tokio::spawn(async move {
            let mut bytes = Vec::new();
            // Words that cannot be read are none.
            errors.read_to_end(&mut bytes).await.ok();
            bytes
        });
        let received = receive(&mut stream, file, matches!(self.place, Place::Store { .. })).await;
        drop(stream);
        let torn = match received {
            Ok(size) => return Ok(size),
            Err(Failure::Here(error)) => return Err(error),
            Err(Failure::Torn(torn)) => torn,
        };
        // The pod says why on standard error; kubectl itself goes when it is dropped.
        let ended = tokio::time::timeout(END, async { (kubectl.wait().await, errors.await) }).await;
        let Ok((Ok(status), Ok(errors))) = ended else { bail!(torn) };
        if status.success() {
            bail!(torn);
        }
        bail!(said(&errors, &torn))
    }

    fn exec(&self, words: Vec<String>) -> Command {
        let mut command = Command::new("kubectl");
        command.args(["exec", &self.pod, "--container", store_pod::CONTAINER, "--namespace", self.namespace]);
        command.args(self.connection.place()).arg("--").args(words);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        command
    }
}

const NO_KUBECTL: &str = "kubectl does not start; put it on PATH";

/// Returns the words of a program in the pod, on its standard error, and what to do where psjobs itself is missing there;
/// `otherwise` if it said nothing.
fn said(errors: &[u8], otherwise: &str) -> String {
    let errors = String::from_utf8_lossy(errors);
    // kubectl adds the exit code.
    let lines = errors.lines().filter(|line| !line.starts_with("command terminated with exit code"));
    let words = lines.map(|line| line.strip_prefix("psjobs-worker: ").unwrap_or(line)).collect::<Vec<_>>();
    let words = words.join("\n").trim().to_owned();
    if words.is_empty() {
        return format!("kubectl exec has failed: {otherwise}");
    }
    let has_no_store = ["unrecognized subcommand", "executable file not found", "no such file or directory"];
    match has_no_store.iter().any(|sign| words.contains(sign)) {
        true => format!("{words}\nthe image of the pod has no `psjobs-worker store`; --image names one that has"),
        false => words,
    }
}

/// Returns why a pod has not started.
async fn late(pods: &Api<Pod>, pod: &str, place: &str) -> String {
    let found = pods.get_opt(pod).await.ok().flatten();
    let messages = found.and_then(|found| found.status).map(|status| {
        let conditions = status.conditions.unwrap_or_default().into_iter().filter_map(|condition| condition.message);
        let containers = status.container_statuses.unwrap_or_default();
        let waiting = containers.into_iter().filter_map(|container| container.state?.waiting?.message);
        conditions.chain(waiting).collect::<Vec<_>>().join("; ")
    });
    format!(
        "pod {pod}, which reads {place}, has not started in {} s: {}; --image names another image",
        START.as_secs(),
        messages.filter(|messages| !messages.is_empty()).unwrap_or_else(|| "no reason is known".into())
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_the_pod_are_the_error() {
        let denied = "psjobs-worker: cannot read s3://bucket/x: 403 Forbidden; check the credentials\n\
                      command terminated with exit code 1\n";
        for (errors, words, has_advice) in [
            (denied, "cannot read s3://bucket/x: 403 Forbidden; check the credentials", false),
            ("cat: model: No such file or directory\n", "cat: model: No such file or directory", false),
            ("command terminated with exit code 137\n", "kubectl exec has failed: it ended", false),
            ("error: unrecognized subcommand 'store'\n", "error: unrecognized subcommand 'store'", true),
        ] {
            let found = said(errors.as_bytes(), "it ended");
            assert!(found.starts_with(words) && !found.contains("exit code"), "{errors:?}: {found}");
            assert_eq!(found.contains("--image"), has_advice, "{errors:?}: {found}");
        }
    }
}
