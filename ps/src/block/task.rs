//! The task that owns one block and executes its commands one after the other.

use std::time::Duration;

use psjobs_arithmetic::codec::Codec;
use tokio::sync::mpsc;

use super::command::Command;
use super::state::{Block, BlockSpec, Waiting};
use crate::replication_log::{ReplicaRole, ReplicationLog};

/// A due snapshot is taken when the block has been idle for this long, so that the answers of other blocks do not wait
/// for it; in any case it is taken before the block changes.
const IDLE: Duration = Duration::from_millis(20);

/// Owns the block until every sender is dropped.
pub(super) async fn run(spec: BlockSpec, mut commands: mpsc::Receiver<Command>) {
    let busy_time = spec.metrics.busy_times.of_block(spec.block);
    let mut block = Block::new(spec);
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
        busy_time.measure(|| block.handle(command));
    }
}

impl Block {
    fn handle(&mut self, command: Command) {
        // A reply is discarded when its caller has gone away.
        match command {
            Command::Gradient { peer, step, version, gradient } => self.gradient(peer, step, version, gradient),
            Command::JoinRound(peer, step) => self.join_round(peer, step),
            Command::Initialize(codec, payload, reply) => {
                let _ = reply.send(self.initialize(codec, &payload));
            }
            Command::Read(reader, into, reply) => self.answer_all(vec![Waiting::Read(reader, into, reply)]),
            Command::NextStep(trainer, reply) => self.answer_all(vec![Waiting::NextStep(trainer, reply)]),
            Command::Finish(trainer) => {
                self.aggregation.rule.finish(trainer);
                self.advance();
                self.answer_joined();
                self.release();
            }
            Command::Snapshot(at, reply) => self.snapshot(at, reply),
            Command::Version(reply) => {
                let _ = reply.send(self.is_initialized().then_some(self.version));
            }
            Command::Steps(reply) => {
                let _ = reply.send(self.settled_steps());
            }
            Command::Restore(epoch, state, reply) => {
                self.epoch = epoch;
                self.restore(state);
                self.log = (self.role == ReplicaRole::Primary).then(|| ReplicationLog::new(self.version));
                let _ = reply.send(());
            }
            Command::Keep(epoch, state, reply) if epoch == self.epoch && self.role != ReplicaRole::Backup => {
                self.keep(state, reply);
            }
            // It belongs to a state that was discarded, or to the primary.
            Command::Keep(..) => {}
            Command::SetRole(role) => self.set_role(role),
            Command::Attach(held, backup, reply) => {
                let _ = reply.send(self.attach(held, backup));
            }
            Command::Acknowledged(version) => {
                let released = self.log.as_mut().map(|log| log.acknowledge(version));
                self.answer_all(released.unwrap_or_default());
            }
            Command::Install(state, previous, primary) => {
                self.restore(Some(state));
                self.previous = previous;
                self.acknowledge(&primary);
            }
            Command::ApplyUpdate(update, primary) => self.follow(update, &primary),
        }
    }

    /// Sets the first values; returns false if the block has values already.
    fn initialize(&mut self, codec: Codec, payload: &[u8]) -> bool {
        if self.is_initialized() {
            return false;
        }
        self.values.resize(self.spec.range.len(), 0.0);
        codec.decode(payload, &mut self.values).expect("the payload was checked when it came in");
        self.state = self.spec.rules.optimizer.state(self.values.len());
        if let Some(mut log) = self.log.take() {
            log.send(self.contents());
            self.log = Some(log);
        }
        true
    }
}
