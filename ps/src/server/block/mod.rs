//! One block of parameters and the task that owns it: values, optimizer state, version, and the
//! gradients of the open round. Nobody else touches them, so nothing is locked. [`training`] says what gradients do to
//! it, [`replication`] what a second server gets of it, [`snapshots`] what a checkpoint does.

mod replication;
mod snapshots;
mod training;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};

use super::command::{Command, Standing};
use super::exchange::empty;
use super::metrics::Metrics;
use super::mirror::Mirror;
use super::peer::{Answer, Peer};
use super::recipe::Recipe;
use crate::checkpoint::BlockState;
use crate::codec::Codec;
use crate::consistency::Rule;
use crate::optimizer::State;
use training::Round;

/// What a block is made of.
pub struct Plan {
    /// Number of the block.
    pub block: u32,
    /// Its elements in the flat space.
    pub range: Range<usize>,
    /// Trainers of the job.
    pub trainers: u32,
    /// They come and go.
    pub elastic: bool,
    /// How the job trains.
    pub recipe: Arc<Recipe>,
    /// The server's epoch when the block was made.
    pub epoch: u64,
    /// Its part in replication when the block was made.
    pub standing: Standing,
    /// Counts what happens.
    pub metrics: Arc<Metrics>,
}

impl Plan {
    /// The block's `values` at `version`, for a trainer that asked with `step`.
    fn answer<'a>(&self, step: u64, version: u64, values: &'a [f32]) -> Answer<'a> {
        Answer { step, block: self.block, version, start: self.range.start, values }
    }
}

/// A snapshot that is due is taken when the block has had nothing to do for so long, so that other blocks' answers
/// need not wait for it; and in any case before the block changes.
const IDLE: Duration = Duration::from_millis(20);

/// Owns the block until every sender is gone.
pub async fn own(plan: Plan, mut commands: mpsc::Receiver<Command>) {
    let meter = plan.metrics.heat.meter(plan.block);
    let mut block = Block::new(plan);
    loop {
        let command = if block.due.is_empty() {
            commands.recv().await
        } else if let Ok(command) = tokio::time::timeout(IDLE, commands.recv()).await {
            command
        } else {
            block.take_due_snapshots();
            continue;
        };
        let Some(command) = command else { return };
        if command.changes() {
            block.take_due_snapshots();
        }
        meter.time(|| block.handle(command));
    }
}

struct Block {
    plan: Plan,
    rule: Rule,
    values: Vec<f32>,
    state: State,
    version: u64,
    /// Only trainers of this epoch are heard: the others' gradients belong to a state that is gone.
    epoch: u64,
    round: Round,
    standing: Standing,
    /// While it stands mirrored.
    mirror: Option<Mirror>,
    /// Trainers that have said with which step they begin, while its round is not open.
    entering: Vec<(Peer, u64)>,
    /// Applied, but its trainer is too far ahead to be answered.
    ahead: Vec<(Peer, u64)>,
    /// Snapshots of versions to come.
    snapshots: Vec<(u64, oneshot::Sender<Option<BlockState>>)>,
    /// Snapshots of the version that is there.
    due: Vec<oneshot::Sender<Option<BlockState>>>,
}

impl Block {
    fn new(plan: Plan) -> Self {
        let consistency = plan.recipe.consistency.clone();
        let rule = if plan.elastic { Rule::elastic(consistency) } else { Rule::new(consistency, plan.trainers) };
        let (epoch, standing) = (plan.epoch, plan.standing);
        Self {
            standing,
            mirror: (standing == Standing::Mirrored).then(|| Mirror::new(0)),
            plan,
            rule,
            values: Vec::new(),
            state: State::default(),
            version: 0,
            epoch,
            round: Round::default(),
            entering: Vec::new(),
            ahead: Vec::new(),
            snapshots: Vec::new(),
            due: Vec::new(),
        }
    }

    fn handle(&mut self, command: Command) {
        // A caller that has gone away no longer wants its answer: failed sends are fine.
        match command {
            Command::Gradient { peer, step, version, gradient } => self.gradient(peer, step, version, gradient),
            Command::JoinRound(peer, step) => self.join_round(peer, step),
            Command::Initialize(codec, payload, reply) => {
                let _ = reply.send(self.initialize(codec, &payload));
            }
            Command::Read(reply) => {
                let _ = reply.send(self.read());
            }
            Command::NextStep(trainer, reply) => {
                // What it gave to the open round is not in the values: a successor gives the same step again, and
                // waits for the round like everybody else.
                let _ = reply.send((self.rule.entry(trainer), !self.values.is_empty()));
            }
            Command::Finish(trainer) => {
                self.rule.finish(trainer);
                self.advance();
                self.begin();
                self.release();
            }
            Command::Snapshot(at, reply) => self.snapshot(at, reply),
            Command::Version(reply) => {
                let _ = reply.send((!self.values.is_empty()).then_some(self.version));
            }
            Command::Steps(reply) => {
                let _ = reply.send(self.settled_steps());
            }
            Command::Restore(epoch, state, reply) => {
                self.epoch = epoch;
                self.restore(state);
                self.mirror = (self.standing == Standing::Mirrored).then(|| Mirror::new(self.version));
                let _ = reply.send(());
            }
            Command::Keep(epoch, state) if epoch == self.epoch => self.keep(state),
            // It belongs to a state that is gone.
            Command::Keep(..) => {}
            Command::Stand(standing) => self.stand(standing),
            Command::Attach(held, backup, reply) => {
                let _ = reply.send(self.attach(held, backup));
            }
            Command::Acknowledged(version) => {
                let free = self.mirror.as_mut().map(|mirror| mirror.acknowledge(version));
                self.answer(free.unwrap_or_default());
            }
            Command::Install(state, primary) => {
                self.restore(Some(state));
                self.acknowledge(&primary);
            }
            Command::Mirror(update, primary) => self.follow(update, &primary),
        }
    }

    fn read(&self) -> Option<Bytes> {
        (!self.values.is_empty()).then(|| self.plan.answer(0, self.version, &self.values).encode(&self.plan.recipe))
    }

    fn initialize(&mut self, codec: Codec, payload: &[u8]) -> bool {
        if !self.values.is_empty() {
            return false;
        }
        self.values.resize(self.plan.range.len(), 0.0);
        codec.decode(payload, &mut self.values).expect("the payload was checked when it came in");
        self.state = self.plan.recipe.optimizer.state(self.values.len());
        if let Some(mut mirror) = self.mirror.take() {
            mirror.send(self.contents());
            self.mirror = Some(mirror);
        }
        true
    }

    /// Whether what `peer` brought is to be heard.
    fn hears(&self, peer: &Peer) -> bool {
        // One that was ended brought what its trainer does not know of: it has left, or comes again.
        if peer.epoch() != self.epoch || self.standing == Standing::Backup || peer.has_ended() {
            return false;
        }
        if self.values.is_empty() {
            peer.refuse(empty(self.plan.block));
        }
        !self.values.is_empty()
    }
}
