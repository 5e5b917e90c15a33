//! Takes what a rank's neighbours send to it: an object that they call, and that never waits. Each meeting of two neighbours has a
//! token, so that what was sent in a ring before is distinguished from what belongs to this one; chunks have numbers, so
//! that one that is sent again after a reconnect is taken once.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::{Condvar, Mutex, MutexGuard};
use psjobs_rpc::{Call, Methods, Registry, RemoteError, RemoteObject};

use super::{Place, trainer_name};

/// The name of the object in calls, and of its methods.
pub const OBJECT: &str = "psjobs/ring";
/// The rank before begins to send, with a token: (token, rank, size).
pub const JOIN: &str = "join";
/// The rank before sends a chunk of values: (token, number, values). Returns the number of the chunk that is missing
/// next; [`OTHER_RING`] if the token is not known any more.
pub const PUT: &str = "put";
/// A neighbour has done its work: (token).
pub const DONE: &str = "done";
/// The rank before reports that a rank is lost, perhaps itself: (token, rank, reason).
pub const LOST: &str = "lost";
/// The answer to [`PUT`] from a rank that has left the ring.
pub const OTHER_RING: i64 = -1;

/// One for each process.
#[derive(Clone)]
pub struct Inbox {
    shared: Arc<Shared>,
}

struct Shared {
    place: Place,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The token under which this rank sends to the next one.
    to_next: i64,
    next_is_done: bool,
    from_before: Option<FromBefore>,
    /// The rank that is lost, and the reason.
    lost: Option<(u32, String)>,
    /// Something has arrived since it was waited for last.
    has_changed: bool,
}

/// The chunks of the rank before since it joined.
struct FromBefore {
    token: i64,
    /// This rank's ring has begun to take from it.
    taken: bool,
    /// The number of the chunk that is missing next.
    missing: i64,
    chunks: VecDeque<Bytes>,
    is_done: bool,
}

/// The next message of the rank before.
pub enum Arrival {
    Nothing,
    Values(Bytes),
    Done,
    Lost { rank: u32, reason: String },
}

impl Inbox {
    /// Registers the object that neighbours call.
    pub fn offer(registry: &mut Registry, place: Place) -> Self {
        let inbox = Self { shared: Arc::new(Shared { place, state: Mutex::default(), changed: Condvar::new() }) };
        let offered = inbox.clone();
        registry.object(OBJECT, move |_, ()| Ok(offered.clone()));
        inbox
    }

    pub fn place(&self) -> Place {
        self.shared.place
    }

    /// Begins a ring in which this rank sends under `token`.
    pub fn begin(&self, token: i64) {
        let mut state = self.state();
        // What has joined meanwhile belongs to the new ring.
        let from_before = state.from_before.take().filter(|from| !from.taken);
        *state = State { to_next: token, from_before, ..State::default() };
    }

    /// Takes the rank before into the ring, if it has joined; returns its token.
    pub fn accept(&self) -> Option<i64> {
        let mut state = self.state();
        let from = state.from_before.as_mut().filter(|from| !from.taken)?;
        from.taken = true;
        Some(from.token)
    }

    /// Takes the next chunk that has arrived under `token`.
    pub fn take(&self, token: i64) -> Arrival {
        let mut state = self.state();
        if let Some(values) = state.of_ring(token).and_then(|from| from.chunks.pop_front()) {
            return Arrival::Values(values);
        }
        match self.trouble(&mut state, token) {
            Some((rank, reason)) => Arrival::Lost { rank, reason },
            None if state.of_ring(token).is_some_and(|from| from.is_done) => Arrival::Done,
            None => Arrival::Nothing,
        }
    }

    /// Returns the rank that is lost, and the reason, if the ring of `token` has lost one.
    pub fn lost(&self, token: i64) -> Option<(u32, String)> {
        self.trouble(&mut self.state(), token)
    }

    /// Returns whether the next rank and the one before have done their work.
    pub fn done(&self, token: i64) -> (bool, bool) {
        let mut state = self.state();
        (state.next_is_done, state.of_ring(token).is_some_and(|from| from.is_done))
    }

    /// Waits until something has arrived since the last call, `limit` at most.
    pub fn wait(&self, limit: Duration) {
        let mut state = self.state();
        if !state.has_changed {
            self.shared.changed.wait_for(&mut state, limit);
        }
        state.has_changed = false;
    }

    /// Wakes the thread that waits.
    fn arrived(&self) {
        self.state().has_changed = true;
        self.shared.changed.notify_one();
    }

    fn trouble(&self, state: &mut State, token: i64) -> Option<(u32, String)> {
        if state.of_ring(token).is_none() {
            return Some((self.shared.place.before(), "it has left the ring".to_owned()));
        }
        state.lost.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock()
    }

    fn join(&self, call: &Call, (token, rank, size): (i64, i64, i64)) -> Result<(), RemoteError> {
        let place = self.shared.place;
        let before = trainer_name(place.before());
        if *call.caller != *before || (rank, size) != (place.before().into(), place.size.into()) {
            let (own, ours) = (place.rank, place.size);
            let text = format!("trainer {own} of {ours} takes values from {before}, not from trainer {rank} of {size}");
            return Err(RemoteError::new(text));
        }
        let mut state = self.state();
        let again = state.from_before.as_ref().is_some_and(|from| from.token == token);
        if !again {
            let chunks = VecDeque::new();
            state.from_before = Some(FromBefore { token, taken: false, missing: 0, chunks, is_done: false });
        }
        Ok(())
    }

    fn put(&self, (token, number, values): (i64, i64, Bytes)) -> i64 {
        let mut state = self.state();
        let Some(from) = state.from_before.as_mut().filter(|from| from.token == token) else { return OTHER_RING };
        if number == from.missing {
            from.missing += 1;
            from.chunks.push_back(values);
        }
        from.missing
    }

    fn mark_done(&self, token: i64) {
        let mut state = self.state();
        state.next_is_done |= state.to_next == token;
        if let Some(from) = state.from_before.as_mut().filter(|from| from.token == token) {
            from.is_done = true;
        }
    }

    fn mark_lost(&self, (token, rank, reason): (i64, i64, String)) {
        let mut state = self.state();
        match &state.from_before {
            // It has left before this rank's ring began.
            Some(from) if from.token == token && !from.taken => state.from_before = None,
            Some(from) if from.token == token => {
                state.lost.get_or_insert((u32::try_from(rank).unwrap_or(u32::MAX), reason));
            }
            // This is about a ring that this rank has left.
            _ => {}
        }
    }
}

impl State {
    /// Returns what the rank before has sent in the ring of `token`.
    fn of_ring(&mut self, token: i64) -> Option<&mut FromBefore> {
        self.from_before.as_mut().filter(|from| from.taken && from.token == token)
    }
}

impl RemoteObject for Inbox {
    fn methods(methods: &mut Methods<Self>) {
        methods
            .add_quick(JOIN, |inbox, call, joined| {
                inbox.join(call, joined)?;
                inbox.arrived();
                Ok(())
            })
            .add_quick(PUT, |inbox, _, chunk| {
                let missing = inbox.put(chunk);
                inbox.arrived();
                Ok(missing)
            })
            .add_quick(DONE, |inbox, _, token: i64| {
                inbox.mark_done(token);
                inbox.arrived();
                Ok(())
            })
            .add_quick(LOST, |inbox, _, lost| {
                inbox.mark_lost(lost);
                inbox.arrived();
                Ok(())
            });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inbox(joined: i64) -> Inbox {
        let inbox = Inbox::offer(&mut Registry::default(), Place { rank: 1, size: 3 });
        inbox.begin(70);
        inbox.state().from_before =
            Some(FromBefore { token: joined, taken: false, missing: 0, chunks: VecDeque::new(), is_done: false });
        inbox
    }

    fn taken(inbox: &Inbox, token: i64) -> String {
        match inbox.take(token) {
            Arrival::Nothing => "nothing".into(),
            Arrival::Values(values) => format!("{values:?}"),
            Arrival::Done => "done".into(),
            Arrival::Lost { rank, reason } => format!("{rank}: {reason}"),
        }
    }

    #[test]
    fn chunks_are_taken_once_and_in_order() {
        let inbox = inbox(7);
        assert_eq!(inbox.put((7, 0, "a".into())), 1, "before the ring begins here");
        assert_eq!(inbox.accept(), Some(7));
        assert_eq!(inbox.accept(), None, "once");
        for (label, number, text, want) in [
            ("again", 0, "a", 1),
            ("the next", 1, "b", 2),
            ("one is missing before it", 3, "d", 2),
            ("that one", 2, "c", 3),
        ] {
            assert_eq!(inbox.put((7, number, text.into())), want, "{label}");
        }
        assert_eq!(inbox.put((8, 0, "x".into())), OTHER_RING);
        inbox.mark_done(7);
        for want in ["b\"a\"", "b\"b\"", "b\"c\"", "done"] {
            assert_eq!(taken(&inbox, 7), want);
        }
        assert_eq!(inbox.done(7), (false, true));
        inbox.mark_done(70);
        assert_eq!(inbox.done(7), (true, true));
    }

    #[test]
    fn a_loss_counts_in_its_own_ring_only() {
        let inbox = inbox(7);
        inbox.accept();
        inbox.mark_lost((5, 2, "another ring".into()));
        assert_eq!(taken(&inbox, 7), "nothing");
        inbox.mark_lost((7, 2, "it was silent".into()));
        assert_eq!(inbox.lost(7), Some((2, "it was silent".into())));
        inbox.begin(71);
        assert_eq!(taken(&inbox, 7), "0: it has left the ring", "for what still runs of the ring before");
        assert_eq!(inbox.accept(), None, "it has to join again");
    }

    #[test]
    fn a_rank_that_joins_and_leaves_before_the_ring_begins_is_awaited_again() {
        let inbox = inbox(7);
        inbox.mark_lost((7, 0, "it has left the ring".into()));
        assert_eq!(inbox.accept(), None);
    }
}
