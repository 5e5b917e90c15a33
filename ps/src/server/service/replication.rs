//! The `Replication` service, the primary's side of a shard: reports the role of this server and sends a backup the
//! blocks and rows that it lacks.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use tokio::sync::mpsc;
use tonic::Status;

use super::first_message::first_message;
use super::frame_service::Methods;
use crate::proto::{self, follow_request::Message};
use crate::replication_log::FrameSender;
use crate::server::state::ServerState;
use crate::server::state::replication::{ALIVE, Process, Replication, SILENCE};
use crate::sparse::Tables;
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
        let text = format!("this server belongs to another job than {job_uid}, the caller's; check the addresses");
        return Err(Status::invalid_argument(text));
    }
    state.replication.as_ref().ok_or_else(|| {
        Status::failed_precondition("this server replicates nothing, the caller does; start all with the same settings")
    })
}

fn holder(holder: Option<proto::ShardHolder>) -> Result<proto::ShardHolder, Status> {
    holder.ok_or_else(|| Status::invalid_argument("the caller must describe itself: holder is not set"))
}

async fn role(state: &ServerState, mut reader: Reader) -> Result<proto::GreetReply, Status> {
    let request: proto::GreetRequest = first_message(state, &mut reader)
        .await?
        .ok_or_else(|| Status::invalid_argument("Greet needs one GreetRequest"))?;
    let replication = replication(state, &request.job_uid)?;
    reader.set_known();
    let caller = holder(request.holder)?;
    let successor = replication.meet(caller.shard, Process::of(&caller));
    if successor.is_none() {
        replication.meet_holder(&caller);
    }
    Ok(proto::GreetReply { holder: replication.holder(caller.shard), successor })
}

async fn serve(state: &ServerState, mut reader: Reader, backup: &FrameSender) -> Result<(), Status> {
    let Some(proto::FollowRequest { message: Some(Message::Open(open)) }) = first_message(state, &mut reader).await?
    else {
        return Err(Status::invalid_argument("the first message of Follow must be Open"));
    };
    let replication = replication(state, &open.job_uid)?;
    reader.set_known();
    let epoch = state.recovery.epoch();
    if open.epoch != 0 && open.epoch != epoch {
        return Err(Status::unavailable("the servers are about to go to a checkpoint; follow again"));
    }
    let Some(proto::FollowRequest { message: Some(Message::Held(held)) }) = reader.message().await? else {
        return Err(Status::invalid_argument("the second message of Follow must be Held"));
    };
    if state.is_to_be_restored() {
        // A process that holds nothing learns that it is given nothing. It does not know the trainers: who joins it describes
        // the model.
        send(backup, &model(state, replication, Vec::new(), Vec::new()));
        return Err(Status::unavailable("this server is on its way to a checkpoint; follow again"));
    }
    let follower = holder(open.holder)?;
    let (shard, end) = (follower.shard, replication.serve(&follower)?);
    let served = tokio::select! {
        biased;
        // First, so that no acknowledgement of before the servers went to a checkpoint counts after that.
        () = end.cancelled() => Err(Status::aborted("the primary has ended this stream; follow again")),
        served = give(state, replication, (shard, held), &mut reader, backup) => served,
        status = backup.abort().aborted() => Err(status),
    };
    replication.close_stream(shard, &end);
    served
}

/// The state of the stream to one backup of a shard.
struct Feed<'a> {
    state: &'a ServerState,
    replication: &'a Replication,
    backup: &'a FrameSender,
    shard: u32,
    /// Versions of the blocks that the backup held when it began to follow.
    held: BTreeMap<u32, u64>,
    /// Versions of the parts of the rows that it held.
    held_rows: Vec<u64>,
    model_sent: bool,
    /// Number of trainers of which the backup knows that they have finished.
    finished_sent: usize,
    /// The shard's tables, once they are sent.
    tables: Option<Arc<Tables>>,
    /// Blocks that the backup does not follow yet.
    lacking: VecDeque<u32>,
    /// Blocks that are being copied.
    copying: BTreeSet<u32>,
    /// Parts of the rows that are being copied.
    copying_parts: BTreeSet<u32>,
    /// The backup holds all.
    complete: bool,
    /// The newest confirmation that the backup was asked for.
    confirmation: u64,
}

async fn give(
    state: &ServerState,
    replication: &Replication,
    (shard, held): (u32, proto::Held),
    reader: &mut Reader,
    backup: &FrameSender,
) -> Result<(), Status> {
    let mut feed = Feed {
        state,
        replication,
        backup,
        shard,
        held: held.blocks.into_iter().map(|held| (held.block, held.version)).collect(),
        held_rows: held.row_parts,
        model_sent: false,
        finished_sent: 0,
        tables: None,
        lacking: VecDeque::new(),
        copying: BTreeSet::new(),
        copying_parts: BTreeSet::new(),
        complete: false,
        confirmation: 0,
    };
    if state.store().is_err() {
        send_model(state, replication, backup, Vec::new());
    }
    let mut beats = tokio::time::interval(ALIVE);
    loop {
        // A message that has begun to arrive must be read to its end, whatever becomes known meanwhile.
        let message = tokio::time::timeout(SILENCE, reader.message::<proto::FollowRequest>());
        tokio::pin!(message);
        let message = loop {
            let (known, left, asked) = (state.known(), state.left.notified(), replication.asked());
            feed.announce().await?;
            feed.advance().await?;
            feed.propose_voters();
            feed.ask_to_confirm();
            tokio::select! {
                biased;
                message = &mut message => break message,
                () = known => {}
                () = left => {}
                () = asked => {}
                _ = beats.tick() => feed.send(&proto::Replica::default()),
            }
        };
        let Some(message) = message.map_err(|_| Status::unavailable("the backup is silent"))?? else { return Ok(()) };
        replication.hear(shard);
        feed.acknowledged(message).await?;
    }
}

/// Sends a backup the model, without tensors if it is not given any blocks, and the members.
fn send_model(state: &ServerState, replication: &Replication, backup: &FrameSender, tensors: Vec<proto::TensorSpec>) {
    let (_, roster) = state.members().model_and_roster();
    send(backup, &model(state, replication, tensors, roster));
}

fn model(
    state: &ServerState,
    replication: &Replication,
    tensors: Vec<proto::TensorSpec>,
    roster: Vec<proto::RosterEntry>,
) -> proto::Replica {
    let (epoch, Process { instance, incarnation }) = (state.recovery.epoch(), replication.process);
    let model = Some(proto::Model { tensors, roster, epoch, instance, incarnation });
    proto::Replica { model, ..proto::Replica::default() }
}

fn send(backup: &FrameSender, replica: &proto::Replica) {
    backup.send(Ok(frame::message(replica)));
}

impl Feed<'_> {
    fn send(&self, replica: &proto::Replica) {
        send(self.backup, replica);
    }

    /// Sends the model and the tables when they have become known, and lets the backup follow the parts of the rows.
    async fn announce(&mut self) -> Result<(), Status> {
        let shard = self.shard;
        if !self.model_sent
            && let Ok(store) = self.state.store()
        {
            let (tensors, _) = self.state.members().model_and_roster();
            send_model(self.state, self.replication, self.backup, tensors);
            self.model_sent = true;
            self.lacking = store.shard(shard).collect();
        }
        // A process that this backup has taken the place of may have heard of the end of a trainer, and nothing else here.
        let finished = self.state.members().finished().len();
        if finished > self.finished_sent {
            self.finished_sent = finished;
            let tensors = if self.model_sent { self.state.members().model_and_roster().0 } else { Vec::new() };
            send_model(self.state, self.replication, self.backup, tensors);
        }
        if self.tables.is_none()
            && let Some(tables) = self.state.tables(shard)
        {
            let (parts, specs) = (tables.parts(), tables.specs().iter().map(Into::into).collect());
            let servers_train_layers = self.state.servers_train_layers();
            let message = Some(proto::Tables { tables: specs, parts, servers_train_layers });
            self.send(&proto::Replica { tables: message, ..proto::Replica::default() });
            for part in 0..parts {
                // A backup without tables starts them without rows, which is version 0.
                let held = self.held_rows.get(part as usize).copied().unwrap_or(0);
                if tables.attach(part, held, self.backup, &self.state.tasks).await? {
                    self.copying_parts.insert(part);
                }
            }
            self.tables = Some(tables);
        }
        Ok(())
    }

    /// Lets the backup follow the next blocks while fewer than [`COPIES`] are being copied; notifies it when it holds all.
    async fn advance(&mut self) -> Result<(), Status> {
        while self.copying.len() < COPIES
            && let Some(block) = self.lacking.pop_front()
        {
            if self.state.store()?.attach(block, self.held.get(&block).copied(), self.backup).await? {
                self.copying.insert(block);
            }
        }
        let known = self.model_sent || self.tables.is_some();
        let copied = self.lacking.is_empty() && self.copying.is_empty() && self.copying_parts.is_empty();
        if known && copied && !self.complete {
            self.complete = true;
            let (voters, mut complete) = (self.state.members().voters(), None);
            self.replication.change(self.shard, |shard| {
                complete = Some(shard.complete(voters));
            });
            self.send(&proto::Replica { complete, ..proto::Replica::default() });
            tracing::info!("the blocks and rows of server {} are held twice", self.shard);
        }
        Ok(())
    }

    /// Sends the next change of the voters, if trainers have come or gone.
    fn propose_voters(&self) {
        if !self.complete {
            return;
        }
        let (voters, mut proposed) = (self.state.members().voters(), None);
        self.replication.change_quietly(self.shard, |shard| proposed = shard.election.propose(&voters));
        if proposed.is_some() {
            self.send(&proto::Replica { voters: proposed, ..proto::Replica::default() });
        }
    }

    /// Lets the backup confirm that it follows, if that was asked for since the last time.
    fn ask_to_confirm(&mut self) {
        let confirmation = self.replication.confirmation(self.shard);
        if confirmation > self.confirmation {
            self.confirmation = confirmation;
            self.send(&proto::Replica { confirmation, ..proto::Replica::default() });
        }
    }

    async fn acknowledged(&mut self, message: proto::FollowRequest) -> Result<(), Status> {
        match message.message {
            Some(Message::Acknowledgement(proto::Acknowledgement { block, version })) => {
                self.copying.remove(&block);
                self.state.store()?.acknowledged(block, version).await;
                Ok(())
            }
            Some(Message::RowsAcknowledgement(proto::RowsAcknowledgement { part, version })) => {
                self.copying_parts.remove(&part);
                if let Some(tables) = &self.tables {
                    tables.acknowledged(part, version).await;
                }
                Ok(())
            }
            Some(Message::VotersAcknowledgement(version)) => {
                self.replication.change_quietly(self.shard, |shard| shard.election.acknowledged(version));
                Ok(())
            }
            Some(Message::Confirmed(number)) => {
                self.replication.confirmed(self.shard, number);
                Ok(())
            }
            Some(Message::Alive(_)) => Ok(()),
            _ => Err(Status::invalid_argument("expected an Acknowledgement; Open and Held come once, at the start")),
        }
    }
}
