//! Connects a rank to its neighbours: it calls the one that is next and is called by the one before, over one connection
//! for each pair, which the lower rank makes. The neighbours meet again when one of them was lost.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use psjobs_ps::retry::LOG_INTERVAL;
use psjobs_rpc::{Endpoint, RRef, RemoteError};

use super::inbox::{Inbox, JOIN, OBJECT};
use super::neighbours::{Neighbour, Neighbours};
use super::{Place, RingError, trainer_name};

/// The time limit of one attempt to find, connect to or call a neighbour.
const TRY: Duration = Duration::from_secs(2);
/// How often a rank that waits looks again.
const LOOK: Duration = Duration::from_millis(50);
/// How often it asks who has finished.
const ASK: Duration = Duration::from_secs(1);

/// A rank's means to meet its neighbours.
pub struct Meeting {
    endpoint: Endpoint,
    inbox: Inbox,
    /// The address at which each neighbour was connected to last.
    dialled: BTreeMap<u32, String>,
}

/// The neighbours that have met this rank so far.
#[derive(Default)]
struct Met {
    /// The next rank's inbox, after it has let this rank join.
    next: Option<(RRef, Option<u64>)>,
    before: Option<(i64, RRef, Option<u64>)>,
}

impl Meeting {
    /// `inbox` was offered by the registry of `endpoint`, which listens for other trainers.
    #[must_use]
    pub fn new(endpoint: Endpoint, inbox: Inbox) -> Self {
        Self { endpoint, inbox, dialled: BTreeMap::new() }
    }

    /// Begins a ring: meets both neighbours. `locate` returns where a trainer listens, waiting so long at most, `finished`
    /// the trainers that have done all their steps. `interrupt` ends the wait.
    ///
    /// # Errors
    /// If a neighbour does not come within `timeout`, or a trainer has finished: no ring of all is possible then.
    pub fn meet(
        &mut self,
        locate: impl Fn(&str, Duration) -> Result<String, RemoteError>,
        finished: impl Fn() -> Vec<u32>,
        timeout: Duration,
        interrupt: &AtomicBool,
    ) -> Result<Neighbours, RingError> {
        let place = self.inbox.place();
        let token = rand::random();
        self.inbox.begin(token);
        let (begun, mut met, mut due, mut asked) = (Instant::now(), Met::default(), LOG_INTERVAL, None);
        loop {
            let missing = match self.meet_once(&mut met, token, &locate) {
                Ok(None) => break,
                Ok(Some(rank)) => (rank, "it has not connected".to_owned()),
                Err((rank, error)) => (rank, error.to_string()),
            };
            if interrupt.load(Ordering::Relaxed) {
                return Err(RingError::Interrupted);
            }
            if asked.is_none_or(|asked: Instant| asked.elapsed() >= ASK) {
                asked = Some(Instant::now());
                if let Some(rank) = finished().into_iter().find(|rank| *rank != place.rank) {
                    return Err(RingError::Finished { rank });
                }
            }
            if begun.elapsed() >= timeout {
                let (rank, reason) = missing;
                return Err(RingError::Absent { rank, seconds: timeout.as_secs(), reason });
            }
            if begun.elapsed() >= due {
                let (rank, reason) = missing;
                tracing::info!(%reason, seconds = begun.elapsed().as_secs(), "waiting for trainer {rank}");
                due = begun.elapsed() + LOG_INTERVAL;
            }
            self.inbox.wait(LOOK);
        }
        let Met { next: Some((next, session)), before: Some((from, before, before_session)) } = met else {
            unreachable!("both have met this rank")
        };
        let next = Neighbour { rank: place.next(), token, inbox: next, session };
        let before = Neighbour { rank: place.before(), token: from, inbox: before, session: before_session };
        Ok(Neighbours::new(self.endpoint.clone(), self.inbox.clone(), next, before))
    }

    /// Does what can be done now. Returns a neighbour that is still missing, with the error if there was one.
    fn meet_once(
        &mut self,
        met: &mut Met,
        token: i64,
        locate: impl Fn(&str, Duration) -> Result<String, RemoteError>,
    ) -> Result<Option<u32>, (u32, RemoteError)> {
        let Place { rank, size } = self.inbox.place();
        let (next, before) = (self.inbox.place().next(), self.inbox.place().before());
        for other in [next, before].into_iter().filter(|other| *other > rank) {
            self.connect(other, &locate).map_err(|error| (other, error))?;
        }
        let session = |rank| self.endpoint.session(&trainer_name(rank));
        if met.next.as_ref().is_none_or(|(_, joined)| *joined != session(next)) {
            met.next = None;
            if let Some(inbox) = self.inbox_of(next).map_err(|error| (next, error))? {
                let joined = session(next);
                let join = inbox.rpc_sync::<()>(JOIN, (token, i64::from(rank), i64::from(size)));
                join.map_err(|error| (next, error))?;
                met.next = Some((inbox, joined));
            }
        }
        if met.before.as_ref().is_some_and(|(from, ..)| self.inbox.lost(*from).is_some()) {
            met.before = None;
        }
        if met.before.is_none()
            && let Some(inbox) = self.inbox_of(before).map_err(|error| (before, error))?
            && let Some(from) = self.inbox.accept()
        {
            met.before = Some((from, inbox, session(before)));
        }
        Ok(if met.next.is_none() { Some(next) } else { met.before.is_none().then_some(before) })
    }

    /// Connects to a higher rank, unless it is connected and listens where it did.
    fn connect(
        &mut self,
        rank: u32,
        locate: impl Fn(&str, Duration) -> Result<String, RemoteError>,
    ) -> Result<(), RemoteError> {
        let name = trainer_name(rank);
        let known = self.dialled.get(&rank);
        let address = locate(&name, TRY)?;
        if self.endpoint.absence(&name).is_none() && known == Some(&address) {
            return Ok(());
        }
        self.endpoint.connect(&name, &address, TRY)?;
        self.dialled.insert(rank, address);
        Ok(())
    }

    /// Returns the inbox of a rank, if it is connected.
    fn inbox_of(&self, rank: u32) -> Result<Option<RRef>, RemoteError> {
        let name = trainer_name(rank);
        if self.endpoint.absence(&name).is_some() {
            return Ok(None);
        }
        self.endpoint.peer(&name).timeout(TRY).singleton(OBJECT, ()).map(Some)
    }
}
