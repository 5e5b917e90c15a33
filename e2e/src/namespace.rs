//! The namespace of one test, and what tests do in it: apply jobs, wait for phases, events and pods.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures::StreamExt;
use k8s_openapi::api::core::v1::{Event, Namespace, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, ObjectMeta, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use psjobs_api::Role;
use psjobs_api::crd::{ParameterServerJob, ParameterServerJobStatus, Phase, names};

use crate::cluster::Cluster;
use crate::wait::{SHORT, until, within};

/// Returns the pod's phase as its node reported it.
#[must_use]
pub fn phase_of(pod: &Pod) -> Option<&str> {
    pod.status.as_ref()?.phase.as_deref()
}

/// A namespace that belongs to one test. Tests in different namespaces may run at the same time.
pub struct TestNamespace {
    pub cluster: Arc<Cluster>,
    pub name: String,
}

impl TestNamespace {
    /// Creates an empty namespace named after the test; deletes the one of an earlier run first.
    ///
    /// # Errors
    /// If the cluster refuses.
    pub async fn prepare(cluster: Arc<Cluster>, test: &str) -> Result<Self> {
        let namespace = Self { cluster, name: format!("e2e-{}", test.replace('_', "-")) };
        let namespaces: Api<Namespace> = Api::all(namespace.cluster.client.clone());
        namespace.remove().await?;
        let what = format!("namespace {} of an earlier run to be deleted", namespace.name);
        until(&namespaces, &namespace.name, SHORT, &what, |now| now.is_none()).await?;
        // The pods of every test must pass the strictest of Kubernetes' pod security standards.
        let labels = [("pod-security.kubernetes.io/enforce".to_owned(), "restricted".to_owned())];
        let name = Some(namespace.name.clone());
        let metadata = ObjectMeta { name, labels: Some(labels.into()), ..ObjectMeta::default() };
        namespaces.create(&PostParams::default(), &Namespace { metadata, ..Namespace::default() }).await?;
        Ok(namespace)
    }

    /// Deletes the namespace; does not wait until it is gone.
    ///
    /// # Errors
    /// If the cluster refuses.
    pub async fn remove(&self) -> Result<()> {
        let namespaces: Api<Namespace> = Api::all(self.cluster.client.clone());
        match namespaces.delete(&self.name, &DeleteParams::default()).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Prints a line of output with the namespace's name, as tests may run at the same time.
    pub fn print(&self, line: impl Display) {
        println!("    {}: {line}", self.name);
    }

    #[must_use]
    pub fn jobs(&self) -> Api<ParameterServerJob> {
        Api::namespaced(self.cluster.client.clone(), &self.name)
    }

    #[must_use]
    pub fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.cluster.client.clone(), &self.name)
    }

    /// Runs `kubectl` in this namespace and returns its output.
    ///
    /// # Errors
    /// If it fails.
    pub async fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        self.cluster.kubectl(&[&["--namespace", &self.name], arguments].concat()).await
    }

    /// Runs `kubectl psjob` in this namespace and returns its output.
    ///
    /// # Errors
    /// If it fails.
    pub async fn psjob(&self, arguments: &[&str]) -> Result<String> {
        self.psjob_with_input(arguments, "").await
    }

    /// Runs `kubectl psjob` in this namespace with `input` as standard input.
    ///
    /// # Errors
    /// As [`TestNamespace::psjob`].
    pub async fn psjob_with_input(&self, arguments: &[&str], input: &str) -> Result<String> {
        self.cluster.psjob(&[arguments, &["--namespace", &self.name]].concat(), input).await
    }

    /// Applies a job with kubectl.
    ///
    /// # Errors
    /// If kubectl or the API server refuses; the error holds their message.
    pub async fn apply(&self, job: &ParameterServerJob) -> Result<String> {
        self.apply_text(&serde_yaml::to_string(job)?).await
    }

    /// Applies a manifest's text with kubectl; it need not be a valid job.
    ///
    /// # Errors
    /// As [`TestNamespace::apply`].
    pub async fn apply_text(&self, manifest: &str) -> Result<String> {
        let arguments = ["--namespace", &self.name, "apply", "--filename", "-"];
        self.cluster.kubectl_with_input(&arguments, manifest).await
    }

    /// Waits until the job is in `phase`, and returns its status.
    ///
    /// # Errors
    /// If that takes longer than `limit`, or the job has ended in another phase.
    pub async fn phase(&self, job: &str, phase: Phase, limit: Duration) -> Result<ParameterServerJobStatus> {
        let of = |job: Option<&ParameterServerJob>| job.and_then(|job| job.status.as_ref()?.phase);
        let there = |now: Option<&ParameterServerJob>| of(now).is_some_and(|now| now == phase || now.is_final());
        let seen = match until(&self.jobs(), job, limit, &format!("{job} to be {phase:?}"), there).await {
            Ok(seen) => seen,
            Err(error) => bail!("{error:#}; {}", self.state(job).await),
        };
        let status = seen.and_then(|job| job.status).context("a job in a phase has a status")?;
        match (status.phase, &status.last_failure) {
            (Some(now), _) if now == phase => Ok(status),
            (now, Some(failure)) => bail!("the job is {now:?} instead of {phase:?}: {}", failure.message),
            (now, None) => bail!("the job is {now:?} instead of {phase:?}"),
        }
    }

    /// Describes the conditions of a job and its pods in some lines, for the error of a wait that timed out.
    async fn state(&self, job: &str) -> String {
        let conditions = "jsonpath={.status.phase}: {range .status.conditions[*]}{.type}={.status} ({.message}) {end}";
        let of_job = format!("{}={job}", names::LABEL_JOB);
        let said = [
            self.kubectl(&["get", "psjobs", job, "--output", conditions]).await,
            self.kubectl(&["get", "pods", "--selector", &of_job, "--output", "wide"]).await,
        ];
        said.map(|said| said.unwrap_or_else(|error| format!("{error:#}"))).join("\n")
    }

    /// Waits for an event of a job: the operator writes events after the status that they report.
    ///
    /// # Errors
    /// If there is none within [`SHORT`].
    pub async fn event(&self, reason: &str, words: &str) -> Result<()> {
        let of_jobs = watcher::Config::default().fields("involvedObject.kind=ParameterServerJob");
        let events = Api::<Event>::namespaced(self.cluster.client.clone(), &self.name);
        let seen = async {
            let mut events = pin!(watcher(events, of_jobs).default_backoff().applied_objects());
            let matches = |event: &Event| {
                let text = event.message.as_deref().unwrap_or_default();
                event.reason.as_deref() == Some(reason) && text.contains(words)
            };
            while let Some(event) = events.next().await {
                if event.is_ok_and(|event| matches(&event)) {
                    return Ok(());
                }
            }
            bail!("the watch of events ended")
        };
        within(SHORT, &format!("an event {reason} with {words:?}"), seen).await
    }

    /// Returns the uid of each of a job's pods by name; another uid means that the pod was replaced.
    ///
    /// # Errors
    /// If the cluster does not answer.
    pub async fn uids(&self, job: &str) -> Result<BTreeMap<String, Option<String>>> {
        let mut pods = self.pods_of(job, Role::Server).await?;
        pods.extend(self.pods_of(job, Role::Trainer).await?);
        Ok(pods.iter().map(|pod| (pod.name_any(), pod.uid())).collect())
    }

    /// Waits until a pod has succeeded or is gone. A pod's phase follows its containers by a second.
    ///
    /// # Errors
    /// If it still runs after [`SHORT`].
    pub async fn ended(&self, pod: &str) -> Result<()> {
        let ended = |pod: Option<&Pod>| pod.is_none_or(|pod| phase_of(pod) == Some("Succeeded"));
        until(&self.pods(), pod, SHORT, &format!("{pod} to end"), ended).await?;
        Ok(())
    }

    /// Returns the job's pods of one role, sorted by name.
    ///
    /// # Errors
    /// If the cluster does not answer.
    pub async fn pods_of(&self, job: &str, role: Role) -> Result<Vec<Pod>> {
        let selected = ListParams::default().labels(&names::selector(job, role));
        let mut pods = self.pods().list(&selected).await?.items;
        pods.sort_by_key(ResourceExt::name_any);
        Ok(pods)
    }
}
