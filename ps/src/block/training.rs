//! The effect of gradients on a block, and the order in which trainers are answered.

use psjobs_api::training::NonFinite;
use tonic::Status;

use super::peer::Peer;
use super::state::{BeforeStep, Block, Waiting};
use crate::aggregation::{Closed, Contribution, Outcome};
use crate::consistency::Rule;
use crate::gradient::{Gradient, Sum};
use crate::proto;
use crate::wire::{codec_number, frame};

impl Block {
    pub(super) fn join_round(&mut self, peer: Peer, step: u64) {
        if !self.accepts(&peer) {
            return;
        }
        let joined = self.aggregation.rule.enter(peer.trainer(), step);
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
        let joined =
            self.joining.extract_if(.., |(_, step)| self.aggregation.rule.may_begin(*step)).collect::<Vec<_>>();
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
        let (trainer, stale) = (peer.trainer(), version < self.version);
        let waiting = (peer, step);
        match self.aggregation.offer(Contribution { trainer, step, stale, gradient, waiting }) {
            Outcome::Apply(gradient) => {
                let staleness = self.version.saturating_sub(version);
                self.spec.metrics.record_staleness(staleness);
                if let Some(gradient) = gradient {
                    let next = proto::NextStep { trainer, step: step.saturating_add(1) };
                    self.update(&gradient, self.spec.rules.factor(step, staleness), |_| vec![next]);
                }
                self.release();
            }
            Outcome::Release => self.release(),
            Outcome::Advance => self.advance(),
            Outcome::Wait => {}
            Outcome::Drop(waiting) => {
                self.spec.metrics.count_late();
                self.answer(vec![waiting]);
            }
            Outcome::Late((peer, _)) => {
                self.spec.metrics.count_late();
                peer.refuse(Status::out_of_range(format!(
                    "step {step} of block {block} was done without trainer {trainer}; enter again"
                )));
            }
        }
    }

    /// Adds the early gradients whose turn in trainer order has come, and updates the values if that closes the round.
    pub(super) fn advance(&mut self) {
        let (elements, buffers) = (self.values.len(), &self.spec.rules.buffers);
        let is_alone = self.spec.trainers == 1 && !self.spec.elastic;
        let add = |sum: &mut Option<Sum>, gradient: Gradient| {
            *sum = Some(match sum.take() {
                Some(sum) => sum.plus(&gradient, elements, buffers),
                None => Sum::begin(gradient, elements, buffers, is_alone),
            });
        };
        let Some(Closed { sum, step, contributors, waiting }) = self.aggregation.advance(add) else { return };
        self.previous.clear();
        if let Some((sum, added)) = sum {
            let (gradient, factor) = (sum.mean(added), self.spec.rules.factor(step, 0));
            self.update(&gradient, factor, |rule| {
                let next = |trainer| proto::NextStep { trainer, step: rule.next_step(trainer) };
                contributors.into_iter().map(next).collect()
            });
        } else {
            // The round counts although it changed no value: the versions of all blocks are those of the steps.
            self.version += 1;
            self.send_whole();
        }
        self.answer(waiting);
        self.answer_joined();
        self.find_due_snapshots();
    }

    /// Sends an update to the backup, with the next steps of its trainers, then applies it.
    fn update(&mut self, gradient: &Gradient, factor: f64, next_steps: impl FnOnce(&Rule) -> Vec<proto::NextStep>) {
        self.version += 1;
        if let Some(log) = &mut self.log {
            let (codec, payload) = gradient.as_sent();
            let (block, version, codec) = (self.spec.block, self.version, codec_number::number(codec));
            let next_steps = next_steps(&self.aggregation.rule);
            let head = proto::Replica { block, version, factor, next_steps, codec, ..proto::Replica::default() };
            let fill = |target: &mut [u8]| target.copy_from_slice(payload);
            log.update(version, frame::replica(&self.spec.rules.buffers, &head, payload.len(), fill));
        }
        self.apply(gradient, factor);
    }

    pub(super) fn apply(&mut self, gradient: &Gradient, factor: f64) {
        let Self { spec, values, previous, state, .. } = self;
        if spec.keeps_previous {
            previous.clear();
            previous.extend_from_slice(values);
        }
        let elements = values.len();
        let mut update = spec.rules.optimizer.begin(values, state, factor, &spec.stretches);
        gradient.for_each_part(elements, |start, part| update.apply(start, part));
    }

    /// Answers the trainers that may continue because no other trainer is too far behind them.
    pub(super) fn release(&mut self) {
        let released = self.aggregation.released();
        self.answer(released);
    }

    /// Sends the current values to trainers, see [`Self::answer_all`].
    pub(super) fn answer(&mut self, peers: Vec<(Peer, u64)>) {
        self.answer_all(peers.into_iter().map(|(peer, step)| Waiting::Trainer(peer, step)).collect());
    }

    /// Answers with the current state once the backup has it. Trainers that wait for the same step share one message.
    pub(super) fn answer_all(&mut self, waiting: Vec<Waiting>) {
        if let Some(log) = self.log.as_mut().filter(|log| log.lacks(self.version)) {
            return log.hold(self.version, waiting);
        }
        let Self { spec, aggregation, .. } = &*self;
        let mut last = None;
        for waiting in waiting {
            match waiting {
                // A repeat of a step is answered, too, where a process before this trainer has given the next one.
                Waiting::Trainer(peer, step) => {
                    let next = BeforeStep { trainer: peer.trainer(), step: step.saturating_add(1) };
                    let (version, values) = self.values_for(Some(next));
                    let mut alone = None;
                    let last = if version == self.version { &mut last } else { &mut alone };
                    peer.answer(&spec.answer(step, version, values), &spec.rules, last);
                }
                // The pull was given up: its trainer may compute with what is in the memory.
                Waiting::Read(_, Some(into), reply) if into.abort.is_aborted() || reply.is_closed() => {}
                // A reply is discarded when its caller has gone away.
                Waiting::Read(reader, into, reply) => {
                    let (version, values) = self.values_for(reader);
                    let answer = spec.answer(0, version, values);
                    let message = || match &into {
                        Some(into) => answer.write(&into.memory),
                        None => answer.encode(&spec.rules),
                    };
                    let _ = reply.send((!values.is_empty()).then(message));
                }
                // The values do not contain a gradient of the open round: a restarted trainer sends that step again
                // and waits for the round like the others.
                Waiting::NextStep(trainer, reply) => {
                    let _ = reply.send((aggregation.rule.entry(trainer), self.is_initialized()));
                }
                Waiting::Kept(reply) => drop(reply.send(())),
            }
        }
    }
}

fn not_finite(trainer: u32, step: u64, block: u32) -> Status {
    Status::invalid_argument(format!(
        "the gradient of trainer {trainer}, step {step}, block {block} holds NaN or infinity; nothing of it was \
         applied: lower the learning rate or look at the loss"
    ))
}
