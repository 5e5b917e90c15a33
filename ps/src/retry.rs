//! Repeats an operation that failed for a reason that may pass. [`Attempts`] decides, from the time alone, when the next
//! attempt is made and when to give up; [`retry`] calls and waits. All retry loops of the trainers, servers and remote
//! objects use it, so they share its rules: a permanent failure and a cancellation end the loop at once, pauses grow up
//! to a limit and are spread, and no attempt begins after the deadline.

use std::time::Duration;

use tokio::time::Instant;

/// Stands for no limit where a wait needs one. No process lives so long, and any time has a time so much later.
pub const WITHOUT_LIMIT: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// How often the log names what a process waits for.
pub const LOG_INTERVAL: Duration = Duration::from_secs(30);

/// When an operation is attempted again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    first: Duration,
    longest: Duration,
    jitter: Option<u32>,
    limit: Option<Limit>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Limit {
    SinceStart(Duration),
    SinceFailure(Duration),
}

impl Schedule {
    /// Pauses for the same time after every failure, without a limit.
    #[must_use]
    pub const fn every(pause: Duration) -> Self {
        Self::growing(pause, pause)
    }

    /// Pauses for `first` after the first failure, twice as long after each further one, up to `longest`; without a
    /// limit.
    #[must_use]
    pub const fn growing(first: Duration, longest: Duration) -> Self {
        Self { first, longest, jitter: None, limit: None }
    }

    /// Shortens each pause to a share between a half and all of it, which depends on `key`: callers with different keys
    /// that fail together do not return together.
    #[must_use]
    pub const fn spread_by(mut self, key: u32) -> Self {
        self.jitter = Some(key);
        self
    }

    /// Gives up when the next attempt would begin `limit` after the start or later.
    #[must_use]
    pub const fn within(mut self, limit: Duration) -> Self {
        self.limit = Some(Limit::SinceStart(limit));
        self
    }

    /// Gives up when the next attempt would begin `limit` after the first failure or later, for operations whose
    /// answer may take any time.
    #[must_use]
    pub const fn failing_for(mut self, limit: Duration) -> Self {
        self.limit = Some(Limit::SinceFailure(limit));
        self
    }
}

/// The attempts made so far by a [`Schedule`].
#[derive(Clone, Debug)]
pub struct Attempts {
    schedule: Schedule,
    failures: u32,
    /// The next pause, before jitter.
    pause: Duration,
    first_failure: Option<Duration>,
}

impl Attempts {
    /// Begins with no failure.
    #[must_use]
    pub const fn new(schedule: Schedule) -> Self {
        Self { schedule, failures: 0, pause: schedule.first, first_failure: None }
    }

    /// Records a failure at `elapsed` after the start; returns the pause before the next attempt, `None` if the limit
    /// allows no further attempt.
    pub fn failed(&mut self, elapsed: Duration) -> Option<Duration> {
        let (pause, first) = (self.pause, *self.first_failure.get_or_insert(elapsed));
        let next = elapsed.saturating_add(pause);
        let over = match self.schedule.limit {
            None => false,
            Some(Limit::SinceStart(limit)) => next >= limit,
            Some(Limit::SinceFailure(limit)) => next.saturating_sub(first) >= limit,
        };
        if over {
            return None;
        }
        let share = self.schedule.jitter.map_or(1.0, |key| share(mix(key, self.failures)));
        self.failures = self.failures.saturating_add(1);
        self.pause = pause.saturating_mul(2).min(self.schedule.longest);
        Some(pause.mul_f64(share))
    }
}

/// Returns a key for [`Schedule::spread_by`] from two numbers. It is a hash, not random, so that a simulation is
/// repeatable.
#[must_use]
pub fn key(one: u32, other: u32) -> u32 {
    mix(one, other)
}

fn mix(mixed: u32, more: u32) -> u32 {
    let mixed = (mixed ^ more.rotate_left(16)).wrapping_add(1).wrapping_mul(0x9e37_79b1);
    mixed ^ (mixed >> 15)
}

/// Maps a hash to a share from 0.5 to 1.
fn share(hash: u32) -> f64 {
    0.5 + f64::from(hash) / f64::from(u32::MAX) / 2.0
}

/// Why an attempt did not succeed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure<P, R> {
    /// Another attempt would fail in the same way.
    Permanent(P),
    /// Another attempt may succeed.
    Transient(R),
}

/// Why an operation was given up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stopped<P, R> {
    /// The failure is permanent.
    Permanent(P),
    /// The limit was reached, with this failure.
    TimedOut(R),
    /// The caller cancelled it.
    Cancelled,
}

/// Waits between attempts, for a loop that cannot be a closure because it borrows more than [`retry`] allows.
pub struct Retries {
    start: Instant,
    attempts: Attempts,
}

impl Retries {
    /// Begins with the first attempt.
    #[must_use]
    pub fn new(schedule: Schedule) -> Self {
        Self { start: Instant::now(), attempts: Attempts::new(schedule) }
    }

    /// Records a failure and waits for the next attempt; returns false at once if the limit allows none.
    pub async fn pause(&mut self) -> bool {
        let Some(pause) = self.attempts.failed(self.start.elapsed()) else { return false };
        tokio::time::sleep(pause).await;
        true
    }
}

/// Repeats `attempt` as `schedule` says until it succeeds. `waits` is called before each pause, with the failure and the
/// time since the start. `cancelled` ends an attempt or a pause.
///
/// # Errors
/// Says why the operation was given up.
pub async fn retry<T, P, R, A: Future<Output = Result<T, Failure<P, R>>>>(
    schedule: Schedule,
    cancelled: impl Future<Output = ()>,
    mut attempt: impl FnMut() -> A,
    mut waits: impl FnMut(&R, Duration),
) -> Result<T, Stopped<P, R>> {
    let (start, mut attempts) = (Instant::now(), Attempts::new(schedule));
    let repeated = async {
        loop {
            let reason = match attempt().await {
                Ok(done) => return Ok(done),
                Err(Failure::Permanent(error)) => return Err(Stopped::Permanent(error)),
                Err(Failure::Transient(reason)) => reason,
            };
            let elapsed = start.elapsed();
            let Some(pause) = attempts.failed(elapsed) else { return Err(Stopped::TimedOut(reason)) };
            waits(&reason, elapsed);
            tokio::time::sleep(pause).await;
        }
    };
    tokio::select! {
        biased;
        done = repeated => done,
        () = cancelled => Err(Stopped::Cancelled),
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    /// Fails at each time after the start, in milliseconds; returns the pauses.
    fn pauses(schedule: Schedule, failures: &[u64]) -> Vec<Option<Duration>> {
        let mut attempts = Attempts::new(schedule);
        failures.iter().map(|elapsed| attempts.failed(MS(*elapsed))).collect()
    }

    #[test]
    fn pauses_grow_up_to_the_longest_and_end_at_the_limit() {
        let growing = Schedule::growing(MS(50), MS(150));
        let all = |pauses: &[u64]| pauses.iter().map(|pause| Some(MS(*pause))).collect::<Vec<_>>();
        assert_eq!(pauses(growing, &[0, 50, 150, 9_000_000]), all(&[50, 100, 150, 150]));
        assert_eq!(pauses(Schedule::every(MS(20)), &[0, 20, 9_000_000]), all(&[20, 20, 20]));
        for (schedule, failures, want) in [
            (growing.within(MS(1000)), [700, 899, 850], [Some(MS(50)), Some(MS(100)), None]),
            (growing.within(MS(1000)), [949, 950, 951], [Some(MS(50)), None, None]),
            (growing.failing_for(MS(1000)), [5000, 5899, 5850], [Some(MS(50)), Some(MS(100)), None]),
            (Schedule::every(Duration::ZERO).within(MS(10)), [9, 10, 11], [Some(MS(0)), None, None]),
            (growing.within(Duration::MAX), [0, 1, 2], [Some(MS(50)), Some(MS(100)), Some(MS(150))]),
        ] {
            assert_eq!(pauses(schedule, &failures), want, "{schedule:?} {failures:?}");
        }
    }

    #[test]
    fn jitter_differs_by_key_and_try_and_stays_between_half_and_all() {
        let of = |key| pauses(Schedule::every(MS(1000)).spread_by(key), &[0; 50]);
        let (one, other) = (of(key(0, 1)), of(key(1, 1)));
        assert_eq!(one, of(key(0, 1)), "the same key pauses alike");
        assert_ne!(one, other);
        assert_ne!(one[0], one[1]);
        assert!(one.iter().chain(&other).flatten().all(|pause| (MS(500)..=MS(1000)).contains(pause)), "{one:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn an_operation_ends_by_success_permanent_failure_limit_or_cancellation() {
        type Tried = Result<u32, Failure<&'static str, u32>>;
        let run = async |schedule: Schedule, cancel: Option<Duration>, succeeds: u32, permanent: u32| {
            let (mut tries, mut waits) = (0, 0);
            let cancelled = async {
                match cancel {
                    Some(after) => tokio::time::sleep(after).await,
                    None => pending().await,
                }
            };
            let attempt = || {
                tries += 1;
                std::future::ready::<Tried>(match tries {
                    tried if tried == succeeds => Ok(tried),
                    tried if tried == permanent => Err(Failure::Permanent("no")),
                    tried => Err(Failure::Transient(tried)),
                })
            };
            let done = retry(schedule, cancelled, attempt, |_, _| waits += 1).await;
            (done, waits)
        };
        let every = Schedule::every(MS(100));
        assert_eq!(run(every, None, 1, 9).await, (Ok(1), 0));
        assert_eq!(run(every, None, 4, 9).await, (Ok(4), 3));
        assert_eq!(run(every, None, 9, 3).await, (Err(Stopped::Permanent("no")), 2));
        assert_eq!(run(every.within(MS(250)), None, 9, 9).await, (Err(Stopped::TimedOut(3)), 2));
        assert_eq!(run(every, Some(MS(250)), 9, 9).await, (Err(Stopped::Cancelled), 3));
    }
}
