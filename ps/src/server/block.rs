//! One block of parameters and the task that owns it: values, optimizer state, version, and the
//! gradients of the open round. Nobody else touches them, so nothing is locked.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use psjobs_api::training::ConsistencyMode;
use tokio::sync::{mpsc, oneshot};
use tonic::Status;

use super::peer::{Answer, Gradient, Peer};
use crate::consistency::{Rule, Verdict};
use crate::optimizer::{Optimizer, State};

/// What a block's task is asked to do.
pub enum Command {
    /// A trainer's gradient; the answer goes to the peer's stream.
    Gradient {
        /// Who sent it, and where the answer goes.
        peer: Peer,
        /// The trainer's step.
        step: u64,
        /// The values, of the block's length.
        gradient: Gradient,
    },
    /// Values for a block that has none; answers whether it took them.
    Initialize(Bytes, oneshot::Sender<bool>),
    /// The version and the current values, `None` if the block has none.
    Read(oneshot::Sender<Option<(u64, Bytes)>>),
    /// The first step that the block does not have from a trainer, and whether it has values.
    NextStep(u32, oneshot::Sender<(u64, bool)>),
    /// A trainer has finished: no round waits for it.
    Finish(u32),
}

/// What a block is made of.
pub struct Plan {
    /// Number of the block.
    pub block: u32,
    /// Its first element in the flat space.
    pub start: usize,
    /// When gradients take effect.
    pub mode: ConsistencyMode,
    /// Trainers of the job.
    pub trainers: u32,
    /// How they take effect.
    pub optimizer: Arc<Optimizer>,
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
    /// The values as they go out, made once a version however many trainers wait.
    encoded: Option<Bytes>,
    round: Round,
}

/// The gradients of a step whose round is open.
#[derive(Default)]
struct Round {
    /// Sum of the gradients added so far, in trainer order; empty before the first.
    sum: Vec<[u8; 4]>,
    /// Gradients that came before their turn.
    early: BTreeMap<u32, Gradient>,
    /// Who is answered when the round closes.
    waiting: Vec<(Peer, u64)>,
}

impl Block {
    fn new(plan: Plan) -> Self {
        let rule = Rule::new(plan.mode, plan.trainers);
        Self {
            plan,
            rule,
            values: Vec::new(),
            state: State::default(),
            version: 0,
            encoded: None,
            round: Round::default(),
        }
    }

    fn handle(&mut self, command: Command) {
        // A caller that has gone away no longer wants its answer: failed sends are fine.
        match command {
            Command::Gradient { peer, step, gradient } => self.gradient(peer, step, gradient),
            Command::Initialize(payload, reply) => {
                let _ = reply.send(self.initialize(&payload));
            }
            Command::Read(reply) => {
                let _ = reply.send((!self.values.is_empty()).then(|| (self.version, self.encode())));
            }
            Command::NextStep(trainer, reply) => {
                let _ = reply.send((self.rule.next_step(trainer), !self.values.is_empty()));
            }
            Command::Finish(trainer) => {
                self.rule.finish(trainer);
                self.advance();
            }
        }
    }

    fn initialize(&mut self, payload: &[u8]) -> bool {
        if !self.values.is_empty() {
            return false;
        }
        self.values = payload.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        self.state = self.plan.optimizer.state(self.values.len());
        true
    }

    fn gradient(&mut self, peer: Peer, step: u64, gradient: Gradient) {
        let block = self.plan.block;
        if self.values.is_empty() {
            return peer
                .refuse(Status::failed_precondition(format!("block {block} has no values yet; push them first")));
        }
        if !finite(gradient.values()) {
            return peer.refuse(Status::invalid_argument(format!(
                "the gradient of trainer {}, step {step}, block {block} holds NaN or infinity; nothing of it was applied: lower the learning rate or look at the loss",
                peer.trainer()
            )));
        }
        match self.rule.offer(peer.trainer(), step) {
            Verdict::Apply => {
                self.update(gradient.values());
                self.answer(&peer, step);
            }
            Verdict::Answer => self.answer(&peer, step),
            Verdict::Join => self.round.waiting.push((peer, step)),
            Verdict::Hold => {
                self.round.early.insert(peer.trainer(), gradient);
                self.round.waiting.push((peer, step));
                self.advance();
            }
        }
    }

    /// Adds what is in its turn; closes the round if it is complete.
    fn advance(&mut self) {
        while let Some(first) = self.round.early.first_entry().filter(|first| self.rule.in_turn(*first.key())) {
            add(&mut self.round.sum, first.remove().values());
        }
        let Some(contributors) = self.rule.close_round() else { return };
        let mut round = std::mem::take(&mut self.round);
        scale(&mut round.sum, contributors.len() as f32);
        self.update(&round.sum);
        for (peer, step) in round.waiting.drain(..) {
            self.answer(&peer, step);
        }
        // The sum's memory serves the next round.
        round.sum.clear();
        self.round = round;
    }

    fn update(&mut self, gradient: &[[u8; 4]]) {
        self.plan.optimizer.apply(&mut self.values, gradient, &mut self.state, 1.0);
        self.version += 1;
        self.encoded = None;
    }

    fn answer(&mut self, peer: &Peer, step: u64) {
        let Self { plan, values, version, encoded, .. } = self;
        let answer = Answer { step, block: plan.block, version: *version, start: plan.start, values };
        peer.answer(&answer, || encoded.get_or_insert_with(|| encode(values)).clone());
    }

    fn encode(&mut self) -> Bytes {
        let values = &self.values;
        self.encoded.get_or_insert_with(|| encode(values)).clone()
    }
}

/// Little-endian bytes of `values`.
pub fn encode(values: &[f32]) -> Bytes {
    let mut bytes = BytesMut::zeroed(values.len() * 4);
    for (bytes, value) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(values) {
        *bytes = value.to_le_bytes();
    }
    bytes.freeze()
}

#[inline(always)]
fn any_exponent_full(values: &[[u8; 4]]) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    values.iter().fold(0, |any, v| any | u32::from(u32::from_le_bytes(*v) & EXPONENT == EXPONENT)) != 0
}

fn finite(gradient: &[[u8; 4]]) -> bool {
    !crate::simd::run(any_exponent_full, gradient)
}

/// `sum += gradient`; the first gradient is the sum, so that no zero is added to it.
fn add(sum: &mut Vec<[u8; 4]>, gradient: &[[u8; 4]]) {
    #[inline(always)]
    fn kernel((sum, gradient): (&mut [[u8; 4]], &[[u8; 4]])) {
        for (sum, g) in sum.iter_mut().zip(gradient) {
            *sum = (f32::from_le_bytes(*sum) + f32::from_le_bytes(*g)).to_le_bytes();
        }
    }
    if sum.is_empty() {
        sum.extend_from_slice(gradient);
    } else {
        crate::simd::run(kernel, (sum.as_mut_slice(), gradient));
    }
}

/// `sum /= contributors`.
fn scale(sum: &mut [[u8; 4]], contributors: f32) {
    #[inline(always)]
    fn kernel((sum, contributors): (&mut [[u8; 4]], f32)) {
        for sum in sum {
            *sum = (f32::from_le_bytes(*sum) / contributors).to_le_bytes();
        }
    }
    if contributors > 1.0 {
        crate::simd::run(kernel, (sum, contributors));
    }
}
