//! Replication of what one task owns, a block or a part of the rows: the roles of its two holders, and the log of the
//! primary, which has the updates that the backup has not acknowledged and the answers that wait for that.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tonic::Status;

use crate::wire::{StreamAbort, WINDOW};

/// The role of a block or a part of the rows in replication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaRole {
    /// Serves trainers; no other server holds it.
    Alone,
    /// Serves trainers; answers them after the backup has acknowledged their updates.
    Primary,
    /// Applies the updates of its primary.
    Backup,
}

/// Frames of copies in the queue, which have places of their own: however much is copied, updates find room.
const PIECES: usize = 16;

/// Sends frames to the other server that holds a shard. Clones send over the same stream.
#[derive(Clone)]
pub struct FrameSender {
    queue: mpsc::Sender<Result<Bytes, Status>>,
    pieces: Arc<Semaphore>,
    abort: StreamAbort,
}

/// A frame of a copy, which keeps its place until it has left.
struct Piece {
    frame: Bytes,
    _place: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.frame
    }
}

impl FrameSender {
    /// Creates the channel between two servers of a job of `trainers` trainers. It has room for two windows of updates
    /// of each trainer, because updates may be sent again while the first are still queued, and for messages about
    /// the stream itself.
    #[must_use]
    pub fn new(trainers: u32) -> (Self, mpsc::Receiver<Result<Bytes, Status>>) {
        let (queue, frames) = mpsc::channel(2 * WINDOW * trainers as usize + 64 + PIECES);
        (Self { queue, pieces: Arc::new(Semaphore::new(PIECES)), abort: StreamAbort::default() }, frames)
    }

    /// Sends a frame; returns false if the stream has ended or is full. A full stream is aborted, because the other side
    /// does not read; it has to follow again.
    pub fn send(&self, frame: Result<Bytes, Status>) -> bool {
        let sent = self.queue.try_send(frame);
        if let Err(TrySendError::Full(_)) = sent {
            tracing::warn!("the other server that holds these blocks does not read; it has to follow anew");
            self.abort.abort(Status::resource_exhausted("what was sent has not been read; follow anew"));
        }
        sent.is_ok()
    }

    /// Sends a frame of a copy when those before it have left; returns false if the stream has ended.
    pub async fn send_when_free(&self, frame: Bytes) -> bool {
        let Ok(place) = self.pieces.clone().acquire_owned().await else { return false };
        self.queue.send(Ok(Bytes::from_owner(Piece { frame, _place: place }))).await.is_ok()
    }

    /// Returns the handle that is aborted when the stream is full.
    #[must_use]
    pub fn abort(&self) -> StreamAbort {
        self.abort.clone()
    }
}

/// The replication log of one block or part of the rows. `W` is a trainer that waits for an answer.
pub struct ReplicationLog<W> {
    backup: Option<FrameSender>,
    /// The version that the backup has acknowledged.
    acknowledged: u64,
    /// No other server has any of it, and none may lead before the first whole copy is there.
    is_first_copy: bool,
    /// Updates that the backup has not acknowledged, with the version after each.
    unacknowledged: VecDeque<(u64, Bytes)>,
    /// Trainers, with the version that must be acknowledged before they are answered.
    waiting: VecDeque<(u64, W)>,
}

impl<W> ReplicationLog<W> {
    /// Creates the log of an owner whose backup has `version`.
    #[must_use]
    pub fn new(version: u64) -> Self {
        let (unacknowledged, waiting) = Default::default();
        Self { backup: None, acknowledged: version, is_first_copy: false, unacknowledged, waiting }
    }

    /// As [`ReplicationLog::new`], of an owner that no other server holds. Trainers need not wait until it is copied: the word
    /// that the backup holds all, and may lead, follows what was updated until then.
    #[must_use]
    pub fn first_copy() -> Self {
        Self { is_first_copy: true, ..Self::new(0) }
    }

    /// Records an update, and sends it if a backup follows.
    pub fn update(&mut self, version: u64, frame: Bytes) {
        self.send(frame.clone());
        self.unacknowledged.push_back((version, frame));
    }

    /// Lets `backup`, which holds version `held`, follow. Sends it the updates that it lacks if the log still has them,
    /// else the frame of the whole at `version` that `contents` makes. Returns whether it sent the whole.
    pub fn attach(
        &mut self,
        backup: FrameSender,
        held: Option<u64>,
        version: Option<u64>,
        contents: impl FnOnce() -> Bytes,
    ) -> bool {
        let has_updates = self.has_updates_since(held, version);
        self.backup = Some(backup);
        if has_updates {
            self.unacknowledged.retain(|(made, _)| held < Some(*made));
            for (_, frame) in self.unacknowledged.clone() {
                self.send(frame);
            }
            self.acknowledged = self.acknowledged.max(held.unwrap_or(0));
            return false;
        }
        self.unacknowledged.clear();
        self.send(contents());
        true
    }

    /// Returns whether a backup that holds version `held` lacks only updates that the log has, up to `version`.
    #[must_use]
    pub fn has_updates_since(&self, held: Option<u64>, version: Option<u64>) -> bool {
        let oldest = self.unacknowledged.front().map(|(first, _)| first - 1).or(version);
        held == version || (held.is_some() && held >= oldest && held <= version)
    }

    /// Sends nothing until the next [`Self::attach`]: a backup is sent the whole as it is now. The log keeps the updates
    /// from now on.
    pub fn begin_copy(&mut self) {
        self.backup = None;
        self.unacknowledged.clear();
    }

    /// Sends a frame without recording it.
    pub fn send(&mut self, frame: Bytes) {
        // A backup that has disconnected or does not read has to follow again.
        if self.backup.as_ref().is_some_and(|backup| !backup.send(Ok(frame))) {
            self.backup = None;
        }
    }

    /// Returns whether the backup has not acknowledged `version` yet.
    #[must_use]
    pub fn lacks(&self, version: u64) -> bool {
        !self.is_first_copy && self.acknowledged < version
    }

    /// Holds answers back until the backup has acknowledged `version`.
    pub fn hold(&mut self, version: u64, trainers: Vec<W>) {
        self.waiting.extend(trainers.into_iter().map(|trainer| (version, trainer)));
    }

    /// Records that the backup has `version`; returns the trainers that may be answered now.
    pub fn acknowledge(&mut self, version: u64) -> Vec<W> {
        self.acknowledged = self.acknowledged.max(version);
        self.is_first_copy = false;
        self.unacknowledged.retain(|(made, _)| *made > version);
        let free = self.waiting.iter().take_while(|(needed, _)| *needed <= self.acknowledged).count();
        self.waiting.drain(..free).map(|(_, trainer)| trainer).collect()
    }

    /// Ends replication; returns all waiting trainers.
    #[must_use]
    pub fn close(self) -> Vec<W> {
        self.waiting.into_iter().map(|(_, trainer)| trainer).collect()
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn frame(version: u64) -> Bytes {
        version.to_le_bytes().to_vec().into()
    }

    fn sent(frames: &mut mpsc::Receiver<Result<Bytes, Status>>) -> Vec<Bytes> {
        std::iter::from_fn(|| frames.try_recv().ok()).map(|frame| frame.expect("a frame")).collect()
    }

    /// A block at version 3, of which the backup has acknowledged 1.
    fn behind() -> ReplicationLog<u32> {
        let mut log = ReplicationLog::new(1);
        for version in [2, 3] {
            log.update(version, frame(version));
        }
        log
    }

    #[test]
    fn a_backup_gets_what_it_lacks_and_no_more() {
        let whole: Bytes = "all".into();
        for (held, want, copied) in [
            (Some(1), vec![frame(2), frame(3)], false),
            (Some(2), vec![frame(3)], false),
            (Some(3), vec![], false),
            (Some(0), vec![whole.clone()], true),
            (Some(4), vec![whole.clone()], true),
            (None, vec![whole.clone()], true),
        ] {
            let (sender, mut frames) = FrameSender::new(1);
            let mut log = behind();
            assert_eq!(log.attach(sender, held, Some(3), || whole.clone()), copied, "it holds {held:?}");
            assert_eq!(sent(&mut frames), want, "it holds {held:?}");
            log.acknowledge(3);
            assert!(!log.lacks(3) && log.lacks(4), "it holds {held:?}");
        }
    }

    #[test]
    fn a_backup_that_reads_nothing_has_to_follow_anew() {
        let (sender, _frames) = FrameSender::new(1);
        let abort = sender.abort();
        let mut log = behind();
        log.attach(sender, Some(3), Some(3), Bytes::new);
        let sent = (4..).take_while(|version| {
            log.update(*version, frame(*version));
            abort.clone().aborted().now_or_never().is_none()
        });
        assert!(sent.count() >= WINDOW, "there is room for what a trainer has in flight");
    }

    #[tokio::test]
    async fn a_copy_takes_no_room_of_updates() {
        let (sender, mut frames) = FrameSender::new(1);
        let abort = sender.abort();
        let copying = tokio::spawn({
            let sender = sender.clone();
            async move {
                for piece in 0..1000 {
                    assert!(sender.send_when_free(frame(piece)).await, "the stream is open");
                }
            }
        });
        tokio::task::yield_now().await;
        let mut log = behind();
        log.attach(sender, Some(3), Some(3), Bytes::new);
        (4..4 + WINDOW as u64).for_each(|version| log.update(version, frame(version)));
        assert!(abort.aborted().now_or_never().is_none(), "the other side reads, but slowly");
        for _ in 0..1000 + WINDOW {
            frames.recv().await.expect("one after the other").expect("a frame");
        }
        copying.await.expect("all were sent");
    }

    #[test]
    fn trainers_do_not_wait_for_the_first_copy() {
        let mut log = ReplicationLog::<u32>::first_copy();
        log.begin_copy();
        log.update(4, frame(4));
        assert!(!log.lacks(4), "no other server has any of it");
        let (sender, mut frames) = FrameSender::new(1);
        log.attach(sender, Some(3), Some(4), Bytes::new);
        assert_eq!(sent(&mut frames), [frame(4)]);
        log.acknowledge(3);
        assert!(log.lacks(4), "the backup may lead soon");
        log.acknowledge(4);
        assert!(!log.lacks(4));
    }

    #[test]
    fn an_empty_block_is_not_copied() {
        let (sender, mut frames) = FrameSender::new(1);
        let mut log = ReplicationLog::<u32>::new(0);
        assert!(!log.attach(sender, None, None, || unreachable!("nothing to copy")));
        assert!(sent(&mut frames).is_empty() && !log.lacks(0));
    }

    #[test]
    fn updates_during_a_copy_follow_it() {
        let mut log = behind();
        log.hold(3, vec![7]);
        assert!(!log.has_updates_since(None, Some(3)));
        log.begin_copy();
        log.update(4, frame(4));
        let (sender, mut frames) = FrameSender::new(1);
        assert!(!log.attach(sender, Some(3), Some(4), || unreachable!("the copy has the rest")));
        assert_eq!(sent(&mut frames), [frame(4)]);
        assert!(log.lacks(4));
        assert_eq!(log.acknowledge(4), [7]);
    }

    #[test]
    fn updates_wait_for_a_backup_that_comes_back() {
        let (sender, frames) = FrameSender::new(1);
        let mut log = behind();
        log.attach(sender, Some(3), Some(3), Bytes::new);
        drop(frames);
        log.update(4, frame(4));
        let (sender, mut frames) = FrameSender::new(1);
        assert!(!log.attach(sender, Some(3), Some(4), || unreachable!("it lacks one update")));
        assert_eq!(sent(&mut frames), [frame(4)]);
    }
}
