//! All blocks that this server holds, its own shard and with replication another's: starts their tasks once the model is known, and checks what
//! comes from outside before a block sees it.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};
use tokio_util::task::TaskTracker;
use tonic::Status;

use super::block;
use super::command::{Command, Standing, Update};
use super::metrics::Metrics;
use super::mirror::Frames;
use super::peer::{Gradient, Peer};
use super::recipe::Recipe;
use crate::checkpoint::BlockState;
use crate::codec::Codec;
use crate::layout::Layout;
use crate::proto;

/// Commands that wait for one block. Every trainer has at most one gradient for it in flight, so
/// this many trainers can hand theirs over without waiting for each other.
const QUEUE: usize = 64;

/// How far training is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Highest version of a block: in Sync the rounds that have closed.
    pub version: u64,
    /// Mean over the trainers of the steps that all blocks have; in an elastic job, where newcomers begin where the
    /// others are, the most of one trainer.
    pub step: u64,
}

/// What the blocks of a server need to start.
pub struct Start<'a> {
    /// How the parameters are cut.
    pub layout: Layout,
    /// The shards that the server holds, and its part in each.
    pub shards: BTreeMap<u32, Standing>,
    /// Trainers of the job.
    pub trainers: u32,
    /// They come and go.
    pub elastic: bool,
    /// The server's epoch.
    pub epoch: u64,
    /// How the job trains.
    pub recipe: &'a Arc<Recipe>,
    /// Counts what happens.
    pub metrics: &'a Arc<Metrics>,
    /// Runs the blocks' tasks.
    pub tasks: &'a TaskTracker,
}

/// The blocks of one server.
pub struct Store {
    layout: Layout,
    elastic: bool,
    /// Slots of optimizer state for each element.
    slots: usize,
    blocks: BTreeMap<u32, mpsc::Sender<Command>>,
}

impl Store {
    /// Starts a task for each block; they end when the store is dropped.
    #[must_use]
    pub fn start(start: Start) -> Self {
        let Start { layout, shards, trainers, elastic, epoch, recipe, metrics, tasks } = start;
        let blocks = shards.iter().flat_map(|(shard, standing)| layout.owned_by(*shard).map(|b| (b, *standing)));
        let blocks = blocks.map(|(block, standing)| {
            let (sender, receiver) = mpsc::channel(QUEUE);
            let plan = block::Plan {
                block,
                range: layout.range(block),
                trainers,
                elastic,
                recipe: recipe.clone(),
                epoch,
                standing,
                metrics: metrics.clone(),
            };
            tasks.spawn(block::own(plan, receiver));
            (block, sender)
        });
        Self { blocks: blocks.collect(), elastic, slots: recipe.optimizer.slots(), layout }
    }

    /// How the parameters are cut.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Hands a trainer's gradient to its block.
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

    /// Tells a block that a trainer takes part from `step` on.
    pub async fn join_round(&self, peer: &Peer, block: u32, step: u64) -> Result<(), Status> {
        self.owned(block)?.send(Command::JoinRound(peer.clone(), step)).await.map_err(|_| ended())
    }

    /// Gives a block its first values; false if it has some.
    pub async fn initialize(&self, block: u32, codec: i32, payload: Bytes) -> Result<bool, Status> {
        let (sender, codec) = self.check(block, codec, &payload)?;
        ask(sender, |reply| Command::Initialize(codec, payload, reply)).await
    }

    /// The message that tells a trainer a block's version and values, `None` if it has none.
    pub async fn read(&self, block: u32) -> Result<Option<Bytes>, Status> {
        ask(self.owned(block)?, Command::Read).await
    }

    /// The step that the trainer begins with, and the blocks of `shard` without values: the first step that not every
    /// block has from it, in an elastic job that of the block that is furthest.
    pub async fn next_step(&self, shard: u32, trainer: u32) -> Result<(u64, Vec<u32>), Status> {
        // A server without blocks holds nobody back.
        let (mut next, mut empty) = (if self.elastic { 0 } else { u64::MAX }, Vec::new());
        for block in self.shard(shard) {
            let (step, initialized) = ask(self.owned(block)?, |reply| Command::NextStep(trainer, reply)).await?;
            next = if self.elastic { next.max(step) } else { next.min(step) };
            if !initialized {
                empty.push(block);
            }
        }
        Ok((next, empty))
    }

    /// Changes the part of this server in replicating `shard`.
    pub async fn stand(&self, shard: u32, standing: Standing) {
        for block in self.shard(shard) {
            self.tell(block, Command::Stand(standing)).await;
        }
    }

    /// Lets a backup that holds version `held` of a block follow; whether it gets a copy.
    pub async fn attach(&self, block: u32, held: Option<u64>, backup: &Frames) -> Result<bool, Status> {
        ask(self.owned(block)?, |reply| Command::Attach(held, backup.clone(), reply)).await
    }

    /// The backup of a block has `version`.
    pub async fn acknowledged(&self, block: u32, version: u64) {
        self.tell(block, Command::Acknowledged(version)).await;
    }

    /// On a backup: takes what its primary says of a block. Acknowledgements go to `primary`.
    pub async fn follow(&self, replica: proto::Replica, primary: &Frames) -> Result<(), Status> {
        if let Some(contents) = replica.contents {
            let range = self.layout.range(contents.block);
            let state = state(contents, range.len())?;
            self.owned(state.0)?.send(Command::Install(state.1, primary.clone())).await.map_err(|_| ended())?;
            return Ok(());
        }
        let proto::Replica { block, version, factor, next_steps, codec, payload, .. } = replica;
        let (sender, codec) = self.check(block, codec, &payload)?;
        let update = Update { version, factor, next_steps, gradient: Gradient::Wire(codec, payload) };
        sender.send(Command::Mirror(update, primary.clone())).await.map_err(|_| ended())
    }

    async fn tell(&self, block: u32, command: Command) {
        if let Ok(sender) = self.owned(block) {
            // A block that has ended needs no word.
            drop(sender.send(command).await);
        }
    }

    /// A block's state at `version`, or now; `None` if it is past that, or has no values.
    pub async fn snapshot(&self, block: u32, version: Option<u64>) -> Option<BlockState> {
        ask(self.owned(block).ok()?, |reply| Command::Snapshot(version, reply)).await.ok()?
    }

    /// Takes a block back to `state`; gradients of streams from before `epoch` no longer reach it.
    pub async fn restore(&self, block: u32, epoch: u64, state: Option<BlockState>) {
        if let Ok(sender) = self.owned(block) {
            // A block that has ended needs no state.
            let _ = ask(sender, |reply| Command::Restore(epoch, state, reply)).await;
        }
    }

    /// Takes a block of parameters that trainers train themselves, as one of them gives it in `epoch`.
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
        sender.send(Command::Keep(epoch, state)).await.map_err(|_| ended())
    }

    /// A block as it was kept, or trained, last; without values if there are none.
    pub async fn contents(&self, block: u32) -> Result<proto::BlockContents, Status> {
        self.owned(block)?;
        let BlockState { values, slots, updates, version, next_steps } =
            self.snapshot(block, None).await.unwrap_or_default();
        let bytes = |values: Vec<f32>| Bytes::copy_from_slice(bytemuck::cast_slice(&values));
        let (values, slots) = (bytes(values), slots.into_iter().map(bytes).collect());
        Ok(proto::BlockContents { block, version, updates, next_steps, values, slots })
    }

    /// How far training is in `shard`; `None` while blocks are without values.
    pub async fn progress(&self, shard: u32) -> Option<Progress> {
        let (mut version, mut steps) = (0, Vec::new());
        for block in self.shard(shard) {
            let sender = self.owned(block).ok()?;
            version = version.max(ask(sender, Command::Version).await.ok()??);
            let of_block = ask(sender, Command::Steps).await.ok()?;
            steps.resize(of_block.len(), u64::MAX);
            steps.iter_mut().zip(of_block).for_each(|(step, of_block)| *step = of_block.min(*step));
        }
        let step = if self.elastic {
            steps.iter().copied().max().unwrap_or(0)
        } else {
            steps.iter().sum::<u64>() / steps.len().max(1) as u64
        };
        Some(Progress { version, step })
    }

    /// Tells every block that a trainer has finished or gone.
    pub async fn finish(&self, trainer: u32) {
        for sender in self.blocks.values() {
            // A block that has ended waits for nobody.
            drop(sender.send(Command::Finish(trainer)).await);
        }
    }

    /// The blocks here, ascending.
    pub fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        self.blocks.keys().copied()
    }

    /// The blocks of a shard, ascending.
    pub fn shard(&self, shard: u32) -> impl DoubleEndedIterator<Item = u32> + use<> {
        self.layout.owned_by(shard)
    }

    /// Blocks of a shard that have values, and their versions.
    pub async fn held(&self, shard: u32) -> Vec<proto::BlockVersion> {
        let mut held = Vec::new();
        for block in self.shard(shard) {
            let Ok(sender) = self.owned(block) else { continue };
            if let Ok(Some(version)) = ask(sender, Command::Version).await {
                held.push(proto::BlockVersion { block, version });
            }
        }
        held
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
        let codec = Codec::from_number(codec).ok_or_else(|| {
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
    answer.await.map_err(|_| ended())
}

/// The state in a primary's message, checked against the block's length.
fn state(contents: proto::BlockContents, elements: usize) -> Result<(u32, BlockState), Status> {
    let proto::BlockContents { block, version, updates, next_steps, values, slots } = contents;
    let floats = |bytes: Bytes| -> Result<Vec<f32>, Status> {
        if !bytes.is_empty() && bytes.len() != elements * 4 {
            let text = format!("block {block} holds {elements} elements, the message {} bytes", bytes.len());
            return Err(Status::invalid_argument(text));
        }
        let (chunks, _) = bytes.as_chunks();
        Ok(chunks.iter().map(|chunk| f32::from_le_bytes(*chunk)).collect())
    };
    let slots = slots.into_iter().map(floats).collect::<Result<_, _>>()?;
    Ok((block, BlockState { values: floats(values)?, slots, updates, version, next_steps }))
}

fn ended() -> Status {
    Status::unavailable("the server is ending; reconnect")
}
