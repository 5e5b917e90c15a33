//! The `ParameterServer` service: gradients up, parameters down.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::mpsc;
use tonic::Status;

use super::peer::{Answer, Peer};
use super::service::Methods;
use super::shared::{Shared, trainer};
use super::store::Store;
use crate::clock::now;
use crate::proto::{self, exchange_request::Message};
use crate::wire::{Outgoing, Reader, frame};

/// Blocks that a Pull holds in memory while the reader is slow.
const PULL_QUEUE: usize = 4;

/// Where answers are handed in.
type Answers = mpsc::Sender<Result<Bytes, Status>>;

/// The service's methods.
#[derive(Clone, Copy)]
pub struct Training;

impl Methods for Training {
    const NAME: &'static str = "psjobs.v1.ParameterServer";

    fn begin(self, method: &str, shared: Arc<Shared>, reader: Reader) -> Option<Result<Outgoing, Status>> {
        match method {
            "Exchange" => Some(exchange(shared, reader)),
            "Pull" => Some(Ok(pull(shared, reader))),
            "Push" => Some(Ok(push(shared, reader))),
            _ => None,
        }
    }
}

fn exchange(shared: Arc<Shared>, reader: Reader) -> Result<Outgoing, Status> {
    // One answer for each block of the step in flight, and one error.
    let (answers, stream) = mpsc::channel(shared.store()?.layout().blocks() as usize + 1);
    shared.clone().tasks.spawn(async move {
        if let Err(status) = read_gradients(&shared, reader, answers.clone()).await {
            tracing::debug!(reason = status.message(), "a training stream ended");
            // The trainer may be gone already.
            drop(answers.try_send(Err(status)));
        }
    });
    Ok(Outgoing::response(stream))
}

fn pull(shared: Arc<Shared>, reader: Reader) -> Outgoing {
    let (answers, stream) = mpsc::channel(PULL_QUEUE);
    shared.clone().tasks.spawn(async move {
        if let Err(status) = send_blocks(&shared, reader, &answers).await {
            drop(answers.send(Err(status)).await);
        }
    });
    Outgoing::response(stream)
}

fn push(shared: Arc<Shared>, reader: Reader) -> Outgoing {
    let (answers, stream) = mpsc::channel(1);
    shared.clone().tasks.spawn(async move {
        let reply = take_values(&shared, reader).await;
        drop(answers.send(reply.map(|reply| frame::message(&reply))).await);
    });
    Outgoing::response(stream)
}

async fn send_blocks(shared: &Shared, mut reader: Reader, answers: &Answers) -> Result<(), Status> {
    let request: proto::PullRequest =
        reader.message().await?.ok_or_else(|| Status::invalid_argument("a Pull needs one PullRequest"))?;
    shared.members().hear(&trainer(request.trainer)?, now())?;
    let store = shared.store()?;
    let blocks: Vec<u32> =
        if request.blocks.is_empty() { store.shard(shared.shard(request.shard)?).collect() } else { request.blocks };
    for block in blocks {
        let (version, values) = store.read(block).await?.ok_or_else(|| empty(block))?;
        let start = store.layout().range(block).start;
        let answer = Answer { step: 0, block, version, start, values: &values };
        if answers.send(Ok(answer.encode(&shared.recipe))).await.is_err() {
            break; // Nobody reads on.
        }
    }
    Ok(())
}

async fn take_values(shared: &Shared, mut reader: Reader) -> Result<proto::PushReply, Status> {
    let store = shared.store()?;
    let (mut known, mut initialized) = (false, 0);
    while let Some(push) = reader.message::<proto::PushRequest>().await? {
        if !known {
            shared.members().hear(&trainer(push.trainer)?, now())?;
            known = true;
        }
        shared.shard(Some(store.layout().owner(push.block)))?;
        initialized += u32::from(store.initialize(push.block, push.codec, push.payload).await?);
    }
    Ok(proto::PushReply { initialized })
}

/// Not the last word: whoever joins again is told which blocks to fill. The servers may have gone back to nothing
/// since a trainer filled this one.
pub fn empty(block: u32) -> Status {
    Status::aborted(format!("block {block} has no values yet; push them first"))
}

/// Hands over a trainer's gradients until its stream ends, or is ended from here.
async fn read_gradients(shared: &Shared, mut reader: Reader, answers: Answers) -> Result<(), Status> {
    let store: &Store = shared.store()?;
    let Some(proto::ExchangeRequest { message: Some(Message::Open(open)) }) = reader.message().await? else {
        return Err(Status::invalid_argument("the first message of a training stream must be Open"));
    };
    let id = trainer(open.trainer)?;
    shared.members().hear(&id, now())?;
    if open.epoch != shared.recovery.epoch() {
        return Err(Status::aborted("the servers went to a checkpoint since this trainer joined; join again"));
    }
    let shard = shared.shard(open.shard)?;
    let memory = shared.memory(open.shared_memory_token, store.layout().elements())?;
    let end = shared.open_stream(id.index, shard);
    let peer = Peer::new(id.index, open.epoch, answers, memory, end.clone());
    loop {
        let message = tokio::select! {
            biased;
            () = end.cancelled() => return Err(Status::aborted("the server has ended this stream")),
            message = reader.message::<proto::ExchangeRequest>() => message?,
        };
        let Some(message) = message else { return Ok(()) };
        let Some(Message::Gradient(gradient)) = message.message else {
            return Err(Status::invalid_argument("expected a gradient block; Open comes once, at the start"));
        };
        shared.members().hear(&id, now())?;
        shared.metrics.gradient(gradient.payload.len());
        let step = gradient.step;
        store.gradient(&peer, gradient).await?;
        shared.members().gave(id.index, step, now());
    }
}
