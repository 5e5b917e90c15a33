//! The `ParameterServer` service: receives gradients and sends parameters.

use std::sync::Arc;

use bytes::Bytes;
use futures::stream::{self, StreamExt as _};
use tokio::sync::mpsc;
use tonic::Status;

use super::first_message::first_message;
use super::frame_service::Methods;
use super::trainer;
use crate::block::{BeforeStep, Peer, PulledInto, Store, no_values};
use crate::clock::now;
use crate::proto::{self, exchange_request::Message};
use crate::server::state::ServerState;
use crate::server::state::streams::{Arrival, StreamKind};
use crate::wire::{Outgoing, Reader, StreamAbort, frame};

/// Number of blocks that a Pull buffers for a slow reader.
const PULL_QUEUE: usize = 1;
/// Number of blocks that write their values into shared memory at the same time, for one Pull.
const PULLED_AT_ONCE: usize = 8;

/// The queue of answers of a stream.
type Answers = mpsc::Sender<Result<Bytes, Status>>;

/// The methods of the service.
#[derive(Clone, Copy)]
pub struct ParameterServer;

impl Methods for ParameterServer {
    const NAME: &'static str = "psjobs.v1.ParameterServer";

    fn begin(self, method: &str, state: Arc<ServerState>, reader: Reader) -> Option<Result<Outgoing, Status>> {
        match method {
            "Exchange" => Some(exchange(state, reader)),
            "Pull" => Some(Ok(pull(state, reader))),
            "InitializeBlocks" => Some(Ok(initialize_blocks(state, reader))),
            _ => None,
        }
    }
}

fn exchange(state: Arc<ServerState>, reader: Reader) -> Result<Outgoing, Status> {
    // One answer for each block of the step in flight, and one error.
    let (answers, stream) = mpsc::channel(state.store()?.layout().blocks() as usize + 1);
    let (arrival, abort) = (state.arrive(), StreamAbort::default());
    let outgoing = Outgoing::response(stream).until(abort.clone().aborted());
    state.clone().tasks.spawn(async move {
        if let Err(status) = read_gradients(&state, reader, &answers, (arrival, &abort)).await {
            tracing::debug!(reason = status.message(), "a training stream ended");
            abort.abort(status);
        }
        // Only after the abort: the response ends with OK when all senders are dropped.
        drop(answers);
    });
    Ok(outgoing)
}

fn pull(state: Arc<ServerState>, reader: Reader) -> Outgoing {
    let (answers, stream) = mpsc::channel(PULL_QUEUE);
    let (arrival, abort) = (state.arrive(), StreamAbort::default());
    let outgoing = Outgoing::response(stream).until(abort.clone().aborted());
    state.clone().tasks.spawn(async move {
        if let Err(status) = send_blocks(&state, reader, &answers, (arrival, &abort)).await {
            drop(answers.send(Err(status)).await);
        }
    });
    outgoing
}

fn initialize_blocks(state: Arc<ServerState>, reader: Reader) -> Outgoing {
    let (answers, stream) = mpsc::channel(1);
    let (arrival, abort) = (state.arrive(), StreamAbort::default());
    let outgoing = Outgoing::response(stream).until(abort.clone().aborted());
    state.clone().tasks.spawn(async move {
        let reply = take_initial_values(&state, reader, (arrival, &abort)).await;
        drop(answers.send(reply.map(|reply| frame::message(&reply))).await);
    });
    outgoing
}

async fn send_blocks(
    state: &ServerState,
    mut reader: Reader,
    answers: &Answers,
    (arrival, abort): (Arrival, &StreamAbort),
) -> Result<(), Status> {
    let request: proto::PullRequest = first_message(state, &mut reader)
        .await?
        .ok_or_else(|| Status::invalid_argument("a Pull needs one PullRequest"))?;
    let only_reads = request.trainer.is_none() && request.job_uid == state.config.job_uid;
    let id = if only_reads { None } else { Some(trainer(request.trainer)?) };
    if let Some(id) = &id {
        state.members().hear(id, now())?;
    }
    reader.set_known();
    let store = state.store()?;
    let shard = state.shard(request.shard)?;
    let reader = id.as_ref().zip(request.step).map(|(id, step)| BeforeStep { trainer: id.index, step });
    // Where two servers hold the blocks, one that stood still during a pull could write into what its successor has sent since.
    let may_write = id.is_some() && state.replication.is_none();
    let memory = state.mapping_of_pull(request.shared_memory_token, store.layout().elements()).filter(|_| may_write);
    let into = memory.map(|memory| PulledInto { memory, abort: abort.clone() });
    if let Some(id) = id {
        state.open_stream(&id, shard, StreamKind::Pull, (arrival, abort));
    }
    let (joined_in, leader_term) = (request.epoch, request.leader_term);
    let check = || match joined_in {
        Some(epoch) => state.check_epoch(epoch).and_then(|()| state.check_leader_term(shard, leader_term)),
        None => Ok(()),
    };
    check()?;
    let blocks: Vec<u32> = if request.blocks.is_empty() { store.shard(shard).collect() } else { request.blocks };
    let at_once = if into.is_some() { PULLED_AT_ONCE } else { 1 };
    let reading = blocks.into_iter().map(|block| read_block(store, block, reader, into.clone()));
    let mut reading = stream::iter(reading).buffered(at_once);
    while let Some(values) = reading.next().await {
        let values = values?;
        // The servers may have gone to a checkpoint while this waited, or a leader was elected.
        check()?;
        if answers.send(Ok(values)).await.is_err() {
            break; // The reader has gone away.
        }
    }
    Ok(())
}

async fn read_block(
    store: &Store,
    block: u32,
    reader: Option<BeforeStep>,
    into: Option<PulledInto>,
) -> Result<Bytes, Status> {
    store.read(block, reader, into).await?.ok_or_else(|| no_values(block))
}

async fn take_initial_values(
    state: &ServerState,
    mut reader: Reader,
    (arrival, abort): (Arrival, &StreamAbort),
) -> Result<proto::InitializeBlocksReply, Status> {
    let store = state.store()?;
    let first: Option<proto::InitializeBlocksRequest> = first_message(state, &mut reader).await?;
    let Some(first) = first else { return Ok(proto::InitializeBlocksReply { initialized: 0 }) };
    let id = trainer(first.trainer.clone())?;
    state.members().hear(&id, now())?;
    reader.set_known();
    // Only its newest stream goes on, so that it holds memory for one announced block.
    state.open_stream(&id, state.config.index, StreamKind::Initialize, (arrival, abort));
    let mut initialized = 0;
    // A first message without values only says whose they are.
    let mut next = if first.payload.is_empty() { next_values(state, &mut reader, abort).await? } else { Some(first) };
    while let Some(push) = next {
        // A trainer with a large model sends nothing else meanwhile, and is not lost.
        state.members().hear(&id, now())?;
        state.shard(Some(store.layout().owner(push.block)))?;
        initialized += u32::from(store.initialize(push.block, push.codec, push.payload).await?);
        next = next_values(state, &mut reader, abort).await?;
    }
    Ok(proto::InitializeBlocksReply { initialized })
}

/// Reads the values of the next block, for as long as a trainer may be silent; `None` at the end of the stream.
async fn next_values(
    state: &ServerState,
    reader: &mut Reader,
    abort: &StreamAbort,
) -> Result<Option<proto::InitializeBlocksRequest>, Status> {
    let silence = state.config.timeouts.silence;
    tokio::select! {
        biased;
        why = abort.clone().aborted() => Err(why),
        message = tokio::time::timeout(silence, reader.message()) => message.unwrap_or_else(|_| {
            let seconds = silence.as_secs_f64();
            Err(Status::deadline_exceeded(format!("no values of a block came in {seconds} s")))
        }),
    }
}

/// Forwards a trainer's gradients to their blocks until its stream ends or is aborted.
async fn read_gradients(
    state: &ServerState,
    mut reader: Reader,
    answers: &Answers,
    (arrival, abort): (Arrival, &StreamAbort),
) -> Result<(), Status> {
    let store: &Store = state.store()?;
    let Some(proto::ExchangeRequest { message: Some(Message::Open(open)) }) = first_message(state, &mut reader).await?
    else {
        return Err(Status::invalid_argument("the first message of a training stream must be Open"));
    };
    let kind = StreamKind::of(&open)?;
    let id = trainer(open.trainer)?;
    state.members().hear(&id, now())?;
    reader.set_known();
    state.check_epoch(open.epoch)?;
    let shard = state.shard(open.shard)?;
    let memory = state.memory(open.shared_memory_token, store.layout().elements())?;
    state.open_stream(&id, shard, kind, (arrival, abort));
    // Streams that were open when the servers went to a checkpoint, or elected a leader, were closed; this one may have been
    // opened just after.
    state.check_epoch(open.epoch)?;
    state.check_leader_term(shard, open.leader_term)?;
    let peer = Peer::new(id.index, open.epoch, answers.clone(), memory, abort.clone());
    loop {
        let message = tokio::select! {
            biased;
            why = abort.clone().aborted() => return Err(why),
            message = reader.message::<proto::ExchangeRequest>() => message?,
        };
        let Some(message) = message else { return Ok(()) };
        let gradient = match message.message {
            Some(Message::Gradient(gradient)) => gradient,
            Some(Message::JoinRound(entry)) => {
                state.members().hear(&id, now())?;
                store.join_round(&peer, entry.block, entry.step).await?;
                continue;
            }
            _ => return Err(Status::invalid_argument("expected a gradient block; Open comes once, at the start")),
        };
        state.members().hear(&id, now())?;
        state.metrics.gradient(gradient.payload.len());
        let step = gradient.step;
        store.gradient(&peer, gradient).await?;
        state.members().gave(id.index, step, now());
    }
}
