//! What the task that owns a block is asked to do.

use bytes::Bytes;
use tokio::sync::oneshot;

use super::mirror::Frames;
use super::peer::{Gradient, Peer};
use crate::checkpoint::BlockState;
use crate::codec::Codec;
use crate::proto;

/// What a block's task is asked to do.
pub enum Command {
    /// A trainer's gradient; the answer goes to the peer's stream.
    Gradient {
        /// Who sent it, and where the answer goes.
        peer: Peer,
        /// The trainer's step.
        step: u64,
        /// Version of the block that it was computed from.
        version: u64,
        /// The values, of the block's length.
        gradient: Gradient,
    },
    /// A trainer of an elastic job takes part from a step on, and gets the values for it; the answer goes to the
    /// peer's stream.
    JoinRound(Peer, u64),
    /// Values for a block that has none, checked to be of its length; answers whether it took them.
    Initialize(Codec, Bytes, oneshot::Sender<bool>),
    /// The message that tells a trainer the version and the current values, `None` if the block has none.
    Read(oneshot::Sender<Option<Bytes>>),
    /// The step that a trainer begins with, and whether the block has values.
    NextStep(u32, oneshot::Sender<(u64, bool)>),
    /// A trainer has finished or gone: no round waits for it.
    Finish(u32),
    /// Everything, at the version named or now; `None` if the block is past it, or has no values.
    Snapshot(Option<u64>, oneshot::Sender<Option<BlockState>>),
    /// The version, `None` if the block has no values.
    Version(oneshot::Sender<Option<u64>>),
    /// By trainer: the first step that the block's values do not have.
    Steps(oneshot::Sender<Vec<u64>>),
    /// The block goes to another state, in an epoch of its own; `None` is a block without values.
    Restore(u64, Option<BlockState>, oneshot::Sender<()>),
    /// Of parameters that trainers train themselves: the state that one of them gives, in an epoch.
    Keep(u64, BlockState),
    /// The block's part in replication changes.
    Stand(Standing),
    /// A backup that holds the version named follows from now on; answers whether it gets a copy.
    Attach(Option<u64>, Frames, oneshot::Sender<bool>),
    /// The backup has a version.
    Acknowledged(u64),
    /// On a backup: the primary's state.
    Install(BlockState, Frames),
    /// On a backup: an update that the primary has made. The values are of the block's length.
    Mirror(Update, Frames),
}

impl Command {
    /// Whether the block may be another one afterwards.
    #[must_use]
    pub fn changes(&self) -> bool {
        match self {
            Self::Gradient { .. }
            | Self::JoinRound(..)
            | Self::Initialize(..)
            | Self::Finish(_)
            | Self::Restore(..)
            | Self::Keep(..)
            | Self::Stand(_)
            | Self::Install(..)
            | Self::Mirror(..) => true,
            Self::Read(_)
            | Self::NextStep(..)
            | Self::Snapshot(..)
            | Self::Version(_)
            | Self::Steps(_)
            | Self::Attach(..)
            | Self::Acknowledged(_) => false,
        }
    }
}

/// A block's part in replication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It talks to trainers, and nobody else holds it.
    Alone,
    /// It talks to trainers, and answers when its backup has their updates.
    Mirrored,
    /// It takes updates from its primary.
    Backup,
}

/// An update, as the primary tells it.
pub struct Update {
    /// The version that it makes.
    pub version: u64,
    /// On the learning rate.
    pub factor: f64,
    /// The first step of trainers that is not in it.
    pub next_steps: Vec<proto::NextStep>,
    /// What is applied.
    pub gradient: Gradient,
}
