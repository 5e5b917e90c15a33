//! Reads what a job keeps, its checkpoints and its model, through a pod that is there for the time of a command: one that mounts
//! the volume, or has the credentials of the object store.

mod catalog;
mod place;
mod stream;

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail, ensure};
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use kube::runtime::wait::{self, await_condition};
use kube::runtime::watcher::Error as WatchError;
use psjobs::BadInput;
use psjobs_api::Role;
use psjobs_api::crd::{ParameterServerJob, names, store_pod};
use tokio::io::{AsyncReadExt as _, BufReader};
use tokio::process::Command;

pub use self::catalog::Checkpoint;
use self::place::Place;
use self::stream::{Failure, receive};
use crate::connection::{Cluster, ConnectionArgs};
use crate::programs::programs;

/// Time for the pod to start, in which its image may have to be pulled.
const START: Duration = Duration::from_secs(120);
/// Time for kubectl to end when what it has sent is not right.
const END: Duration = Duration::from_secs(5);
/// Time for the cluster to take the deletion of the pod.
const DELETION: Duration = Duration::from_secs(10);

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
/// [`BadInput`] if the job keeps no checkpoints, the cluster refuses the pod, or the right to watch it is missing; if the pod does
/// not start, `work` fails, or Ctrl-C ends it.
pub async fn with_reader<T>(
    connection: &ConnectionArgs,
    cluster: &Cluster,
    job: &ParameterServerJob,
    image: Option<&str>,
    work: impl AsyncFnOnce(&Reader<'_>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let name = job.metadata.name.clone().unwrap_or_default();
    let pods = Api::<Pod>::namespaced(cluster.client.clone(), &cluster.namespace);
    let (place, pod) = place::of(job, image, image_of_server(&pods, job).await)?;
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
    let params = DeleteParams::background();
    drop(tokio::time::timeout(DELETION, pods.delete(&reader.pod, &params)).await);
    done
}

/// Returns the image of a job's server 0, if its pod is there. Without the right to look it is not known.
async fn image_of_server(pods: &Api<Pod>, job: &ParameterServerJob) -> Option<String> {
    let name = names::pod(job.metadata.name.as_deref()?, job.spec.pod_role(Role::Server), 0);
    let pod = pods.get_opt(&name).await.ok().flatten()?;
    let server = programs(pod).into_iter().next()?;
    server.spec?.containers.into_iter().next()?.image
}

impl Reader<'_> {
    async fn start(&self, pods: &Api<Pod>) -> anyhow::Result<()> {
        eprintln!("waiting for pod {}, which reads {}", self.pod, self.kept_in());
        let (pod, place) = (&self.pod, self.kept_in());
        let Ok(found) = tokio::time::timeout(START, await_condition(pods.clone(), pod, has_begun)).await else {
            let found = pods.get_opt(pod).await.ok().flatten();
            let why = why_not_running(found.and_then(|found| found.status));
            let seconds = START.as_secs();
            bail!("pod {pod}, which reads {place}, has not started in {seconds} s: {why}; --image names another image");
        };
        let found = found.map_err(unwatched)?;
        if phase(found.as_ref()) == Some("Running") {
            return Ok(());
        }
        let why = why_not_running(found.and_then(|found| found.status));
        bail!("pod {pod}, which reads {place}, has ended instead of waiting: {why}; --image names another image")
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

fn phase(pod: Option<&Pod>) -> Option<&str> {
    pod?.status.as_ref()?.phase.as_deref()
}

/// Returns whether a pod runs, or has ended and will not run any more.
fn has_begun(pod: Option<&Pod>) -> bool {
    matches!(phase(pod), Some("Running" | "Succeeded" | "Failed"))
}

/// Says why a pod cannot be watched, and which right is missing where the cluster refuses.
fn unwatched(error: wait::Error) -> anyhow::Error {
    let wait::Error::ProbeFailed(cause) = &error;
    let refusal = match cause {
        WatchError::InitialListFailed(kube::Error::Api(status)) => Some(("list", status)),
        WatchError::WatchStartFailed(kube::Error::Api(status)) | WatchError::WatchError(status) => {
            Some(("watch", status))
        }
        _ => None,
    };
    match refusal {
        Some((right, status)) if status.code == 403 => {
            let words = &status.message;
            BadInput::new(format!("the right to {right} pods in the namespace is missing; ask for it ({words})")).into()
        }
        _ => anyhow::Error::new(error).context("the cluster did not answer as it should; try again"),
    }
}

/// Returns what the cluster says of a pod that does not run.
fn why_not_running(status: Option<PodStatus>) -> String {
    let status = status.unwrap_or_default();
    let conditions = status.conditions.unwrap_or_default().into_iter().filter_map(|condition| condition.message);
    let containers = status.container_statuses.unwrap_or_default().into_iter();
    let containers = containers.filter_map(|container| {
        let state = container.state?;
        let ended = state.terminated.and_then(|ended| ended.message.or(ended.reason));
        ended.or_else(|| state.waiting?.message)
    });
    let all = status.message.into_iter().chain(conditions).chain(containers);
    let words = all.filter(|message| !message.is_empty()).collect::<Vec<_>>().join("; ");
    if words.is_empty() { "no reason is known".into() } else { words }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_pod_that_has_ended_is_not_waited_for_and_says_why() {
        let container = |state: Value| {
            let name = store_pod::CONTAINER;
            json!([{"name": name, "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state}])
        };
        let waits = container(json!({"waiting": {"reason": "ErrImagePull", "message": "no image"}}));
        let ended = json!({"exitCode": 128, "reason": "StartError", "message": "exec: sleep: not found"});
        let ended = container(json!({ "terminated": ended }));
        let failed = container(json!({"terminated": {"exitCode": 1, "reason": "Error"}}));
        let unready = json!([{"type": "Ready", "status": "False", "message": "unready: [read]"}]);
        for (status, begun, why) in [
            (json!({}), false, "no reason is known"),
            (json!({"phase": "Pending", "containerStatuses": waits}), false, "no image"),
            (json!({"phase": "Running"}), true, "no reason is known"),
            (
                json!({"phase": "Failed", "conditions": unready, "containerStatuses": ended}),
                true,
                "unready: [read]; exec: sleep: not found",
            ),
            (json!({"phase": "Failed", "containerStatuses": failed}), true, "Error"),
            (json!({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}), true, "low on memory"),
            (json!({"phase": "Succeeded"}), true, "no reason is known"),
        ] {
            let pod: Pod = serde_json::from_value(json!({ "status": status })).expect("a pod");
            assert_eq!(has_begun(Some(&pod)), begun, "{status}");
            assert_eq!(why_not_running(pod.status), why, "{status}");
        }
        assert!(!has_begun(None));
    }

    #[test]
    fn a_right_that_is_missing_is_named() {
        use WatchError::{InitialListFailed, NoResourceVersion, WatchStartFailed};
        let refusal = |code| kube::Error::Api(Box::new(Status { code, message: "words".into(), ..Status::default() }));
        for (cause, said) in [
            (InitialListFailed(refusal(403)), "the right to list pods in the namespace is missing; ask for it (words)"),
            (WatchStartFailed(refusal(403)), "the right to watch pods in the namespace is missing; ask for it (words)"),
            (InitialListFailed(refusal(500)), "the cluster did not answer as it should; try again"),
            (NoResourceVersion, "the cluster did not answer as it should; try again"),
        ] {
            let error = unwatched(wait::Error::ProbeFailed(cause));
            assert_eq!(error.to_string(), said);
            assert_eq!(error.is::<BadInput>(), said.contains("words"), "{said}");
        }
    }

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
