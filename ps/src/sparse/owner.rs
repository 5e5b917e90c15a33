//! The task that owns a [`Shard`]: takes commands one after the other, and lets rows go as time passes.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior};

use super::counts::Counts;
use super::gradients::Gradients;
use super::shard::{Holding, Shard, ShardState};

/// How often unused rows are looked for while nobody asks for anything.
const LOOK: Duration = Duration::from_secs(1);

/// A command to a shard's task.
pub enum Command {
    /// Rows of a table, for a trainer.
    Pull { trainer: u32, table: usize, keys: Vec<u64>, reply: oneshot::Sender<Vec<f32>> },
    /// A trainer's gradients of a step, by table; answered when it may go on. Those of an earlier epoch belong to
    /// rows that are gone: they are not heard.
    Push { trainer: u32, epoch: u64, step: u64, gradients: Option<Vec<Gradients>>, reply: oneshot::Sender<()> },
    /// The first step that the shard does not have from a trainer.
    NextStep(u32, oneshot::Sender<u64>),
    /// A trainer has finished: no round waits for it.
    Finish(u32),
    /// Steps that the rows contain of every trainer.
    Progress(oneshot::Sender<u64>),
    /// Everything, when the rows contain so many steps of every trainer, or now; `None` if they contain more.
    Snapshot(Option<u64>, oneshot::Sender<Option<ShardState>>),
    /// Another shard, in an epoch of its own.
    Replace(Box<Owned>, u64, oneshot::Sender<()>),
}

/// A shard whose pushes are answered through channels.
pub type Owned = Shard<oneshot::Sender<()>>;

/// Owns the shard until every sender is gone.
pub async fn own(shard: Owned, mut commands: mpsc::Receiver<Command>, counts: Arc<Counts>) {
    let mut owner = Owner { shard, epoch: 0, snapshots: Vec::new() };
    let began = Instant::now();
    let mut ticks = tokio::time::interval(LOOK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let watches = owner.shard.watches_time();
    let mut told = vec![Holding::default(); owner.shard.holdings().count()];
    loop {
        tokio::select! {
            biased;
            command = commands.recv() => match command {
                Some(command) => owner.handle(command),
                None => return,
            },
            _ = ticks.tick(), if watches => {}
        }
        // One push ends one round at most, so that no step is passed over between two looks.
        owner.take_due_snapshots();
        owner.shard.evict(u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX));
        for ((table, now), before) in (0..).zip(owner.shard.holdings()).zip(&mut told) {
            counts.holds(table, *before, now);
            *before = now;
        }
    }
}

struct Owner {
    shard: Owned,
    /// That of the last checkpoint which the shard went to.
    epoch: u64,
    /// Snapshots of steps to come.
    snapshots: Vec<(u64, oneshot::Sender<Option<ShardState>>)>,
}

impl Owner {
    fn handle(&mut self, command: Command) {
        let shard = &mut self.shard;
        // A caller that has gone away no longer wants its answer: failed sends are fine.
        let free = match command {
            Command::Pull { trainer, table, keys, reply } => {
                let _ = reply.send(shard.pull(trainer, table, &keys));
                Vec::new()
            }
            Command::Push { epoch, .. } if epoch < self.epoch => Vec::new(),
            Command::Push { trainer, step, gradients, reply, .. } => shard.push(trainer, step, gradients, reply),
            Command::NextStep(trainer, reply) => {
                let _ = reply.send(shard.next_step(trainer));
                Vec::new()
            }
            Command::Finish(trainer) => shard.finish(trainer),
            Command::Progress(reply) => {
                let _ = reply.send(shard.settled_by_all());
                Vec::new()
            }
            Command::Snapshot(Some(at), reply) => {
                self.snapshots.push((at, reply));
                Vec::new()
            }
            Command::Snapshot(None, reply) => {
                let _ = reply.send(Some(shard.state()));
                Vec::new()
            }
            Command::Replace(other, epoch, reply) => {
                // Whoever waited for an answer of the one before is told that it is gone.
                *self = Self { shard: *other, epoch, snapshots: Vec::new() };
                let _ = reply.send(());
                Vec::new()
            }
        };
        for waiting in free {
            let _ = waiting.send(());
        }
    }

    fn take_due_snapshots(&mut self) {
        if self.snapshots.is_empty() {
            return;
        }
        let now = self.shard.settled_by_all();
        for (at, reply) in self.snapshots.extract_if(.., |(at, _)| *at <= now) {
            let _ = reply.send((at == now).then(|| self.shard.state()));
        }
    }
}
