//! The environment contract: what the operator and `psjobs run` pass to each process of a job, and
//! how a process reads it. The torch names (`MASTER_ADDR`, `RANK`, ...) are the ones users know;
//! ours carry the prefix `PSJOB_`.

use crate::checkpoint::CheckpointPolicy;
use crate::index_ranges;
use crate::role::Role;
use crate::training::{Training, TrainingError};

/// Host of server 0.
pub const MASTER_ADDR: &str = "MASTER_ADDR";
/// Port of server 0.
pub const MASTER_PORT: &str = "MASTER_PORT";
/// Servers plus trainers.
pub const WORLD_SIZE: &str = "WORLD_SIZE";
/// Rank in the job: servers 0..S-1, trainers S..S+N-1.
pub const RANK: &str = "RANK";
/// Rank among the job's processes on this machine; 0 in a pod.
pub const LOCAL_RANK: &str = "LOCAL_RANK";
/// Name of the job.
pub const PSJOB_NAME: &str = "PSJOB_NAME";
/// Namespace of the job; `default` outside a cluster.
pub const PSJOB_NAMESPACE: &str = "PSJOB_NAMESPACE";
/// Unique id of the job; processes of different jobs refuse each other by it.
pub const PSJOB_UID: &str = "PSJOB_UID";
/// `ps` or `trainer`.
pub const PSJOB_ROLE: &str = "PSJOB_ROLE";
/// Index within the role, from 0.
pub const PSJOB_INDEX: &str = "PSJOB_INDEX";
/// All servers in order, `host:port,host:port`.
pub const PSJOB_SERVERS: &str = "PSJOB_SERVERS";
/// Number of trainers; in an elastic job the most there may be.
pub const PSJOB_TRAINERS: &str = "PSJOB_TRAINERS";
/// The fewest trainers that train, at least 1; set in elastic jobs only.
pub const PSJOB_MIN_TRAINERS: &str = "PSJOB_MIN_TRAINERS";
/// Servers that hold each block, 1 or 2; 1 if it is not set.
pub const PSJOB_REPLICATION_FACTOR: &str = "PSJOB_REPLICATION_FACTOR";
/// Connections of a trainer to each server; not set if it is to decide.
pub const PSJOB_CONNECTIONS: &str = "PSJOB_CONNECTIONS";
/// So many there are at most.
pub const MOST_CONNECTIONS: u32 = 16;
/// `spec.training` as JSON.
pub const PSJOB_TRAINING: &str = "PSJOB_TRAINING";
/// How often this replica was started before: 0, 1, ...
pub const PSJOB_INCARNATION: &str = "PSJOB_INCARNATION";
/// 1 if this process is started again when it fails; not set otherwise. Such a process waits for other processes of its
/// job without limit, because no process would be there to start the job again.
pub const PSJOB_SUPERVISED: &str = "PSJOB_SUPERVISED";
/// Trainers that have finished and get no other process, as `0-2,5`; set for servers, if there are any. A server that
/// starts after they have left waits for none of them.
pub const PSJOB_FINISHED_TRAINERS: &str = "PSJOB_FINISHED_TRAINERS";
/// Folder of the job's checkpoints; all servers see the same one.
pub const PSJOB_CHECKPOINT_DIR: &str = "PSJOB_CHECKPOINT_DIR";
/// How often and how many, as JSON.
pub const PSJOB_CHECKPOINT: &str = "PSJOB_CHECKPOINT";
/// Folder in which server 0 writes the series of metrics; with checkpoints they are beside those if it is not set.
pub const PSJOB_METRICS_DIR: &str = "PSJOB_METRICS_DIR";
/// Address of the MLflow tracking server that keeps a run of the job; set for servers, if there is one.
pub const PSJOB_MLFLOW_URI: &str = "PSJOB_MLFLOW_URI";
/// Name of the experiment that the run belongs to; [`DEFAULT_EXPERIMENT`] if it is not set.
pub const PSJOB_MLFLOW_EXPERIMENT: &str = "PSJOB_MLFLOW_EXPERIMENT";
/// The experiment that every tracking server of MLflow has.
pub const DEFAULT_EXPERIMENT: &str = "Default";
/// Folder with ca.crt, tls.crt and tls.key; the job's processes then talk TLS.
pub const PSJOB_TLS_DIR: &str = "PSJOB_TLS_DIR";
/// Number of GPUs that a process was given for itself.
pub const PSJOB_GPUS: &str = "PSJOB_GPUS";
/// File that takes the [`ReplicaResult`](crate::ReplicaResult) at the end.
pub const PSJOB_RESULT_FILE: &str = "PSJOB_RESULT_FILE";

/// The settings of a process: its job and its own place in it.
#[derive(Clone, Debug, PartialEq)]
pub struct Environment {
    /// Name of the job.
    pub name: String,
    /// Namespace of the job.
    pub namespace: String,
    /// Unique id of the job.
    pub uid: String,
    /// The role of this process.
    pub role: Role,
    /// Index within the role, below the number of replicas of that role.
    pub index: u32,
    /// `host:port` of every server, in order; at least one.
    pub servers: Vec<String>,
    /// Servers that hold each block, 1 or 2; at most the number of servers.
    pub replication_factor: u32,
    /// Connections that a trainer opens to each server, 1 to 16, if it is not to decide by itself.
    pub connections: Option<u32>,
    /// Number of trainers, at least one; in an elastic job the most there may be.
    pub trainers: u32,
    /// The fewest trainers that train, if they may come and go: 1 to `trainers`.
    pub min_trainers: Option<u32>,
    /// Trainers that had finished when this process started, ascending; none in an elastic job.
    pub finished_trainers: Vec<u32>,
    /// `spec.training`.
    pub training: Training,
    /// How often this replica was started before.
    pub incarnation: u32,
    /// The operator or `psjobs run` starts this process again when it fails.
    pub supervised: bool,
    /// Rank among the job's processes on this machine.
    pub local_rank: u32,
    /// GPUs that this process was given for itself, so that it is an error not to use one.
    pub gpus: u32,
    /// Where the result goes, if anybody wants it.
    pub result_file: Option<String>,
    /// Where the servers keep the job's state, if anywhere.
    pub checkpoint: Option<Checkpoint>,
    /// Where server 0 writes the series of metrics, if not beside the checkpoints.
    pub metrics_folder: Option<String>,
    /// The tracking server that keeps a run of the job, if any.
    pub mlflow: Option<Mlflow>,
    /// Folder with the certificates for TLS, if the job's processes talk so.
    pub tls_folder: Option<String>,
}

/// Where and how the servers keep the job's state.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    /// Folder that all servers share.
    pub folder: String,
    /// How often and how many.
    pub policy: CheckpointPolicy,
}

/// A tracking server of MLflow, and the experiment there. Credentials are variables of MLflow's own, beside these.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mlflow {
    /// Address, `http://` or `https://`.
    pub uri: String,
    /// Name of the experiment.
    pub experiment: String,
}

/// A variable of the contract that is missing or cannot be right; the text says what to set.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum EnvironmentError {
    /// The variable is not set.
    #[error("{0} is not set; the operator and `psjobs run` set it, by hand use the flags that --help lists")]
    Missing(&'static str),
    /// The variable is set to something that cannot be read.
    #[error("{name} is {value:?}; expected {expected}")]
    Invalid {
        /// Name of the variable.
        name: &'static str,
        /// The value that was found.
        value: String,
        /// A description of the values that are allowed.
        expected: String,
    },
    /// `PSJOB_TRAINING` holds values that cannot work.
    #[error("{PSJOB_TRAINING} is not usable: {0}")]
    Training(TrainingError),
}

impl Environment {
    /// That of server 0 of a plain job: no replication, checkpoints or TLS, and no result file.
    #[must_use]
    pub fn new(name: &str, uid: &str, servers: Vec<String>, trainers: u32, training: Training) -> Self {
        Self {
            name: name.to_owned(),
            namespace: "default".to_owned(),
            uid: uid.to_owned(),
            role: Role::Server,
            index: 0,
            servers,
            replication_factor: 1,
            connections: None,
            trainers,
            min_trainers: None,
            finished_trainers: Vec::new(),
            training,
            incarnation: 0,
            supervised: false,
            local_rank: 0,
            gpus: 0,
            result_file: None,
            checkpoint: None,
            metrics_folder: None,
            mlflow: None,
            tls_folder: None,
        }
    }

    /// Servers plus trainers.
    #[must_use]
    pub fn world_size(&self) -> u32 {
        self.servers.len() as u32 + self.trainers
    }

    /// Rank in the job: servers first.
    #[must_use]
    pub fn rank(&self) -> u32 {
        match self.role {
            Role::Server => self.index,
            Role::Trainer => self.servers.len() as u32 + self.index,
        }
    }

    /// Role and index of a rank in a job of `servers` servers; `None` past `world_size`.
    #[must_use]
    pub fn place(rank: u32, servers: u32, world_size: u32) -> Option<(Role, u32)> {
        match rank {
            r if r >= world_size => None,
            r if r < servers => Some((Role::Server, r)),
            r => Some((Role::Trainer, r - servers)),
        }
    }

    /// The variables to start this process with, sorted by name.
    ///
    /// # Panics
    /// If `servers` is empty: a job has at least one.
    #[must_use]
    pub fn to_vars(&self) -> Vec<(&'static str, String)> {
        let (host, port) = self.servers[0].rsplit_once(':').expect("servers are host:port");
        let mut vars = vec![
            (MASTER_ADDR, host.to_owned()),
            (MASTER_PORT, port.to_owned()),
            (WORLD_SIZE, self.world_size().to_string()),
            (RANK, self.rank().to_string()),
            (LOCAL_RANK, self.local_rank.to_string()),
            (PSJOB_NAME, self.name.clone()),
            (PSJOB_NAMESPACE, self.namespace.clone()),
            (PSJOB_UID, self.uid.clone()),
            (PSJOB_ROLE, self.role.to_string()),
            (PSJOB_INDEX, self.index.to_string()),
            (PSJOB_SERVERS, self.servers.join(",")),
            (PSJOB_TRAINERS, self.trainers.to_string()),
            (PSJOB_TRAINING, serde_json::to_string(&self.training).expect("training serializes")),
            (PSJOB_INCARNATION, self.incarnation.to_string()),
        ];
        if let Some(Checkpoint { folder, policy }) = &self.checkpoint {
            vars.push((PSJOB_CHECKPOINT_DIR, folder.clone()));
            vars.push((PSJOB_CHECKPOINT, serde_json::to_string(policy).expect("a policy serializes")));
        }
        if self.replication_factor > 1 {
            vars.push((PSJOB_REPLICATION_FACTOR, self.replication_factor.to_string()));
        }
        if self.supervised {
            vars.push((PSJOB_SUPERVISED, "1".to_owned()));
        }
        if self.gpus > 0 {
            vars.push((PSJOB_GPUS, self.gpus.to_string()));
        }
        if !self.finished_trainers.is_empty() {
            vars.push((PSJOB_FINISHED_TRAINERS, index_ranges::format(&self.finished_trainers)));
        }
        vars.extend(self.connections.map(|connections| (PSJOB_CONNECTIONS, connections.to_string())));
        vars.extend(self.min_trainers.map(|fewest| (PSJOB_MIN_TRAINERS, fewest.to_string())));
        vars.extend(self.metrics_folder.clone().map(|folder| (PSJOB_METRICS_DIR, folder)));
        if let Some(Mlflow { uri, experiment }) = &self.mlflow {
            vars.push((PSJOB_MLFLOW_URI, uri.clone()));
            vars.push((PSJOB_MLFLOW_EXPERIMENT, experiment.clone()));
        }
        vars.extend(self.tls_folder.clone().map(|folder| (PSJOB_TLS_DIR, folder)));
        vars.extend(self.result_file.clone().map(|file| (PSJOB_RESULT_FILE, file)));
        vars.sort_unstable();
        vars
    }

    /// Reads the contract through `lookup` (in a process: `|name| std::env::var(name).ok()`).
    /// `Ok(None)` if `PSJOB_ROLE` is not set: this process was not started as part of a job.
    ///
    /// # Errors
    /// The first variable that is missing or cannot be right.
    pub fn from_vars(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, EnvironmentError> {
        if lookup(PSJOB_ROLE).is_none() {
            return Ok(None);
        }
        let vars = Lookup(&lookup);
        let role = vars.text(PSJOB_ROLE)?;
        let role = Role::parse(&role).ok_or_else(|| invalid(PSJOB_ROLE, &role, "ps or trainer"))?;
        let servers = vars.text(PSJOB_SERVERS)?;
        let servers: Vec<String> = servers.split(',').map(|s| parse_address(s.trim())).collect::<Result<_, _>>()?;
        let trainers = vars.number(PSJOB_TRAINERS)?;
        if trainers == 0 {
            return Err(invalid(PSJOB_TRAINERS, "0", "at least 1"));
        }
        let min_trainers = lookup(PSJOB_MIN_TRAINERS).map(|_| vars.number(PSJOB_MIN_TRAINERS)).transpose()?;
        if let Some(fewest) = min_trainers.filter(|fewest| !(1..=trainers).contains(fewest)) {
            return Err(invalid(
                PSJOB_MIN_TRAINERS,
                &fewest.to_string(),
                &format!("1 to {trainers}, the most trainers"),
            ));
        }
        let replication_factor = vars.number_or(PSJOB_REPLICATION_FACTOR, 1)?;
        if !(1..=2.min(servers.len() as u32)).contains(&replication_factor) {
            let expected = format!("1, or 2 with at least 2 servers; there are {}", servers.len());
            return Err(invalid(PSJOB_REPLICATION_FACTOR, &replication_factor.to_string(), &expected));
        }
        let connections = lookup(PSJOB_CONNECTIONS).map(|_| vars.number(PSJOB_CONNECTIONS)).transpose()?;
        if let Some(connections) = connections.filter(|connections| !(1..=MOST_CONNECTIONS).contains(connections)) {
            let expected = format!("1 to {MOST_CONNECTIONS}, or nothing at all");
            return Err(invalid(PSJOB_CONNECTIONS, &connections.to_string(), &expected));
        }
        let index = vars.number(PSJOB_INDEX)?;
        let replicas = if role == Role::Server { servers.len() as u32 } else { trainers };
        if index >= replicas {
            let expected = format!("a number below {replicas}, the job's {role} count");
            return Err(invalid(PSJOB_INDEX, &index.to_string(), &expected));
        }
        let environment = Self {
            name: vars.text(PSJOB_NAME)?,
            namespace: vars.text(PSJOB_NAMESPACE)?,
            uid: vars.text(PSJOB_UID)?,
            role,
            index,
            servers,
            replication_factor,
            connections,
            trainers,
            min_trainers,
            finished_trainers: parse_finished(lookup(PSJOB_FINISHED_TRAINERS), trainers, min_trainers.is_some())?,
            training: parse_training(&vars.text(PSJOB_TRAINING)?)?,
            incarnation: vars.number_or(PSJOB_INCARNATION, 0)?,
            supervised: vars.flag(PSJOB_SUPERVISED)?,
            local_rank: vars.number_or(LOCAL_RANK, 0)?,
            gpus: vars.number_or(PSJOB_GPUS, 0)?,
            result_file: lookup(PSJOB_RESULT_FILE).filter(|file| !file.is_empty()),
            checkpoint: parse_checkpoint(lookup(PSJOB_CHECKPOINT_DIR), lookup(PSJOB_CHECKPOINT))?,
            metrics_folder: lookup(PSJOB_METRICS_DIR).filter(|folder| !folder.is_empty()),
            mlflow: parse_mlflow(lookup(PSJOB_MLFLOW_URI), lookup(PSJOB_MLFLOW_EXPERIMENT)),
            tls_folder: lookup(PSJOB_TLS_DIR).filter(|folder| !folder.is_empty()),
        };
        for (name, want) in [(RANK, environment.rank()), (WORLD_SIZE, environment.world_size())] {
            let found = vars.number_or(name, want)?;
            if found != want {
                let expected = format!(
                    "{want} for {role} {index} of {} servers and {trainers} trainers",
                    environment.servers.len()
                );
                return Err(invalid(name, &found.to_string(), &expected));
            }
        }
        Ok(Some(environment))
    }
}

struct Lookup<'a, F>(&'a F);

impl<F: Fn(&str) -> Option<String>> Lookup<'_, F> {
    fn text(&self, name: &'static str) -> Result<String, EnvironmentError> {
        (self.0)(name).ok_or(EnvironmentError::Missing(name))
    }

    fn number(&self, name: &'static str) -> Result<u32, EnvironmentError> {
        let text = self.text(name)?;
        text.trim().parse().map_err(|_| invalid(name, &text, "a whole number from 0"))
    }

    fn number_or(&self, name: &'static str, default: u32) -> Result<u32, EnvironmentError> {
        if (self.0)(name).is_none() { Ok(default) } else { self.number(name) }
    }

    fn flag(&self, name: &'static str) -> Result<bool, EnvironmentError> {
        match (self.0)(name).as_deref().map(str::trim) {
            None | Some("" | "0") => Ok(false),
            Some("1") => Ok(true),
            Some(other) => Err(invalid(name, other, "1, or nothing at all")),
        }
    }
}

fn parse_address(text: &str) -> Result<String, EnvironmentError> {
    let ok =
        text.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok_and(|p| p > 0));
    if ok {
        Ok(text.to_owned())
    } else {
        Err(invalid(PSJOB_SERVERS, text, "host:port for every server, separated by commas"))
    }
}

fn parse_finished(text: Option<String>, trainers: u32, elastic: bool) -> Result<Vec<u32>, EnvironmentError> {
    let Some(text) = text.filter(|text| !text.is_empty()) else { return Ok(Vec::new()) };
    let finished: Vec<u32> = index_ranges::parse(&text).collect();
    let are_there = finished.iter().all(|trainer| *trainer < trainers);
    if elastic || !are_there || index_ranges::format(&finished) != text {
        let expected = if elastic {
            "nothing: an elastic job ends when its batches are done".to_owned()
        } else {
            format!("indexes below {trainers}, ascending, such as 0-2,5")
        };
        return Err(invalid(PSJOB_FINISHED_TRAINERS, &text, &expected));
    }
    Ok(finished)
}

fn parse_training(json: &str) -> Result<Training, EnvironmentError> {
    let training: Training = serde_json::from_str(json)
        .map_err(|e| invalid(PSJOB_TRAINING, json, &format!("spec.training as JSON ({e})")))?;
    training.validate().map_err(EnvironmentError::Training)?;
    Ok(training)
}

fn parse_checkpoint(folder: Option<String>, policy: Option<String>) -> Result<Option<Checkpoint>, EnvironmentError> {
    let Some(folder) = folder.filter(|folder| !folder.is_empty()) else { return Ok(None) };
    let json = policy.unwrap_or_else(|| "{}".into());
    let policy: CheckpointPolicy = serde_json::from_str(&json)
        .map_err(|e| invalid(PSJOB_CHECKPOINT, &json, &format!("intervalSeconds, keep and resume as JSON ({e})")))?;
    if policy.interval_seconds == 0 || policy.keep == 0 {
        return Err(invalid(PSJOB_CHECKPOINT, &json, "intervalSeconds and keep of at least 1"));
    }
    Ok(Some(Checkpoint { folder, policy }))
}

fn parse_mlflow(uri: Option<String>, experiment: Option<String>) -> Option<Mlflow> {
    let uri = uri.filter(|uri| !uri.is_empty())?;
    let experiment = experiment.filter(|name| !name.is_empty()).unwrap_or_else(|| DEFAULT_EXPERIMENT.to_owned());
    Some(Mlflow { uri, experiment })
}

fn invalid(name: &'static str, value: &str, expected: &str) -> EnvironmentError {
    EnvironmentError::Invalid { name, value: value.to_owned(), expected: expected.to_owned() }
}

#[cfg(test)]
mod tests;
