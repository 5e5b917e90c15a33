//! Flags of commands that fetch what a job keeps: where it is if the job is not there any more, and the image that reads it.

use anyhow::Context as _;
use clap::Args;
use psjobs::BadInput;
use psjobs_api::checkpoint::is_object_store;
use psjobs_api::crd::{GROUP, KIND, ParameterServerJob, VERSION};
use serde_json::json;

use crate::connection::Cluster;

/// Flags beside the name of a job.
#[derive(Debug, Default, Args)]
pub struct SourceArgs {
    /// Folder of an object store in which a job that was deleted has a folder of its name, as s3://BUCKET/FOLDER
    #[arg(long)]
    url: Option<String>,
    /// With --url: the Secret with the credentials of the store
    #[arg(long, value_name = "NAME", requires = "url")]
    secret: Option<String>,
    /// With --url: the service account that may read the store
    #[arg(long, value_name = "NAME", requires = "url")]
    service_account: Option<String>,
    /// Image of the pod that reads; by default that of the job's trainers for a volume, and of its servers for an object store
    #[arg(long)]
    image: Option<String>,
}

impl SourceArgs {
    /// Returns the job `name`, or what stands for it where it was deleted.
    ///
    /// # Errors
    /// If there is no such job, the cluster does not answer, or the URL is none of an object store.
    pub async fn job(&self, cluster: &Cluster, name: &str) -> anyhow::Result<ParameterServerJob> {
        match &self.url {
            Some(url) => self.deleted(url, name),
            None => cluster.job(name).await,
        }
    }

    /// Returns whether the job was deleted.
    pub fn is_deleted(&self) -> bool {
        self.url.is_some()
    }

    /// Returns the image of the pod that reads, if it is named.
    pub fn image(&self) -> Option<&str> {
        self.image.as_deref()
    }

    /// Returns a job without a uid that has kept its checkpoints below `url`.
    fn deleted(&self, url: &str, name: &str) -> anyhow::Result<ParameterServerJob> {
        if !is_object_store(url) {
            return Err(BadInput::new(format!(
                "--url {url} is no folder of an object store; give s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or az://CONTAINER/FOLDER"
            ))
            .into());
        }
        let mut spec = json!({
            "trainer": {"template": {"spec": {"containers": []}}},
            "checkpoint": {"objectStore": {"url": url, "secret": self.secret}},
        });
        if let Some(account) = &self.service_account {
            let container = json!({"name": "server"});
            spec["ps"] = json!({"template": {"spec": {"serviceAccountName": account, "containers": [container]}}});
        }
        let job = json!({
            "apiVersion": format!("{GROUP}/{VERSION}"), "kind": KIND, "metadata": {"name": name}, "spec": spec,
        });
        serde_json::from_value(job).context("the flags make no job")
    }
}

#[cfg(test)]
mod tests {
    use psjobs_api::crd::store_pod;

    use super::*;

    #[test]
    fn a_deleted_job_is_read_with_the_secret_and_the_account_of_the_flags() {
        let named = |name: &str| Some(name.to_owned());
        let flags = |secret, service_account| SourceArgs { secret, service_account, ..SourceArgs::default() };
        let job = flags(named("keys"), named("reader")).deleted("s3://bucket/jobs", "mnist").expect("a job");
        let folder = job.spec.checkpoint.as_ref().and_then(|checkpoint| checkpoint.object_store_folder("mnist"));
        assert_eq!(folder.as_deref(), Some("s3://bucket/jobs/mnist"));
        let pod = store_pod::pod(&job, "image:1");
        assert_eq!(pod["spec"]["serviceAccountName"], "reader");
        assert_eq!(pod["spec"]["containers"][0]["envFrom"], json!([{"secretRef": {"name": "keys"}}]));
        assert_eq!(pod["metadata"].get("ownerReferences"), None, "there is no job that it could belong to");
        let job = flags(None, None).deleted("s3://bucket/jobs", "mnist").expect("a job");
        assert!(store_pod::image(&job, None).starts_with("psjobs-worker:"), "that of this version");
        let wrong = flags(None, None).deleted("/mnt/jobs", "mnist").expect_err("a path");
        assert!(wrong.to_string().contains("s3://BUCKET/FOLDER"), "{wrong}");
    }
}
