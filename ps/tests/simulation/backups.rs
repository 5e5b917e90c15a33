//! A trainer of a Sync job with backup trainers, and what it insists on: each round holds the mean of those that gave to
//! it, no gradient counts in two rounds, and what was there does not go unless the servers went back.

use std::rc::Rc;
use std::time::Duration;

use psjobs_ps::client::AsyncSession;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::model::Model;
use super::network::Host;
use super::trainer::{Failure, Job, config, fail};

/// Shares of a round are sums of a few fractions.
const ROUNDING: f32 = 1e-4;

/// Trains to the end.
pub async fn train(job: Rc<Job>, index: u32, incarnation: u32) -> Result<(), Failure> {
    let (plan, host) = (&job.plan, Host::Trainer(index, incarnation));
    let seed = plan.seed ^ (u64::from(index) << 32) ^ (u64::from(incarnation) << 40);
    let mut chance = ChaCha8Rng::seed_from_u64(seed);
    let mut session = AsyncSession::join(config(&job, index, incarnation), &job.model.initial()).await.map_err(fail)?;
    job.begins().await;
    let mut seen = look(&job.model, index, session.parameters(), None)?;
    let mut step = session.next_step();
    while step < plan.steps {
        tokio::time::sleep(Duration::from_millis(chance.random_range(0..=plan.compute))).await;
        job.model.fill_batch(u64::from(index) * plan.steps + step, session.gradients_mut());
        let epoch = session.epoch();
        let next = session.exchange(step).await.map_err(fail)?;
        job.network.wires().trace.log(format_args!("{host:?} did step {step}, goes on with {next}"));
        // A process before this one may have done this step on servers that went back.
        let before = (next == step + 1 && session.epoch() == epoch).then_some(seen);
        seen = look(&job.model, index, session.parameters(), before)?;
        step = next;
    }
    session.leave(true, plan.steps, [("loss".to_owned(), 0.5)].into()).await.map_err(fail)
}

/// Checks the parameters; `before` are the shares of an earlier look that must still be there.
fn look(
    model: &Model,
    index: u32,
    parameters: &[f32],
    before: Option<Vec<Vec<f32>>>,
) -> Result<Vec<Vec<f32>>, Failure> {
    let violation = |what: String| Failure::Violation(format!("trainer {index} finds that {what}"));
    check(model, parameters).map_err(violation)?;
    let now = model.batches(parameters);
    for (block, before) in before.iter().flatten().enumerate() {
        if let Some(batch) = (0..before.len()).find(|batch| now[block][*batch] < before[*batch]) {
            return Err(violation(format!("batch {batch} went from block {block}")));
        }
    }
    Ok(now)
}

/// Checks that parameters are made of whole rounds.
pub fn check(model: &Model, parameters: &[f32]) -> Result<(), String> {
    for (block, shares) in model.batches(parameters).iter().enumerate() {
        let fraction = |share: f32| share == 0.0 || ((1.0 / share).round() - 1.0 / share).abs() < ROUNDING;
        let rounds: f32 = shares.iter().sum();
        let whole = (rounds - rounds.round()).abs() < ROUNDING * shares.len() as f32;
        if !whole || !shares.iter().all(|share| (0.0..=1.0).contains(share) && fraction(*share)) {
            return Err(format!("block {block} holds {shares:?}: not whole rounds of gradients once each"));
        }
    }
    Ok(())
}
