//! Measures where the time of a trainer's steps goes. Does no I/O; the time comes from the caller.

use std::time::{Duration, Instant};

use psjobs_ps::client::TimeSpent;
use tch::Device;

/// A part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The trainer waits for its batch.
    Data,
    /// Computes the loss.
    Forward,
    /// Computes the gradient and gives it to the updater, which waits for others in between.
    Backward,
}

/// Adds up the parts of the steps.
#[derive(Clone, Copy, Debug)]
pub struct StepClock {
    spent: TimeSpent,
    /// Forward and backward can be told apart.
    is_split: bool,
    began: Instant,
    /// The end of the part before, and the time waited for others until then.
    since: Instant,
    waited: Duration,
}

impl StepClock {
    /// A trainer that computes on `device` begins now. A GPU computes later than it is asked to, so that only the end of a whole
    /// step is known there.
    #[must_use]
    pub fn new(device: Device, now: Instant) -> Self {
        Self { is_split: device == Device::Cpu, ..Self::of_whole_steps(now) }
    }

    /// As [`StepClock::new`], but forward and backward are not told apart on any device.
    #[must_use]
    pub fn of_whole_steps(now: Instant) -> Self {
        Self { spent: TimeSpent::default(), is_split: false, began: now, since: now, waited: Duration::ZERO }
    }

    /// A part begins: what was done since the last one belongs to none.
    pub fn begin(&mut self, waited: Duration, now: Instant) {
        (self.since, self.waited) = (now, waited);
    }

    /// A part ends, and another one begins. What was `waited` for others meanwhile is not in it.
    pub fn end(&mut self, part: Part, waited: Duration, now: Instant) {
        let time = now.saturating_duration_since(self.since).saturating_sub(waited.saturating_sub(self.waited));
        let sum = match part {
            Part::Data => &mut self.spent.data,
            Part::Forward if self.is_split => &mut self.spent.forward,
            Part::Backward if self.is_split => &mut self.spent.backward,
            Part::Forward | Part::Backward => &mut self.spent.compute,
        };
        *sum += time;
        self.begin(waited, now);
    }

    /// Returns the time of the parts that have ended.
    #[must_use]
    pub fn spent(&self, now: Instant) -> TimeSpent {
        TimeSpent { total: now.saturating_duration_since(self.began), ..self.spent }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two steps of 10 s; between them 5 s for something else.
    fn two_steps(device: Device) -> TimeSpent {
        let start = Instant::now();
        let (at, seconds) = (|second| start + Duration::from_secs(second), Duration::from_secs);
        let mut clock = StepClock::new(device, start);
        for (began, waited) in [(0, 0), (15, 4)] {
            clock.begin(seconds(waited), at(began));
            clock.end(Part::Data, seconds(waited), at(began + 1));
            clock.end(Part::Forward, seconds(waited), at(began + 3));
            // Four of them pass in the exchange.
            clock.end(Part::Backward, seconds(waited + 4), at(began + 10));
        }
        clock.spent(at(25))
    }

    #[test]
    fn each_part_has_its_own_time_without_that_in_which_others_were_waited_for() {
        let seconds = Duration::from_secs;
        let want = TimeSpent {
            total: seconds(25),
            data: seconds(2),
            forward: seconds(4),
            backward: seconds(6),
            compute: Duration::ZERO,
        };
        assert_eq!(two_steps(Device::Cpu), want);
    }

    #[test]
    fn on_a_gpu_forward_and_backward_are_one_part() {
        let seconds = Duration::from_secs;
        let want = TimeSpent { total: seconds(25), data: seconds(2), compute: seconds(10), ..TimeSpent::default() };
        assert_eq!(two_steps(Device::Cuda(0)), want);
    }
}
