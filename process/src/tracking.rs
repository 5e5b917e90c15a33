//! The run of MLflow that a job keeps: begun with server 0, and ended with it.

use anyhow::anyhow;
use psjobs_api::{Environment, ReplicaResult};
use psjobs_ps::checkpoint::runs::BY_HAND;
use psjobs_ps::checkpoint::{Disk, Folder};
use psjobs_ps::server::{ServerConfig, ServerError};
use psjobs_tracking::{Ending, Folders, Follower, Job, Settings, flat, follow};
use tempfile::TempDir;

use crate::{Failure, variables};

/// A job that is tracked, or is not.
#[derive(Debug, Default)]
pub struct Tracked {
    follower: Option<Follower>,
    /// Holds the series of a job that keeps them nowhere else.
    scratch: Option<TempDir>,
}

impl Tracked {
    /// Begins to follow the job on server 0, if it names a tracking server. `config` gets a folder for the series if it has none:
    /// what is sent is what they have.
    ///
    /// # Errors
    /// If the address or the credentials cannot be right, or the job has no id of its own.
    pub fn begin(environment: &Environment, config: &mut ServerConfig) -> Result<Self, Failure> {
        let Some(mlflow) = environment.mlflow.as_ref().filter(|_| environment.index == 0) else {
            return Ok(Self::default());
        };
        if environment.uid == BY_HAND {
            return Err(Failure::Input(anyhow!(
                "--mlflow-uri needs --job-id, by which the run of the job is found: all jobs without one would share theirs; \
                 give the same one to all processes of the job"
            )));
        }
        let settings = Settings::new(&mlflow.uri, &mlflow.experiment, variables()).map_err(Failure::input)?;
        let mut scratch = None;
        if config.series.is_none() && config.checkpoint.is_none() {
            let folder = TempDir::with_prefix("psjobs-metrics-").map_err(Failure::work)?;
            config.series = Some(Folder::new(Disk::System, folder.path()));
            scratch = Some(folder);
        }
        let folders = Folders {
            series: config.series.clone(),
            checkpoints: config.checkpoint.as_ref().map(|checkpoint| checkpoint.folder.clone()),
            steps_per_exchange: environment.training.steps_per_exchange(),
            elastic: environment.min_trainers.is_some(),
        };
        let follower = follow(settings, job(environment), folders).map_err(Failure::input)?;
        Ok(Self { follower: Some(follower), scratch })
    }

    /// Sends the rest and says how the job has ended. Takes as long as the tracking server takes values.
    pub async fn end(self, outcome: &Result<ReplicaResult, ServerError>) {
        let Self { follower, scratch } = self;
        if let Some(follower) = follower {
            // The log says what the run lacks; training is over, and has succeeded without.
            let _has_all = follower.end(ending(outcome)).await;
        }
        drop(scratch);
    }
}

/// Returns the job of a run: its parameters are the settings of the servers.
fn job(environment: &Environment) -> Job {
    let mut parameters = flat(&serde_json::to_value(&environment.training).unwrap_or_default());
    parameters.insert("servers".to_owned(), environment.servers.len().to_string());
    parameters.insert("trainers".to_owned(), environment.trainers.to_string());
    if let Some(fewest) = environment.min_trainers {
        parameters.insert("minTrainers".to_owned(), fewest.to_string());
    }
    Job {
        name: environment.name.clone(),
        namespace: environment.namespace.clone(),
        uid: environment.uid.clone(),
        parameters,
    }
}

/// Returns what the end of server 0 means for the run.
fn ending(outcome: &Result<ReplicaResult, ServerError>) -> Ending {
    match outcome {
        Ok(_) => Ending::Finished,
        Err(ServerError::Stopped) => Ending::Stopped,
        Err(ServerError::Replaced { .. } | ServerError::FolderTaken { .. }) => Ending::Replaced,
        Err(_) => Ending::Failed,
    }
}

#[cfg(test)]
mod tests {
    use psjobs_api::Training;

    use super::*;

    fn environment(uid: &str) -> Environment {
        let mlflow = psjobs_api::env::Mlflow { uri: "ftp://mlflow".into(), experiment: "Default".into() };
        let servers = vec!["localhost:29500".into()];
        Environment { mlflow: Some(mlflow), ..Environment::new("mnist", uid, servers, 2, Training::default()) }
    }

    #[test]
    fn a_run_has_the_settings_of_its_job() {
        let Job { name, uid, parameters, .. } = job(&environment("0b6c"));
        assert_eq!((name.as_str(), uid.as_str()), ("mnist", "0b6c"));
        let parameter = |name: &str| parameters.get(name).map(String::as_str);
        assert_eq!((parameter("trainers"), parameter("servers")), (Some("2"), Some("1")));
        assert!(parameter("optimizer.type").is_some() && parameter("consistency.mode").is_some(), "{parameters:?}");
    }

    #[test]
    fn a_job_that_cannot_be_tracked_says_why() {
        for (uid, index, said) in
            [(BY_HAND, 0, Some("--mlflow-uri needs --job-id")), ("0b6c", 0, Some("neither http://")), ("0b6c", 1, None)]
        {
            let environment = Environment { index, ..environment(uid) };
            let begun = Tracked::begin(&environment, &mut ServerConfig::new(&environment));
            let error = begun.err().map(|failure| match failure {
                Failure::Input(error) => error.to_string(),
                other => panic!("{other:?}"),
            });
            assert_eq!(error.is_some(), said.is_some(), "{uid} {index}");
            assert!(error.unwrap_or_default().contains(said.unwrap_or_default()));
        }
    }

    #[test]
    fn only_the_end_of_the_job_ends_its_run_well() {
        assert_eq!(ending(&Ok(ReplicaResult::default())), Ending::Finished);
        assert_eq!(ending(&Err(ServerError::Stopped)), Ending::Stopped);
        let replaced = ServerError::Replaced { server: 0, incarnation: 1, successor: 2 };
        assert_eq!(ending(&Err(replaced)), Ending::Replaced);
        let refused = ServerError::FolderInUse { job: "lm".into(), uid: "b".into(), folder: "/checkpoints".into() };
        assert_eq!(ending(&Err(refused)), Ending::Failed, "nobody goes on with the run of a job that never began");
        assert_eq!(ending(&Err(ServerError::Abandoned("silent".into()))), Ending::Failed);
    }
}
