//! All blocks that this server owns: starts their tasks once the model is known, and checks what
//! comes from outside before a block sees it.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};
use tokio_util::task::TaskTracker;
use tonic::Status;

use super::block::{self, Command};
use super::metrics::Metrics;
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
    /// Mean over the trainers of the steps that all blocks have.
    pub mean_step: u64,
}

/// The blocks of one server.
pub struct Store {
    layout: Layout,
    blocks: BTreeMap<u32, mpsc::Sender<Command>>,
}

impl Store {
    /// Starts a task for each block that `server` owns; they end when the store is dropped.
    #[must_use]
    pub fn start(
        layout: Layout,
        server: u32,
        trainers: u32,
        epoch: u64,
        recipe: &Arc<Recipe>,
        metrics: &Arc<Metrics>,
        tasks: &TaskTracker,
    ) -> Self {
        let blocks = layout.owned_by(server).map(|block| {
            let (sender, receiver) = mpsc::channel(QUEUE);
            let plan = block::Plan {
                block,
                start: layout.range(block).start,
                trainers,
                recipe: recipe.clone(),
                epoch,
                metrics: metrics.clone(),
            };
            tasks.spawn(block::own(plan, receiver));
            (block, sender)
        });
        Self { blocks: blocks.collect(), layout }
    }

    /// How the parameters are cut.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Number of blocks here.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks.len()
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

    /// Gives a block its first values; false if it has some.
    pub async fn initialize(&self, block: u32, codec: i32, payload: Bytes) -> Result<bool, Status> {
        let (sender, codec) = self.check(block, codec, &payload)?;
        let mut values = vec![0.0; self.layout.range(block).len()];
        codec.decode(&payload, &mut values).map_err(|error| Status::invalid_argument(error.to_string()))?;
        ask(sender, |reply| Command::Initialize(values, reply)).await
    }

    /// Version and values of a block, `None` if it has none.
    pub async fn read(&self, block: u32) -> Result<Option<(u64, Vec<f32>)>, Status> {
        ask(self.owned(block)?, Command::Read).await
    }

    /// The first step that not every block has from the trainer, and the blocks without values.
    pub async fn next_step(&self, trainer: u32) -> Result<(u64, Vec<u32>), Status> {
        let (mut next, mut empty) = (u64::MAX, Vec::new());
        for (block, sender) in &self.blocks {
            let (step, initialized) = ask(sender, |reply| Command::NextStep(trainer, reply)).await?;
            next = next.min(step);
            if !initialized {
                empty.push(*block);
            }
        }
        // A server without blocks holds nobody back.
        Ok((next, empty))
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

    /// How far training is here; `None` while blocks are without values.
    pub async fn progress(&self, trainers: u32) -> Option<Progress> {
        let mut progress = Progress { version: 0, mean_step: 0 };
        for sender in self.blocks.values() {
            progress.version = progress.version.max(ask(sender, Command::Version).await.ok()??);
        }
        let mut steps = 0;
        for trainer in 0..trainers {
            let (step, _) = self.next_step(trainer).await.ok()?;
            steps += if step == u64::MAX { 0 } else { step };
        }
        progress.mean_step = steps / u64::from(trainers.max(1));
        Some(progress)
    }

    /// Tells every block that a trainer has finished.
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

fn ended() -> Status {
    Status::unavailable("the server is ending; reconnect")
}
