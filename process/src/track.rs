//! `psjobs-worker track`: sends MLflow what it lacks of a job that is over.

use std::collections::BTreeMap;
use std::io::ErrorKind;

use anyhow::{Context as _, anyhow};
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use psjobs_api::ReplicaResult;
use psjobs_api::env::DEFAULT_EXPERIMENT;
use psjobs_object_store as object_store;
use psjobs_ps::checkpoint::runs::{BY_HAND, RunRecord};
use psjobs_ps::checkpoint::{Checkpoint, Folder, Runs};
use psjobs_ps::series::{IN_RUN, Source};
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
/// If the folder has no such job, or none with metrics and an id of its own, or the tracking server does not take all.
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
        let (job, beside) = match &checkpoints {
            Some(folder) => {
                let (found, wanted) = (folder.clone(), self.job_id.clone());
                let found = folder.disk().work(move || job_in(&found, wanted.as_deref())).await;
                let (job, metrics) = found.map_err(Failure::Input)?;
                (job, Some(metrics))
            }
            None => (job(self.job_id.clone().unwrap_or_default(), None, BTreeMap::new()), None),
        };
        check_id(&job.uid).map_err(Failure::Input)?;
        if let Some(metrics) = series.clone().or(beside) {
            let disk = metrics.disk().clone();
            disk.work(move || check_metrics(&metrics)).await.map_err(Failure::Input)?;
        }
        // The job is over: all of its points stay.
        let folders = Folders { series, checkpoints, steps_per_exchange: 1, elastic: false };
        let follower = follow(settings, job, folders).map_err(Failure::input)?;
        if follower.end(Ending::Finished).await {
            return Ok(ReplicaResult::default());
        }
        Err(Failure::Work(anyhow!("{} does not have all points; the log says why, try again later", self.mlflow_uri)))
    }
}

/// Checks that a job has an id of its own.
fn check_id(uid: &str) -> anyhow::Result<()> {
    match uid {
        BY_HAND => Err(anyhow!(
            "a job that was started by hand without --job-id has no run of its own in MLflow, because all such jobs have the \
             id {BY_HAND}; name another job with --job-id, and give one to all processes of the next job"
        )),
        _ => Ok(()),
    }
}

/// Checks that a folder has series.
fn check_metrics(folder: &Folder) -> anyhow::Result<()> {
    let names = match folder.disk().names(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
        names => names.with_context(|| format!("cannot list {}", folder.display()))?,
    };
    if names.iter().any(|name| name.to_str().and_then(Source::of_folder).is_some()) {
        return Ok(());
    }
    Err(anyhow!(
        "{} has no metrics of a job; if the job kept them elsewhere, give that folder with --metrics-dir",
        folder.display()
    ))
}

/// Returns the job with the id `wanted` in a checkpoint folder, or the newest one, with the settings of its last checkpoint;
/// and the folder that its series have if they are beside the checkpoints.
fn job_in(folder: &Folder, wanted: Option<&str>) -> anyhow::Result<(Job, Folder)> {
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
    Ok((job(record.uid.clone(), Some(record.job.clone()), parameters), catalog.folder().folder(IN_RUN)))
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
        let found = |wanted: Option<&str>| job_in(&folder, wanted).map(|(job, _)| (job.uid, job.name));
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
        let (_, metrics) = job_in(&folder, Some("a")).expect("it is there");
        assert!(metrics.ends_with("run-00001/metrics"), "{}", metrics.display());
    }

    #[test]
    fn a_job_without_an_id_or_metrics_is_not_tracked() {
        assert!(check_id("0b6c").is_ok());
        let error = check_id(BY_HAND).expect_err("its run cannot be found").to_string();
        assert!(error.contains("--job-id"), "{error}");
        let scratch = tempfile::tempdir().expect("a folder");
        for (below, has_metrics) in [("missing", false), ("run-00001", false), ("trainer-0", true), ("job", true)] {
            let folder = Folder::from(&scratch.path().join(below));
            if below != "missing" {
                std::fs::create_dir_all(folder.join(below)).expect("a folder");
            }
            let error = check_metrics(&folder).err().map(|error| error.to_string());
            assert_eq!(error.is_none(), has_metrics, "{below}");
            assert!(error.is_none_or(|error| error.contains(below) && error.contains("--metrics-dir")), "{below}");
        }
    }
}
