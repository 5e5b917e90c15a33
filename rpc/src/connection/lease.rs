//! Leases: this process renews its own by heartbeats, and ends those of peers that were silent for too long.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::attach::free_held_by;
use super::state::Process;
use crate::proto;

/// Renews this process's leases elsewhere, and ends those of peers that are silent.
pub(crate) async fn keep_leases(process: Arc<dyn Process>) {
    let shared = process.connections();
    let lease = shared.settings.lease;
    let mut ticks = tokio::time::interval(lease / 4);
    loop {
        ticks.tick().await;
        shared.lease_checks.fetch_add(1, Ordering::Relaxed);
        let (links, silent) = {
            let mut peers = shared.peers.lock();
            (peers.links().collect::<Vec<_>>(), peers.silent(Instant::now(), lease))
        };
        for link in links {
            link.send(proto::frame::Kind::Heartbeat(proto::Heartbeat {}));
        }
        for name in silent {
            end_lease(&*process, &name, &format!("it was silent for {lease:?}"));
        }
    }
}

fn end_lease(process: &dyn Process, name: &str, reason: &str) {
    tracing::warn!(peer = name, reason, "peer is lost; what it held is freed");
    process.connections().end_peer(name, reason, true, |session| free_held_by(process, session));
}
