//! A block's side of replication: the primary sends the updates that it applies, the backup applies and acknowledges
//! them.

use bytes::Bytes;
use tonic::Status;

use super::command::Update;
use super::state::Block;
use crate::proto;
use crate::replication_log::{FrameSender, ReplicaRole, ReplicationLog};
use crate::wire::frame;

impl Block {
    pub(super) fn set_role(&mut self, role: ReplicaRole) {
        let before = std::mem::replace(&mut self.role, role);
        match role {
            ReplicaRole::Primary if before != ReplicaRole::Primary => {
                self.log = Some(ReplicationLog::new(self.version));
            }
            ReplicaRole::Primary => {}
            ReplicaRole::Alone => {
                let waiting = self.log.take().map(ReplicationLog::close);
                self.answer_all(waiting.unwrap_or_default());
            }
            ReplicaRole::Backup => {
                self.log = None;
                // The leader is asked for them.
                self.snapshots.clear();
            }
        }
    }

    /// Lets a backup that holds version `held` follow; returns whether it is sent a copy of the block, `None` if this
    /// block is a backup itself.
    pub(super) fn attach(&mut self, held: Option<u64>, backup: FrameSender) -> Option<bool> {
        if self.role == ReplicaRole::Backup {
            return None;
        }
        self.role = ReplicaRole::Primary;
        let mut log = self.log.take().unwrap_or_else(|| ReplicationLog::new(0));
        let version = self.is_initialized().then_some(self.version);
        let copied = log.attach(backup, held, version, || self.contents());
        // An update may have reached it although its acknowledgement got lost with the connection.
        let released = held.filter(|_| !copied).map(|held| log.acknowledge(held));
        self.log = Some(log);
        self.answer_all(released.unwrap_or_default());
        Some(copied)
    }

    /// Applies an update of the primary. Acknowledges it before that, because it can no longer get lost then.
    pub(super) fn follow(&mut self, update: Update, primary: &FrameSender) {
        if self.role != ReplicaRole::Backup || update.version != self.version + 1 {
            let text = format!(
                "block {} is at version {}, the update makes {}",
                self.spec.block, self.version, update.version
            );
            primary.send(Err(Status::data_loss(text)));
            return;
        }
        self.version = update.version;
        self.acknowledge(primary);
        for next in &update.next_steps {
            self.aggregation.rule.advance(next.trainer, next.step);
        }
        self.apply(&update.gradient, update.factor);
        self.find_due_snapshots();
    }

    pub(super) fn acknowledge(&self, primary: &FrameSender) {
        let message = proto::Acknowledgement { block: self.spec.block, version: self.version };
        let message = proto::follow_request::Message::Acknowledgement(message);
        // A primary that has disconnected needs no acknowledgement.
        primary.send(Ok(frame::message(&proto::FollowRequest { message: Some(message) })));
    }

    /// Sends all of the block to the backup, as the update that made its version.
    pub(super) fn send_whole(&mut self) {
        if let Some(mut log) = self.log.take() {
            match self.version {
                // A backup without values is sent the whole when it follows.
                0 => log.send(self.contents()),
                version => log.update(version, self.contents()),
            }
            self.log = Some(log);
        }
    }

    /// Returns the frame that makes a backup equal to this block.
    pub(super) fn contents(&self) -> Bytes {
        let bytes = |values: &Vec<f32>| Bytes::copy_from_slice(bytemuck::cast_slice(values));
        let contents = proto::BlockContents {
            block: self.spec.block,
            version: self.version,
            updates: self.state.step(),
            next_steps: self.settled_steps(),
            values: bytes(&self.values),
            slots: self.state.slots().iter().map(bytes).collect(),
            previous: bytes(&self.previous),
        };
        frame::message(&proto::Replica { contents: Some(contents), ..proto::Replica::default() })
    }
}
