//! Detects stragglers. A trainer's own pace counts only the time in which it does not wait for servers or other trainers,
//! so a slow trainer is detected also where all trainers proceed in step.

use std::time::{Duration, Instant};

/// Seconds of work over which the pace is smoothed.
const WINDOW: f64 = 20.0;
/// Seconds of work before a pace is reported: the first steps are slower.
const WARM_UP: f64 = 5.0;
/// A straggler needs at least this many times the median time for a step.
const CLEARLY: f64 = 1.5;

/// The pace of one process.
#[derive(Clone, Debug)]
pub struct Pace {
    steps: u64,
    waiting: Duration,
    at: Instant,
    /// Seconds of work seen, at most the smoothing window.
    worked: f64,
    rate: f64,
}

impl Pace {
    /// Creates the pace of a process that begins now.
    pub fn new(now: Instant) -> Self {
        Self { steps: 0, waiting: Duration::ZERO, at: now, worked: 0.0, rate: 0.0 }
    }

    /// Records the steps done and the time waited by this process so far.
    pub fn observe(&mut self, steps: u64, waiting: Duration, now: Instant) {
        if steps == self.steps {
            return; // A step longer than a report: it is counted when it is done.
        }
        // A process that goes on from a checkpoint begins with the steps of those before it, and servers
        // may go back: neither is work.
        let done = steps.checked_sub(self.steps).filter(|_| self.steps > 0);
        let (elapsed, waited) = (now.saturating_duration_since(self.at), waiting.saturating_sub(self.waiting));
        (self.steps, self.waiting, self.at) = (steps, waiting, now);
        let work = elapsed.saturating_sub(waited).max(elapsed / 100).as_secs_f64();
        let Some(done) = done.filter(|_| work > 0.0) else { return };
        let weight = (work / (self.worked + work)).max(1.0 - (-work / WINDOW).exp());
        self.rate += weight * (done as f64 / work - self.rate);
        self.worked = (self.worked + work).min(WINDOW);
    }

    /// Returns the pace, `None` before enough work was seen.
    pub fn steps_per_second(&self) -> Option<f64> {
        (self.worked >= WARM_UP).then_some(self.rate)
    }
}

/// Returns the indices of trainers that are clearly slower than the median of all known paces. Of two trainers the
/// faster one is the median.
pub fn stragglers(paces: &[Option<f64>]) -> Vec<u32> {
    let mut known = paces.iter().flatten().copied().collect::<Vec<_>>();
    known.sort_by(f64::total_cmp);
    let Some(&median) = known.get(known.len() / 2) else { return Vec::new() };
    let slow = |pace: &Option<f64>| pace.is_some_and(|pace| pace * CLEARLY <= median && pace < median);
    (0..).zip(paces).filter(|(_, pace)| slow(pace)).map(|(index, _)| index).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_clearly_slower_than_the_median_is_a_straggler() {
        type Row = (&'static str, &'static [Option<f64>], &'static [u32]);
        let rows: [Row; 9] = [
            ("no trainer", &[], &[]),
            ("one alone", &[Some(1.0)], &[]),
            ("nothing known of the others", &[Some(1.0), None, None], &[]),
            ("equals", &[Some(10.0), Some(9.0), Some(8.0)], &[]),
            ("a little slower", &[Some(10.0), Some(10.0), Some(7.0)], &[]),
            ("half as fast", &[Some(10.0), Some(5.0), Some(11.0)], &[1]),
            ("of two the slower", &[Some(4.0), Some(10.0)], &[0]),
            ("one that is much faster makes no stragglers", &[Some(100.0), Some(10.0), Some(10.0)], &[]),
            ("two of five, one not known", &[Some(9.0), Some(2.0), None, Some(10.0), Some(3.0), Some(9.0)], &[1, 4]),
        ];
        for (label, paces, want) in rows {
            assert_eq!(stragglers(paces), want, "{label}");
        }
    }

    #[test]
    fn the_pace_is_that_of_the_work_between_waits() {
        let start = Instant::now();
        // Each row: seconds since the start, steps so far, seconds waited so far.
        let pace = |rows: &[(f64, u64, f64)]| {
            let mut pace = Pace::new(start);
            for &(at, steps, waited) in rows {
                pace.observe(steps, Duration::from_secs_f64(waited), start + Duration::from_secs_f64(at));
            }
            pace.steps_per_second()
        };
        assert_eq!(pace(&[(1.0, 10, 0.0), (3.0, 30, 0.0)]), None, "too early to know");
        assert_eq!(pace(&[(1.0, 10, 0.0), (6.0, 60, 0.0)]), Some(10.0));
        assert_eq!(pace(&[(1.0, 10, 0.0), (11.0, 60, 5.0)]), Some(10.0), "half of it was waiting");
        assert_eq!(pace(&[(1.0, 1, 0.0), (3.0, 1, 0.0), (11.0, 2, 0.0)]), Some(0.1), "a step longer than a report");
        assert_eq!(pace(&[(1.0, 500, 0.0), (7.0, 560, 0.0)]), Some(10.0), "it went on from step 490");
        assert_eq!(pace(&[(1.0, 100, 0.0), (2.0, 40, 0.0), (8.0, 100, 0.0)]), Some(10.0), "the servers went back");
    }
}
