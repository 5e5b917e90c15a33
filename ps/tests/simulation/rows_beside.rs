//! A trainer of a job whose servers train rows of a sparse table beside dense parameters. It insists of both on what
//! trainers of the one or the other insist on.

use std::rc::Rc;
use std::time::Duration;

use futures::future::join;
use psjobs_ps::client::{AsyncSession, RowGradients, SessionTables};
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::network::Host;
use super::tables::{all_together, keys, marks, row_counts, specs};
use super::trainer::{Failure, Job, Witness, config, fail};

/// Trains to the end.
pub async fn train(job: Rc<Job>, index: u32, incarnation: u32) -> Result<(), Failure> {
    let plan = &job.plan;
    let mut chance = ChaCha8Rng::seed_from_u64(plan.seed ^ (u64::from(index) << 32) ^ (u64::from(incarnation) << 40));
    let mut session = AsyncSession::join(config(&job, index, incarnation), &job.model.initial()).await.map_err(fail)?;
    let tables = SessionTables::open(&mut session, specs()).await.map_err(fail)?;
    job.begins().await;
    let witnesses = (Witness::new(&job, index), Witness::new(&job, index));
    let mut trainer = Trainer { job: &job, host: Host::Trainer(index, incarnation), index, session, tables, witnesses };
    let mut step = trainer.tables.next_step(trainer.session.next_step());
    trainer.entered(step).await?;
    loop {
        while step < plan.steps {
            tokio::time::sleep(Duration::from_millis(chance.random_range(0..=plan.compute))).await;
            step = trainer.step(step).await?;
        }
        let following = trainer.session.finish().await.map_err(fail)?;
        step = trainer.follow(plan.steps - 1, following).await?;
        let is_over = step == plan.steps;
        job.complete.borrow_mut()[index as usize] = is_over;
        if is_over && (!job.complete.borrow().iter().all(|complete| *complete) || trainer.finds_all().await?) {
            break;
        }
        step = trainer.tables.next_step(trainer.session.next_step());
    }
    let Trainer { session, .. } = trainer;
    session.leave(true, plan.steps, [("loss".to_owned(), 0.5)].into()).await.map_err(fail)
}

struct Trainer<'a> {
    job: &'a Job,
    host: Host,
    index: u32,
    session: AsyncSession,
    tables: SessionTables,
    /// One looks at parameters, the other at rows.
    witnesses: (Witness<'a>, Witness<'a>),
}

impl Trainer<'_> {
    /// Does a step; returns the next one.
    async fn step(&mut self, step: u64) -> Result<u64, Failure> {
        let plan = &self.job.plan;
        // As a forward pass does, whose rows need not be those of the step if the servers have gone back.
        self.tables.pull(&[(0, &keys(plan))]).await.map_err(fail)?;
        let parameters = self.session.parameters().to_vec();
        self.job.model.fill(self.index, step, &parameters, self.session.gradients_mut());
        let (epoch, (keys, values)) = (self.session.epoch(), marks(plan, self.index, step));
        let rows = [RowGradients { table: 0, keys: &keys, values: &values }];
        let (pushed, following) = join(self.tables.push(epoch, step, &rows), self.session.exchange(step)).await;
        pushed.map_err(fail)?;
        let following = following.map_err(fail)?;
        let next = self.tables.follow(&self.session, step, following).await.map_err(fail)?;
        let trace = format_args!("{:?} did step {step}, goes on with {next}", self.host);
        self.job.network.wires().trace.log(trace);
        // A process before this one may have done this step on servers that went back.
        if next == step + 1 && self.session.epoch() == epoch {
            let counts = self.job.model.counts(self.session.parameters());
            self.witnesses.0.answered(step, counts)?;
            if let Some(rows) = self.rows().await? {
                self.witnesses.1.answered(step, row_counts(plan, &rows))?;
            }
        } else {
            self.entered(next).await?;
        }
        Ok(next)
    }

    /// Follows the session after it has finished with `step`.
    async fn follow(&mut self, step: u64, following: u64) -> Result<u64, Failure> {
        let next = self.tables.follow(&self.session, step, following).await.map_err(fail)?;
        if next != step + 1 {
            self.entered(next).await?;
        }
        Ok(next)
    }

    async fn entered(&mut self, next: u64) -> Result<(), Failure> {
        self.witnesses.0.entered(next, self.job.model.counts(self.session.parameters()))?;
        match self.rows().await? {
            Some(rows) => self.witnesses.1.entered(next, row_counts(&self.job.plan, &rows)),
            None => Ok(()),
        }
    }

    async fn rows(&mut self) -> Result<Option<Vec<f32>>, Failure> {
        let pulled = self.tables.pull(&[(0, &keys(&self.job.plan))]).await.map_err(fail)?;
        Ok(pulled.map(|mut rows| rows.remove(0)))
    }

    /// Looks whether all steps of all trainers are there, which must be so unless the servers have gone back.
    async fn finds_all(&mut self) -> Result<bool, Failure> {
        let plan = &self.job.plan;
        // A repeat of the last step is answered with what there is now.
        let parameters = self.session.parameters().to_vec();
        self.job.model.fill(self.index, plan.steps - 1, &parameters, self.session.gradients_mut());
        let following = self.session.exchange(plan.steps - 1).await.map_err(fail)?;
        let rows = self.rows().await?;
        let next = self.follow(plan.steps - 1, following).await?;
        let Some(rows) = rows.filter(|_| next == plan.steps) else { return Ok(false) };
        self.witnesses.0.all_there(self.job.model.counts(self.session.parameters()))?;
        self.witnesses.1.all_there(row_counts(plan, &rows))?;
        let (found, want) = (all_together(&rows), (plan.steps * u64::from(plan.trainers)) as f32);
        if found != want {
            return self.witnesses.1.violation(format!("finds {found} pushes of everybody, not {want}"));
        }
        Ok(true)
    }
}
