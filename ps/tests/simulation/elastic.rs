//! A trainer of an elastic job, and what it insists on: a batch that it has done stays in the parameters, nothing is in
//! them more often than it was given, and what was there does not go unless the servers went back.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use psjobs_api::training::ConsistencyMode;
use psjobs_ps::client::{AsyncSession, ClientError, Ended, OverlapSession, SessionConfig};
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use tokio::runtime::Handle;

use super::network::Host;
use super::trainer::{Failure, Job, config, fail};

/// Reads what it is dealt until nothing is left, or it is asked to `leave`.
pub async fn train(job: Rc<Job>, index: u32, incarnation: u32, leave: Arc<AtomicBool>) -> Result<(), Failure> {
    let host = Host::Trainer(index, incarnation);
    let seed = job.plan.seed ^ (u64::from(index) << 32) ^ (u64::from(incarnation) << 40);
    let mut chance = ChaCha8Rng::seed_from_u64(seed);
    let config = SessionConfig { interrupt: leave.clone(), ..config(&job, index, incarnation) };
    let mut session = match AsyncSession::join(config, &job.model.initial()).await {
        Ok(session) => session,
        Err(ClientError::Interrupted) => return Ok(()),
        Err(error) => return Err(fail(error)),
    };
    job.begins().await;
    let mut witness = Witness { job: &job, index, entries: 0, seen: Vec::new(), done: Vec::new() };
    if job.plan.overlap {
        return train_overlapped(session, witness, chance, &leave).await;
    }
    let finished = loop {
        if leave.load(Relaxed) {
            break false;
        }
        let batch = match session.next_batch().await {
            Ok(Some(batch)) => batch,
            Ok(None) => break true,
            Err(ClientError::Interrupted) => break false,
            Err(error) => return Err(fail(error)),
        };
        witness.look(session.parameters(), session.entries())?;
        tokio::time::sleep(Duration::from_millis(chance.random_range(0..=job.plan.compute))).await;
        job.model.fill_batch(batch, session.gradients_mut());
        job.sent.borrow_mut()[batch as usize] += 1;
        let step = session.next_step();
        match session.exchange(step).await {
            Ok(next) => {
                job.network.wires().trace.log(format_args!("{host:?} gave batch {batch} in step {step}, next {next}"));
            }
            Err(ClientError::Interrupted) => break false,
            Err(error) => return Err(fail(error)),
        }
        if session.entries() == witness.entries {
            witness.done.push(batch);
        }
        witness.look(session.parameters(), session.entries())?;
    };
    leave_job(session, finished).await
}

async fn leave_job(session: AsyncSession, finished: bool) -> Result<(), Failure> {
    let left = session.leave(finished, 0, [("loss".to_owned(), 0.5)].into()).await;
    // A server that is away takes who is to leave for lost when it is back.
    if finished { left.map_err(fail) } else { Ok(()) }
}

/// As [`train`], where the gradient of a batch is computed while the exchange of the one before is under way.
async fn train_overlapped(
    session: AsyncSession,
    mut witness: Witness<'_>,
    mut chance: ChaCha8Rng,
    leave: &AtomicBool,
) -> Result<(), Failure> {
    let job = witness.job;
    let mut memory = session.map_memory().map_err(fail)?;
    let mut session = OverlapSession::new(session, Handle::current());
    let mut gradient = vec![0.0; memory.elements()];
    // The batch whose exchange is under way.
    let mut given = None;
    let finished = loop {
        if leave.load(Relaxed) {
            break false;
        }
        let batch = match session.next_batch(None).await {
            Ok(batch) => batch,
            Err(ClientError::Interrupted) => break false,
            Err(error) => return Err(fail(error)),
        };
        if session.entries() != witness.entries {
            given = None;
            witness.look(memory.parameters(), session.entries())?;
        }
        if let Some(batch) = batch {
            tokio::time::sleep(Duration::from_millis(chance.random_range(0..=job.plan.compute))).await;
            job.model.fill_batch(batch, &mut gradient);
        }
        let ended = if batch.is_some() { session.end_exchange().await } else { session.settle().await };
        let has_gone_back = match ended {
            None => false,
            Some(Ok(Ended { has_gone_back, .. })) => {
                let done = given.take().filter(|_| !has_gone_back);
                witness.done.extend(done);
                witness.look(memory.parameters(), session.entries())?;
                has_gone_back
            }
            Some(Err(ClientError::Interrupted)) => break false,
            Some(Err(error)) => return Err(fail(error)),
        };
        match batch {
            // It is others' to read.
            _ if has_gone_back => {}
            None => break true,
            Some(batch) => {
                memory.gradients_mut().copy_from_slice(&gradient);
                job.sent.borrow_mut()[batch as usize] += 1;
                let step = session.next_step();
                session.begin_exchange(step);
                given = Some(batch);
            }
        }
    };
    match session.into_session().await {
        Some(session) => leave_job(session, finished).await,
        None => Ok(()),
    }
}

struct Witness<'a> {
    job: &'a Job,
    index: u32,
    /// How often the trainer had entered when it looked last.
    entries: u64,
    /// By block and batch, what was in the parameters then.
    seen: Vec<Vec<f32>>,
    /// Batches done since it entered.
    done: Vec<u64>,
}

impl Witness<'_> {
    fn look(&mut self, parameters: &[f32], entries: u64) -> Result<(), Failure> {
        let (job, now) = (self.job, self.job.model.batches(parameters));
        let before = std::mem::replace(&mut self.seen, now.clone());
        let again = std::mem::replace(&mut self.entries, entries) != entries;
        if again {
            self.done.clear();
        }
        let sync = job.plan.consistency.mode == ConsistencyMode::Sync;
        let sent = job.sent.borrow();
        for (block, batches) in now.iter().enumerate() {
            for (batch, (share, sent)) in batches.iter().zip(sent.iter()).enumerate() {
                let whole = sync || share.fract() == 0.0;
                if !whole || *share > *sent as f32 + 1e-3 {
                    return self
                        .violation(format!("finds {share} of batch {batch} in block {block}, given {sent} times"));
                }
                if !again && !before.is_empty() && *share < before[block][batch] {
                    return self.violation(format!("saw batch {batch} go from block {block}, which has {share} of it"));
                }
            }
            let least = if sync { 1.0 / job.plan.trainers as f32 - 1e-3 } else { 1.0 };
            if let Some(batch) = self.done.iter().find(|batch| batches[**batch as usize] < least) {
                return self.violation(format!("did batch {batch}, block {block} has {}", batches[*batch as usize]));
            }
        }
        Ok(())
    }

    fn violation<T>(&self, what: String) -> Result<T, Failure> {
        Err(Failure::Violation(format!("trainer {} {what}", self.index)))
    }
}
