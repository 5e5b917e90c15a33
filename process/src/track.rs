//! `psjobs-worker track`: sends MLflow what it lacks of a job that is over.

use std::collections::BTreeMap;

use anyhow::anyhow;
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use psjobs_api::ReplicaResult;
use psjobs_api::env::DEFAULT_EXPERIMENT;
use psjobs_object_store as object_store;
use psjobs_ps::checkpoint::runs::RunRecord;
use psjobs_ps::checkpoint::{Checkpoint, Folder, Runs};
use psjobs_tracking::{Ending, Folders, Job, Settings, flat, follow};

use crate::{Failure, variables};

/// Arguments of `track`.
#[derive(Clone, Debug, Args)]
pub struct TrackArgs {
    /// Tracking server of MLflow, as http://HOST:PORT
    #[arg(long, value_name = "URL")]
    mlflow_uri: String,
    /// Experiment that the run of the job belongs to
    #[arg(long, value_name = "NAME", default_value = DEFAULT_EXPERIMENT, value_parser = NonEmptyStringValueParser::new())]
    mlflow_experiment: String,
    /// Folder of the job's checkpoints or its URL in an object store; its metrics are there, too
    #[arg(long, value_name = "DIR", required_unless_present = "metrics_dir")]
    checkpoint_dir: Option<String>,
    /// Folder of the job's metrics, if they are not beside its checkpoints
    #[arg(long, value_name = "DIR", requires = "job_id")]
    metrics_dir: Option<String>,
    /// Id of the job [default: that of the newest job in --checkpoint-dir]
    #[arg(long, value_name = "ID", value_parser = NonEmptyStringValueParser::new())]
    job_id: Option<String>,
}

/// Sends the points that the run of a job lacks, and its model; then the run is finished.
///
/// # Errors
/// If the folder has no such job, or the tracking server does not take all.
pub fn run(args: &TrackArgs) -> Result<ReplicaResult, Failure> {
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::work)?;
    runtime.block_on(args.send())
}

impl TrackArgs {
    async fn send(&self) -> Result<ReplicaResult, Failure> {
        let settings = Settings::new(&self.mlflow_uri, &self.mlflow_experiment, variables()).map_err(Failure::input)?;
        let open = |place: &String| object_store::folder(place, variables()).map_err(Failure::input);
        let checkpoints = self.checkpoint_dir.as_ref().map(open).transpose()?;
        let series = self.metrics_dir.as_ref().map(open).transpose()?;
        let job = match &checkpoints {
            Some(folder) => {
                let (found, wanted) = (folder.clone(), self.job_id.clone());
                let job = folder.disk().work(move || job_in(&found, wanted.as_deref())).await;
                job.map_err(Failure::Input)?
            }
            None => job(self.job_id.clone().unwrap_or_default(), None, BTreeMap::new()),
        };
        // The job is over: all of its points stay.
        let folders = Folders { series, checkpoints, steps_per_exchange: 1, elastic: false };
        let follower = follow(settings, job, folders).map_err(Failure::input)?;
        if follower.end(Ending::Finished).await {
            return Ok(ReplicaResult::default());
        }
        Err(Failure::Work(anyhow!("{} does not have all points; the log says why, try again later", self.mlflow_uri)))
    }
}

/// Returns the job with the id `wanted` in a checkpoint folder, or the newest one, with the settings of its last checkpoint.
fn job_in(folder: &Folder, wanted: Option<&str>) -> anyhow::Result<Job> {
    let runs = Runs::new(folder);
    let records = runs.list()?;
    let is_wanted = |record: &&RunRecord| wanted.is_none_or(|wanted| record.uid == wanted);
    let Some(record) = records.iter().rfind(is_wanted) else {
        return Err(anyhow!(
            "{} has no checkpoints of such a job; check --checkpoint-dir and --job-id",
            folder.display()
        ));
    };
    let catalog = runs.catalog(record.run);
    let newest = catalog.complete()?.last().and_then(|step| Checkpoint::open(catalog.path(*step)).ok());
    let mut parameters = BTreeMap::new();
    if let Some(description) = newest.as_ref().map(Checkpoint::description) {
        parameters = flat(&description.training);
        parameters.insert("servers".to_owned(), description.servers.to_string());
        parameters.insert("trainers".to_owned(), description.trainers.to_string());
    }
    Ok(job(record.uid.clone(), Some(record.job.clone()), parameters))
}

/// Describes a job, of which a run that is there has more than this.
fn job(uid: String, name: Option<String>, parameters: BTreeMap<String, String>) -> Job {
    Job { name: name.unwrap_or_else(|| uid.clone()), namespace: "default".to_owned(), uid, parameters }
}

#[cfg(test)]
mod tests {
    use psjobs_ps::checkpoint::runs::JobIdentity;

    use super::*;

    #[test]
    fn the_newest_job_in_a_folder_is_tracked_unless_another_is_named() {
        let scratch = tempfile::tempdir().expect("a folder");
        let folder = Folder::from(scratch.path());
        let found = |wanted: Option<&str>| job_in(&folder, wanted).map(|job| (job.uid, job.name));
        let error = found(None).expect_err("nothing is there").to_string();
        assert!(error.contains("check --checkpoint-dir"), "{error}");
        for (uid, job) in [("a", "mnist"), ("b", "lm")] {
            let (uid, job) = (uid.to_owned(), job.to_owned());
            let identity = JobIdentity { uid, job, incarnation: 0, resume: false, given: false };
            Runs::new(&folder).begin(&identity, None, 0).expect("begins");
        }
        assert_eq!(found(None).expect("there is one"), ("b".to_owned(), "lm".to_owned()));
        assert_eq!(found(Some("a")).expect("it is there"), ("a".to_owned(), "mnist".to_owned()));
        assert!(found(Some("c")).is_err());
    }
}
