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
use crate::server::state::replica_role::{Evidence, Role, Transition};
use crate::server::state::replication::{Replication, Shard, replica_role};

/// Pause between two probes of a server whose role has not settled.
const PAUSE: Duration = Duration::from_millis(50);
/// Pause between two probes of a server that this one leads without.
const ALONE: Duration = Duration::from_secs(1);
/// Timeout of a probe.
const ANSWER: Duration = Duration::from_secs(2);
/// How long a candidate asks for votes. Trainers that have voted for the other holder are free again when that one has
/// ended its candidacy.
const CANDIDACY: Duration = Duration::from_secs(3);
/// Pause before the next candidacy. The server that the shard is named after comes first.
const RESTS: [Duration; 2] = [Duration::from_millis(500), Duration::from_millis(1500)];

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
    // The last candidacy: when it began, and whether it goes on.
    let mut candidacy: Option<(Instant, bool)> = None;
    loop {
        let is_candidate = candidacy.is_some_and(|(_, goes_on)| goes_on);
        match replication.role(shard) {
            Role::Backup { .. } if !is_candidate => {
                if let Err(status) = follow::follow(state, replication, shard).await {
                    tracing::debug!(shard, reason = status.message(), "no longer following");
                }
            }
            Role::Primary { .. } => replication.without_backup(shard).await,
            Role::Backup { .. } | Role::Starting => {}
        }
        let gone = |(trainer, incarnation)| state.members().is_gone(trainer, incarnation);
        let answer = tokio::select! {
            biased;
            role = replication.elected(shard, gone) => {
                candidacy = None;
                assume(state, replication, shard, role).await;
                continue;
            }
            answer = look(replication, shard, &state.config.job_uid) => answer,
        };
        let evidence = match answer {
            Answer::Evidence(evidence) => evidence,
            Answer::Replaced { successor } => {
                let (server, incarnation) = (replication.index, replication.process.incarnation);
                return ServerError::Replaced { server, incarnation, successor };
            }
        };
        let rest = RESTS[usize::from(shard != replication.index)];
        match candidacy {
            Some((begun, true)) if begun.elapsed() >= CANDIDACY => {
                replication.withdraw(shard);
                candidacy = Some((Instant::now(), false));
            }
            // The trainers may elect the other one meanwhile.
            Some((ended, false)) if ended.elapsed() < rest && evidence.may_stand() => {}
            _ => match replication.learn(shard, evidence) {
                Transition::Stay => {}
                Transition::To(role) => {
                    candidacy = None;
                    assume(state, replication, shard, role).await;
                    continue;
                }
                Transition::Stand => {
                    if candidacy.is_none() {
                        let other = replication.other(shard);
                        tracing::warn!(
                            "server {other} does not answer; asks the trainers to elect this one for shard {shard}"
                        );
                    }
                    candidacy = Some((Instant::now(), true));
                    // They come back to vote.
                    state.close_streams_to(shard);
                }
                Transition::Withdraw => candidacy = None,
                // Before the first trainer has joined there are no blocks to lose.
                Transition::Lost if state.store().is_err() && state.tables(shard).is_none() => {
                    replication.change(shard, Shard::begin_anew);
                }
                Transition::Lost => return ServerError::Lost { shard, other: replication.other(shard) },
            },
        }
        let pause = if replication.role(shard) == (Role::Primary { alone: true }) { ALONE } else { PAUSE };
        let gone = |(trainer, incarnation)| state.members().is_gone(trainer, incarnation);
        tokio::select! {
            biased;
            role = replication.elected(shard, gone) => {
                candidacy = None;
                assume(state, replication, shard, role).await;
            }
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// Passes the new role of this server in `shard` on to the blocks and rows.
async fn assume(state: &ServerState, replication: &Replication, shard: u32, role: Role) {
    let other = replication.other(shard);
    match role {
        Role::Primary { alone: true } => {
            tracing::info!("this server goes on with the blocks of server {shard} without server {other}");
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
    if matches!(role, Role::Backup { .. }) {
        // A trainer whose gradient a block holds sends nothing more, and would wait for the answer of a block that gives
        // none as a backup. Gradients of streams that are opened later are refused.
        state.close_streams_to(shard);
    }
    replication.settle(shard);
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
        Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused => return Answer::Evidence(Evidence::Refused),
        Ok(Ok(())) => {}
        _ => return Answer::Evidence(replication.silence(shard)),
    }
    let request = proto::GreetRequest { job_uid: job_uid.to_owned(), holder: replication.holder(shard) };
    let greet = async {
        let endpoint = replication.network.endpoint(address, Some(psjobs_api::Role::Server)).ok()?;
        let mut client = ReplicationClient::new(replication.network.connect(&endpoint).await.ok()?);
        Some(client.greet(Request::new(request)).await.ok()?.into_inner())
    };
    let reply = tokio::time::timeout(ANSWER, greet).await.ok().flatten();
    Answer::Evidence(match reply {
        Some(proto::GreetReply { successor: Some(successor), .. }) => return Answer::Replaced { successor },
        // Of a process that was replaced and still runs the role counts no more.
        Some(proto::GreetReply { holder: Some(holder), .. })
            if !replication.was_replaced(shard, holder.incarnation) =>
        {
            replication.meet_holder(&holder)
        }
        Some(_) | None => replication.silence(shard),
    })
}

#[cfg(test)]
mod tests {
    use psjobs_api::{Environment, Training};

    use super::*;
    use crate::server::config::ServerConfig;
    use crate::server::state::streams::StreamKind;
    use crate::wire::StreamAbort;

    #[tokio::test]
    async fn a_server_that_becomes_a_backup_sends_its_trainers_away() {
        let servers = vec!["ps-0:29500".to_owned(), "ps-1:29500".to_owned()];
        let plain = Environment::new("mnist", "job-1", servers, 1, Training::default());
        let environment = Environment { replication_factor: 2, ..plain };
        let state = ServerState::new(ServerConfig { shared_memory: false, ..ServerConfig::new(&environment) });
        let replication = state.replication.as_ref().expect("two holders");
        let id = proto::TrainerId { job_uid: "job-1".to_owned(), index: 0, incarnation: 0 };
        let roles = [(Role::Primary { alone: true }, false), (Role::Backup { complete: false }, true)];
        for (role, ends) in roles {
            let stream = StreamAbort::default();
            let kind = StreamKind::Exchange { lane: 0, lanes: 1 };
            state.open_stream(&id, 0, kind, (state.arrive(), &stream));
            assume(&state, replication, 0, role).await;
            assert_eq!(stream.is_aborted(), ends, "{role:?}");
        }
    }
}
