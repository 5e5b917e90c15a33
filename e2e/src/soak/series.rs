//! The steps of a job over time, and what they show: how long it stood still, and what it lost. No I/O; times are those
//! since the soak's start.

use std::time::Duration;

/// The step of a job, summed over its trainers, when it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    pub at: Duration,
    pub step: u64,
}

/// Time in which a job that trains makes a step and is seen to do so.
const LATELY: Duration = Duration::from_secs(5);

/// Returns the longest time without a new step that began between `from` and `until`; one that lasts at `from` begins
/// there. `None` if the job did not train at `from`, stood still already, or was not seen to go on. The job's end counts
/// as a new step.
pub fn standstill(samples: &[Sample], end: Option<Duration>, from: Duration, until: Duration) -> Option<Duration> {
    let (before, after): (Vec<_>, Vec<_>) = new_steps(samples).chain(end).partition(|at| *at <= from);
    let trained = before.last().is_some_and(|last| from - *last <= LATELY) && end.is_none_or(|end| end > from);
    let moves: Vec<_> = [from].into_iter().chain(after).collect();
    let longest = moves.windows(2).filter(|pair| pair[0] <= until).map(|pair| pair[1] - pair[0]).max();
    longest.filter(|_| trained)
}

/// Returns the longest time without a new step, from the first one to the job's end.
pub fn longest_standstill(samples: &[Sample], end: Option<Duration>) -> Option<Duration> {
    let moves: Vec<_> = new_steps(samples).chain(end).collect();
    moves.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).max()
}

/// Returns the times at which a new step was seen.
fn new_steps(samples: &[Sample]) -> impl Iterator<Item = Duration> + '_ {
    samples.windows(2).filter(|pair| pair[1].step > pair[0].step).map(|pair| pair[1].at)
}

/// Returns how many steps were done more than once: each time that the step fell, how far. Servers count a gradient when it
/// arrives, and a trainer gives the next one when the one before was acknowledged: so one step of each of `trainers` may have
/// been under way, which is given again, and not lost.
pub fn steps_lost(samples: &[Sample], trainers: u64) -> u64 {
    let (mut peak, mut fallen, mut lost) = (0, 0, 0);
    for sample in samples {
        if sample.step >= peak {
            (peak, lost, fallen) = (sample.step, lost + acknowledged(fallen, trainers), 0);
        }
        fallen = fallen.max(peak - sample.step);
    }
    lost + acknowledged(fallen, trainers)
}

/// Returns whether the step fell so far that a job of so many trainers does steps once more.
pub fn falls_back(before: u64, step: u64, trainers: u64) -> bool {
    acknowledged(before.saturating_sub(step), trainers) > 0
}

/// Returns how many of the last `steps` of all trainers were certainly acknowledged.
fn acknowledged(steps: u64, trainers: u64) -> u64 {
    steps.saturating_sub(trainers)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seconds and steps.
    type Steps = &'static [(u64, u64)];
    /// A label, steps, the end, from when until when there is a fault, and the standstill.
    type Standstill = (&'static str, Steps, Option<u64>, (u64, u64), Option<u64>);

    fn series(samples: &[(u64, u64)]) -> Vec<Sample> {
        samples.iter().map(|&(at, step)| Sample { at: Duration::from_secs(at), step }).collect()
    }

    #[test]
    fn a_standstill_is_the_longest_pause_that_a_fault_begins() {
        let rows: [Standstill; 10] = [
            ("it goes on", &[(1, 1), (2, 2), (3, 3), (4, 4)], None, (2, 3), Some(1)),
            ("it pauses", &[(1, 1), (2, 2), (3, 2), (9, 3), (10, 4)], None, (2, 2), Some(7)),
            ("it pauses a moment after the fault", &[(1, 1), (2, 2), (4, 3), (20, 4)], None, (2, 5), Some(16)),
            ("it pauses long after it", &[(1, 1), (2, 2), (4, 3), (9, 4), (30, 5)], None, (2, 5), Some(5)),
            ("it falls back and goes on", &[(1, 8), (2, 9), (5, 4), (7, 5)], None, (2, 2), Some(5)),
            ("it ends", &[(1, 1), (2, 2)], Some(6), (3, 3), Some(3)),
            ("it was not seen to go on", &[(1, 1), (2, 2), (3, 2)], None, (2, 2), None),
            ("it had not begun", &[(5, 1), (6, 2)], None, (2, 2), None),
            ("it had ended", &[(1, 1), (2, 2)], Some(3), (4, 4), None),
            ("it stood still already", &[(1, 1), (2, 2), (9, 2), (20, 3)], None, (9, 9), None),
        ];
        for (label, samples, end, (from, until), want) in rows {
            let second = Duration::from_secs;
            let found = standstill(&series(samples), end.map(second), second(from), second(until));
            assert_eq!(found, want.map(second), "{label}");
        }
    }

    #[test]
    fn steps_that_are_done_again_are_lost() {
        let rows: [(&str, Steps, u64); 6] = [
            ("none", &[], 0),
            ("a step of each of two trainers was under way", &[(1, 10), (2, 8), (3, 12)], 0),
            ("it grows", &[(1, 1), (2, 5), (3, 5), (4, 9)], 0),
            ("it falls once", &[(1, 10), (2, 7), (3, 8), (4, 12)], 1),
            ("it falls twice", &[(1, 10), (2, 7), (3, 11), (4, 8), (5, 20)], 2),
            ("it ends below", &[(1, 10), (2, 4), (3, 8)], 4),
        ];
        for (label, samples, want) in rows {
            assert_eq!(steps_lost(&series(samples), 2), want, "{label}");
        }
    }

    #[test]
    fn a_job_stands_still_from_its_first_step_to_its_end() {
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        for (label, samples, end, want) in [
            ("it has not begun", &[(0, 0), (9, 0)][..], None, None),
            ("it waits for its pods before", &[(0, 0), (9, 0), (10, 1), (11, 2)], None, seconds(1)),
            ("in the middle", &[(0, 0), (1, 1), (5, 1), (6, 2), (7, 3)], Some(8), seconds(5)),
            ("after its last step", &[(0, 0), (1, 1), (2, 2), (9, 2)], Some(12), seconds(10)),
            ("it begins anew", &[(0, 0), (1, 8), (2, 9), (3, 0), (4, 1), (5, 2)], None, seconds(2)),
        ] {
            let end = end.map(Duration::from_secs);
            assert_eq!(longest_standstill(&series(samples), end), want, "{label}");
        }
    }
}
