//! All blocks of a server: its own shard and, with replication, another server's. Starts their tasks once the model is
//! known, and checks requests before a block sees them.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use futures::future::join_all;
use psjobs_arithmetic::codec::Codec;
use psjobs_arithmetic::parameter_group::{Stretch, within};
use tokio::sync::{mpsc, oneshot};
use tonic::Status;

use super::command::{Command, Update};
use super::metrics::BlockMetrics;
use super::peer::{Peer, PulledInto};
use super::state::{BeforeStep, BlockSpec};
use super::task;
use crate::checkpoint::BlockState;
use crate::gradient::Gradient;
use crate::layout::Layout;
use crate::owner_tasks::{Owned, OwnerTasks};
use crate::proto;
use crate::replication_log::{FrameSender, ReplicaRole};
use crate::training_rules::TrainingRules;
use crate::wire::codec_number;

/// Queue length of one block. Every trainer has at most one gradient for it in flight, so this many trainers can send
/// theirs without waiting for each other.
const QUEUE: usize = 64;

/// How far training has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Highest version of a block; in Sync the number of closed rounds.
    pub version: u64,
    /// Steps applied to all blocks: the mean over the trainers, or in an elastic job the maximum, because new trainers
    /// begin at the step of the others.
    pub step: u64,
}

/// The settings that the blocks of a server start with.
pub struct Start<'a> {
    /// The division of the parameters into blocks.
    pub layout: Layout,
    /// The parameter groups of the model.
    pub stretches: &'a [Stretch],
    /// The shards that the server holds, with its role in each.
    pub shards: BTreeMap<u32, ReplicaRole>,
    /// Number of trainers of the job.
    pub trainers: u32,
    /// Trainers may join and leave during the job.
    pub elastic: bool,
    /// The server's epoch.
    pub epoch: u64,
    /// How the job trains.
    pub rules: &'a Arc<TrainingRules>,
    /// The counters that the blocks increment.
    pub metrics: &'a Arc<BlockMetrics>,
    /// Starts the blocks' tasks.
    pub tasks: &'a OwnerTasks,
}

/// Blocks that are asked at the same time.
const ASKED_AT_ONCE: usize = 1024;

/// The blocks of one server.
pub struct Store {
    layout: Layout,
    elastic: bool,
    /// Slots of optimizer state for each element.
    slots: usize,
    keeps_previous: bool,
    blocks: BTreeMap<u32, mpsc::Sender<Command>>,
}

impl Store {
    /// Starts a task for each block; they end when the store is dropped.
    #[must_use]
    pub fn start(start: Start) -> Self {
        let Start { layout, stretches, shards, trainers, elastic, epoch, rules, metrics, tasks } = start;
        let blocks = shards.iter().flat_map(|(shard, role)| layout.owned_by(*shard).map(|b| (b, *role)));
        let keeps_previous = rules.keeps_previous(elastic, &layout);
        let blocks = blocks.map(|(block, role)| {
            let (sender, receiver) = mpsc::channel(QUEUE);
            let range = layout.range(block);
            let spec = BlockSpec {
                block,
                stretches: within(stretches, &range),
                range,
                trainers,
                elastic,
                rules: rules.clone(),
                keeps_previous,
                epoch,
                role,
                metrics: metrics.clone(),
            };
            tasks.spawn(Owned::Block(block), task::run(spec, receiver));
            (block, sender)
        });
        Self { blocks: blocks.collect(), elastic, keeps_previous, slots: rules.optimizer.slots(), layout }
    }

    /// Returns the division of the parameters into blocks.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Sends a trainer's gradient to its block.
    pub async fn gradient(&self, peer: &Peer, frame: proto::GradientBlock) -> Result<(), Status> {
        let proto::GradientBlock { step, version, block, codec, payload } = frame;
        let (sender, gradient) = match peer.memory() {
            None => {
                let (sender, codec) = self.check(block, codec, &payload)?;
                (sender, Gradient::Wire(codec, payload))
            }
            Some(memory) if payload.is_empty() => {
                (self.owned(block)?, Gradient::Shared(memory.clone(), self.layout.range(block)))
            }
            Some(_) => {
                return Err(Status::invalid_argument(
                    "a stream with shared memory carries no payloads; leave them empty",
                ));
            }
        };
        let command = Command::Gradient { peer: peer.clone(), step, version, gradient };
        sender.send(command).await.map_err(|_| ended())
    }

    /// Notifies a block that a trainer joins its rounds from `step` on.
    pub async fn join_round(&self, peer: &Peer, block: u32, step: u64) -> Result<(), Status> {
        self.owned(block)?.send(Command::JoinRound(peer.clone(), step)).await.map_err(|_| ended())
    }

    /// Sets the first values of a block; returns false if it has values already.
    pub async fn initialize(&self, block: u32, codec: i32, payload: Bytes) -> Result<bool, Status> {
        let (sender, codec) = self.check(block, codec, &payload)?;
        ask(sender, |reply| Command::Initialize(codec, payload, reply)).await
    }

    /// Returns the message with a block's version and values, `None` if it has no values: the current ones, or those that
    /// `reader` computes its step from. The values are written `into` memory that is given, and not into the message.
    pub async fn read(
        &self,
        block: u32,
        reader: Option<BeforeStep>,
        into: Option<PulledInto>,
    ) -> Result<Option<Bytes>, Status> {
        ask(self.owned(block)?, |reply| Command::Read(reader, into, reply)).await
    }

    /// Returns the step that a trainer begins with, and the blocks of `shard` without values. The step is the first that
    /// not every block has from this trainer, or in an elastic job that of the furthest block.
    pub async fn next_step(&self, shard: u32, trainer: u32) -> Result<(u64, Vec<u32>), Status> {
        // A server without blocks does not limit the step.
        let (mut next, mut empty) = (if self.elastic { 0 } else { u64::MAX }, Vec::new());
        let answers = self.ask_shard(shard, |reply| Command::NextStep(trainer, reply)).await;
        for (block, answer) in self.shard(shard).zip(answers) {
            let (step, initialized) = answer?;
            next = if self.elastic { next.max(step) } else { next.min(step) };
            if !initialized {
                empty.push(block);
            }
        }
        Ok((next, empty))
    }

    /// Changes the role of this server in the replication of `shard`.
    pub async fn set_role(&self, shard: u32, role: ReplicaRole) {
        for block in self.shard(shard) {
            self.send(block, Command::SetRole(role)).await;
        }
    }

    /// Lets a backup that holds version `held` of a block follow; returns whether it is sent a copy.
    pub async fn attach(&self, block: u32, held: Option<u64>, backup: &FrameSender) -> Result<bool, Status> {
        let attached = ask(self.owned(block)?, |reply| Command::Attach(held, backup.clone(), reply)).await?;
        attached.ok_or_else(|| Status::unavailable(format!("block {block} is not led here; follow again")))
    }

    /// Notifies a block that its backup has `version`.
    pub async fn acknowledged(&self, block: u32, version: u64) {
        self.send(block, Command::Acknowledged(version)).await;
    }

    /// Applies a message of the primary on a backup. Acknowledgements go to `primary`.
    pub async fn follow(&self, replica: proto::Replica, primary: &FrameSender) -> Result<(), Status> {
        if let Some(mut contents) = replica.contents {
            let elements = self.layout.range(contents.block).len();
            let previous = floats(contents.block, &std::mem::take(&mut contents.previous), elements)?;
            let (block, state) = state(contents, elements)?;
            let install = Command::Install(state, previous, primary.clone());
            self.owned(block)?.send(install).await.map_err(|_| ended())?;
            return Ok(());
        }
        let proto::Replica { block, version, factor, next_steps, codec, payload, .. } = replica;
        let (sender, codec) = self.check(block, codec, &payload)?;
        let update = Update { version, factor, next_steps, gradient: Gradient::Wire(codec, payload) };
        sender.send(Command::ApplyUpdate(update, primary.clone())).await.map_err(|_| ended())
    }

    async fn send(&self, block: u32, command: Command) {
        if let Ok(sender) = self.owned(block) {
            // A block that has ended needs no command.
            drop(sender.send(command).await);
        }
    }

    /// Returns a block's state at `version`, or now; `None` if the block is past it or has no values.
    pub async fn snapshot(&self, block: u32, version: Option<u64>) -> Option<BlockState> {
        ask(self.owned(block).ok()?, |reply| Command::Snapshot(version, reply)).await.ok()?
    }

    /// Sets a block to `state`; it ignores gradients of streams from before `epoch`.
    pub async fn restore(&self, block: u32, epoch: u64, state: Option<BlockState>) {
        if let Ok(sender) = self.owned(block) {
            // A block that has ended needs no state.
            let _ = ask(sender, |reply| Command::Restore(epoch, state, reply)).await;
        }
    }

    /// Stores a block of parameters that the trainers train themselves, as one of them sends it in `epoch`; returns when
    /// the backup has it.
    pub async fn keep(&self, epoch: u64, contents: proto::BlockContents) -> Result<(), Status> {
        let (block, slots) = (contents.block, contents.slots.len());
        let sender = self.owned(block)?;
        let (_, state) = state(contents, self.layout.range(block).len())?;
        if state.values.is_empty() || state.slots.iter().any(Vec::is_empty) || slots != self.slots {
            return Err(Status::invalid_argument(format!(
                "block {block} needs values and {} slots of optimizer state, {slots} slots came",
                self.slots
            )));
        }
        ask(sender, |reply| Command::Keep(epoch, state, reply)).await
    }

    /// Returns whether blocks keep their values from before the last update.
    #[must_use]
    pub fn keeps_previous(&self) -> bool {
        self.keeps_previous
    }

    /// Returns the current contents of a block, without values if it has none.
    pub async fn contents(&self, block: u32) -> Result<proto::BlockContents, Status> {
        self.owned(block)?;
        let BlockState { values, slots, updates, version, next_steps, .. } =
            self.snapshot(block, None).await.unwrap_or_default();
        let bytes = |values: Vec<f32>| Bytes::copy_from_slice(bytemuck::cast_slice(&values));
        let (values, slots) = (bytes(values), slots.into_iter().map(bytes).collect());
        Ok(proto::BlockContents { block, version, updates, next_steps, values, slots, previous: Bytes::new() })
    }

    /// Returns how far training has come in `shard`, `None` while blocks are without values.
    pub async fn progress(&self, shard: u32) -> Option<Progress> {
        let mut version = 0;
        for answer in self.ask_shard(shard, Command::Version).await {
            version = version.max(answer.ok()??);
        }
        let steps = self.next_steps(shard).await?;
        let step = if self.elastic {
            steps.iter().copied().max().unwrap_or(0)
        } else {
            steps.iter().sum::<u64>() / steps.len().max(1) as u64
        };
        Some(Progress { version, step })
    }

    /// Returns the first step of each trainer that not all blocks of `shard` contain.
    pub async fn next_steps(&self, shard: u32) -> Option<Vec<u64>> {
        let mut steps = Vec::new();
        for answer in self.ask_shard(shard, Command::Steps).await {
            let of_block = answer.ok()?;
            steps.resize(of_block.len(), u64::MAX);
            steps.iter_mut().zip(of_block).for_each(|(step, of_block)| *step = of_block.min(*step));
        }
        Some(steps)
    }

    /// Notifies every block that a trainer has finished or left.
    pub async fn finish(&self, trainer: u32) {
        for sender in self.blocks.values() {
            // A block that has ended waits for no trainer.
            drop(sender.send(Command::Finish(trainer)).await);
        }
    }

    /// Returns the blocks of this server, ascending.
    pub fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        self.blocks.keys().copied()
    }

    /// Returns the blocks of a shard, ascending.
    pub fn shard(&self, shard: u32) -> impl DoubleEndedIterator<Item = u32> + use<> {
        self.layout.owned_by(shard)
    }

    /// Returns the blocks of a shard that have values, with their versions.
    pub async fn held(&self, shard: u32) -> Vec<proto::BlockVersion> {
        let mut held = Vec::new();
        for (block, answer) in self.shard(shard).zip(self.ask_shard(shard, Command::Version).await) {
            if let Ok(Some(version)) = answer {
                held.push(proto::BlockVersion { block, version });
            }
        }
        held
    }

    /// Asks the blocks of a shard, many at the same time; returns their answers in order.
    async fn ask_shard<T>(
        &self,
        shard: u32,
        command: impl Fn(oneshot::Sender<T>) -> Command,
    ) -> Vec<Result<T, Status>> {
        let command = &command;
        let blocks: Vec<u32> = self.shard(shard).collect();
        let mut answers = Vec::with_capacity(blocks.len());
        for some in blocks.chunks(ASKED_AT_ONCE) {
            let asked = some.iter().map(|block| async move { ask(self.owned(*block)?, command).await });
            answers.extend(join_all(asked).await);
        }
        answers
    }

    fn owned(&self, block: u32) -> Result<&mpsc::Sender<Command>, Status> {
        self.blocks.get(&block).ok_or_else(|| {
            let message = if block < self.layout.blocks() {
                format!("block {block} belongs to server {}; send it there", self.layout.owner(block))
            } else {
                format!("block {block} does not exist; the model has blocks 0 to {}", self.layout.blocks() - 1)
            };
            Status::invalid_argument(message)
        })
    }

    fn check(&self, block: u32, codec: i32, payload: &[u8]) -> Result<(&mpsc::Sender<Command>, Codec), Status> {
        let sender = self.owned(block)?;
        let codec = codec_number::from_number(codec).ok_or_else(|| {
            Status::invalid_argument(format!("codec {codec} is not known here; CODEC_F32 (1) always works"))
        })?;
        codec
            .check(payload, self.layout.range(block).len())
            .map_err(|error| Status::invalid_argument(format!("block {block}: {error}")))?;
        Ok((sender, codec))
    }
}

async fn ask<T>(
    sender: &mpsc::Sender<Command>,
    command: impl FnOnce(oneshot::Sender<T>) -> Command,
) -> Result<T, Status> {
    let (reply, answer) = oneshot::channel();
    sender.send(command(reply)).await.map_err(|_| ended())?;
    answer.await.map_err(|_| Status::unavailable("the block has another leader, or the server is ending; ask again"))
}

/// Reads the state in a message, checked against the block's length.
fn state(contents: proto::BlockContents, elements: usize) -> Result<(u32, BlockState), Status> {
    let proto::BlockContents { block, version, updates, next_steps, values, slots, .. } = contents;
    let slots = slots.iter().map(|slot| floats(block, slot, elements)).collect::<Result<_, _>>()?;
    let (values, previous) = (floats(block, &values, elements)?, Vec::new());
    Ok((block, BlockState { values, slots, previous, updates, version, next_steps }))
}

/// Reads values of a block, which are all there or none.
fn floats(block: u32, bytes: &[u8], elements: usize) -> Result<Vec<f32>, Status> {
    if !bytes.is_empty() && bytes.len() != elements * 4 {
        let text = format!("block {block} holds {elements} elements, the message {} bytes", bytes.len());
        return Err(Status::invalid_argument(text));
    }
    let (chunks, _) = bytes.as_chunks();
    Ok(chunks.iter().map(|chunk| f32::from_le_bytes(*chunk)).collect())
}

fn ended() -> Status {
    Status::unavailable("the server is ending; reconnect")
}
