//! The peers that this process knows: their connections, and when they were last heard. Does no I/O.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use psjobs_ps::clock::Checks;

use super::link::Link;
use crate::ids::Session;

#[derive(Debug, Default)]
pub(crate) struct Peers {
    by_name: HashMap<Arc<str>, State>,
    checks: Checks,
}

#[derive(Debug)]
struct State {
    session: Session,
    incarnation: u32,
    heard: Instant,
    link: Result<Arc<Link>, Absence>,
}

/// A process was replaced by one of a higher incarnation.
#[derive(Debug, thiserror::Error)]
#[error("{name} was replaced: this is its incarnation {incarnation}, and {known} has connected before")]
pub(crate) struct Superseded {
    name: String,
    incarnation: u32,
    known: u32,
}

/// A connection and session that a new connection has replaced.
pub(crate) struct Replaced {
    pub session: Session,
    pub link: Option<Arc<Link>>,
}

/// Since when and why there is no connection.
#[derive(Clone, Debug)]
pub struct Absence {
    pub since: Instant,
    pub reason: String,
    /// True if the process will not come back: it said goodbye, or its lease is over.
    pub ended: bool,
    /// True if its lease is over.
    pub lease_over: bool,
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

    /// Returns the connection to a peer, or why there is none; `None` for one that never connected.
    pub fn state(&self, name: &str) -> Option<Result<Arc<Link>, Absence>> {
        self.by_name.get(name).map(|state| state.link.clone())
    }

    /// Refuses a process that was replaced: one of a lower incarnation than was known under its name before.
    pub fn check(&self, name: &str, incarnation: u32) -> Result<(), Superseded> {
        match self.by_name.get(name) {
            Some(known) if incarnation < known.incarnation => {
                Err(Superseded { name: name.to_owned(), incarnation, known: known.incarnation })
            }
            _ => Ok(()),
        }
    }

    /// Sets the connection to a peer, and returns the one before it.
    pub fn enter(&mut self, link: &Arc<Link>, now: Instant) -> Result<Option<Replaced>, Superseded> {
        self.check(&link.peer, link.incarnation)?;
        let (session, incarnation) = (link.session, link.incarnation);
        let state = State { session, incarnation, heard: now, link: Ok(Arc::clone(link)) };
        let before = self.by_name.insert(Arc::clone(&link.peer), state);
        Ok(before.map(|before| Replaced { session: before.session, link: before.link.ok() }))
    }

    /// Marks a peer as gone for good, and returns the connection that it had.
    pub fn end(&mut self, name: &str, reason: &str, lease_over: bool, now: Instant) -> Option<Replaced> {
        let state = self.by_name.get_mut(name)?;
        let absence = Absence { since: now, reason: reason.to_owned(), ended: true, lease_over };
        Some(Replaced { session: state.session, link: std::mem::replace(&mut state.link, Err(absence)).ok() })
    }

    /// Returns why a process will not come back; `None` if it is connected or may connect again.
    pub fn gone(&self, name: &str) -> Option<String> {
        let absence = self.by_name.get(name)?.link.as_ref().err()?;
        absence.ended.then(|| absence.reason.clone())
    }

    /// Returns whether the lease of a process is over, which connects again: this process has let go of what it held.
    pub fn is_lease_over(&self, name: &str, session: Session) -> bool {
        let is_over = |state: &State| state.link.as_ref().is_err_and(|absence| absence.lease_over);
        self.by_name.get(name).is_some_and(|state| state.session == session && is_over(state))
    }

    pub fn heard(&mut self, link: &Link, now: Instant) {
        if let Some(state) = self.by_name.get_mut(&link.peer).filter(|state| state.session == link.session) {
            state.heard = now;
        }
    }

    /// Removes a connection that has ended; false if it was not the current one.
    pub fn leave(&mut self, link: &Link, absence: Absence) -> bool {
        let is_current =
            |state: &&mut State| state.link.as_ref().is_ok_and(|current| std::ptr::eq(Arc::as_ptr(current), link));
        self.by_name.get_mut(&link.peer).filter(is_current).map(|state| state.link = Err(absence)).is_some()
    }

    /// Checks the leases: returns the names of the peers whose lease has run out. Peers get a new lease if the check before
    /// was more than half a lease ago: this process stood still, and what they sent meanwhile may not be read yet.
    pub fn silent(&mut self, now: Instant, lease: Duration) -> Vec<Arc<str>> {
        if self.checks.come_late(now, lease / 2) {
            self.by_name.values_mut().for_each(|state| state.heard = now);
        }
        let over = |state: &State| now.duration_since(state.heard) > lease && !state.is_ended();
        self.by_name.iter().filter(|(_, state)| over(state)).map(|(name, _)| Arc::clone(name)).collect()
    }
}

impl State {
    fn is_ended(&self) -> bool {
        self.link.as_ref().is_err_and(|absence| absence.ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(20);

    #[test]
    fn a_peer_is_silent_after_a_lease_in_which_this_process_looked() {
        let rows = [
            ("looked in time", &[5, 10, 15, 20, 25][..], &[25][..]),
            ("stood still for more than half a lease", &[5, 10, 35, 40, 45, 50, 55, 60], &[60]),
            ("stood still twice", &[5, 10, 25, 30, 50, 55], &[]),
            ("was late by less", &[5, 10, 20, 24], &[24]),
        ];
        for (label, checks, want) in rows {
            let start = Instant::now();
            let link = Arc::new(Link::new("trainer-0".into(), (7, 0), Link::channel().0));
            let mut peers = Peers::default();
            peers.enter(&link, start).expect("it is the first");
            let mut at = |seconds: &u64| !peers.silent(start + Duration::from_secs(*seconds), LEASE).is_empty();
            let silent: Vec<u64> = checks.iter().copied().filter(|seconds| at(seconds)).collect();
            assert_eq!(silent, want, "{label}");
        }
    }
}
