//! One block of parameters and the task that owns it: values, optimizer state, version, and the
//! gradients of the open round. Nobody else touches them, so nothing is locked.

use std::collections::BTreeMap;
use std::sync::Arc;

use psjobs_api::training::NonFinite;
use tokio::sync::{mpsc, oneshot};
use tonic::Status;

use super::metrics::Metrics;
use super::peer::{Answer, Gradient, Peer};
use super::recipe::Recipe;
use super::sum::{add, finite, scale};
use crate::checkpoint::BlockState;
use crate::consistency::{Rule, Verdict};
use crate::optimizer::State;
use crate::wire::buffers::Buffer;

/// What a block's task is asked to do.
pub enum Command {
    /// A trainer's gradient; the answer goes to the peer's stream.
    Gradient {
        /// Who sent it, and where the answer goes.
        peer: Peer,
        /// The trainer's step.
        step: u64,
        /// Version of the block that it was computed from.
        version: u64,
        /// The values, of the block's length.
        gradient: Gradient,
    },
    /// Values for a block that has none; answers whether it took them.
    Initialize(Vec<f32>, oneshot::Sender<bool>),
    /// The version and the current values, `None` if the block has none.
    Read(oneshot::Sender<Option<(u64, Vec<f32>)>>),
    /// The first step that the block does not have from a trainer, and whether it has values.
    NextStep(u32, oneshot::Sender<(u64, bool)>),
    /// A trainer has finished: no round waits for it.
    Finish(u32),
    /// Everything, at the version named or now; `None` if the block is past it, or has no values.
    Snapshot(Option<u64>, oneshot::Sender<Option<BlockState>>),
    /// The version, `None` if the block has no values.
    Version(oneshot::Sender<Option<u64>>),
    /// The block goes to another state, in an epoch of its own; `None` is a block without values.
    Restore(u64, Option<BlockState>, oneshot::Sender<()>),
}

/// What a block is made of.
pub struct Plan {
    /// Number of the block.
    pub block: u32,
    /// Its first element in the flat space.
    pub start: usize,
    /// Trainers of the job.
    pub trainers: u32,
    /// How the job trains.
    pub recipe: Arc<Recipe>,
    /// The server's epoch when the block was made.
    pub epoch: u64,
    /// Counts what happens.
    pub metrics: Arc<Metrics>,
}

/// Owns the block until every sender is gone.
pub async fn own(plan: Plan, mut commands: mpsc::Receiver<Command>) {
    let mut block = Block::new(plan);
    while let Some(command) = commands.recv().await {
        block.handle(command);
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
    /// Applied, but its trainer is too far ahead to be answered.
    ahead: Vec<(Peer, u64)>,
    /// Snapshots of versions to come.
    snapshots: Vec<(u64, oneshot::Sender<Option<BlockState>>)>,
}

/// The gradients of a step whose round is open.
#[derive(Default)]
struct Round {
    /// Sum of the gradients added so far, in trainer order.
    sum: Option<Buffer>,
    /// How many those are.
    added: usize,
    /// Gradients that came before their turn; `None` for one that is left out.
    early: BTreeMap<u32, Option<Gradient>>,
    /// The highest step that was given.
    step: u64,
    /// Who is answered when the round closes.
    waiting: Vec<(Peer, u64)>,
}

impl Block {
    fn new(plan: Plan) -> Self {
        let rule = Rule::new(plan.recipe.consistency.clone(), plan.trainers);
        let epoch = plan.epoch;
        Self {
            plan,
            rule,
            values: Vec::new(),
            state: State::default(),
            version: 0,
            epoch,
            round: Round::default(),
            ahead: Vec::new(),
            snapshots: Vec::new(),
        }
    }

    fn handle(&mut self, command: Command) {
        // A caller that has gone away no longer wants its answer: failed sends are fine.
        match command {
            Command::Gradient { peer, step, version, gradient } => self.gradient(peer, step, version, gradient),
            Command::Initialize(values, reply) => {
                let _ = reply.send(self.initialize(values));
            }
            Command::Read(reply) => {
                let _ = reply.send((!self.values.is_empty()).then(|| (self.version, self.values.clone())));
            }
            Command::NextStep(trainer, reply) => {
                let _ = reply.send((self.rule.next_step(trainer), !self.values.is_empty()));
            }
            Command::Finish(trainer) => {
                self.rule.finish(trainer);
                self.advance();
                self.release();
            }
            Command::Snapshot(at, reply) => self.snapshot(at, reply),
            Command::Version(reply) => {
                let _ = reply.send((!self.values.is_empty()).then_some(self.version));
            }
            Command::Restore(epoch, state, reply) => {
                self.epoch = epoch;
                self.restore(state);
                let _ = reply.send(());
            }
        }
    }

    fn initialize(&mut self, values: Vec<f32>) -> bool {
        if !self.values.is_empty() {
            return false;
        }
        self.values = values;
        self.state = self.plan.recipe.optimizer.state(self.values.len());
        true
    }

    fn gradient(&mut self, peer: Peer, step: u64, version: u64, gradient: Gradient) {
        let block = self.plan.block;
        if peer.epoch() != self.epoch {
            return;
        }
        if self.values.is_empty() {
            return peer
                .refuse(Status::failed_precondition(format!("block {block} has no values yet; push them first")));
        }
        let mut gradient = Some(gradient);
        if self.plan.recipe.non_finite != NonFinite::Pass
            && !gradient.as_ref().is_some_and(|gradient| gradient.with_values(self.values.len(), finite))
        {
            self.plan.metrics.not_finite();
            if self.plan.recipe.non_finite == NonFinite::Refuse {
                return peer.refuse(not_finite(peer.trainer(), step, block));
            }
            gradient = None;
        }
        match self.rule.offer(peer.trainer(), step, version < self.version) {
            Verdict::Apply => {
                let staleness = self.version.saturating_sub(version);
                self.plan.metrics.staleness(staleness);
                if let Some(gradient) = gradient {
                    let factor = self.plan.recipe.factor(step, staleness);
                    gradient.with_values(self.values.len(), |gradient| self.update(gradient, factor));
                }
                self.ahead.push((peer, step));
                self.release();
            }
            Verdict::Answer => {
                self.ahead.push((peer, step));
                self.release();
            }
            Verdict::Drop => {
                self.plan.metrics.late();
                self.answer(&[(peer, step)]);
            }
            Verdict::Join => self.round.waiting.push((peer, step)),
            Verdict::Hold => {
                self.round.early.insert(peer.trainer(), gradient);
                self.round.step = self.round.step.max(step);
                self.round.waiting.push((peer, step));
                self.advance();
            }
        }
    }

    /// Adds what is in its turn; closes the round if it is complete.
    fn advance(&mut self) {
        while let Some(first) = self.round.early.first_entry().filter(|first| self.rule.in_turn(*first.key())) {
            let gradient = first.remove();
            self.add(gradient);
        }
        if self.rule.close_round().is_none() {
            return;
        }
        while let Some((_, gradient)) = self.round.early.pop_first() {
            self.add(gradient);
        }
        let Round { sum, added, step, waiting, .. } = std::mem::take(&mut self.round);
        if let Some(mut sum) = sum {
            let sum = sum.bytes_mut().as_chunks_mut().0;
            scale(sum, added as f32);
            self.update(sum, self.plan.recipe.factor(step, 0));
        }
        self.answer(&waiting);
        self.take_due_snapshots();
    }

    /// `sum += gradient`; the first gradient is the sum, so that no zero is added to it.
    fn add(&mut self, gradient: Option<Gradient>) {
        let Some(gradient) = gradient else { return };
        let elements = self.values.len();
        let Round { sum, added, .. } = &mut self.round;
        gradient.with_values(elements, |gradient| match sum {
            Some(sum) => add(sum.bytes_mut().as_chunks_mut().0, gradient),
            None => {
                let mut first = self.plan.recipe.buffers.take(elements * 4);
                first.bytes_mut().copy_from_slice(gradient.as_flattened());
                *sum = Some(first);
            }
        });
        *added += 1;
    }

    fn update(&mut self, gradient: &[[u8; 4]], factor: f64) {
        self.plan.recipe.optimizer.apply(&mut self.values, gradient, &mut self.state, factor);
        self.version += 1;
    }

    /// Answers those of whom nobody is too far behind.
    fn release(&mut self) {
        let may = self.ahead.extract_if(.., |(peer, _)| self.rule.may_go_on(peer.trainer())).collect::<Vec<_>>();
        self.answer(&may);
    }

    /// Sends the current values; those who wait for the same step share one copy.
    fn answer(&self, peers: &[(Peer, u64)]) {
        let Self { plan, values, version, .. } = self;
        let mut last = None;
        for (peer, step) in peers {
            let answer = Answer { step: *step, block: plan.block, version: *version, start: plan.start, values };
            peer.answer(&answer, &plan.recipe, &mut last);
        }
    }

    fn snapshot(&mut self, at: Option<u64>, reply: oneshot::Sender<Option<BlockState>>) {
        match at {
            Some(at) if at > self.version && !self.values.is_empty() => self.snapshots.push((at, reply)),
            Some(at) if at < self.version => drop(reply.send(None)),
            _ => drop(reply.send(self.capture())),
        }
    }

    fn take_due_snapshots(&mut self) {
        let version = self.version;
        for (_, reply) in self.snapshots.extract_if(.., |(at, _)| *at <= version).collect::<Vec<_>>() {
            drop(reply.send(self.capture()));
        }
    }

    fn capture(&self) -> Option<BlockState> {
        if self.values.is_empty() {
            return None;
        }
        Some(BlockState {
            values: self.values.clone(),
            slots: self.state.slots().to_vec(),
            updates: self.state.step(),
            version: self.version,
            next_steps: (0..self.plan.trainers).map(|trainer| self.rule.settled(trainer)).collect(),
        })
    }

    fn restore(&mut self, state: Option<BlockState>) {
        let BlockState { values, slots, updates, version, next_steps } = state.unwrap_or_default();
        self.values = values;
        self.state = State::restored(slots, updates);
        self.version = version;
        self.rule.restore(&next_steps);
        self.round = Round::default();
        self.ahead.clear();
        self.snapshots.clear();
    }
}

fn not_finite(trainer: u32, step: u64, block: u32) -> Status {
    Status::invalid_argument(format!(
        "the gradient of trainer {trainer}, step {step}, block {block} holds NaN or infinity; nothing of it was \
         applied: lower the learning rate or look at the loss"
    ))
}
