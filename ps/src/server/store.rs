//! All blocks that this server owns: starts their tasks once the model is known, and checks what
//! comes from outside before a block sees it.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use psjobs_api::Training;
use tokio::sync::{mpsc, oneshot};
use tokio_util::task::TaskTracker;
use tonic::Status;

use super::block::{self, Command};
use super::peer::{Gradient, Peer};
use crate::layout::Layout;
use crate::optimizer::Optimizer;
use crate::proto;

/// Commands that wait for one block. Every trainer has at most one gradient for it in flight, so
/// this many trainers can hand theirs over without waiting for each other.
const QUEUE: usize = 64;

/// The blocks of one server.
pub struct Store {
    layout: Layout,
    blocks: BTreeMap<u32, mpsc::Sender<Command>>,
}

impl Store {
    /// Starts a task for each block that `server` owns; they end when the store is dropped.
    #[must_use]
    pub fn start(layout: Layout, server: u32, trainers: u32, training: &Training, tasks: &TaskTracker) -> Self {
        let optimizer = Arc::new(Optimizer::new(&training.optimizer));
        let blocks = layout.owned_by(server).map(|block| {
            let (sender, receiver) = mpsc::channel(QUEUE);
            let plan = block::Plan {
                block,
                start: layout.range(block).start,
                mode: training.consistency.mode,
                trainers,
                optimizer: optimizer.clone(),
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
        let (sender, gradient) = match peer.memory() {
            None => {
                let sender = self.check(frame.block, frame.codec, frame.payload.len())?;
                (sender, Gradient::Wire(frame.payload))
            }
            Some(memory) if frame.payload.is_empty() => {
                (self.owned(frame.block)?, Gradient::Shared(memory.clone(), self.layout.range(frame.block)))
            }
            Some(_) => {
                return Err(Status::invalid_argument(
                    "a stream with shared memory carries no payloads; leave them empty",
                ));
            }
        };
        let command = Command::Gradient { peer: peer.clone(), step: frame.step, gradient };
        sender.send(command).await.map_err(|_| ended())
    }

    /// Gives a block its first values; false if it has some.
    pub async fn initialize(&self, block: u32, codec: i32, payload: Bytes) -> Result<bool, Status> {
        let sender = self.check(block, codec, payload.len())?;
        ask(sender, |reply| Command::Initialize(payload, reply)).await
    }

    /// Version and values of a block, `None` if it has none.
    pub async fn read(&self, block: u32) -> Result<Option<(u64, Bytes)>, Status> {
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

    fn check(&self, block: u32, codec: i32, bytes: usize) -> Result<&mpsc::Sender<Command>, Status> {
        let sender = self.owned(block)?;
        if codec != i32::from(proto::Codec::F32) {
            return Err(Status::invalid_argument(format!("codec {codec} is not known here; use CODEC_F32 (1)")));
        }
        let want = self.layout.range(block).len() * 4;
        if bytes != want {
            return Err(Status::invalid_argument(format!(
                "block {block} has {want} bytes of f32, the payload {bytes}; trainer and server must have one layout"
            )));
        }
        Ok(sender)
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
