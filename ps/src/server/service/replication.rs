//! The `Replication` service, the primary's side of a shard: reports the role of this server and sends a backup the
//! blocks that it lacks.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use tokio::sync::mpsc;
use tonic::Status;

use super::frame_service::Methods;
use crate::block::FrameSender;
use crate::block::Store;
use crate::proto::{self, follow_request::Message};
use crate::server::state::ServerState;
use crate::server::state::replication::Replication;
use crate::wire::{Outgoing, Reader, frame};

/// Number of blocks copied to a backup at a time, so that updates of other blocks do not wait behind copies.
const COPIES: usize = 4;

/// The methods of the service.
#[derive(Clone, Copy)]
pub struct Replicating;

impl Methods for Replicating {
    const NAME: &'static str = "psjobs.v1.Replication";

    fn begin(self, method: &str, state: Arc<ServerState>, reader: Reader) -> Option<Result<Outgoing, Status>> {
        match method {
            "Greet" => Some(Ok(greet(state, reader))),
            "Follow" => Some(Ok(follow(state, reader))),
            _ => None,
        }
    }
}

fn greet(state: Arc<ServerState>, reader: Reader) -> Outgoing {
    let (answers, stream) = mpsc::channel(1);
    state.clone().tasks.spawn(async move {
        let reply = role(&state, reader).await;
        drop(answers.try_send(reply.map(|reply| frame::message(&reply))));
    });
    Outgoing::response(stream)
}

fn follow(state: Arc<ServerState>, reader: Reader) -> Outgoing {
    let (backup, stream) = FrameSender::new(state.config.trainers);
    let outgoing = Outgoing::response(stream).until(backup.abort().aborted());
    state.clone().tasks.spawn(async move {
        if let Err(status) = serve(&state, reader, &backup).await {
            backup.send(Err(status));
        }
    });
    outgoing
}

fn replication<'a>(state: &'a ServerState, job_uid: &str) -> Result<&'a Replication, Status> {
    let want = &state.config.job_uid;
    if job_uid != want {
        let text = format!("this server belongs to job {want}, the caller to job {job_uid}; check the addresses");
        return Err(Status::invalid_argument(text));
    }
    state.replication.as_ref().ok_or_else(|| {
        Status::failed_precondition("this server replicates nothing, the caller does; start all with the same settings")
    })
}

async fn role(state: &ServerState, mut reader: Reader) -> Result<proto::GreetReply, Status> {
    let request: proto::GreetRequest =
        reader.message().await?.ok_or_else(|| Status::invalid_argument("Greet needs one GreetRequest"))?;
    let replication = replication(state, &request.job_uid)?;
    replication.meet(request.shard, request.instance);
    Ok(proto::GreetReply { role: replication.role(request.shard).told().into() })
}

async fn serve(state: &ServerState, mut reader: Reader, backup: &FrameSender) -> Result<(), Status> {
    let Some(proto::FollowRequest { message: Some(Message::Open(open)) }) = reader.message().await? else {
        return Err(Status::invalid_argument("the first message of Follow must be Open"));
    };
    let replication = replication(state, &open.job_uid)?;
    let epoch = state.recovery.epoch();
    if open.epoch != 0 && open.epoch != epoch {
        return Err(Status::unavailable("the servers are about to go to a checkpoint; follow again"));
    }
    let end = replication.serve(open.shard, open.instance)?;
    let served = tokio::select! {
        biased;
        served = give(state, replication, &open, &mut reader, backup) => served,
        () = end.cancelled() => Err(Status::aborted("the primary has ended this stream; follow again")),
        status = backup.abort().aborted() => Err(status),
    };
    replication.close_stream(open.shard, &end);
    served
}

async fn give(
    state: &ServerState,
    replication: &Replication,
    open: &proto::OpenFollow,
    reader: &mut Reader,
    backup: &FrameSender,
) -> Result<(), Status> {
    let send = |replica: &proto::Replica| backup.send(Ok(frame::message(replica)));
    let model = |model| proto::Replica { model: Some(model), ..proto::Replica::default() };
    let (epoch, instance) = (state.recovery.epoch(), replication.instance);
    if state.store().is_err() {
        send(&model(proto::Model { instance, ..proto::Model::default() }));
        state.model_known().await;
    }
    let store = state.store()?;
    let (tensors, roster) = state.members().told();
    send(&model(proto::Model { tensors, roster, epoch, instance }));
    let held: BTreeMap<u32, u64> = open.held.iter().map(|held| (held.block, held.version)).collect();
    let mut copying = BTreeSet::new();
    let mut lacking: VecDeque<u32> = store.shard(open.shard).collect();
    let mut complete = false;
    loop {
        attach(store, &held, &mut lacking, &mut copying, backup).await?;
        if !complete && lacking.is_empty() && copying.is_empty() {
            complete = true;
            replication.change(open.shard, |shard| shard.whole = true);
            send(&proto::Replica { complete: true, ..proto::Replica::default() });
            tracing::info!("the blocks of server {} are held twice", open.shard);
        }
        let Some(message) = reader.message::<proto::FollowRequest>().await? else { return Ok(()) };
        let Some(Message::Acknowledgement(proto::Acknowledgement { block, version })) = message.message else {
            return Err(Status::invalid_argument("expected an Acknowledgement; Open comes once, at the start"));
        };
        copying.remove(&block);
        store.acknowledged(block, version).await;
    }
}

/// Lets the backup follow the next blocks while fewer than [`COPIES`] are being copied.
async fn attach(
    store: &Store,
    held: &BTreeMap<u32, u64>,
    lacking: &mut VecDeque<u32>,
    copying: &mut BTreeSet<u32>,
    backup: &FrameSender,
) -> Result<(), Status> {
    while copying.len() < COPIES
        && let Some(block) = lacking.pop_front()
    {
        if store.attach(block, held.get(&block).copied(), backup).await? {
            copying.insert(block);
        }
    }
    Ok(())
}
