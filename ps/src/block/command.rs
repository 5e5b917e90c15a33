//! The commands that the task of a block executes.

use bytes::Bytes;
use psjobs_arithmetic::codec::Codec;
use tokio::sync::oneshot;

use super::peer::{Peer, PulledInto};
use super::state::BeforeStep;
use crate::checkpoint::BlockState;
use crate::gradient::Gradient;
use crate::proto;
use crate::replication_log::{FrameSender, ReplicaRole};

/// A command to the task of a block.
pub enum Command {
    /// A trainer's gradient; the answer goes to the peer's stream.
    Gradient {
        /// The stream that it came from, which the answer goes to.
        peer: Peer,
        /// The trainer's step.
        step: u64,
        /// The version of the block that it was computed from.
        version: u64,
        /// The values, of the block's length.
        gradient: Gradient,
    },
    /// A trainer of an elastic job joins the rounds from a step on; the answer, with the values for that step, goes
    /// to the peer's stream.
    JoinRound(Peer, u64),
    /// The first values, checked to have the length of the block; answers false if the block has values already.
    Initialize(Codec, Bytes, oneshot::Sender<bool>),
    /// Answers with the message of the version and values, `None` if the block has no values. The values are the current
    /// ones, or those that the step named is computed from; they are in the message or in the memory that is given.
    Read(Option<BeforeStep>, Option<PulledInto>, oneshot::Sender<Option<Bytes>>),
    /// Answers with the step that a trainer begins with, and whether the block has values.
    NextStep(u32, oneshot::Sender<(u64, bool)>),
    /// A trainer has finished or left: rounds no longer wait for it.
    Finish(u32),
    /// Answers with the whole state, when the block is at the given version or now; `None` if it is past that version, or
    /// has no values now.
    Snapshot(Option<u64>, oneshot::Sender<Option<BlockState>>),
    /// Answers with the version, `None` if the block has no values.
    Version(oneshot::Sender<Option<u64>>),
    /// Answers, by trainer, with the first step that is not in the values.
    Steps(oneshot::Sender<Vec<u64>>),
    /// Replaces the state of the block, in a new epoch; `None` is a block without values.
    Restore(u64, Option<BlockState>, oneshot::Sender<()>),
    /// Stores the state of parameters that the trainers train themselves, as one of them sends it in an epoch. Answered
    /// when the backup has it; dropped if the block is in another epoch or a backup itself.
    Keep(u64, BlockState, oneshot::Sender<()>),
    /// Changes the block's role in replication.
    SetRole(ReplicaRole),
    /// A backup that holds the given version follows from now on; answers whether it is sent a copy, `None` if the block
    /// is a backup itself.
    Attach(Option<u64>, FrameSender, oneshot::Sender<Option<bool>>),
    /// The backup has acknowledged a version.
    Acknowledged(u64),
    /// On a backup: replaces the state by the primary's, and the values from before the last update, empty for none.
    Install(BlockState, Vec<f32>, FrameSender),
    /// On a backup: applies an update of the primary. The values have the length of the block.
    ApplyUpdate(Update, FrameSender),
}

impl Command {
    /// Returns whether the command may change the block.
    #[must_use]
    pub fn changes(&self) -> bool {
        match self {
            Self::Gradient { .. }
            | Self::JoinRound(..)
            | Self::Initialize(..)
            | Self::Finish(_)
            | Self::Restore(..)
            | Self::Keep(..)
            | Self::SetRole(_)
            | Self::Install(..)
            | Self::ApplyUpdate(..) => true,
            Self::Read(..)
            | Self::NextStep(..)
            | Self::Snapshot(..)
            | Self::Version(_)
            | Self::Steps(_)
            | Self::Attach(..)
            | Self::Acknowledged(_) => false,
        }
    }
}

/// An update, as the primary sends it.
pub struct Update {
    /// The version of the block after it.
    pub version: u64,
    /// Factor on the learning rate.
    pub factor: f64,
    /// The next step of each trainer whose gradient is in it.
    pub next_steps: Vec<proto::NextStep>,
    /// The gradient to apply.
    pub gradient: Gradient,
}
