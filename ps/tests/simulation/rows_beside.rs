//! A trainer of a job whose servers train rows of a sparse table beside dense parameters. It insists of both on what
//! trainers of the one or the other insist on. Where exchanges overlap, a step's rows go up when its exchange begins.

use std::rc::Rc;
use std::time::Duration;

use futures::future::join;
use psjobs_ps::client::{AsyncSession, Ended, OverlapSession, RowGradients, SessionConfig, SessionTables};
use psjobs_ps::shm::Mapping;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::model::Counts;
use super::network::Host;
use super::tables::{all_together, keys, marks, row_counts, specs};
use super::trainer::{Failure, Job, Witness, config, fail};

const IDLE: &str = "no exchange is under way";

/// Trains to the end.
pub async fn train(job: Rc<Job>, index: u32, incarnation: u32) -> Result<(), Failure> {
    let plan = &job.plan;
    let mut chance = ChaCha8Rng::seed_from_u64(plan.seed ^ (u64::from(index) << 32) ^ (u64::from(incarnation) << 40));
    // As in Python, the session does not know its last step: parameters may be ahead of rows.
    let config = SessionConfig { total_steps: SessionConfig::UNKNOWN_STEPS, ..config(&job, index, incarnation) };
    let mut session = AsyncSession::join(config, &job.model.initial()).await.map_err(fail)?;
    let tables = SessionTables::open(&mut session, specs()).await.map_err(fail)?;
    job.begins().await;
    let memory = session.map_memory().map_err(fail)?;
    let mut trainer = Trainer {
        job: &job,
        host: Host::Trainer(index, incarnation),
        index,
        session: OverlapSession::new(session, Handle::current()),
        held: memory.parameters().to_vec(),
        memory,
        tables,
        epoch: 0,
        witnesses: (Witness::new(&job, index), Witness::new(&job, index)),
    };
    let mut step = trainer.tables.next_step(trainer.session.next_step());
    trainer.entered(step).await?;
    loop {
        while step < plan.steps || trainer.session.is_exchanging() {
            tokio::time::sleep(Duration::from_millis(chance.random_range(0..=plan.compute))).await;
            step = if plan.overlap { trainer.advance(step).await? } else { trainer.step(step).await? };
        }
        step = trainer.finish().await?;
        let is_over = step == plan.steps;
        job.complete.borrow_mut()[index as usize] = is_over;
        if is_over && (!job.complete.borrow().iter().all(|complete| *complete) || trainer.finds_all().await?) {
            break;
        }
        step = trainer.tables.next_step(trainer.session.next_step());
    }
    let session = trainer.session.into_session().await.expect(IDLE);
    session.leave(true, plan.steps, [("loss".to_owned(), 0.5)].into()).await.map_err(fail)
}

struct Trainer<'a> {
    job: &'a Job,
    host: Host,
    index: u32,
    session: OverlapSession,
    memory: Mapping,
    /// The parameters that the model computes with.
    held: Vec<f32>,
    tables: SessionTables,
    /// The epoch of the tables when the exchange under way began.
    epoch: u64,
    /// One looks at parameters, the other at rows.
    witnesses: (Witness<'a>, Witness<'a>),
}

impl Trainer<'_> {
    /// Does a step; returns the next one.
    async fn step(&mut self, step: u64) -> Result<u64, Failure> {
        let plan = &self.job.plan;
        // As a forward pass does, whose rows need not be those of the step if the servers have gone back.
        self.tables.pull(&[(0, &keys(plan))]).await.map_err(fail)?;
        self.job.model.fill(self.index, step, &self.held, self.memory.gradients_mut());
        let (epoch, (keys, values)) = (self.session.idle().expect(IDLE).epoch(), marks(plan, self.index, step));
        self.epoch = self.tables.epoch();
        let rows = [RowGradients { table: 0, keys: &keys, values: &values }];
        let (pushed, following) = join(self.tables.push(epoch, step, &rows), self.session.exchange(step)).await;
        pushed.map_err(fail)?;
        let following = following.map_err(fail)?;
        let session = self.session.idle().expect(IDLE);
        let next = self.tables.follow(session, step, following).await.map_err(fail)?;
        // Where a server that was replaced lives on, the parameters may come from it still, and the rows from its successor.
        let has_gone_back = session.epoch() != epoch || self.tables.epoch() != self.epoch;
        let trace = format_args!("{:?} did step {step}, goes on with {next}", self.host);
        self.job.network.wires().trace.log(trace);
        // A process before this one may have done this step on servers that went back.
        if next == step + 1 && !has_gone_back {
            self.answered(step).await?;
        } else {
            self.entered(next).await?;
        }
        Ok(next)
    }

    /// Computes the gradients of `step`, then ends the exchange of the step before and begins that of this one, and pushes its
    /// rows. After the last step it only ends. Returns the next step.
    async fn advance(&mut self, step: u64) -> Result<u64, Failure> {
        let (plan, is_over) = (&self.job.plan, step >= self.job.plan.steps);
        self.tables.pull(&[(0, &keys(plan))]).await.map_err(fail)?;
        let mut gradient = vec![0.0; self.held.len()];
        if !is_over {
            self.job.model.fill(self.index, step, &self.held, &mut gradient);
        }
        let ended = if is_over { self.session.settle().await } else { self.session.end_exchange().await };
        if let Some(ended) = ended {
            let Ended { next: following, has_gone_back } = ended.map_err(fail)?;
            let session = self.session.idle_mut().expect(IDLE);
            let next = self.tables.follow(session, step - 1, following).await.map_err(fail)?;
            let trace = format_args!("{:?} ended the step before {step}, goes on with {next}", self.host);
            self.job.network.wires().trace.log(trace);
            if has_gone_back || next != step || self.tables.epoch() != self.epoch {
                session.take_parameters();
                self.entered(next).await?;
                return Ok(next);
            }
            self.answered(step - 1).await?;
        }
        if is_over {
            return Ok(step);
        }
        self.memory.gradients_mut().copy_from_slice(&gradient);
        self.epoch = self.tables.epoch();
        let epoch = self.session.idle().expect(IDLE).epoch();
        self.session.begin_exchange(step);
        let (keys, values) = marks(plan, self.index, step);
        let rows = [RowGradients { table: 0, keys: &keys, values: &values }];
        self.tables.push(epoch, step, &rows).await.map_err(fail)?;
        Ok(step + 1)
    }

    /// Says that all steps are done; returns the next one if they are not.
    async fn finish(&mut self) -> Result<u64, Failure> {
        let Self { session, tables, .. } = self;
        let session = session.idle_mut().expect(IDLE);
        let epoch = session.epoch();
        let next = tables.finish(session).await.map_err(fail)?;
        if next != self.job.plan.steps || session.epoch() != epoch {
            self.entered(next).await?;
        }
        Ok(next)
    }

    /// Follows the session after it has finished with `step`.
    async fn follow(&mut self, step: u64, following: u64) -> Result<u64, Failure> {
        let session = self.session.idle().expect(IDLE);
        let next = self.tables.follow(session, step, following).await.map_err(fail)?;
        if next != step + 1 {
            self.entered(next).await?;
        }
        Ok(next)
    }

    /// Both the parameters and the rows of `step` were acknowledged.
    async fn answered(&mut self, step: u64) -> Result<(), Failure> {
        let counts = self.take();
        self.witnesses.0.answered(step, counts)?;
        match self.rows().await? {
            Some(rows) => self.witnesses.1.answered(step, row_counts(&self.job.plan, &rows)),
            None => Ok(()),
        }
    }

    async fn entered(&mut self, next: u64) -> Result<(), Failure> {
        let counts = self.take();
        self.witnesses.0.entered(next, counts)?;
        match self.rows().await? {
            Some(rows) => self.witnesses.1.entered(next, row_counts(&self.job.plan, &rows)),
            None => Ok(()),
        }
    }

    /// Takes the parameters that are there now.
    fn take(&mut self) -> Result<Counts, String> {
        self.held = self.memory.parameters().to_vec();
        self.job.model.counts(&self.held)
    }

    async fn rows(&mut self) -> Result<Option<Vec<f32>>, Failure> {
        let pulled = self.tables.pull(&[(0, &keys(&self.job.plan))]).await.map_err(fail)?;
        Ok(pulled.map(|mut rows| rows.remove(0)))
    }

    /// Looks whether all steps of all trainers are there, which must be so unless the servers have gone back.
    async fn finds_all(&mut self) -> Result<bool, Failure> {
        let since = Instant::now();
        loop {
            match self.find_all().await {
                Err(Failure::Violation(_)) if self.witnesses.0.may_look_again(since).await => {}
                found => return found,
            }
        }
    }

    async fn find_all(&mut self) -> Result<bool, Failure> {
        let plan = &self.job.plan;
        // A repeat of the last step is answered with what there is now.
        self.job.model.fill(self.index, plan.steps - 1, &self.held, self.memory.gradients_mut());
        let following = self.session.exchange(plan.steps - 1).await.map_err(fail)?;
        let rows = self.rows().await?;
        let next = self.follow(plan.steps - 1, following).await?;
        let Some(rows) = rows.filter(|_| next == plan.steps) else { return Ok(false) };
        let counts = self.take();
        self.witnesses.0.all_there(counts)?;
        self.witnesses.1.all_there(row_counts(plan, &rows))?;
        let (found, want) = (all_together(&rows), (plan.steps * u64::from(plan.trainers)) as f32);
        if found != want {
            return self.witnesses.1.violation(format!("finds {found} pushes of everybody, not {want}"));
        }
        Ok(true)
    }
}
