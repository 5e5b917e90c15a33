//! The task that owns a [`Shard`]: takes commands one after the other, and lets rows go as time passes.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior};

use super::gradients::Gradients;
use super::shard::{Holding, Shard};
use super::tables::Counts;

/// How often unused rows are looked for while nobody asks for anything.
const LOOK: Duration = Duration::from_secs(1);

/// What a shard's task is asked to do.
pub enum Command {
    /// Rows of a table, for a trainer.
    Pull { trainer: u32, table: usize, keys: Vec<u64>, reply: oneshot::Sender<Vec<f32>> },
    /// A trainer's gradients of a step, by table; answered when it may go on.
    Push { trainer: u32, step: u64, gradients: Option<Vec<Gradients>>, reply: oneshot::Sender<()> },
    /// The first step that the shard does not have from a trainer.
    NextStep(u32, oneshot::Sender<u64>),
    /// A trainer has finished: no round waits for it.
    Finish(u32),
}

/// Owns the shard until every sender is gone.
pub async fn own(mut shard: Shard<oneshot::Sender<()>>, mut commands: mpsc::Receiver<Command>, counts: Arc<Counts>) {
    let began = Instant::now();
    let mut ticks = tokio::time::interval(LOOK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let watches = shard.watches_time();
    let mut told = vec![Holding::default(); shard.holdings().count()];
    loop {
        tokio::select! {
            biased;
            command = commands.recv() => match command {
                Some(command) => handle(&mut shard, command),
                None => return,
            },
            _ = ticks.tick(), if watches => {}
        }
        shard.evict(u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX));
        for ((table, now), before) in (0..).zip(shard.holdings()).zip(&mut told) {
            counts.holds(table, *before, now);
            *before = now;
        }
    }
}

fn handle(shard: &mut Shard<oneshot::Sender<()>>, command: Command) {
    // A caller that has gone away no longer wants its answer: failed sends are fine.
    let free = match command {
        Command::Pull { trainer, table, keys, reply } => {
            let _ = reply.send(shard.pull(trainer, table, &keys));
            Vec::new()
        }
        Command::Push { trainer, step, gradients, reply } => shard.push(trainer, step, gradients, reply),
        Command::NextStep(trainer, reply) => {
            let _ = reply.send(shard.next_step(trainer));
            Vec::new()
        }
        Command::Finish(trainer) => shard.finish(trainer),
    };
    for waiting in free {
        let _ = waiting.send(());
    }
}
