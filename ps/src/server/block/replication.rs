//! A block that two servers hold: the primary sends what it applies, the backup follows and says so.

use bytes::Bytes;
use tonic::Status;

use super::Block;
use crate::proto;
use crate::server::command::{Standing, Update};
use crate::server::mirror::{Frames, Mirror};
use crate::wire::frame;

impl Block {
    pub(super) fn stand(&mut self, standing: Standing) {
        let before = std::mem::replace(&mut self.standing, standing);
        match standing {
            Standing::Mirrored if before != Standing::Mirrored => self.mirror = Some(Mirror::new(self.version)),
            Standing::Mirrored => {}
            Standing::Alone => {
                let waiting = self.mirror.take().map(Mirror::dissolve);
                self.answer(waiting.unwrap_or_default());
            }
            Standing::Backup => self.mirror = None,
        }
    }

    pub(super) fn attach(&mut self, held: Option<u64>, backup: Frames) -> bool {
        if self.standing == Standing::Backup {
            return false;
        }
        self.standing = Standing::Mirrored;
        let mut mirror = self.mirror.take().unwrap_or_else(|| Mirror::new(0));
        let version = (!self.values.is_empty()).then_some(self.version);
        let copied = mirror.attach(backup, held, version, || self.contents());
        self.mirror = Some(mirror);
        copied
    }

    /// Takes an update of the primary, and says so before it is applied: from here on it is not lost.
    pub(super) fn follow(&mut self, update: Update, primary: &Frames) {
        if self.standing != Standing::Backup || update.version != self.version + 1 {
            let text = format!(
                "block {} is at version {}, the update makes {}",
                self.plan.block, self.version, update.version
            );
            primary.send(Err(Status::data_loss(text)));
            return;
        }
        self.version = update.version;
        self.acknowledge(primary);
        for next in &update.next_steps {
            self.rule.advance(next.trainer, next.step);
        }
        self.apply(&update.gradient, update.factor);
        self.find_due_snapshots();
    }

    pub(super) fn acknowledge(&self, primary: &Frames) {
        let message = proto::Acknowledgement { block: self.plan.block, version: self.version };
        let message = proto::follow_request::Message::Acknowledgement(message);
        // A primary that is gone needs no word.
        primary.send(Ok(frame::message(&proto::FollowRequest { message: Some(message) })));
    }

    /// The frame that makes a backup equal to this block.
    pub(super) fn contents(&self) -> Bytes {
        let bytes = |values: &Vec<f32>| Bytes::copy_from_slice(bytemuck::cast_slice(values));
        let contents = proto::BlockContents {
            block: self.plan.block,
            version: self.version,
            updates: self.state.step(),
            next_steps: self.settled_steps(),
            values: bytes(&self.values),
            slots: self.state.slots().iter().map(bytes).collect(),
        };
        frame::message(&proto::Replica { contents: Some(contents), ..proto::Replica::default() })
    }
}
