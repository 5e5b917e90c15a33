//! Keeps two copies of every block, so that the loss of one server costs no step (spec.ps.replicationFactor 2). The shard
//! of server k is also held by server k+1. Its primary sends the updates (`server::service::replication`), its backup
//! takes them ([`follow`]); the blocks do the rest.

mod follow;

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tonic::Request;

use crate::proto;
use crate::proto::replication_client::ReplicationClient;
use crate::server::error::ServerError;
use crate::server::state::ServerState;
use crate::server::state::replica_role::{Evidence, Role};
use crate::server::state::replication::{Process, Replication, replica_role};

/// Pause between two probes of a server whose role has not settled.
const PAUSE: Duration = Duration::from_millis(50);
/// How long a primary keeps trainers while its backup is silent. They would wait for answers that it cannot give.
const CUT_OFF: Duration = Duration::from_secs(5);
/// Timeout of a probe; a server without an answer is silent.
const ANSWER: Duration = Duration::from_secs(2);

/// Keeps the role of this server in all its shards up to date, until the blocks of one are lost, or this process was
/// replaced.
pub async fn run(state: &Arc<ServerState>) -> ServerError {
    let Some(replication) = &state.replication else { return std::future::pending().await };
    let shards: Vec<u32> = replication.shards();
    let kept = shards.into_iter().map(|shard| Box::pin(keep(state, replication, shard)));
    futures::future::select_all(kept).await.0
}

/// Keeps the role of this server in `shard` up to date. Returns when its blocks are lost, or this process was replaced.
async fn keep(state: &Arc<ServerState>, replication: &Replication, shard: u32) -> ServerError {
    // The time since which this server leads the shard without a backup that answers.
    let mut silent_since = None;
    loop {
        match replication.role(shard) {
            Role::Backup { .. } => {
                if let Err(status) = follow::follow(state, replication, shard).await {
                    tracing::debug!(shard, reason = status.message(), "no longer following");
                }
            }
            Role::Primary { .. } => replication.without_backup(shard).await,
            Role::Starting => {}
        }
        let evidence = match look(replication, shard, &state.config.job_uid).await {
            Answer::Evidence(evidence) => evidence,
            Answer::Replaced { successor } => {
                let (server, incarnation) = (replication.index, replication.process.incarnation);
                return ServerError::Replaced { server, incarnation, successor };
            }
        };
        let leads = matches!(replication.role(shard), Role::Primary { alone: false });
        if leads && evidence == Evidence::Silent {
            if silent_since.get_or_insert_with(Instant::now).elapsed() >= CUT_OFF {
                cut_off(state, replication, shard);
            }
        } else {
            silent_since = None;
        }
        match replication.learn(shard, evidence) {
            None => tokio::time::sleep(PAUSE).await,
            // Before the first trainer has joined there are no blocks to lose.
            Some(Role::Starting) if state.store().is_err() && state.tables(shard).is_none() => {
                replication.change(shard, |here| here.role = Role::Starting);
            }
            Some(Role::Starting) => return ServerError::Lost { shard, other: replication.other(shard) },
            Some(role) => assume(state, replication, shard, role).await,
        }
    }
}

/// Passes the new role of this server in `shard` on to the blocks and rows.
async fn assume(state: &ServerState, replication: &Replication, shard: u32, role: Role) {
    let other = replication.other(shard);
    match role {
        Role::Primary { alone: true } => {
            tracing::info!("server {other} has ended; this one goes on with the blocks of server {shard} alone");
        }
        Role::Primary { alone: false } => tracing::info!("this server leads the blocks of server {shard}"),
        Role::Backup { .. } => tracing::info!("backs up the blocks of server {shard}, which server {other} leads"),
        Role::Starting => {}
    }
    if let Ok(store) = state.store() {
        store.set_role(shard, replica_role(role)).await;
        if state.config.min_trainers.is_some() && matches!(role, Role::Primary { .. }) {
            // Updates on their way may have listed trainers that have left meanwhile.
            let absent = state.members().absent();
            for trainer in absent {
                store.finish(trainer).await;
            }
        }
    }
    if let Some(tables) = state.tables(shard) {
        tables.set_role(replica_role(role)).await;
    }
    replication.settle(shard);
}

/// Sends the trainers of `shard` away, once, until a backup follows: this server cannot answer them, and the other holder
/// may have been told to lead.
fn cut_off(state: &ServerState, replication: &Replication, shard: u32) {
    let mut now = false;
    replication.change(shard, |here| {
        now = !here.cut_off && here.stream.is_none();
        here.cut_off |= now;
    });
    if now {
        let other = replication.other(shard);
        tracing::warn!(
            "server {other} does not answer; the trainers of server {shard}'s blocks are sent to look for it"
        );
        state.close_streams();
    }
}

/// The result of a probe.
enum Answer {
    Evidence(Evidence),
    /// The other server knows a process that has replaced this one.
    Replaced {
        successor: u32,
    },
}

/// Probes the other holder of `shard` and asks for its role.
async fn look(replication: &Replication, shard: u32, job_uid: &str) -> Answer {
    let address = &replication.servers[replication.other(shard) as usize];
    match tokio::time::timeout(ANSWER, replication.network.probe(address)).await {
        Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused => return Answer::Evidence(Evidence::Gone),
        Ok(Ok(())) => {}
        _ => return Answer::Evidence(Evidence::Silent),
    }
    let Process { instance, incarnation } = replication.process;
    let request = proto::GreetRequest { job_uid: job_uid.to_owned(), shard, instance, incarnation };
    let greet = async {
        let endpoint = replication.network.endpoint(address, Some(psjobs_api::Role::Server)).ok()?;
        let mut client = ReplicationClient::new(replication.network.connect(&endpoint).await.ok()?);
        Some(client.greet(Request::new(request)).await.ok()?.into_inner())
    };
    match tokio::time::timeout(ANSWER, greet).await.ok().flatten() {
        Some(proto::GreetReply { successor: Some(successor), .. }) => Answer::Replaced { successor },
        // A process that was replaced and still runs: its role counts no more.
        Some(reply) if replication.was_replaced(shard, reply.incarnation) => Answer::Evidence(Evidence::Silent),
        Some(reply) => Answer::Evidence(Evidence::Is(reply.role())),
        None => Answer::Evidence(Evidence::Silent),
    }
}
