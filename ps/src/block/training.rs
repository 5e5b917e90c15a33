//! The effect of gradients on a block, and the order in which trainers are answered.

use psjobs_api::training::NonFinite;
use tonic::Status;

use super::peer::Peer;
use super::state::{Block, Round};
use crate::codec::Codec;
use crate::consistency::{Rule, Verdict};
use crate::gradient::{Gradient, add, scale};
use crate::proto;
use crate::wire::frame;

impl Block {
    pub(super) fn join_round(&mut self, peer: Peer, step: u64) {
        if !self.accepts(&peer) {
            return;
        }
        let joined = self.rule.enter(peer.trainer(), step);
        // Replaces an earlier attempt of the same trainer, perhaps over this stream.
        self.joining.retain(|(earlier, _)| earlier.trainer() != peer.trainer());
        match joined {
            Ok(()) => self.joining.push((peer, step)),
            Err(round) => {
                let refusal = self.spec.answer(round, self.version, &[]);
                peer.answer(&refusal, &self.spec.rules, &mut None);
            }
        }
        self.advance();
        self.answer_joined();
        self.release();
    }

    /// Answers joining trainers whose first round is open.
    pub(super) fn answer_joined(&mut self) {
        let joined = self.joining.extract_if(.., |(_, step)| self.rule.may_begin(*step)).collect::<Vec<_>>();
        self.answer(joined);
    }

    pub(super) fn gradient(&mut self, peer: Peer, step: u64, version: u64, gradient: Gradient) {
        let block = self.spec.block;
        if !self.accepts(&peer) {
            return;
        }
        let mut gradient = Some(gradient);
        if self.spec.rules.non_finite != NonFinite::Pass
            && !gradient.as_ref().is_some_and(|gradient| gradient.is_finite(self.values.len()))
        {
            self.spec.metrics.count_not_finite();
            if self.spec.rules.non_finite == NonFinite::Refuse {
                return peer.refuse(not_finite(peer.trainer(), step, block));
            }
            gradient = None;
        }
        match self.rule.offer(peer.trainer(), step, version < self.version) {
            Verdict::Apply => {
                let staleness = self.version.saturating_sub(version);
                self.spec.metrics.record_staleness(staleness);
                if let Some(gradient) = gradient {
                    let next = proto::NextStep { trainer: peer.trainer(), step: step.saturating_add(1) };
                    self.update(&gradient, self.spec.rules.factor(step, staleness), |_| vec![next]);
                }
                self.ahead.push((peer, step));
                self.release();
            }
            Verdict::Answer => {
                self.ahead.push((peer, step));
                self.release();
            }
            Verdict::Drop => {
                self.spec.metrics.count_late();
                self.answer(vec![(peer, step)]);
            }
            Verdict::Late => {
                self.spec.metrics.count_late();
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

    /// Adds the early gradients whose turn in trainer order has come, and closes the round if it is complete.
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
            let (gradient, factor) = (Gradient::Wire(Codec::F32, sum.freeze()), self.spec.rules.factor(step, 0));
            self.update(&gradient, factor, |rule| {
                let next = |trainer| proto::NextStep { trainer, step: rule.next_step(trainer) };
                contributors.into_iter().map(next).collect()
            });
        }
        self.answer(waiting);
        self.answer_joined();
        self.find_due_snapshots();
    }

    /// Adds a gradient to the sum. The first one becomes the sum, so that no zeros are added.
    fn add(&mut self, gradient: Option<Gradient>) {
        let Some(gradient) = gradient else { return };
        let elements = self.values.len();
        let Round { sum, added, .. } = &mut self.round;
        gradient.with_values(elements, |gradient| match sum {
            Some(sum) => add(sum.bytes_mut().as_chunks_mut().0, gradient),
            None => {
                let mut first = self.spec.rules.buffers.take(elements * 4);
                first.bytes_mut().copy_from_slice(gradient.as_flattened());
                *sum = Some(first);
            }
        });
        *added += 1;
    }

    /// Sends an update to the backup, with the next steps of its trainers, then applies it.
    fn update(&mut self, gradient: &Gradient, factor: f64, next_steps: impl FnOnce(&Rule) -> Vec<proto::NextStep>) {
        self.version += 1;
        if let Some(log) = &mut self.log {
            let (codec, payload) = gradient.as_sent();
            let (block, version, codec) = (self.spec.block, self.version, codec.number());
            let next_steps = next_steps(&self.rule);
            let head = proto::Replica { block, version, factor, next_steps, codec, ..proto::Replica::default() };
            let fill = |target: &mut [u8]| target.copy_from_slice(payload);
            log.update(version, frame::replica(&self.spec.rules.buffers, &head, payload.len(), fill));
        }
        self.apply(gradient, factor);
    }

    pub(super) fn apply(&mut self, gradient: &Gradient, factor: f64) {
        let Self { spec, values, state, .. } = self;
        let elements = values.len();
        gradient.with_values(elements, |gradient| spec.rules.optimizer.apply(values, gradient, state, factor));
    }

    /// Answers the trainers that may continue because no other trainer is too far behind them.
    pub(super) fn release(&mut self) {
        let released = self.ahead.extract_if(.., |(_, step)| self.rule.may_go_on(*step)).collect::<Vec<_>>();
        self.answer(released);
    }

    /// Sends the current values once the backup has them. Trainers that wait for the same step share one message.
    pub(super) fn answer(&mut self, peers: Vec<(Peer, u64)>) {
        let Self { spec, values, version, log, .. } = self;
        if let Some(log) = log.as_mut().filter(|log| log.lacks(*version)) {
            return log.hold(*version, peers);
        }
        let mut last = None;
        for (peer, step) in peers {
            peer.answer(&spec.answer(step, *version, values), &spec.rules, &mut last);
        }
    }
}

fn not_finite(trainer: u32, step: u64, block: u32) -> Status {
    Status::invalid_argument(format!(
        "the gradient of trainer {trainer}, step {step}, block {block} holds NaN or infinity; nothing of it was \
         applied: lower the learning rate or look at the loss"
    ))
}
