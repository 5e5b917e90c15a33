//! Balancing a pole by reinforcement learning: trainer 0 is the agent, all others are observers. The
//! agent calls every observer to run an episode; for each step the observer calls back for an action
//! and reports the reward; then the agent learns. Servers only send the observers its address.

mod agent;
mod observer;
mod physics;
mod policy;

use std::sync::Arc;
use std::time::{Duration, Instant};

use psjobs_api::{Environment, ReplicaResult};
use tracing::{info, warn};

use observer::Work;
use psjobs_rpc::{Peer, Pending, RRef, Registry, RemoteError, server_integration};
use psjobs_worker::Metrics;
use psjobs_worker::train::modules::{ModulesError, Participant, RemoteStepClock};
use psjobs_worker::train::step_clock::Part;

/// Solved when the running reward is above this.
pub const SOLVED_ABOVE: f64 = 475.0;
/// How often an observer looks whether it must stop, or its agent is gone.
const LOOK: Duration = Duration::from_millis(200);

/// The settings of agent and observers.
#[derive(Clone, Debug)]
pub struct Settings {
    pub seed: u64,
    /// Adam's.
    pub learning_rate: f64,
    /// One call for each step instead of two.
    pub packed: bool,
    /// Ends after so many rounds, solved or not.
    pub max_rounds: u64,
    /// Rounds between two lines in the log.
    pub log_every: u64,
    /// Before training the first observer makes so many calls that do nothing, to measure them.
    pub measure_calls: Option<u32>,
    /// How long to wait for a process of the job.
    pub connect_timeout: Duration,
}

/// Does this trainer's part. `None` if `stop` said so.
///
/// # Errors
/// See [`ModulesError`].
pub fn run(
    environment: &Environment,
    settings: &Settings,
    ready: impl FnOnce(),
    stop: impl Fn() -> bool,
) -> Result<Option<ReplicaResult>, ModulesError> {
    if environment.trainers < 2 {
        let text = "trainer 0 is the agent and every other one an observer: a job needs at least 2 trainers";
        return Err(ModulesError::Connect(RemoteError::new(text)));
    }
    if environment.index == 0 {
        lead(environment, settings, ready, stop)
    } else {
        observe(environment, settings, ready, stop)
    }
}

fn observe(
    environment: &Environment,
    settings: &Settings,
    ready: impl FnOnce(),
    stop: impl Fn() -> bool,
) -> Result<Option<ReplicaResult>, ModulesError> {
    let (work, mut registry) = (Arc::<Work>::default(), Registry::default());
    observer::offer(&mut registry, &work);
    let participant = Participant::join(environment, registry, Vec::new(), 0, settings.connect_timeout)?;
    participant.attend(|participant| {
        let (endpoint, agent) = (participant.endpoint(), server_integration::trainer_name(0));
        let server = &participant.servers()[0];
        endpoint.connect_published(server, &agent, settings.connect_timeout).map_err(ModulesError::Connect)?;
        ready();
        let start = Instant::now();
        while !work.wait(LOOK) {
            participant.report(work.steps(), work.steps(), &Metrics::new(), Some(work.spent(start.elapsed())));
            if stop() {
                return Ok(None);
            }
            if let Some(reason) = endpoint.gone(&agent) {
                let source = RemoteError::Unreachable { peer: agent, call: "an observer".into(), reason };
                return Err(ModulesError::Step { step: work.steps(), source });
            }
        }
        let (steps, (spent, waiting)) = (work.steps(), work.spent(start.elapsed()));
        let (seconds, waiting_seconds) = (spent.total.as_secs_f64(), Some(waiting.as_secs_f64()));
        Ok(Some(ReplicaResult { steps, examples: steps, seconds, waiting_seconds, ..ReplicaResult::default() }))
    })
}

fn lead(
    environment: &Environment,
    settings: &Settings,
    ready: impl FnOnce(),
    stop: impl Fn() -> bool,
) -> Result<Option<ReplicaResult>, ModulesError> {
    let mut registry = Registry::default();
    agent::offer(&mut registry);
    let participant = Participant::join(environment, registry, Vec::new(), 0, settings.connect_timeout)?;
    participant.attend(|participant| {
        let server = &participant.servers()[0];
        participant.endpoint().publish(server, &environment.servers[0]).map_err(ModulesError::Connect)?;
        let mut rounds = Rounds::new(participant, environment.trainers - 1, settings).map_err(ModulesError::Connect)?;
        ready();
        let (start, mut clock) = (Instant::now(), RemoteStepClock::of_whole_steps());
        let mut solved = false;
        while !solved && rounds.count < settings.max_rounds {
            if stop() {
                return Ok(None);
            }
            let round = rounds.count;
            clock.begin();
            solved = rounds.run().map_err(|source| ModulesError::Step { step: round, source })? > SOLVED_ABOVE;
            // The calls of the observers, which choose actions, are forward, and `learn` is both.
            clock.end(Part::Backward);
            participant.report(rounds.count, 0, &rounds.metrics(), Some(clock.spent()));
            if rounds.count.is_multiple_of(settings.log_every) || solved {
                rounds.log();
            }
        }
        if !solved {
            warn!(rounds = rounds.count, "not solved: the running reward is not above {SOLVED_ABOVE}");
        }
        let mut metrics = rounds.metrics();
        metrics.insert("solved".into(), f64::from(u8::from(solved)));
        // Steps of the environment are the observers'; the agent's are those of its optimizer.
        let result = ReplicaResult {
            steps: rounds.count,
            examples: 0,
            seconds: start.elapsed().as_secs_f64(),
            waiting_seconds: Some(clock.waited().as_secs_f64()),
            metrics,
            ..ReplicaResult::default()
        };
        rounds.finish();
        Ok(Some(result))
    })
}

/// The agent's side of all rounds.
struct Rounds<'a> {
    settings: &'a Settings,
    agent: RRef,
    observers: Vec<Seat>,
    last_number: i64,
    count: u64,
    steps: u64,
    in_episodes: Duration,
    least: f64,
    running_reward: f64,
    calls_per_second: Option<f64>,
}

/// An observer's place: its process may be replaced.
struct Seat {
    peer: Peer,
    /// With a number that no other one has had: what a lost observer may still say counts for nothing.
    observer: Option<(i64, RRef)>,
}

impl<'a> Rounds<'a> {
    fn new(participant: &Participant, observers: u32, settings: &'a Settings) -> Result<Self, RemoteError> {
        let endpoint = participant.endpoint();
        let agent = endpoint.peer(endpoint.name());
        let agent = agent.remote(agent::NAME, (settings.seed as i64, settings.learning_rate))?;
        let seat = |index: u32| {
            let peer = endpoint.peer(&server_integration::trainer_name(index + 1)).timeout(settings.connect_timeout);
            Seat { peer, observer: None }
        };
        let mut rounds = Self {
            settings,
            agent,
            observers: (0..observers).map(seat).collect(),
            last_number: 0,
            count: 0,
            steps: 0,
            in_episodes: Duration::ZERO,
            least: 0.0,
            running_reward: 0.0,
            calls_per_second: None,
        };
        rounds.take_seats()?;
        if let Some(count) = settings.measure_calls {
            let (_, first) = rounds.observers[0].observer.as_ref().expect("every seat was taken");
            let seconds: f64 = first.rpc_sync("call_repeatedly", (&rounds.agent, i64::from(count)))?;
            rounds.calls_per_second = Some(f64::from(count) / seconds);
        }
        Ok(rounds)
    }

    /// Makes the observers that are missing; waits for their processes.
    fn take_seats(&mut self) -> Result<(), RemoteError> {
        for seat in self.observers.iter_mut().filter(|seat| seat.observer.is_none()) {
            self.last_number += 1;
            // The process may have ended in order, where its machine is drained; another takes its place.
            let peer = seat.peer.clone().await_replacement();
            let made = peer.remote(observer::NAME, (self.last_number, self.settings.seed as i64))?;
            seat.observer = Some((self.last_number, made));
        }
        Ok(())
    }

    /// One episode of every observer, side by side, and what is learnt from them. Gives the running reward.
    fn run(&mut self) -> Result<f64, RemoteError> {
        self.take_seats()?;
        let start = Instant::now();
        let begin = |seat: &Seat| {
            let (number, observer) = seat.observer.as_ref().expect("every seat was taken");
            (*number, observer.rpc_async("run_episode", (&self.agent, self.settings.packed)))
        };
        let episodes: Vec<(i64, Result<Pending<i64>, _>)> = self.observers.iter().map(begin).collect();
        let mut whole = Vec::new();
        for (seat, (number, episode)) in self.observers.iter_mut().zip(episodes) {
            match episode.and_then(Pending::wait) {
                Ok(_) => whole.push(number),
                Err(error) if error.is_retryable() => {
                    warn!(observer = seat.peer.name(), %error, "lost an observer; the round goes on without it");
                    seat.observer = None;
                }
                Err(error) => return Err(error),
            }
        }
        self.in_episodes += start.elapsed();
        if whole.is_empty() {
            return Ok(self.running_reward);
        }
        let steps: i64;
        (self.least, self.running_reward, steps) = self.agent.rpc_sync("learn", whole)?;
        self.count += 1;
        self.steps += steps.unsigned_abs();
        Ok(self.running_reward)
    }

    fn metrics(&self) -> Metrics {
        let mut metrics = Metrics::from([
            ("running_reward".to_owned(), self.running_reward),
            ("rounds".to_owned(), self.count as f64),
            ("steps_per_second".to_owned(), self.steps as f64 / self.in_episodes.as_secs_f64().max(1e-9)),
        ]);
        metrics.extend(self.calls_per_second.map(|rate| ("bare_calls_per_second".to_owned(), rate)));
        metrics
    }

    fn log(&self) {
        let steps_per_second = self.metrics()["steps_per_second"].round();
        let (reward, running_reward) = (self.least, (self.running_reward * 10.0).round() / 10.0);
        info!(round = self.count, steps = self.steps, reward, running_reward, steps_per_second, "training");
    }

    /// Notifies the observers that it is over.
    fn finish(self) {
        for seat in &self.observers {
            if let Err(error) = seat.peer.rpc_sync::<()>(observer::FINISH, ()) {
                warn!(%error, "an observer does not know that it is over");
            }
        }
    }
}
