//! Decides about the lease of the election, by the clock of this process alone: what a candidate does next, and whether
//! the leader may still write. [`crate::leader`] asks the API server.
//!
//! A leader whose requests fail cannot know whether another one leads by now. So it stops writing a while before its lease
//! runs out for the others, who wait the whole duration after they last saw it renewed.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How long a lease lasts: the longest time until a dead leader is replaced.
pub const DURATION: Duration = Duration::from_secs(8);
/// How often the leader renews it, and others look at it.
pub const INTERVAL: Duration = Duration::from_secs(2);
/// How long before its end the leader stops writing, for requests that are under way.
const MARGIN: Duration = Duration::from_secs(2);
/// How long the API server may take to answer the renewal.
pub const ANSWER: Duration = Duration::from_secs(2);
/// How long caches may be behind after requests have failed: a watch that hears nothing is begun anew within that time.
const BEHIND: Duration = Duration::from_secs(300);

/// The lease as it was seen last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sighting {
    /// Name of its holder; empty if it has none.
    pub holder: String,
    /// Its resource version.
    pub version: String,
    /// How often it has changed hands.
    pub transitions: i32,
    /// How long it lasts, as its holder says.
    pub duration: Duration,
    /// When this version was first seen.
    pub since: Instant,
}

impl Sighting {
    /// Returns what is known after the lease was seen again: an unchanged version keeps its time.
    #[must_use]
    pub fn after(self, before: Option<&Self>) -> Self {
        match before {
            Some(before) if before.version == self.version => Self { since: before.since, ..self },
            _ => self,
        }
    }
}

/// The next action of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Creates the lease as its holder.
    Create,
    /// Renews it, or takes over a lease that was given back or has run out.
    Hold,
    /// Looks again later.
    Wait,
}

/// Decides what the candidate `me` does next with the lease that was seen last, if there is one.
#[must_use]
pub fn step(seen: Option<&Sighting>, me: &str, now: Instant) -> Step {
    match seen {
        None => Step::Create,
        Some(seen) if seen.holder == me || seen.holder.is_empty() => Step::Hold,
        Some(seen) if now.saturating_duration_since(seen.since) >= seen.duration => Step::Hold,
        Some(_) => Step::Wait,
    }
}

/// The right of this process to write.
#[derive(Debug)]
pub struct Tenure(Mutex<State>);

#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// No other operator writes, so that no lease is needed.
    unlimited: bool,
    /// When the last renewal that succeeded was sent.
    renewed: Option<Instant>,
    /// When requests last worked again after they had not.
    recovered: Option<Instant>,
}

impl Tenure {
    /// The right of an operator that takes part in no election.
    #[must_use]
    pub fn unlimited() -> Self {
        Self(Mutex::new(State { unlimited: true, ..State::default() }))
    }

    /// The right of a candidate, which has none before the first renewal.
    #[must_use]
    pub fn elected() -> Self {
        Self(Mutex::new(State::default()))
    }

    /// Notes that the renewal which was sent at `asked` succeeded.
    pub fn renewed(&self, asked: Instant) {
        let mut state = self.0.lock();
        let is_late = |before: Instant| asked.saturating_duration_since(before) > INTERVAL + ANSWER;
        if state.renewed.is_some_and(is_late) {
            state.recovered = Some(asked);
        }
        state.renewed = Some(asked);
    }

    /// Notes that another operator holds the lease, or that it was given back.
    pub fn end(&self) {
        let mut state = self.0.lock();
        // The next term begins with new watches.
        (state.renewed, state.recovered) = (None, None);
    }

    /// Returns true if this process may write at `now`.
    #[must_use]
    pub fn holds(&self, now: Instant) -> bool {
        let state = *self.0.lock();
        let lasts = |renewed: Instant| now.saturating_duration_since(renewed) < DURATION - MARGIN;
        state.unlimited || state.renewed.is_some_and(lasts)
    }

    /// Returns true if the watches may still show what was true before requests failed, so that a job must be read again
    /// before pods are created for it.
    #[must_use]
    pub fn caches_may_be_behind(&self, now: Instant) -> bool {
        let recent = |recovered: Instant| now.saturating_duration_since(recovered) < BEHIND;
        self.0.lock().recovered.is_some_and(recent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(holder: &str, version: &str, since: Instant) -> Sighting {
        let (holder, version) = (holder.to_owned(), version.to_owned());
        Sighting { holder, version, transitions: 0, duration: DURATION, since }
    }

    #[test]
    fn a_candidate_takes_a_lease_that_is_free_or_was_not_renewed_for_its_duration() {
        let start = Instant::now();
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        let rows = [
            ("there is none", None, 0.0, Step::Create),
            ("its own", Some(seen("me", "1", start)), 0.0, Step::Hold),
            ("its own, long ago", Some(seen("me", "1", start)), 100.0, Step::Hold),
            ("given back", Some(seen("", "1", start)), 0.0, Step::Hold),
            ("another's, just seen", Some(seen("you", "1", start)), 0.0, Step::Wait),
            ("another's, not over", Some(seen("you", "1", start)), 7.9, Step::Wait),
            ("another's, over", Some(seen("you", "1", start)), 8.0, Step::Hold),
        ];
        for (label, lease, now, want) in rows {
            assert_eq!(step(lease.as_ref(), "me", at(now)), want, "{label}");
        }
        let again = seen("you", "1", at(5.0)).after(Some(&seen("you", "1", start)));
        assert_eq!(step(Some(&again), "me", at(8.0)), Step::Hold, "it is the same renewal, seen again");
        let renewed = seen("you", "2", at(5.0)).after(Some(&seen("you", "1", start)));
        assert_eq!(step(Some(&renewed), "me", at(8.0)), Step::Wait, "it was renewed");
    }

    #[test]
    fn the_right_to_write_ends_before_another_may_take_the_lease() {
        let start = Instant::now();
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        let tenure = Tenure::elected();
        assert!(!tenure.holds(start), "not before the first renewal");
        tenure.renewed(start);
        for (now, want) in [(0.0, true), (5.9, true), (6.0, false), (8.0, false), (1000.0, false)] {
            assert_eq!(tenure.holds(at(now)), want, "{now} s after the renewal");
        }
        tenure.renewed(at(4.0));
        assert!(tenure.holds(at(9.9)));
        tenure.end();
        assert!(!tenure.holds(at(4.1)));
        assert!(Tenure::unlimited().holds(at(1000.0)), "without an election");
    }

    #[test]
    fn caches_are_confirmed_for_a_while_after_requests_have_failed() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let tenure = Tenure::elected();
        for second in [0, 2, 4, 8] {
            tenure.renewed(at(second));
            assert!(!tenure.caches_may_be_behind(at(second)), "renewed in time at {second} s");
        }
        tenure.renewed(at(13));
        for (now, want) in [(13, true), (312, true), (313, false)] {
            assert_eq!(tenure.caches_may_be_behind(at(now)), want, "at {now} s");
        }
        tenure.end();
        tenure.renewed(at(30));
        assert!(!tenure.caches_may_be_behind(at(30)), "a term begins with new caches");
        assert!(!Tenure::unlimited().caches_may_be_behind(at(30)));
    }
}
