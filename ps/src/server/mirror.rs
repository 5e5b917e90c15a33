//! What the primary of a block owes its backup: the updates that are on their way there, and the answers that
//! wait until they have arrived. A primary without a backup has none of this.

use std::collections::VecDeque;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tonic::Status;

use super::hang_up::HangUp;
use super::peer::Peer;
use crate::wire::WINDOW;

/// Frames on their way to the other server that holds a shard. Cheap to clone.
#[derive(Clone)]
pub struct Frames {
    queue: mpsc::Sender<Result<Bytes, Status>>,
    end: HangUp,
}

impl Frames {
    /// Room for what is in flight between two servers of a job of `trainers` trainers, and where it comes out: of each
    /// trainer a window of updates, twice, because some may be sent again while the first are not gone yet; and
    /// what is said about the stream itself.
    #[must_use]
    pub fn new(trainers: u32) -> (Self, mpsc::Receiver<Result<Bytes, Status>>) {
        let (queue, frames) = mpsc::channel(2 * WINDOW * trainers as usize + 64);
        (Self { queue, end: HangUp::default() }, frames)
    }

    /// Whether there was room. If not, the other side does not read: the stream has to end, and to begin anew.
    pub fn send(&self, frame: Result<Bytes, Status>) -> bool {
        let sent = self.queue.try_send(frame);
        if let Err(TrySendError::Full(_)) = sent {
            tracing::warn!("the other server that holds these blocks does not read; it has to follow anew");
            self.end.hang_up(Status::resource_exhausted("what was sent has not been read; follow anew"));
        }
        sent.is_ok()
    }

    /// Hung up when there was no room.
    #[must_use]
    pub fn end(&self) -> HangUp {
        self.end.clone()
    }
}

/// One block's side of replication.
pub struct Mirror {
    backup: Option<Frames>,
    /// The version that the backup has.
    acknowledged: u64,
    /// Updates that the backup has not acknowledged, by the version that they make.
    under_way: VecDeque<(u64, Bytes)>,
    /// Trainers and their steps, by the version that must have arrived before they are answered.
    waiting: VecDeque<(u64, Peer, u64)>,
}

impl Mirror {
    /// A backup that has `version` and is expected to follow.
    #[must_use]
    pub fn new(version: u64) -> Self {
        Self { backup: None, acknowledged: version, under_way: VecDeque::new(), waiting: VecDeque::new() }
    }

    /// Sends an update, or keeps it until a backup follows.
    pub fn update(&mut self, version: u64, frame: Bytes) {
        self.send(frame.clone());
        self.under_way.push_back((version, frame));
    }

    /// Lets `backup`, which holds version `held`, follow; `contents` makes the frame with the block at
    /// `version`. Whether that had to be sent.
    pub fn attach(
        &mut self,
        backup: Frames,
        held: Option<u64>,
        version: Option<u64>,
        contents: impl FnOnce() -> Bytes,
    ) -> bool {
        self.backup = Some(backup);
        let oldest = self.under_way.front().map(|(first, _)| first - 1).or(version);
        if held == version || (held.is_some() && held >= oldest && held <= version) {
            self.under_way.retain(|(made, _)| held < Some(*made));
            for (_, frame) in self.under_way.clone() {
                self.send(frame);
            }
            self.acknowledged = self.acknowledged.max(held.unwrap_or(0));
            return false;
        }
        self.under_way.clear();
        self.send(contents());
        true
    }

    /// Sends a frame that needs no acknowledgement.
    pub fn send(&mut self, frame: Bytes) {
        // A backup that is gone, or reads nothing, has to follow anew.
        if self.backup.as_ref().is_some_and(|backup| !backup.send(Ok(frame))) {
            self.backup = None;
        }
    }

    /// Whether the backup lacks something of `version`.
    #[must_use]
    pub fn owes(&self, version: u64) -> bool {
        self.acknowledged < version
    }

    /// Answers to be given when the backup has `version`.
    pub fn hold(&mut self, version: u64, peers: Vec<(Peer, u64)>) {
        self.waiting.extend(peers.into_iter().map(|(peer, step)| (version, peer, step)));
    }

    /// The backup has `version`; who may be answered now.
    pub fn acknowledge(&mut self, version: u64) -> Vec<(Peer, u64)> {
        self.acknowledged = self.acknowledged.max(version);
        self.under_way.retain(|(made, _)| *made > version);
        let free = self.waiting.iter().take_while(|(needed, ..)| *needed <= self.acknowledged).count();
        self.waiting.drain(..free).map(|(_, peer, step)| (peer, step)).collect()
    }

    /// There is no backup any more; everybody who waits.
    #[must_use]
    pub fn dissolve(self) -> Vec<(Peer, u64)> {
        self.waiting.into_iter().map(|(_, peer, step)| (peer, step)).collect()
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
    fn behind() -> Mirror {
        let mut mirror = Mirror::new(1);
        for version in [2, 3] {
            mirror.update(version, frame(version));
        }
        mirror
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
            let (sender, mut frames) = Frames::new(1);
            let mut mirror = behind();
            assert_eq!(mirror.attach(sender, held, Some(3), || whole.clone()), copied, "it holds {held:?}");
            assert_eq!(sent(&mut frames), want, "it holds {held:?}");
            mirror.acknowledge(3);
            assert!(!mirror.owes(3) && mirror.owes(4), "it holds {held:?}");
        }
    }

    #[test]
    fn a_backup_that_reads_nothing_has_to_follow_anew() {
        let (sender, _frames) = Frames::new(1);
        let end = sender.end();
        let mut mirror = behind();
        mirror.attach(sender, Some(3), Some(3), Bytes::new);
        let sent = (4..).take_while(|version| {
            mirror.update(*version, frame(*version));
            end.clone().hung_up().now_or_never().is_none()
        });
        assert!(sent.count() >= WINDOW, "there is room for what a trainer has in flight");
    }

    #[test]
    fn an_empty_block_is_not_copied() {
        let (sender, mut frames) = Frames::new(1);
        let mut mirror = Mirror::new(0);
        assert!(!mirror.attach(sender, None, None, || unreachable!("nothing to copy")));
        assert!(sent(&mut frames).is_empty() && !mirror.owes(0));
    }

    #[test]
    fn updates_wait_for_a_backup_that_comes_back() {
        let (sender, frames) = Frames::new(1);
        let mut mirror = behind();
        mirror.attach(sender, Some(3), Some(3), Bytes::new);
        drop(frames);
        mirror.update(4, frame(4));
        let (sender, mut frames) = Frames::new(1);
        assert!(!mirror.attach(sender, Some(3), Some(4), || unreachable!("it lacks one update")));
        assert_eq!(sent(&mut frames), [frame(4)]);
    }
}
