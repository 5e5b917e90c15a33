//! Finds out that another process has taken this server's place while this one still runs, as when a node loses its kubelet and
//! keeps its containers and its network. Trainers that are connected would otherwise stay with this process, and wait for those
//! that have joined its successor. The name of a server leads to its newest process, so this one asks who answers there.

use std::time::Duration;

use tonic::Status;

use super::recovery::client::client;
use crate::proto;
use crate::server::error::ServerError;
use crate::server::state::ServerState;

/// Pause between two looks.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// How long the process at the address may take to answer.
const ANSWER: Duration = Duration::from_secs(5);

/// Waits until a process of a higher incarnation answers at this server's address.
pub async fn found(state: &ServerState) -> ServerError {
    let Some(address) = &state.config.address else { return std::future::pending().await };
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let answer = tokio::time::timeout(ANSWER, ask(state, address)).await;
        match answer.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer"))) {
            Ok(there) => {
                let (server, incarnation) = (state.config.index, state.config.incarnation);
                if let Some(successor) = successor((server, incarnation), &there) {
                    return ServerError::Replaced { server, incarnation, successor };
                }
            }
            // It is being replaced, or its address is not known yet, or any more.
            Err(status) => {
                tracing::debug!(address, reason = status.message(), "no process answers at this server's address")
            }
        }
    }
}

/// Asks over a connection of its own, because an open one stays with the process that it was made to.
async fn ask(state: &ServerState, address: &str) -> Result<proto::IdentifyReply, Status> {
    let request = proto::IdentifyRequest { job_uid: state.config.job_uid.clone() };
    Ok(client(&state.config.network, address)?.identify(request).await?.into_inner())
}

/// Returns the incarnation that has taken the place of this process of a server. Another server may answer where addresses are
/// given to others before names follow: it says nothing about this one.
fn successor((server, incarnation): (u32, u32), there: &proto::IdentifyReply) -> Option<u32> {
    (there.server == server && there.incarnation > incarnation).then_some(there.incarnation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_later_process_of_the_same_server_is_a_successor() {
        for (server, incarnation, want) in [(1, 2, None), (1, 1, None), (1, 3, Some(3)), (0, 3, None)] {
            let there = proto::IdentifyReply { server, incarnation };
            assert_eq!(successor((1, 2), &there), want, "{there:?}");
        }
    }
}
