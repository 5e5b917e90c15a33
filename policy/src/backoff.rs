//! `spec.failurePolicy.backoff`: how long a restart waits.

use std::time::Duration;

use psjobs_api::crd::Backoff;

/// Returns how long to wait after so many failures in a row: not at all after the first, then longer each time.
#[must_use]
pub fn wait(policy: &Backoff, in_a_row: u32) -> Duration {
    let Some(doublings) = in_a_row.checked_sub(2) else { return Duration::ZERO };
    let seconds = policy.initial_seconds.saturating_mul(1 << doublings.min(40));
    Duration::from_secs(seconds.min(policy.max_seconds).unsigned_abs())
}

/// Returns the number of failures in a row, this one included, of what failed `before` times in a row and then ran for
/// this time.
#[must_use]
pub fn failures_in_a_row(policy: &Backoff, before: u32, ran: Duration) -> u32 {
    let was_healthy = ran >= Duration::from_secs(policy.reset_after_seconds.unsigned_abs());
    if was_healthy { 1 } else { before.saturating_add(1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_doubles_up_to_its_limit_and_a_healthy_while_resets_it() {
        let policy = Backoff { initial_seconds: 2, max_seconds: 10, reset_after_seconds: 100 };
        let waits = (0..7).map(|n| wait(&policy, n).as_secs()).collect::<Vec<_>>();
        assert_eq!(waits, [0, 0, 2, 4, 8, 10, 10]);
        assert_eq!(wait(&policy, u32::MAX).as_secs(), 10);
        let in_a_row = |ran| failures_in_a_row(&policy, 4, Duration::from_secs(ran));
        assert_eq!((in_a_row(99), in_a_row(100)), (5, 1));
    }

    #[test]
    fn the_default_is_at_once_then_a_second_up_to_a_minute() {
        let waits = (1..10).map(|n| wait(&Backoff::default(), n).as_secs()).collect::<Vec<_>>();
        assert_eq!(waits, [0, 1, 2, 4, 8, 16, 32, 60, 60]);
    }
}
