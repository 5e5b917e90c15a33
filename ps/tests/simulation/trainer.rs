//! A trainer process, and what it insists on: that its own gradients are in the parameters it gets, each once, and
//! that no trainer's ever disappear again, unless it learns that the servers went back.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use psjobs_api::training::ConsistencyMode;
use psjobs_ps::client::{AsyncSession, ClientError, GradualStep, LastHeard, SessionConfig, Voting};
use psjobs_ps::network::Network as Reached;
use psjobs_ps::shm::Mapping;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::end::Dialer;
use super::job::{JOB, addresses};
use super::model::{Counts, Model, tensors};
use super::network::{Host, Network};
use super::plan::Plan;

/// So long a server's process that was replaced may live on after the last step.
const FORMER_LEADER: Duration = Duration::from_secs(120);

/// Why a trainer ended early.
#[derive(Debug)]
pub enum Failure {
    /// It says why.
    Reported(String),
    /// It has seen what must never be.
    Violation(String),
}

/// The parts of a job that all its trainers share.
pub struct Job {
    pub plan: Plan,
    pub model: Model,
    pub network: Network,
    /// Trainers whose steps are all acknowledged.
    pub complete: RefCell<Vec<bool>>,
    /// How often each batch of an elastic job was given.
    pub sent: RefCell<Vec<u32>>,
    /// A server has been started again. Trainers of which it knows a step that was not answered yet go on after it,
    /// without a wait for others.
    pub restarted: Cell<bool>,
    /// The longest time that a trainer waited for an answer to its gradients.
    pub longest_wait: Cell<Duration>,
}

impl Job {
    /// True if a trainer has had an answer to a gradient, or a batch of an elastic job.
    pub fn has_trained(&self) -> bool {
        !self.longest_wait.get().is_zero() || self.sent.borrow().iter().any(|times| *times > 0)
    }

    /// Waits until the job may begin to train.
    pub async fn begins(&self) {
        let left = self.plan.begins().saturating_sub(self.network.wires().trace.age());
        tokio::time::sleep(left).await;
    }
}

/// Trains to the end.
pub async fn train(job: Rc<Job>, index: u32, incarnation: u32) -> Result<(), Failure> {
    let plan = &job.plan;
    let host = Host::Trainer(index, incarnation);
    let mut chance = ChaCha8Rng::seed_from_u64(plan.seed ^ (u64::from(index) << 32) ^ (u64::from(incarnation) << 40));
    let mut session = AsyncSession::join(config(&job, index, incarnation), &job.model.initial()).await.map_err(fail)?;
    job.begins().await;
    let mut memory = session.map_memory().map_err(fail)?;
    let mut witness = Witness::new(&job, index);
    let counts = |parameters: &[f32]| job.model.counts(parameters);
    let mut step = session.next_step();
    witness.entered(step, counts(session.parameters()))?;
    let mut complete_since = None;
    loop {
        while step < plan.steps {
            let pause = |part: u32| Duration::from_millis(chance.random_range(0..=plan.compute)) / part;
            let (epoch, gradient) = (session.epoch(), (index, step));
            let (sent, next);
            if plan.gradual {
                (session, next, sent) = exchange_gradually(&job, session, &mut memory, gradient, pause).await;
            } else {
                let mut pause = pause;
                tokio::time::sleep(pause(1)).await;
                let parameters = session.parameters().to_vec();
                job.model.fill(index, step, &parameters, session.gradients_mut());
                sent = Instant::now();
                next = session.exchange(step).await;
            }
            let next = next.map_err(fail)?;
            job.longest_wait.set(job.longest_wait.get().max(sent.elapsed()));
            job.network.wires().trace.log(format_args!("{host:?} did step {step}, goes on with {next}"));
            // The step is done also if servers went back to a checkpoint that has it.
            if next == step + 1 {
                session.recorder().record(next * series_steps(plan), &series_values(index, next));
            }
            // A process before this one may have done this step on servers that went back.
            if next == step + 1 && session.epoch() == epoch {
                witness.answered(step, counts(session.parameters()))?
            } else {
                witness.entered(next, counts(session.parameters()))?
            }
            step = next;
        }
        job.complete.borrow_mut()[index as usize] = true;
        if !job.complete.borrow().iter().all(|complete| *complete) {
            break;
        }
        // The last one looks again: a repeat of its last step is answered with what there is now.
        let parameters = session.parameters().to_vec();
        job.model.fill(index, plan.steps - 1, &parameters, session.gradients_mut());
        step = session.exchange(plan.steps - 1).await.map_err(fail)?;
        if step == plan.steps {
            let found = witness.all_there(counts(session.parameters()));
            if found.is_err() && witness.may_look_again(*complete_since.get_or_insert_with(Instant::now)).await {
                continue;
            }
            found?;
            break;
        }
        job.complete.borrow_mut()[index as usize] = false;
        witness.entered(step, counts(session.parameters()))?;
    }
    session.leave(true, plan.steps, [("loss".to_owned(), 0.5)].into()).await.map_err(fail)
}

/// Steps of a trainer in the series of its metrics for one exchange.
pub fn series_steps(plan: &Plan) -> u64 {
    u64::from(plan.local_steps.max(1))
}

/// The values that a trainer records when `exchanges` are done.
pub fn series_values(index: u32, exchanges: u64) -> BTreeMap<String, f64> {
    [("loss".to_owned(), f64::from(index) + exchanges as f64 / 1024.0)].into()
}

/// Makes a step whose gradient is computed in three parts, from the back, each of which leaves when it is there. Returns the
/// time of the last one, too.
async fn exchange_gradually(
    job: &Job,
    session: AsyncSession,
    memory: &mut Mapping,
    (index, step): (u32, u64),
    mut pause: impl FnMut(u32) -> Duration,
) -> (AsyncSession, Result<u64, ClientError>, Instant) {
    const PARTS: u32 = 3;
    let mut gradient = vec![0.0; memory.elements()];
    job.model.fill(index, step, memory.parameters(), &mut gradient);
    let mut under_way = GradualStep::begin(session, &Handle::current(), step, gradient.len());
    for part in (0..PARTS as usize).rev() {
        tokio::time::sleep(pause(PARTS)).await;
        let first = gradient.len() * part / PARTS as usize;
        memory.gradients_mut()[first..].copy_from_slice(&gradient[first..]);
        under_way.offer(first);
    }
    let sent = Instant::now();
    let (session, next) = under_way.end().await;
    (session, next, sent)
}

pub fn fail(error: impl std::error::Error) -> Failure {
    Failure::Reported(error.to_string())
}

pub fn config(job: &Job, index: u32, incarnation: u32) -> SessionConfig {
    let dialer = Dialer { network: job.network.clone(), from: Host::Trainer(index, incarnation) };
    SessionConfig {
        job_uid: JOB.into(),
        trainer: index,
        incarnation,
        servers: addresses(&job.plan),
        tensors: tensors(&job.plan),
        total_steps: job.plan.steps,
        local_steps: job.plan.local_steps,
        overlap: job.plan.overlap,
        elastic: job.plan.least.is_some(),
        supervised: job.plan.supervised,
        connect_timeout: SessionConfig::waiting_time(job.plan.supervised),
        connections: job.plan.connections,
        shared_memory: false,
        replication_factor: if job.plan.replicated { 2 } else { 1 },
        compression: job.plan.compression.clone(),
        network: Reached::Other(Arc::new(dialer)),
        interrupt: Arc::default(),
        voting: Voting::default(),
        last_heard: LastHeard::default(),
        concluded: Arc::default(),
        finished_trainers: Arc::default(),
    }
}

/// Looks at every set of parameters, or rows, that a trainer gets. It receives what is in them.
pub struct Witness<'a> {
    job: &'a Job,
    index: u32,
    /// By block, or row of each trainer: own gradients that were there when it entered. Blocks may differ by some.
    floor: Vec<u64>,
    seen: Counts,
}

impl<'a> Witness<'a> {
    pub fn new(job: &'a Job, index: u32) -> Self {
        Self { job, index, floor: Vec::new(), seen: Vec::new() }
    }

    /// It has joined, or the servers went back: it goes on with `next`.
    pub fn entered(&mut self, next: u64, counts: Result<Counts, String>) -> Result<(), Failure> {
        if self.job.plan.forgets {
            return Ok(());
        }
        self.seen = self.checked(counts)?;
        self.floor = self.seen.iter().map(|block| block[self.index as usize]).collect();
        match self.floor.iter().position(|own| *own < next) {
            Some(block) => {
                self.violation(format!("is asked to go on with {next}, block {block} has {}", self.floor[block]))
            }
            None => Ok(()),
        }
    }

    /// `step` was acknowledged.
    pub fn answered(&mut self, step: u64, counts: Result<Counts, String>) -> Result<(), Failure> {
        let (job, index) = (self.job, self.index as usize);
        if job.plan.forgets {
            return Ok(());
        }
        let before = std::mem::take(&mut self.seen);
        self.seen = self.checked(counts)?;
        for (block, (now, before)) in self.seen.iter().zip(&before).enumerate() {
            let want = self.floor[block].max(step + 1);
            // In Sync a step that is given again is answered with the values before the next one, which the process before may
            // have given to this server, too.
            if job.plan.consistency.mode == ConsistencyMode::Sync && now[index] == step + 1 && step + 1 < want {
                continue;
            }
            // The process before this one went on with servers that had been started anew, and so did not know of this one.
            if now[index] > want && job.restarted.get() && job.plan.may_run_twice(self.index) {
                continue;
            }
            if now[index] != want {
                return self.violation(format!("gave step {step}; block {block} has {} of it, not {want}", now[index]));
            }
            if now.iter().zip(before).any(|(now, before)| now < before) {
                return self.violation(format!("saw block {block} go back from {before:?} to {now:?}"));
            }
            let bound = step + 1 - u64::from(job.plan.consistency.staleness).min(step + 1);
            let bounded = job.plan.consistency.mode == ConsistencyMode::Bounded && !job.restarted.get();
            if bounded && now.iter().any(|count| *count < bound) {
                return self.violation(format!("was let ahead to {} in block {block}, with {now:?}", step + 1));
            }
        }
        Ok(())
    }

    /// Every trainer has done its steps.
    pub fn all_there(&self, counts: Result<Counts, String>) -> Result<(), Failure> {
        if self.job.plan.forgets {
            return Ok(());
        }
        let counts = self.checked(counts)?;
        if counts.iter().flatten().all(|count| *count == self.job.plan.steps) {
            return Ok(());
        }
        self.violation(format!("finds {counts:?} when all trainers have done their steps"))
    }

    /// After [`Witness::all_there`] has failed: returns whether it may be so for now, a second later. Where a former leader of
    /// blocks lives on, a step that is given again is answered with what it had; it ends soon.
    pub async fn may_look_again(&self, since: Instant) -> bool {
        let may = self.job.plan.has_former_leaders() && since.elapsed() < FORMER_LEADER;
        if may {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        may
    }

    fn checked(&self, counts: Result<Counts, String>) -> Result<Counts, Failure> {
        counts.or_else(|what| self.violation(format!("finds that {what}")))
    }

    pub fn violation<T>(&self, what: String) -> Result<T, Failure> {
        Err(Failure::Violation(format!("trainer {} {what}", self.index)))
    }
}
