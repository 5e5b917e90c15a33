//! A block's state, taken for a checkpoint and put back.

use tokio::sync::oneshot;

use super::Block;
use super::training::Round;
use crate::checkpoint::BlockState;
use crate::optimizer::State;

impl Block {
    pub(super) fn snapshot(&mut self, at: Option<u64>, reply: oneshot::Sender<Option<BlockState>>) {
        match at {
            Some(at) if at > self.version && !self.values.is_empty() => self.snapshots.push((at, reply)),
            Some(at) if at < self.version => drop(reply.send(None)),
            _ => self.due.push(reply),
        }
    }

    /// The block has a new version.
    pub(super) fn find_due_snapshots(&mut self) {
        let version = self.version;
        self.due.extend(self.snapshots.extract_if(.., |(at, _)| *at <= version).map(|(_, reply)| reply));
    }

    pub(super) fn take_due_snapshots(&mut self) {
        for reply in std::mem::take(&mut self.due) {
            // Whoever asked may be gone.
            drop(reply.send(self.capture()));
        }
    }

    /// Takes what a trainer gives of parameters that it trains itself. A snapshot of a version that was never given is
    /// not to be had any more.
    pub(super) fn keep(&mut self, state: BlockState) {
        let state = BlockState { next_steps: vec![state.version; self.plan.trainers as usize], ..state };
        for (_, reply) in self.snapshots.extract_if(.., |(at, _)| *at < state.version) {
            drop(reply.send(None));
        }
        let waiting = std::mem::take(&mut self.snapshots);
        self.restore(Some(state));
        self.snapshots = waiting;
        self.find_due_snapshots();
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
            next_steps: self.settled_steps(),
        })
    }

    /// By trainer: the first step that the values do not have.
    pub(super) fn settled_steps(&self) -> Vec<u64> {
        (0..self.plan.trainers).map(|trainer| self.rule.settled(trainer)).collect()
    }

    pub(super) fn restore(&mut self, state: Option<BlockState>) {
        let BlockState { values, slots, updates, version, next_steps } = state.unwrap_or_default();
        self.values = values;
        self.state = State::restored(slots, updates);
        self.version = version;
        self.rule.restore(&next_steps);
        self.round = Round::default();
        self.entering.clear();
        self.ahead.clear();
        self.snapshots.clear();
    }
}
