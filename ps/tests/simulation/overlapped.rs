//! A trainer that computes each gradient while the exchange of the one before is under way. It insists on what the others
//! insist on, and that each gradient counts by the parameters that it was computed with.

use std::rc::Rc;
use std::time::Duration;

use psjobs_api::training::ConsistencyMode;
use psjobs_ps::client::{AsyncSession, Ended, OverlapSession};
use psjobs_ps::shm::Mapping;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::model::Counts;
use super::network::Host;
use super::trainer::{Failure, Job, Witness, config, fail, series_steps, series_values};

/// Trains to the end.
pub async fn train(job: Rc<Job>, index: u32, incarnation: u32) -> Result<(), Failure> {
    let plan = &job.plan;
    let mut chance = ChaCha8Rng::seed_from_u64(plan.seed ^ (u64::from(index) << 32) ^ (u64::from(incarnation) << 40));
    let session = AsyncSession::join(config(&job, index, incarnation), &job.model.initial()).await.map_err(fail)?;
    job.begins().await;
    let memory = session.map_memory().map_err(fail)?;
    let mut step = session.next_step();
    let mut trainer = Trainer {
        job: &job,
        host: Host::Trainer(index, incarnation),
        index,
        session: OverlapSession::new(session, Handle::current()),
        held: Held { parameters: memory.parameters().to_vec(), was_answer: false },
        memory,
        given: Vec::new(),
        witness: Witness::new(&job, index),
    };
    trainer.witness.entered(step, trainer.counts())?;
    let mut complete_since = None;
    loop {
        while step < plan.steps || trainer.session.is_exchanging() {
            tokio::time::sleep(Duration::from_millis(chance.random_range(0..=plan.compute))).await;
            step = trainer.advance(step).await?;
        }
        job.complete.borrow_mut()[index as usize] = true;
        if !job.complete.borrow().iter().all(|complete| *complete) {
            break;
        }
        // The last one looks again: a repeat of its last step is answered with what there is now.
        job.model.fill(index, plan.steps - 1, &trainer.held.parameters, trainer.memory.gradients_mut());
        step = trainer.session.exchange(plan.steps - 1).await.map_err(fail)?;
        trainer.take(false);
        if step == plan.steps {
            let found = trainer.witness.all_there(trainer.counts());
            if found.is_err() && trainer.witness.may_look_again(*complete_since.get_or_insert_with(Instant::now)).await
            {
                continue;
            }
            found?;
            break;
        }
        job.complete.borrow_mut()[index as usize] = false;
        trainer.witness.entered(step, trainer.counts())?;
    }
    let Some(session) = trainer.session.into_session().await else { return Ok(()) };
    session.leave(true, plan.steps, [("loss".to_owned(), 0.5)].into()).await.map_err(fail)
}

struct Trainer<'a> {
    job: &'a Job,
    host: Host,
    index: u32,
    session: OverlapSession,
    memory: Mapping,
    /// The parameters that the model computes with.
    held: Held,
    /// By block: the updates in the parameters that the gradient was computed with whose exchange is under way.
    given: Vec<u64>,
    witness: Witness<'a>,
}

/// Parameters that a trainer has taken.
struct Held {
    parameters: Vec<f32>,
    /// They were the answer to a gradient.
    was_answer: bool,
}

impl Trainer<'_> {
    /// Computes the gradient of `step`, then ends the exchange of the step before and begins that of this one. After the last
    /// step it only ends. Returns the next step.
    async fn advance(&mut self, step: u64) -> Result<u64, Failure> {
        let (job, is_over) = (self.job, step >= self.job.plan.steps);
        let mut gradient = vec![0.0; self.held.parameters.len()];
        let mut updates = Vec::new();
        if !is_over {
            updates = self.computes(step)?;
            job.model.fill(self.index, step, &self.held.parameters, &mut gradient);
        }
        let waited = Instant::now();
        let ended = if is_over { self.session.settle().await } else { self.session.end_exchange().await };
        if let Some(ended) = ended {
            let Ended { next, has_gone_back } = ended.map_err(fail)?;
            job.longest_wait.set(job.longest_wait.get().max(waited.elapsed()));
            let trace = format_args!("{:?} ended the step before {step}, goes on with {next}", self.host);
            job.network.wires().trace.log(trace);
            self.take(!has_gone_back);
            if has_gone_back {
                self.witness.entered(next, self.counts())?;
                return Ok(next);
            }
            self.check_versions()?;
            self.witness.answered(step - 1, self.counts())?;
        }
        if is_over {
            return Ok(step);
        }
        self.memory.gradients_mut().copy_from_slice(&gradient);
        self.session.begin_exchange(step);
        self.given = updates;
        self.session.record((step + 1) * series_steps(&job.plan), &series_values(self.index, step + 1));
        Ok(step + 1)
    }

    /// Takes the parameters that are there now.
    fn take(&mut self, was_answer: bool) {
        self.held = Held { parameters: self.memory.parameters().to_vec(), was_answer };
    }

    fn counts(&self) -> Result<Counts, String> {
        self.job.model.counts(&self.held.parameters)
    }

    /// Returns the updates of each block in the parameters with which `step` is computed. In Bounded they are one step older
    /// than without overlap, and not more.
    fn computes(&self, step: u64) -> Result<Vec<u64>, Failure> {
        let plan = &self.job.plan;
        let counts = self.counts().or_else(|what| self.witness.violation(format!("finds that {what}")))?;
        let oldest = step.saturating_sub(u64::from(plan.consistency.staleness) + 1);
        let bounded = plan.consistency.mode == ConsistencyMode::Bounded && !self.job.restarted.get();
        let is_too_old = counts.iter().flatten().any(|count| *count < oldest);
        if bounded && self.held.was_answer && is_too_old {
            return self.witness.violation(format!("computes step {step} with {counts:?}"));
        }
        Ok(counts.iter().map(|block| block.iter().sum()).collect())
    }

    /// Checks that the gradient which was answered counts by the parameters that it was computed with.
    fn check_versions(&self) -> Result<(), Failure> {
        let Some(session) = self.session.idle().filter(|_| !self.job.plan.forgets) else { return Ok(()) };
        for (block, updates) in (0..).zip(&self.given) {
            let sent = session.version_of_gradient(block);
            if sent != *updates {
                let what = format!("sent block {block} as computed with {sent} updates, there were {updates}");
                return self.witness.violation(what);
            }
        }
        Ok(())
    }
}
