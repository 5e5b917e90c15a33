//! Commands that create a job: submit a manifest, clone a job that is there.

use std::path::{Path, PathBuf};

use clap::Args;
use kube::api::PostParams;
use psjobs::setting::Setting;
use psjobs::{BadInput, validate};
use psjobs_api::crd::{GROUP, KIND, ParameterServerJob, VERSION};
use serde_json::{Value, json};

use crate::connection::{Cluster, ConnectionArgs};
use crate::{text, watch};

/// Create the job of a manifest
///
/// The manifest is checked first, as `psjobs validate` does. Exit code with --watch: 0 the job succeeded, 1 it failed.
#[derive(Debug, Args)]
pub struct SubmitArgs {
    /// The manifest, with one job and nothing else; - reads standard input
    file: PathBuf,
    #[command(flatten)]
    new: NewArgs,
    /// Name of the job, instead of the manifest's
    #[arg(long)]
    name: Option<String>,
}

/// Create a job with the spec of another one
///
/// Exit code with --watch: 0 the job succeeded, 1 it failed.
#[derive(Debug, Args)]
pub struct CloneArgs {
    /// Name of the job whose spec is taken
    name: String,
    /// Name of the new job
    new_name: String,
    #[command(flatten)]
    new: NewArgs,
}

#[derive(Debug, Args)]
struct NewArgs {
    /// Set a field of spec, for example --set training.optimizer.learningRate=0.1
    #[arg(long = "set", value_name = "FIELD=VALUE")]
    settings: Vec<Setting>,
    /// Show the job's progress until it ends
    #[arg(long, short)]
    watch: bool,
}

impl SubmitArgs {
    pub async fn run(self, connection: &ConnectionArgs) -> anyhow::Result<u8> {
        let (mut job, others) = validate::job_and_others(&self.file, &self.new.settings)?;
        if !others.is_empty() {
            return Err(BadInput::new(format!(
                "{} holds more than a job, and submit creates nothing else: {}; put that into a file of its own, for \
                 `kubectl apply`",
                self.file.display(),
                others.join(", ")
            ))
            .into());
        }
        // The check has put a name into a manifest that leaves its end to the API server.
        if job.metadata.generate_name.is_some() {
            job.metadata.name = None;
        }
        if self.name.is_some() {
            job.metadata.generate_name = None;
            job.metadata.name = self.name;
        }
        create(connection.open().await?, connection, job, self.new.watch).await
    }
}

impl CloneArgs {
    pub async fn run(self, connection: &ConnectionArgs) -> anyhow::Result<u8> {
        let cluster = connection.open().await?;
        let job = cluster.job(&self.name).await?;
        let document = document(&job, &self.new_name)?;
        let job = validate::job_of(vec![document], &self.new.settings, Path::new(&self.name))?;
        create(cluster, connection, job, self.new.watch).await
    }
}

/// The manifest of a new job with the labels and the spec of another one, which starts at once.
fn document(job: &ParameterServerJob, name: &str) -> serde_json::Result<Value> {
    let mut spec = serde_json::to_value(&job.spec)?;
    spec["suspend"] = false.into();
    let mut metadata = json!({"name": name});
    if let Some(labels) = &job.metadata.labels {
        metadata["labels"] = json!(labels);
    }
    Ok(json!({"apiVersion": format!("{GROUP}/{VERSION}"), "kind": KIND, "metadata": metadata, "spec": spec}))
}

async fn create(
    mut cluster: Cluster,
    connection: &ConnectionArgs,
    mut job: ParameterServerJob,
    watch: bool,
) -> anyhow::Result<u8> {
    let mut flags = connection.as_flags();
    // As kubectl has it: a namespace in the manifest counts where no flag names another one.
    if let Some(namespace) = job.metadata.namespace.clone().filter(|_| !connection.names_namespace()) {
        flags.namespace = format!(" --namespace {namespace}");
        cluster.namespace = namespace;
    }
    job.metadata.namespace = Some(cluster.namespace.clone());
    let name = job.metadata.name.clone().or_else(|| job.metadata.generate_name.clone()).unwrap_or_default();
    let created = cluster.jobs().create(&PostParams::default(), &job).await;
    let created = created.map_err(|error| cluster.explain(error, &name))?;
    let name = created.metadata.name.unwrap_or(name);
    text::print(format_args!("{name} is created in namespace {}", cluster.namespace));
    if watch {
        return watch::until_its_end(&cluster, &name, &flags).await;
    }
    text::print(format_args!("`kubectl psjob watch {name}{flags}` shows its progress"));
    Ok(0)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::command_line::Cli;

    #[test]
    fn documents_beside_the_job_are_named_and_nothing_is_created() {
        let job = "apiVersion: psjobs.dev/v1alpha1\nkind: ParameterServerJob\nmetadata: {name: mnist}\n\
                   spec: {trainer: {template: {spec: {containers: [{name: trainer, image: i}]}}}}\n";
        let other = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: settings}\n";
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("job.yaml");
        std::fs::write(&file, format!("{other}---\n{job}")).expect("written");
        let file = file.display().to_string();
        for flags in [&["--set", "trainer.replicas=3"][..], &[]] {
            let words = ["kubectl-psjob", "submit", file.as_str(), "--kubeconfig", "/no/such/file"];
            let cli = Cli::try_parse_from(words.iter().chain(flags).copied()).expect("words of the command line");
            let error = cli.run().expect_err("it is refused");
            assert!(error.is::<BadInput>() && error.to_string().contains("ConfigMap"), "{error}");
        }
    }

    #[test]
    fn a_clone_has_the_labels_and_the_spec_and_starts_at_once() {
        let spec = json!({"suspend": true, "trainer": {"replicas": 3, "template": {"spec": {"containers": [{"name": "trainer"}]}}}});
        let job: ParameterServerJob = serde_json::from_value(json!({
            "apiVersion": "psjobs.dev/v1alpha1", "kind": "ParameterServerJob", "spec": spec,
            "metadata": {"name": "mnist", "uid": "1", "resourceVersion": "7", "labels": {"team": "vision"}},
            "status": {"restarts": 2, "restartsCountTowardsMax": 0},
        }))
        .expect("a job");
        let setting = "trainer.replicas=4".parse().expect("a setting");
        let document = document(&job, "again").expect("JSON");
        let clone = validate::job_of(vec![document], &[setting], Path::new("mnist")).expect("a valid job");
        assert_eq!(clone.metadata.name.as_deref(), Some("again"));
        assert_eq!(clone.metadata.labels, job.metadata.labels);
        assert!(clone.metadata.uid.is_none() && clone.metadata.resource_version.is_none() && clone.status.is_none());
        assert!(!clone.spec.suspend);
        assert_eq!(clone.spec.trainer.replicas, 4);
        assert_eq!(clone.spec.trainer.template, job.spec.trainer.template);
    }

    #[test]
    fn a_job_without_labels_has_a_clone() {
        let mut job: ParameterServerJob = serde_json::from_value(json!({
            "apiVersion": "psjobs.dev/v1alpha1", "kind": "ParameterServerJob", "metadata": {"name": "mnist"},
            "spec": {"trainer": {"template": {"spec": {"containers": [{"name": "trainer"}]}}}},
        }))
        .expect("a job");
        job.metadata.labels = None;
        let document = document(&job, "again").expect("JSON");
        validate::job_of(vec![document], &[], Path::new("mnist")).expect("a valid job");
    }
}
