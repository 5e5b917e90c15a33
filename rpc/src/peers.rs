//! The processes that this one knows: their connections, and the leases on what they hold here.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::link::Link;
use super::lock::lock;
use super::object_table::Session;
use super::remote_refs::{Change, Snapshot};
use super::wire::proto;
use super::{Endpoint, RemoteError};

#[derive(Debug, Default)]
pub(crate) struct Peers {
    by_name: HashMap<Arc<str>, State>,
}

#[derive(Debug)]
struct State {
    session: Session,
    heard: Instant,
    link: Result<Arc<Link>, Absence>,
}

/// Why there is no connection.
#[derive(Clone, Debug)]
struct Absence {
    reason: String,
    /// True if waiting for it is vain: it said goodbye, or its lease is over.
    ended: bool,
}

impl Peers {
    pub fn links(&self) -> impl Iterator<Item = Arc<Link>> {
        self.by_name.values().filter_map(|state| state.link.as_ref().ok().cloned())
    }

    pub fn link_of(&self, session: Session) -> Option<Arc<Link>> {
        self.links().find(|link| link.session == session)
    }

    pub fn session_of(&self, name: &str) -> Option<Session> {
        self.by_name.get(name).map(|state| state.session)
    }

    /// Why a process will not come back; `None` if it is there, or may be again.
    pub fn gone(&self, name: &str) -> Option<String> {
        let absence = self.by_name.get(name)?.link.as_ref().err()?;
        absence.ended.then(|| absence.reason.clone())
    }

    pub fn heard(&mut self, link: &Link, now: Instant) {
        if let Some(state) = self.by_name.get_mut(&link.peer).filter(|state| state.session == link.session) {
            state.heard = now;
        }
    }

    /// Enters that a connection is no more; false if it was not the current one.
    fn leave(&mut self, link: &Link, absence: Absence) -> bool {
        let is_current =
            |state: &&mut State| state.link.as_ref().is_ok_and(|current| std::ptr::eq(Arc::as_ptr(current), link));
        self.by_name.get_mut(&link.peer).filter(is_current).map(|state| state.link = Err(absence)).is_some()
    }

    fn silent(&self, now: Instant, lease: Duration) -> Vec<Arc<str>> {
        let over = |state: &State| now.duration_since(state.heard) > lease && !state.is_ended();
        self.by_name.iter().filter(|(_, state)| over(state)).map(|(name, _)| Arc::clone(name)).collect()
    }
}

impl State {
    fn is_ended(&self) -> bool {
        self.link.as_ref().is_err_and(|absence| absence.ended)
    }
}

/// Enters a new connection. `told` is what this end said it holds there, as of when it said it: what
/// changed since is sent first. Without it, `told` is said now.
pub(crate) fn attach(endpoint: &Endpoint, link: &Arc<Link>, told: Option<&Snapshot>) {
    let shared = endpoint.shared();
    let holdings = lock(&shared.holdings);
    match told {
        Some(before) => {
            for change in holdings.since(before, link.session) {
                link.send(match change {
                    Change::Retain(object) => proto::frame::Kind::Retain(proto::Retain { object }),
                    Change::Release(object) => proto::frame::Kind::Release(proto::Release { object }),
                    Change::End(context) => proto::frame::Kind::EndContext(proto::EndContext { context }),
                });
            }
        }
        None => {
            let snapshot = holdings.snapshot(link.session);
            link.send(proto::frame::Kind::Hello(hello(endpoint, link.session, &snapshot)));
        }
    }
    let state = State { session: link.session, heard: Instant::now(), link: Ok(Arc::clone(link)) };
    let before = lock(&shared.peers).by_name.insert(Arc::clone(&link.peer), state);
    drop(holdings);
    shared.peers_changed.notify_all();
    if let Some(before) = before {
        if let Ok(old) = before.link {
            old.close("it was replaced by a new connection");
        }
        if before.session != link.session {
            tracing::info!(peer = %link.peer, "peer was restarted; what it held is freed");
            forget(endpoint, before.session);
        }
    }
}

/// Who this end is and what it holds at `session`.
pub(crate) fn hello(endpoint: &Endpoint, session: Session, held: &Snapshot) -> proto::Hello {
    let shared = endpoint.shared();
    proto::Hello {
        job_uid: shared.settings.job_uid.clone(),
        name: shared.name.to_string(),
        session: shared.session,
        held_at: session,
        held: held.references.iter().map(|(&object, &count)| proto::Held { object, count }).collect(),
        contexts: held.contexts.iter().copied().collect(),
    }
}

/// Leaves a connection that ended, unless a new one has replaced it.
pub(crate) fn detach(endpoint: &Endpoint, link: &Link, reason: &str, ended: bool) {
    let left = lock(&endpoint.shared().peers).leave(link, Absence { reason: reason.to_owned(), ended });
    // Only now: who learns here that a call is lost may call again at once, and must not find this connection.
    link.close(reason);
    if left {
        endpoint.shared().peers_changed.notify_all();
        if ended {
            forget(endpoint, link.session);
        }
    }
}

/// Frees what a dead process held.
fn forget(endpoint: &Endpoint, session: Session) {
    endpoint.shared().host.reconcile(session, &HashMap::new());
    endpoint.shared().contexts.reconcile(endpoint, session, &[]);
}

/// The connection to a peer; waits until `deadline` for one that is expected.
pub(crate) fn link_to(
    endpoint: &Endpoint,
    peer: &str,
    call: &str,
    deadline: Instant,
) -> Result<Arc<Link>, RemoteError> {
    let shared = endpoint.shared();
    let unreachable = |reason: String| RemoteError::Unreachable { peer: peer.into(), call: call.into(), reason };
    let mut peers = lock(&shared.peers);
    loop {
        if shared.stopping.is_cancelled() {
            return Err(unreachable(format!("{} is ending", shared.name)));
        }
        let reason = match peers.by_name.get(peer).map(|state| &state.link) {
            Some(Ok(link)) => return Ok(Arc::clone(link)),
            Some(Err(absence)) if absence.ended => return Err(unreachable(absence.reason.clone())),
            Some(Err(absence)) => absence.reason.clone(),
            None => "it has not connected".to_owned(),
        };
        let Some(left) = deadline.checked_duration_since(Instant::now()) else {
            return Err(unreachable(reason));
        };
        peers = shared.peers_changed.wait_timeout(peers, left).unwrap_or_else(PoisonError::into_inner).0;
    }
}

/// Renews this process's leases elsewhere, and ends those of processes that went silent.
pub(crate) async fn keep_leases(endpoint: Endpoint) {
    let lease = endpoint.shared().settings.lease;
    let mut ticks = tokio::time::interval(lease / 4);
    loop {
        ticks.tick().await;
        endpoint.shared().lease_checks.fetch_add(1, Ordering::Relaxed);
        let (links, silent) = {
            let peers = lock(&endpoint.shared().peers);
            (peers.links().collect::<Vec<_>>(), peers.silent(Instant::now(), lease))
        };
        for link in links {
            link.send(proto::frame::Kind::Heartbeat(proto::Heartbeat {}));
        }
        for name in silent {
            end_lease(&endpoint, &name, &format!("it was silent for {lease:?}"));
        }
    }
}

fn end_lease(endpoint: &Endpoint, name: &str, reason: &str) {
    let (session, link) = {
        let mut peers = lock(&endpoint.shared().peers);
        let Some(state) = peers.by_name.get_mut(name) else { return };
        let absence = Absence { reason: reason.to_owned(), ended: true };
        (state.session, std::mem::replace(&mut state.link, Err(absence)).ok())
    };
    tracing::warn!(peer = name, reason, "peer is lost; what it held is freed");
    if let Some(link) = link {
        link.close(reason);
    }
    endpoint.shared().peers_changed.notify_all();
    forget(endpoint, session);
}
