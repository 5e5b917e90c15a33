//! The backup's side of a shard: receives the model, the tables, the blocks and rows and every update from the primary.

use std::sync::Arc;

use tonic::Status;

use crate::clock::now;
use crate::layout::{Layout, TensorSpec};
use crate::proto::{self, follow_request::Message};
use crate::replication_log::FrameSender;
use crate::server::state::ServerState;
use crate::server::state::replication::{ALIVE, Process, Replication, SILENCE};
use crate::sparse::{TableSpec, Tables};
use crate::wire::{MAX_FRAME, Outgoing, call, frame};

/// The version of rows that no log has.
const NO_VERSION: u64 = u64::MAX;
/// Receive window: a few blocks.
const WINDOW: u32 = 8 * 1024 * 1024;

/// Follows the primary of `shard` until the stream ends.
pub async fn follow(state: &ServerState, replication: &Replication, shard: u32) -> Result<(), Status> {
    let end = replication.open_stream(shard);
    let followed = tokio::select! {
        biased;
        // First, so that nothing of before the servers went to a checkpoint is taken after that.
        () = end.cancelled() => Ok(()),
        followed = take(state, replication, shard) => followed,
    };
    replication.close_stream(shard, &end);
    followed
}

async fn take(state: &ServerState, replication: &Replication, shard: u32) -> Result<(), Status> {
    if state.recovery.is_restoring() {
        return Err(Status::unavailable("this server is on its way to a checkpoint"));
    }
    let address = &replication.servers[replication.other(shard) as usize];
    let endpoint = (replication.network.endpoint(address, Some(psjobs_api::Role::Server)))
        .map_err(|_| Status::invalid_argument(format!("{address:?} is not the address of a server")))?
        .tcp_nodelay(true)
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(2 * WINDOW)
        .max_frame_size(MAX_FRAME);
    let channel = replication.network.connect(&endpoint).await.map_err(|error| Status::from_error(error.into()))?;
    // Versions of a copy that has gone another way say nothing: all of it is sent.
    let diverged = replication.has_diverged(shard);
    let held = match state.store() {
        Ok(store) if !diverged => store.held(shard).await,
        Ok(_) | Err(_) => Vec::new(),
    };
    let mut held_rows = match state.tables(shard) {
        Some(tables) => tables.begin_follow().await?,
        None => Vec::new(),
    };
    if diverged {
        held_rows.fill(NO_VERSION);
    }
    let open = proto::OpenFollow {
        job_uid: state.config.job_uid.clone(),
        holder: replication.holder(shard),
        // One that has not all its state yet follows in any epoch; the model message names it.
        epoch: if state.recovery.awaits_restore() { 0 } else { state.recovery.epoch() },
    };
    let held = proto::Held { blocks: held, row_parts: held_rows };
    let (acknowledgements, outgoing) = FrameSender::new(state.config.trainers);
    for message in [Message::Open(open), Message::Held(held)] {
        acknowledgements.send(Ok(frame::message(&proto::FollowRequest { message: Some(message) })));
    }
    let (path, outgoing) =
        ("/psjobs.v1.Replication/Follow", Outgoing::request(outgoing).until(acknowledgements.abort().aborted()));
    let mut incoming = call(channel, path, outgoing, &state.rules.buffers).await?;
    let beating = {
        let acknowledgements = acknowledgements.clone();
        async move {
            let mut beats = tokio::time::interval(ALIVE);
            loop {
                beats.tick().await;
                let alive = proto::FollowRequest { message: Some(Message::Alive(true)) };
                acknowledgements.send(Ok(frame::message(&alive)));
            }
        }
    };
    let taking = async {
        loop {
            let message = tokio::time::timeout(SILENCE, incoming.message::<proto::Replica>()).await;
            let Some(replica) = message.map_err(|_| Status::unavailable("the primary is silent"))?? else {
                return Ok(());
            };
            replication.hear(shard);
            apply(state, replication, shard, replica, &acknowledgements).await?;
        }
    };
    tokio::select! {
        biased;
        taken = taking => taken,
        () = beating => Ok(()),
    }
}

/// Takes one message of the primary.
async fn apply(
    state: &ServerState,
    replication: &Replication,
    shard: u32,
    mut replica: proto::Replica,
    acknowledgements: &FrameSender,
) -> Result<(), Status> {
    if let Some(model) = replica.model.take() {
        return adopt(state, replication, shard, model).await;
    }
    if replica.confirmation > 0 {
        let message = Some(Message::Confirmed(replica.confirmation));
        acknowledgements.send(Ok(frame::message(&proto::FollowRequest { message })));
    } else if let Some(complete) = replica.complete {
        tracing::info!("holds all blocks of server {shard}");
        let version = complete.voters.as_ref().map_or(0, |voters| voters.version);
        replication.complete(shard, complete);
        acknowledge_voters(version, acknowledgements);
    } else if let Some(voters) = replica.voters {
        let version = voters.version;
        replication.change(shard, |here| here.election.adopt_voters(voters));
        acknowledge_voters(version, acknowledgements);
    } else if let Some(tables) = replica.tables {
        open_tables(state, shard, tables).await?;
    } else if let Some(rows) = replica.rows {
        tables_of(state, shard)?.install(rows, acknowledgements).await?;
    } else if let Some(update) = replica.rows_update {
        count_steps(state, &update.next_steps);
        tables_of(state, shard)?.follow(update, acknowledgements).await?;
    } else if replica != proto::Replica::default() {
        count_steps(state, &replica.next_steps);
        state.store()?.follow(replica, acknowledgements).await?;
    }
    Ok(())
}

fn acknowledge_voters(version: u64, acknowledgements: &FrameSender) {
    let message = Some(Message::VotersAcknowledgement(version));
    acknowledgements.send(Ok(frame::message(&proto::FollowRequest { message })));
}

/// Records the steps of trainers that an update contains.
fn count_steps(state: &ServerState, next_steps: &[proto::NextStep]) {
    let (mut members, now) = (state.members(), now());
    next_steps.iter().for_each(|next| members.gave(next.trainer, next.step.saturating_sub(1), now));
}

/// Starts the tables of the primary, if this server does not have them.
async fn open_tables(state: &ServerState, shard: u32, opened: proto::Tables) -> Result<(), Status> {
    let specs: Vec<TableSpec> = opened.tables.into_iter().map(TableSpec::from).collect();
    TableSpec::validate(&specs).map_err(|error| Status::data_loss(error.to_string()))?;
    state.set_servers_train_layers(opened.servers_train_layers);
    let tables = state.tables_for(shard, &specs);
    if tables.parts() != opened.parts || tables.specs() != specs {
        return Err(Status::data_loss("the primary's tables are others than those held here"));
    }
    let finished = state.members().finished();
    for trainer in finished {
        tables.finish(trainer).await;
    }
    Ok(())
}

fn tables_of(state: &ServerState, shard: u32) -> Result<Arc<Tables>, Status> {
    state.tables(shard).ok_or_else(|| Status::data_loss("rows came before the tables that they belong to"))
}

/// Takes over the model and the members from the primary. A model without tensors is not known there yet.
async fn adopt(state: &ServerState, replication: &Replication, shard: u32, model: proto::Model) -> Result<(), Status> {
    if replication.was_replaced(shard, model.incarnation) {
        return Err(Status::unavailable("the process there was replaced; its successor leads, or this server does"));
    }
    let (there, mut same_epoch) = (!model.tensors.is_empty(), true);
    let is_new = state.store().is_err();
    if there {
        let tensors = model.tensors.into_iter().map(TensorSpec::from).collect::<Vec<_>>();
        let layout = Layout::new(&tensors, state.config.servers as usize)
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        same_epoch = state.recovery.adopt_epoch(model.epoch);
        state.members().adopt(&tensors).map_err(Status::invalid_argument)?;
        state.store_for(layout, &tensors);
    }
    // Blocks that are new know of none; the others have heard of those that this server knows.
    let known = if is_new { Vec::new() } else { state.members().finished() };
    let finished = model.roster.iter().filter(|entry| entry.finished).filter_map(|entry| entry.trainer.as_ref());
    for trainer in finished.filter(|trainer| !known.contains(&trainer.index)) {
        state.finish(trainer.index).await;
    }
    {
        let mut members = state.members();
        members.adopt_roster(&model.roster, same_epoch, now());
        state.end_if_done(&mut members);
    }
    replication.change(shard, |shard| {
        shard.leaders_epoch = model.epoch;
        shard.found = Some(same_epoch && (there || shard.found == Some(true)));
        shard.peer_restarted = false;
        shard.peer = Some(Process { instance: model.instance, incarnation: model.incarnation });
    });
    Ok(())
}
