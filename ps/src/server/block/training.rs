//! What gradients do to a block, and who is answered when.

use std::collections::BTreeMap;

use psjobs_api::training::NonFinite;
use tonic::Status;

use super::Block;
use crate::codec::Codec;
use crate::consistency::{Rule, Verdict};
use crate::proto;
use crate::server::peer::{Gradient, Peer};
use crate::server::sum::{add, scale};
use crate::wire::buffers::Buffer;
use crate::wire::frame;

/// The gradients of a step whose round is open.
#[derive(Default)]
pub(super) struct Round {
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
    pub(super) fn join_round(&mut self, peer: Peer, step: u64) {
        if !self.hears(&peer) {
            return;
        }
        let entered = self.rule.enter(peer.trainer(), step);
        // Of an earlier try; its stream may be this one.
        self.entering.retain(|(earlier, _)| earlier.trainer() != peer.trainer());
        match entered {
            Ok(()) => self.entering.push((peer, step)),
            Err(round) => {
                let refusal = self.plan.answer(round, self.version, &[]);
                peer.answer(&refusal, &self.plan.recipe, &mut None);
            }
        }
        self.advance();
        self.begin();
        self.release();
    }

    /// Answers those whose first round is open.
    pub(super) fn begin(&mut self) {
        let begin = self.entering.extract_if(.., |(_, step)| self.rule.may_begin(*step)).collect::<Vec<_>>();
        self.answer(begin);
    }

    pub(super) fn gradient(&mut self, peer: Peer, step: u64, version: u64, gradient: Gradient) {
        let block = self.plan.block;
        if !self.hears(&peer) {
            return;
        }
        let mut gradient = Some(gradient);
        if self.plan.recipe.non_finite != NonFinite::Pass
            && !gradient.as_ref().is_some_and(|gradient| gradient.is_finite(self.values.len()))
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
                    let next = proto::NextStep { trainer: peer.trainer(), step: step.saturating_add(1) };
                    self.update(&gradient, self.plan.recipe.factor(step, staleness), |_| vec![next]);
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
                self.answer(vec![(peer, step)]);
            }
            Verdict::Late => {
                self.plan.metrics.late();
                peer.refuse(Status::out_of_range(format!(
                    "step {step} of block {block} was done without trainer {}; enter again",
                    peer.trainer()
                )));
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
    pub(super) fn advance(&mut self) {
        while let Some(first) = self.round.early.first_entry().filter(|first| self.rule.in_turn(*first.key())) {
            let gradient = first.remove();
            self.add(gradient);
        }
        let Some(contributors) = self.rule.close_round() else { return };
        while let Some((_, gradient)) = self.round.early.pop_first() {
            self.add(gradient);
        }
        let Round { sum, added, step, waiting, .. } = std::mem::take(&mut self.round);
        if let Some(mut sum) = sum {
            scale(sum.bytes_mut().as_chunks_mut().0, added as f32);
            let (gradient, factor) = (Gradient::Wire(Codec::F32, sum.freeze()), self.plan.recipe.factor(step, 0));
            self.update(&gradient, factor, |rule| {
                let next = |trainer| proto::NextStep { trainer, step: rule.next_step(trainer) };
                contributors.into_iter().map(next).collect()
            });
        }
        self.answer(waiting);
        self.begin();
        self.find_due_snapshots();
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

    /// Applies a gradient, after it has left for the backup with the steps that trainers go on with.
    fn update(&mut self, gradient: &Gradient, factor: f64, next_steps: impl FnOnce(&Rule) -> Vec<proto::NextStep>) {
        self.version += 1;
        if let Some(mirror) = &mut self.mirror {
            let (codec, payload) = gradient.as_sent();
            let (block, version, codec) = (self.plan.block, self.version, codec.number());
            let next_steps = next_steps(&self.rule);
            let head = proto::Replica { block, version, factor, next_steps, codec, ..proto::Replica::default() };
            let fill = |target: &mut [u8]| target.copy_from_slice(payload);
            mirror.update(version, frame::replica(&self.plan.recipe.buffers, &head, payload.len(), fill));
        }
        self.apply(gradient, factor);
    }

    pub(super) fn apply(&mut self, gradient: &Gradient, factor: f64) {
        let Self { plan, values, state, .. } = self;
        let elements = values.len();
        gradient.with_values(elements, |gradient| plan.recipe.optimizer.apply(values, gradient, state, factor));
    }

    /// Answers those of whom nobody is too far behind.
    pub(super) fn release(&mut self) {
        let may = self.ahead.extract_if(.., |(_, step)| self.rule.may_go_on(*step)).collect::<Vec<_>>();
        self.answer(may);
    }

    /// Sends the current values, when the backup has them; those who wait for the same step share one copy.
    pub(super) fn answer(&mut self, peers: Vec<(Peer, u64)>) {
        let Self { plan, values, version, mirror, .. } = self;
        if let Some(mirror) = mirror.as_mut().filter(|mirror| mirror.owes(*version)) {
            return mirror.hold(*version, peers);
        }
        let mut last = None;
        for (peer, step) in peers {
            peer.answer(&plan.answer(step, *version, values), &plan.recipe, &mut last);
        }
    }
}

fn not_finite(trainer: u32, step: u64, block: u32) -> Status {
    Status::invalid_argument(format!(
        "the gradient of trainer {trainer}, step {step}, block {block} holds NaN or infinity; nothing of it was \
         applied: lower the learning rate or look at the loss"
    ))
}
