//! Captures the state of a block for a checkpoint, and restores it.

use psjobs_arithmetic::optimizer::State;
use tokio::sync::oneshot;

use super::state::{Block, Waiting};
use crate::checkpoint::BlockState;

impl Block {
    pub(super) fn snapshot(&mut self, at: Option<u64>, reply: oneshot::Sender<Option<BlockState>>) {
        match at {
            Some(at) if at > self.version => self.snapshots.push((at, reply)),
            Some(at) if at < self.version => drop(reply.send(None)),
            Some(_) => self.due.push((false, reply)),
            // Other blocks may be a step behind, whose trainers then need the values before it.
            None => self.due.push((self.spec.keeps_previous, reply)),
        }
    }

    /// Finds the snapshots that were requested for the version that the block has reached.
    pub(super) fn find_due_snapshots(&mut self) {
        let version = self.version;
        self.due.extend(self.snapshots.extract_if(.., |(at, _)| *at <= version).map(|(_, reply)| (false, reply)));
    }

    pub(super) fn take_due_snapshots(&mut self) {
        for (with_previous, reply) in std::mem::take(&mut self.due) {
            // The caller may have gone away.
            drop(reply.send(self.capture(with_previous)));
        }
    }

    /// Stores the state of parameters that the trainers train themselves, and sends it to the backup. Snapshots of
    /// versions that were skipped fail.
    pub(super) fn keep(&mut self, state: BlockState, reply: oneshot::Sender<()>) {
        let before = self.is_initialized().then_some(self.version);
        let state = BlockState { next_steps: vec![state.version; self.spec.trainers as usize], ..state };
        for (_, reply) in self.snapshots.extract_if(.., |(at, _)| *at < state.version) {
            drop(reply.send(None));
        }
        let waiting = std::mem::take(&mut self.snapshots);
        self.restore(Some(state));
        self.snapshots = waiting;
        self.find_due_snapshots();
        // A state that is stored again at one version is the same.
        if before < Some(self.version) {
            self.send_whole();
        }
        self.answer_all(vec![Waiting::Kept(reply)]);
    }

    fn capture(&self, with_previous: bool) -> Option<BlockState> {
        if !self.is_initialized() {
            return None;
        }
        // Where the last round changed nothing, the values before it are those after it.
        let previous = if self.previous.is_empty() { &self.values } else { &self.previous };
        Some(BlockState {
            values: self.values.clone(),
            slots: self.state.slots().to_vec(),
            previous: if with_previous { previous.clone() } else { Vec::new() },
            updates: self.state.step(),
            version: self.version,
            next_steps: self.settled_steps(),
        })
    }

    /// Returns, by trainer, the first step that is not in the values.
    pub(super) fn settled_steps(&self) -> Vec<u64> {
        (0..self.spec.trainers).map(|trainer| self.aggregation.rule.settled(trainer)).collect()
    }

    pub(super) fn restore(&mut self, state: Option<BlockState>) {
        let BlockState { values, slots, previous, updates, version, next_steps } = state.unwrap_or_default();
        self.values = values;
        self.previous = if self.spec.keeps_previous { previous } else { Vec::new() };
        self.state = State::restored(slots, updates);
        self.version = version;
        self.aggregation.restore(&next_steps);
        self.joining.clear();
        self.snapshots.clear();
    }
}
