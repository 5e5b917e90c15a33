//! The summary of a run: how it ended and the figures that its processes wrote down.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use psjobs_api::Role;
use psjobs_api::result::Traffic;
use serde::Serialize;

use super::lifecycle::{Ending, Failure, Outcome};
use super::plan::{Plan, Replica};
use super::results::Results;
use super::view::words::{self, number};

/// The one JSON object that `--json` prints.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    pub name: String,
    pub state: State,
    /// The metric of this name, null if the trainers report none.
    pub accuracy: Option<f64>,
    pub metrics: BTreeMap<String, f64>,
    pub steps: Option<u64>,
    pub examples: Option<u64>,
    /// The steps of all trainers together, in their training loops.
    pub steps_per_second: Option<f64>,
    pub examples_per_second: Option<f64>,
    /// The time of the longest training loop.
    pub seconds: Option<f64>,
    /// From the first process's start to the last one's end.
    pub total_seconds: f64,
    /// Share of the trainers' time spent waiting for servers, other trainers and the network.
    pub waiting_share: Option<f64>,
    /// The waiting share of each trainer, by index; null for one that left no result.
    pub waiting_shares: Vec<Option<f64>>,
    /// The bytes of the connections to all servers; null unless each has counted them. Payloads in shared memory are not
    /// among them.
    pub traffic: Option<Traffic>,
    pub trainers: u32,
    pub servers: u32,
    pub restarts: u32,
    /// Fields of the manifest that were ignored, for one.
    pub warnings: Vec<String>,
    /// Folder of the job's checkpoints and of its exported model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoints: Option<String>,
    /// File of the trained model, if the servers exported it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    pub failure: Option<FailureReport>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum State {
    Succeeded,
    Failed,
    Interrupted,
}

/// Why the job failed, and what its trouble began with.
#[derive(Clone, Debug, Serialize)]
pub struct FailureReport {
    pub reason: String,
    pub role: Option<String>,
    pub index: Option<u32>,
    pub rank: Option<u32>,
    /// As a container's: 128 and the signal for a process that was killed.
    pub exit_code: Option<i32>,
    pub log_tail: Vec<String>,
}

impl Summary {
    pub fn new(plan: &Plan, ending: &Ending, restarts: u32, results: &Results, total: Duration) -> Self {
        let of = |role| results.iter().filter(move |(replica, _)| replica.role == role).map(|(_, result)| result);
        let trained: Vec<_> = of(Role::Trainer).collect();
        let any = !trained.is_empty();
        let steps = trained.iter().map(|result| result.steps).sum::<u64>();
        let examples = trained.iter().map(|result| result.examples).sum::<u64>();
        let seconds = trained.iter().map(|result| result.seconds).fold(0.0, f64::max);
        let waiting: Option<f64> = trained.iter().map(|result| result.waiting_seconds).sum();
        let busy: f64 = trained.iter().map(|result| result.seconds).sum();
        // Server 0 heard all trainers; of the trainers themselves the first counts.
        let mut metrics = BTreeMap::new();
        for result in of(Role::Server).chain(of(Role::Trainer)) {
            for (name, value) in &result.metrics {
                metrics.entry(name.clone()).or_insert(*value);
            }
        }
        let per_second = |count: u64| (seconds > 0.0).then(|| count as f64 / seconds);
        Self {
            name: plan.name.clone(),
            state: match ending {
                Ending::Over(Outcome::Succeeded) => State::Succeeded,
                Ending::Over(Outcome::Failed { .. }) => State::Failed,
                Ending::Interrupted(_) => State::Interrupted,
            },
            accuracy: metrics.get("accuracy").copied(),
            metrics,
            steps: any.then_some(steps),
            examples: any.then_some(examples),
            steps_per_second: per_second(steps),
            examples_per_second: per_second(examples),
            seconds: any.then_some(seconds),
            total_seconds: total.as_secs_f64(),
            waiting_share: waiting.filter(|_| busy > 0.0).map(|waiting| waiting / busy),
            waiting_shares: (0..plan.trainers).map(|index| waiting_share(results, index)).collect(),
            traffic: traffic(results, plan.servers),
            trainers: plan.trainers,
            servers: plan.servers,
            restarts,
            warnings: plan.warnings.clone(),
            checkpoints: plan.checkpoint_folder().map(str::to_owned),
            model: of(Role::Server).find_map(|result| result.model.clone()),
            failure: match ending {
                Ending::Over(Outcome::Failed { reason, cause }) => {
                    Some(FailureReport::new(plan, reason, cause.as_ref()))
                }
                _ => None,
            },
        }
    }
}

fn traffic(results: &Results, servers: u32) -> Option<Traffic> {
    let of_server = |index| results.get(&Replica { role: Role::Server, index })?.traffic;
    (0..servers).map(of_server).try_fold(Traffic::default(), |sum, traffic| {
        let traffic = traffic?;
        Some(Traffic { received: sum.received + traffic.received, sent: sum.sent + traffic.sent })
    })
}

fn waiting_share(results: &Results, index: u32) -> Option<f64> {
    let result = results.get(&Replica { role: Role::Trainer, index })?;
    result.waiting_seconds.filter(|_| result.seconds > 0.0).map(|waiting| waiting / result.seconds)
}

impl FailureReport {
    fn new(plan: &Plan, reason: &str, cause: Option<&Failure>) -> Self {
        Self {
            reason: reason.to_owned(),
            role: cause.map(|cause| cause.replica.role.to_string()),
            index: cause.map(|cause| cause.replica.index),
            rank: cause.map(|cause| plan.rank(cause.replica)),
            exit_code: cause.map(|cause| cause.exit.code()),
            log_tail: cause.map(|cause| cause.tail.clone()).unwrap_or_default(),
        }
    }
}

/// A heading and a small table.
impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            State::Succeeded => "succeeded",
            State::Failed => "failed",
            State::Interrupted => "was interrupted",
        };
        write!(f, "{} {state} after {}", self.name, words::duration(self.total_seconds))?;
        let mut row = |name: &str, value: String| write!(f, "\n  {name:<14}{value}");
        for (name, value) in &self.metrics {
            row(name, number(*value))?;
        }
        if let (Some(steps), Some(rate), Some(seconds)) = (self.steps, self.steps_per_second, self.seconds) {
            row("steps/s", format!("{}   ({steps} steps in {seconds:.1} s)", number(rate)))?;
        }
        if let Some(rate) = self.examples_per_second {
            row("examples/s", number(rate))?;
        }
        if let Some(share) = self.waiting_share {
            row("waiting", format!("{:.1} % of the trainers' time", share * 100.0))?;
        }
        row("trainers", self.trainers.to_string())?;
        row("servers", self.servers.to_string())?;
        if self.restarts > 0 {
            row("restarts", self.restarts.to_string())?;
        }
        if let Some(model) = &self.model {
            row("model", model.clone())?;
        }
        match (&self.checkpoints, self.state) {
            (Some(folder), State::Succeeded) => row("checkpoints", folder.clone()),
            (Some(folder), _) => row("checkpoints", format!("{folder}; run the job again to go on from the newest")),
            (None, _) => Ok(()),
        }
    }
}
