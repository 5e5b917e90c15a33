//! Enters and removes connections, so that each end knows what the other holds, also after a reconnect.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::link::Link;
use super::peers::{Absence, Superseded};
use super::remote_refs::{Change, Snapshot};
use super::state::{Connections, Process};
use crate::error::RemoteError;
use crate::ids::Session;
use crate::proto;
use crate::wait_clock::waits;

/// Enters a new connection. `sent` is what this end's Hello said that it holds there: changes since then are sent
/// first. Without it, the Hello is sent now.
pub(crate) fn attach(process: &dyn Process, link: &Arc<Link>, sent: Option<&Snapshot>) -> Result<(), Superseded> {
    let shared = process.connections();
    let remote_refs = shared.remote_refs.lock();
    match sent {
        Some(before) => {
            for change in remote_refs.since(before, link.session) {
                link.send(match change {
                    Change::Retain(object) => proto::frame::Kind::Retain(proto::Retain { object }),
                    Change::Release(object) => proto::frame::Kind::Release(proto::Release { object }),
                    Change::End(context) => proto::frame::Kind::EndContext(proto::EndContext { context }),
                });
            }
        }
        None => {
            let snapshot = remote_refs.snapshot(link.session);
            link.send(proto::frame::Kind::Hello(hello(shared, link.session, &snapshot)));
        }
    }
    let replaced = shared.peers.lock().enter(link, Instant::now())?;
    drop(remote_refs);
    shared.peers_changed.notify_all();
    if let Some(replaced) = replaced {
        if let Some(old) = replaced.link {
            old.outdate();
            old.close("it was replaced by a new connection");
        }
        if replaced.session != link.session {
            tracing::info!(peer = %link.peer, "peer was restarted; what it held is freed");
            free_held_by(process, replaced.session);
        }
    }
    Ok(())
}

/// Returns the first frame of a connection: this process's name, and what it holds at `session`.
pub(crate) fn hello(shared: &Connections, session: Session, held: &Snapshot) -> proto::Hello {
    proto::Hello {
        job_uid: shared.settings.job_uid.clone(),
        incarnation: shared.settings.incarnation,
        name: shared.name.to_string(),
        session: shared.session,
        held_at: session,
        held: held.references.iter().map(|(&object, &count)| proto::Held { object, count }).collect(),
        contexts: held.contexts.iter().copied().collect(),
    }
}

/// A process comes back whose lease was over, and relies on what was let go then.
#[derive(Debug, thiserror::Error)]
#[error("{here} has let go of what {there} held, which was silent for {lease:?}; start {there} again")]
pub(crate) struct LeaseOver {
    here: String,
    there: String,
    lease: Duration,
}

/// Handles what a peer's Hello says that it holds here.
///
/// Refuses a peer that relies on what was let go when its lease was over. Its calls would fail one by one, or, in a context
/// that they open anew, compute with other parameters than the calls before.
pub(crate) fn reconcile(process: &dyn Process, hello: &proto::Hello) -> Result<(), LeaseOver> {
    let shared = process.connections();
    if hello.held_at != shared.session {
        return Ok(());
    }
    let held: HashMap<_, _> = hello.held.iter().map(|held| (held.object, held.count)).collect();
    let lease_over = shared.peers.lock().is_lease_over(&hello.name, hello.session);
    if lease_over && process.may_lack(&held, &hello.contexts) {
        tracing::warn!(peer = %hello.name, "peer was silent, and relies on what was let go; it has to start again");
        return Err(LeaseOver {
            here: shared.name.to_string(),
            there: hello.name.clone(),
            lease: shared.settings.lease,
        });
    }
    let before = shared.peers.lock().state(&hello.name).and_then(Result::ok);
    if let Some(before) = before {
        before.outdate();
    }
    process.reconcile(hello.session, &held, &hello.contexts);
    Ok(())
}

/// Removes a connection that ended, unless a new one has replaced it.
pub(crate) fn detach(process: &dyn Process, link: &Link, reason: &str, ended: bool) {
    let shared = process.connections();
    let left = shared
        .peers
        .lock()
        .leave(link, Absence { since: Instant::now(), reason: reason.to_owned(), ended, lease_over: false });
    // After the removal: a caller that learns here that its call is lost may call again at once, and must not find
    // this connection.
    link.close(reason);
    if left {
        shared.peers_changed.notify_all();
        if ended {
            free_held_by(process, link.session);
        }
    }
}

/// Frees what a process held that is gone.
pub(crate) fn free_held_by(process: &dyn Process, session: Session) {
    process.reconcile(session, &HashMap::new(), &[]);
}

/// Returns the connection to a peer; waits for one until `deadline`. A process that has ended is waited for only if the
/// caller `awaits_replacement`.
pub(crate) fn link_to(
    shared: &Connections,
    peer: &str,
    call: &str,
    deadline: Instant,
    awaits_replacement: bool,
) -> Result<Arc<Link>, RemoteError> {
    let unreachable = |reason: String| RemoteError::Unreachable { peer: peer.into(), call: call.into(), reason };
    let mut peers = shared.peers.lock();
    loop {
        if shared.stopping.is_cancelled() {
            return Err(unreachable(format!("{} is ending", shared.name)));
        }
        let reason = match peers.state(peer) {
            Some(Ok(link)) => return Ok(link),
            Some(Err(absence)) if absence.ended && !awaits_replacement => return Err(unreachable(absence.reason)),
            Some(Err(absence)) => absence.reason,
            None => "it has not connected".to_owned(),
        };
        let Some(left) = deadline.checked_duration_since(Instant::now()) else {
            return Err(unreachable(reason));
        };
        let _waits = waits();
        shared.peers_changed.wait_for(&mut peers, left);
    }
}
