//! The lines that the pods say: one each 20 µs, by ten pods in turn, and 1 ms later by the next ten.

use std::time::Duration;

pub const PODS: usize = 100;
/// Lines of all pods together, numbered by time: 10 s of 50,000 lines/s.
pub const LINES: usize = 500_000;
/// Lines of 1 ms, in which each of `SPEAKERS` pods says five.
pub const TURN: usize = 50;
/// Pods that speak in the same turn.
pub const SPEAKERS: usize = 10;
/// Bytes of a line as the kubelet sends it, with its time and the end of the line.
const LENGTH: usize = 120;

/// The pod that says a line.
pub fn pod_of(number: usize) -> usize {
    number / TURN * SPEAKERS % PODS + number % SPEAKERS
}

/// When a line is said, since the first one.
pub fn due(number: usize) -> Duration {
    Duration::from_micros(20 * number as u64)
}

/// A line as the kubelet sends it.
pub fn line(number: usize) -> String {
    let due = due(number);
    let said = format!("2026-01-01T00:00:{:02}.{:09}Z {number:09} ", due.as_secs(), due.subsec_nanos());
    format!("{said:.<width$}\n", width = LENGTH - 1)
}

/// The lines that a pod says in the turn that begins with line `first`; `place` is its place among those that speak.
pub fn lines_of_turn(first: usize, place: usize) -> String {
    (first + place..first + TURN).step_by(SPEAKERS).map(line).collect()
}

/// Returns the number of a line that the program printed, with the name of its replica in front.
pub fn number_of(printed: &str) -> Option<usize> {
    let (replica, said) = printed.split_once(' ')?;
    let number = said.split_once(' ')?.0.parse().ok()?;
    let pod: usize = replica.strip_prefix("trainer-")?.parse().ok()?;
    (number < LINES && pod == pod_of(number)).then_some(number)
}
