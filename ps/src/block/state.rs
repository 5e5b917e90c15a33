//! The state of one block: values, optimizer state, version, and the gradients of the open round.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use psjobs_arithmetic::optimizer::State;
use psjobs_arithmetic::parameter_group::Stretch;
use tokio::sync::oneshot;
use tonic::Status;

use super::metrics::BlockMetrics;
use super::peer::{Answer, Peer, PulledInto};
use crate::aggregation::Aggregation;
use crate::checkpoint::BlockState;
use crate::gradient::{Gradient, Sum};
use crate::replication_log::{ReplicaRole, ReplicationLog};
use crate::training_rules::TrainingRules;

/// The settings that a block is made from.
pub(super) struct BlockSpec {
    /// Number of the block.
    pub block: u32,
    /// Its elements in the flat parameter space.
    pub range: Range<usize>,
    /// The parameter groups of its elements.
    pub stretches: Vec<Stretch>,
    /// Number of trainers of the job.
    pub trainers: u32,
    /// Trainers may join and leave during the job.
    pub elastic: bool,
    /// How the job trains.
    pub rules: Arc<TrainingRules>,
    /// Keeps the values from before the last update, see [`TrainingRules::keeps_previous`].
    pub keeps_previous: bool,
    /// The server's epoch when the block is made.
    pub epoch: u64,
    /// Its role in replication when the block is made.
    pub role: ReplicaRole,
    /// The counters that the block's task increments.
    pub metrics: Arc<BlockMetrics>,
}

impl BlockSpec {
    /// Returns the answer with `values` at `version` to a trainer that is at `step`.
    pub(super) fn answer<'a>(&self, step: u64, version: u64, values: &'a [f32]) -> Answer<'a> {
        Answer { step, block: self.block, version, start: self.range.start, values }
    }
}

/// One block. Only its task accesses it.
pub(super) struct Block {
    pub spec: BlockSpec,
    /// Gradients that wait for others, and the trainers that wait for an answer, with their steps.
    pub aggregation: Aggregation<Gradient, Sum, (Peer, u64)>,
    pub values: Vec<f32>,
    /// The values before the update that made `version`, if the block keeps them; empty where they are not known, or the
    /// last round changed nothing.
    pub previous: Vec<f32>,
    pub state: State,
    pub version: u64,
    /// Gradients of streams from another epoch are ignored: they belong to a state that was discarded.
    pub epoch: u64,
    pub role: ReplicaRole,
    /// Set while the role is [`ReplicaRole::Primary`].
    pub log: Option<ReplicationLog<Waiting>>,
    /// Trainers that have joined with a step whose round is not open yet.
    pub joining: Vec<(Peer, u64)>,
    /// Snapshots that were requested for a later version.
    pub snapshots: Vec<(u64, oneshot::Sender<Option<BlockState>>)>,
    /// Snapshots of the current version that have not been taken yet, with the values before it or without.
    pub due: Vec<(bool, oneshot::Sender<Option<BlockState>>)>,
}

impl Block {
    pub(super) fn new(spec: BlockSpec) -> Self {
        let rule = spec.rules.rule(spec.trainers, spec.elastic);
        let (epoch, role) = (spec.epoch, spec.role);
        Self {
            role,
            log: (role == ReplicaRole::Primary).then(|| ReplicationLog::new(0)),
            spec,
            aggregation: Aggregation::new(rule),
            values: Vec::new(),
            previous: Vec::new(),
            state: State::default(),
            version: 0,
            epoch,
            joining: Vec::new(),
            snapshots: Vec::new(),
            due: Vec::new(),
        }
    }

    pub(super) fn is_initialized(&self) -> bool {
        !self.values.is_empty()
    }

    /// Returns the values that a caller reads, with their version: the current ones, or those from before the last update
    /// for a trainer whose gradient of that step is in it already. Such a trainer takes the place of one that died in the
    /// middle of its step, and computes the gradient of the other blocks from the same values.
    pub(super) fn values_for(&self, reader: Option<BeforeStep>) -> (u64, &[f32]) {
        // The step comes from the wire: no addition to it.
        let settled = |trainer| self.aggregation.rule.settled(trainer);
        let has_step = |before: BeforeStep| settled(before.trainer).checked_sub(1) == Some(before.step);
        if !self.previous.is_empty() && reader.is_some_and(has_step) {
            (self.version - 1, &self.previous)
        } else {
            (self.version, &self.values)
        }
    }

    /// Decides whether a message of `peer` is processed.
    pub(super) fn accepts(&self, peer: &Peer) -> bool {
        // A message of an aborted stream is dropped: its trainer has left, or sends it again over a new stream.
        if peer.epoch() != self.epoch || peer.is_aborted() {
            return false;
        }
        if self.role == ReplicaRole::Backup {
            peer.refuse(Status::unavailable(format!("block {} is not led here; join again", self.spec.block)));
            return false;
        }
        if !self.is_initialized() {
            peer.refuse(no_values(self.spec.block));
        }
        self.is_initialized()
    }
}

/// A trainer, and the step whose gradient it computes from the values that it reads.
#[derive(Clone, Copy)]
pub struct BeforeStep {
    pub trainer: u32,
    pub step: u64,
}

/// A caller whose answer shows the state of a block. It waits until the backup has that state: what a caller has seen
/// must not be lost with this server.
pub(super) enum Waiting {
    /// A trainer that has given this step or joined with it.
    Trainer(Peer, u64),
    /// The caller of [`Command::Read`](super::command::Command::Read).
    Read(Option<BeforeStep>, Option<PulledInto>, oneshot::Sender<Option<Bytes>>),
    /// The caller of [`Command::NextStep`](super::command::Command::NextStep), about this trainer.
    NextStep(u32, oneshot::Sender<(u64, bool)>),
    /// A trainer that has stored parameters of its own.
    Kept(oneshot::Sender<()>),
}

/// Returns the error for a block without values. It is retryable: a trainer that joins again learns which blocks it
/// has to fill. The servers may have discarded the values since another trainer filled the block.
pub fn no_values(block: u32) -> Status {
    Status::aborted(format!("block {block} has no values yet; push them first"))
}
