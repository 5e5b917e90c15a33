//! Training a model that lives in other processes: the trainer calls its modules through autograd
//! contexts, and takes part in the job's life as a [`Member`] without parameters of its own.

use std::time::{Duration, Instant};

use psjobs_api::{Environment, ReplicaResult};
use psjobs_ps::client::{ClientError, Member, Recorder, SessionConfig, TensorSpec, TimeSpent};
use psjobs_ps::network::Network;
use psjobs_ps::tls::TlsError;
use tch::Device;

use super::Plan;
use super::progress::{Done, Progress};
use super::step_clock::{Part, StepClock};
use crate::data::sampler::TooFewExamples;
use crate::workload::Metrics;
use psjobs_rpc::{Driver, Endpoint, Peer, Registry, RemoteError, Settings, WaitClock, server_integration};

/// A process that has sent nothing for this long, not even a heartbeat, is lost to a trainer.
const SILENCE: Duration = Duration::from_secs(20);

/// Training failed.
#[derive(Debug, thiserror::Error)]
pub enum ModulesError {
    #[error(transparent)]
    TooFewExamples(#[from] TooFewExamples),
    #[error("this trainer cannot begin")]
    Runtime(#[source] std::io::Error),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("this trainer cannot begin")]
    Join(#[source] ClientError),
    #[error("this trainer cannot begin")]
    Connect(#[source] RemoteError),
    #[error("this trainer cannot go on at step {step}")]
    Step { step: u64, source: RemoteError },
    #[error("the loss is {loss} at step {step}: training has diverged; lower the learning rate")]
    Diverged { step: u64, loss: f64 },
    #[error("the model is trained, but cannot be evaluated")]
    Evaluate(#[source] RemoteError),
    #[error("this trainer is done, but cannot say so")]
    Leave(#[source] ClientError),
}

impl ModulesError {
    /// Returns true if other processes alone end this trainer; see [`ClientError::is_caused_by_others`].
    #[must_use]
    pub fn is_caused_by_others(&self, supervised: bool) -> bool {
        match self {
            Self::Join(error) | Self::Leave(error) => error.is_caused_by_others(supervised),
            Self::Connect(error) | Self::Step { source: error, .. } | Self::Evaluate(error) => error.is_peer_away(),
            Self::TooFewExamples(_) | Self::Runtime(_) | Self::Tls(_) | Self::Diverged { .. } => false,
        }
    }

    /// Returns true if the cause lies in this trainer, so that the servers are to be notified.
    #[must_use]
    pub fn is_own(&self) -> bool {
        match self {
            Self::Join(error) | Self::Leave(error) => error.is_own(),
            Self::Connect(error) | Self::Step { source: error, .. } | Self::Evaluate(error) => !error.is_peer_away(),
            Self::TooFewExamples(_) | Self::Runtime(_) | Self::Tls(_) | Self::Diverged { .. } => true,
        }
    }
}

/// Measures the steps of a trainer whose model is in other processes. The time for which its thread waits for them is the
/// exchange, and in no part.
#[derive(Clone, Debug)]
pub struct RemoteStepClock {
    parts: StepClock,
    waits: WaitClock,
}

impl RemoteStepClock {
    /// Starts with the first step of this thread.
    #[must_use]
    pub fn start() -> Self {
        // A trainer itself computes on the CPU.
        Self { parts: StepClock::new(Device::Cpu, Instant::now()), waits: WaitClock::start() }
    }

    /// As [`RemoteStepClock::start`], but forward and backward are not told apart.
    #[must_use]
    pub fn of_whole_steps() -> Self {
        Self { parts: StepClock::of_whole_steps(Instant::now()), waits: WaitClock::start() }
    }

    /// A part begins: what was done since the last one belongs to none.
    pub fn begin(&mut self) {
        self.parts.begin(self.waited(), Instant::now());
    }

    /// A part ends, and another one begins.
    pub fn end(&mut self, part: Part) {
        self.parts.end(part, self.waited(), Instant::now());
    }

    /// Returns the time waited for other processes so far.
    #[must_use]
    pub fn waited(&self) -> Duration {
        self.waits.waited()
    }

    /// Returns where the time went so far, for [`Participant::report`].
    #[must_use]
    pub fn spent(&self) -> (TimeSpent, Duration) {
        let waited = self.waited();
        (self.parts.spent(Instant::now()), waited)
    }
}

/// A trainer in its job: a member of it, and connected to its servers.
pub struct Participant {
    // Dropped first: the servers are notified that nothing is held there any more.
    connections: Connections,
    member: Member,
    servers: Vec<Peer>,
}

struct Connections {
    endpoint: Endpoint,
    // Behind the endpoint, which runs on it.
    _driver: Driver,
}

impl Drop for Connections {
    fn drop(&mut self) {
        self.endpoint.shutdown();
    }
}

impl Participant {
    /// Joins the job in `environment`, offering what `registry` can make. `layers` are those that the trainers train
    /// themselves, for the servers' checkpoints, if there are any. Waits up to `connect_timeout` for each server.
    ///
    /// # Errors
    /// If a server stays away, or refuses this trainer.
    pub fn join(
        environment: &Environment,
        registry: Registry,
        layers: Vec<TensorSpec>,
        total_steps: u64,
        connect_timeout: Duration,
    ) -> Result<Self, ModulesError> {
        let start = |settings, driver: &Driver| Endpoint::start_driven(settings, registry, driver);
        Self::join_with(start, environment, layers, total_steps, connect_timeout)
    }

    /// As [`Participant::join`], for a trainer whose calls do not wait for their answers: the driver's thread alone sends
    /// and receives, while the trainer computes.
    ///
    /// # Errors
    /// As [`Participant::join`].
    pub fn join_streaming(
        environment: &Environment,
        registry: Registry,
        layers: Vec<TensorSpec>,
        total_steps: u64,
        connect_timeout: Duration,
    ) -> Result<Self, ModulesError> {
        let start = |settings, driver: &Driver| Endpoint::start(settings, registry, driver.handle());
        Self::join_with(start, environment, layers, total_steps, connect_timeout)
    }

    fn join_with(
        start: impl FnOnce(Settings, &Driver) -> Endpoint,
        environment: &Environment,
        layers: Vec<TensorSpec>,
        total_steps: u64,
        connect_timeout: Duration,
    ) -> Result<Self, ModulesError> {
        let network = Network::of(environment)?;
        let settings = Settings::new(server_integration::name(environment), environment.uid.as_str());
        let incarnation = environment.incarnation;
        let settings = Settings { incarnation, lease: SILENCE, network: network.clone(), ..settings };
        let driver = Driver::start().map_err(ModulesError::Runtime)?;
        let connections = Connections { endpoint: start(settings, &driver), _driver: driver };
        let config = SessionConfig::new(environment, layers, total_steps);
        let config = SessionConfig { connect_timeout, network, ..config };
        let member = Member::join(config).map_err(ModulesError::Join)?;
        let connect = |(index, address): (u32, &String)| {
            connections.endpoint.connect(&server_integration::server_name(index), address, connect_timeout)
        };
        let servers = (0..).zip(&environment.servers).map(connect).collect::<Result<_, _>>();
        let servers = servers.map_err(ModulesError::Connect)?;
        Ok(Self { connections, member, servers })
    }

    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.connections.endpoint
    }

    /// The job's servers in order; at least one.
    #[must_use]
    pub fn servers(&self) -> &[Peer] {
        &self.servers
    }

    /// Returns the configuration that this trainer has joined with, for its sparse tables.
    #[must_use]
    pub fn config(&self) -> &SessionConfig {
        self.member.config()
    }

    /// See [`psjobs_ps::client::AsyncMember::finished`].
    #[must_use]
    pub fn finished(&self) -> Vec<u32> {
        self.member.finished()
    }

    /// Reports to the servers how far this trainer is; see [`psjobs_ps::client::AsyncMember::report`].
    pub fn report(&self, step: u64, examples: u64, metrics: &Metrics, spent: Option<(TimeSpent, Duration)>) {
        self.member.report(step, examples, metrics, spent);
    }

    /// Returns where the metrics of this trainer are recorded over time.
    #[must_use]
    pub fn recorder(&self) -> Recorder {
        self.member.recorder()
    }

    /// Does steps `0..total` of `plan`. `step` gives the loss, and ends the parts of its time that come before backward, to which
    /// the rest belongs; `stop` is asked before each. `None` if it said so.
    ///
    /// # Errors
    /// If a step fails, or its loss is not a number.
    pub fn train(
        &self,
        plan: &Plan,
        total: u64,
        stop: impl Fn() -> bool,
        mut step: impl FnMut(u64, &mut RemoteStepClock) -> Result<f64, RemoteError>,
    ) -> Result<Option<ReplicaResult>, ModulesError> {
        let mut progress = Progress::new(total, plan.log_every, Instant::now());
        let mut clock = RemoteStepClock::start();
        for number in 0..total {
            if stop() {
                self.report(number, progress.examples(), &progress.metrics(), Some(clock.spent()));
                return Ok(None);
            }
            clock.begin();
            let loss = step(number, &mut clock).map_err(|source| ModulesError::Step { step: number, source })?;
            clock.end(Part::Backward);
            if !loss.is_finite() {
                return Err(ModulesError::Diverged { step: number, loss });
            }
            let done = Done { next: number + 1, examples: plan.batch, loss, waiting: clock.waited() };
            let due = progress.step(done, Instant::now());
            if let Some(point) = progress.take_point() {
                self.recorder().record(number + 1, &point);
            }
            if due {
                self.report(number + 1, progress.examples(), &progress.metrics(), Some(clock.spent()));
            }
        }
        Ok(Some(progress.result(clock.waited())))
    }

    /// Lets go of everything elsewhere, and leaves the job: with a result if its work is done.
    ///
    /// # Errors
    /// If a server does not answer.
    pub fn leave(self, result: Option<&ReplicaResult>) -> Result<(), ModulesError> {
        let Self { connections, member, servers } = self;
        drop((servers, connections));
        if let Some(result) = result {
            // The result counts steps that were made again, too. A trainer whose steps have no known end makes none again.
            let steps = match member.config().total_steps {
                0 => result.steps,
                total => result.steps.min(total),
            };
            member.report(steps, result.examples, &result.metrics, None);
        }
        member.leave(result.is_some()).map_err(ModulesError::Leave)
    }

    /// Ends with an error of this trainer's own, which `failure` describes: notifies the servers.
    pub fn fail(self, failure: String) {
        let Self { connections, member, servers } = self;
        drop((servers, connections));
        member.fail(failure);
    }

    /// Does `work` as this participant, and leaves the job as that ended: with a result, before the last step, or with
    /// an error, of which the servers are notified if its cause lies in this trainer.
    ///
    /// # Errors
    /// Returns the error of `work`, or that a server does not answer.
    pub fn attend(
        self,
        work: impl FnOnce(&Self) -> Result<Option<ReplicaResult>, ModulesError>,
    ) -> Result<Option<ReplicaResult>, ModulesError> {
        match work(&self) {
            Ok(result) => self.leave(result.as_ref()).map(|()| result),
            Err(error) => {
                if error.is_own() {
                    self.fail(super::chain(&error));
                }
                Err(error)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_processes_excuse_a_trainer_and_only_its_own_errors_are_reported() {
        let text = || String::from("no");
        let away = || ClientError::Unreachable { address: text(), seconds: 120, reason: text() };
        let conflict = || ClientError::Conflict { address: text(), reason: text() };
        let misplaced = ClientError::Misplaced { address: text(), found: 1, servers: 2, want: 0, ours: 2 };
        let lost = || RemoteError::Lost { peer: text(), call: text(), reason: text() };
        let failed = || RemoteError::Failed { peer: text(), call: text(), message: text() };
        // The error, if it is caused by others by hand and where it is supervised, and if servers are to be notified.
        let rows = [
            (ModulesError::Join(away()), (true, true), false),
            (ModulesError::Join(conflict()), (false, true), false),
            (ModulesError::Join(misplaced), (false, true), false),
            (ModulesError::Join(ClientError::Refused { address: text(), reason: text() }), (false, false), true),
            (ModulesError::Leave(away()), (true, true), false),
            (ModulesError::Leave(conflict()), (false, true), false),
            (ModulesError::Leave(ClientError::Interrupted), (false, false), false),
            (ModulesError::Connect(lost()), (true, true), false),
            (ModulesError::Step { step: 3, source: lost() }, (true, true), false),
            (ModulesError::Step { step: 3, source: failed() }, (false, false), true),
            (ModulesError::Evaluate(lost()), (true, true), false),
            (ModulesError::Evaluate(failed()), (false, false), true),
            (ModulesError::Runtime(std::io::ErrorKind::WouldBlock.into()), (false, false), true),
            (ModulesError::Diverged { step: 3, loss: f64::NAN }, (false, false), true),
        ];
        for (error, by_others, own) in rows {
            let found = (error.is_caused_by_others(false), error.is_caused_by_others(true));
            assert_eq!((found, error.is_own()), (by_others, own), "{error:?}");
        }
    }
}
