//! Up to which steps points are sent: those that no checkpoint takes back.

use std::collections::VecDeque;
use std::time::Duration;

use psjobs_ps::series::Source;
use tokio::time::Instant;

/// Time after which the event files have every entry of before a checkpoint. A trainer sends them once a second, and they are
/// written within two more.
pub const SETTLES: Duration = Duration::from_secs(10);

/// The steps whose points may be sent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Durable {
    /// None: there is no checkpoint yet.
    #[default]
    Nothing,
    /// Steps in a checkpoint, by trainer index; for the job itself those that all trainers have in it.
    UpTo(Vec<u64>),
    /// All: nothing takes steps back, or the job is over.
    All,
}

impl Durable {
    /// Returns whether the points of `source` at `step` may be sent.
    #[must_use]
    pub fn has(&self, source: Source, step: u64) -> bool {
        match self {
            Self::Nothing => false,
            Self::All => true,
            Self::UpTo(steps) => {
                let own = match source {
                    Source::Trainer(index) => steps.get(index as usize),
                    Source::Job => steps.iter().min(),
                };
                own.is_some_and(|held| step <= *held)
            }
        }
    }

    /// Returns whether this one lacks steps of a trainer that `other` has.
    fn is_behind(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::UpTo(own), Self::UpTo(others)) => own.iter().zip(others).any(|(own, other)| own < other),
            (Self::Nothing, Self::UpTo(_)) => true,
            _ => false,
        }
    }
}

/// Checkpoints on their way to be relied on. A trainer that goes back says in its series which points it discards, and makes
/// their steps again. A checkpoint may be complete before that is in the event files: one that was just found would let points
/// pass that were discarded.
#[derive(Debug, Default)]
pub struct Settling {
    relied_on: Durable,
    found: VecDeque<(Instant, Durable)>,
}

impl Settling {
    /// Takes the newest checkpoint that there is `now`, and returns the one that is relied on.
    pub fn observe(&mut self, newest: Durable, now: Instant) -> &Durable {
        if newest == Durable::All {
            self.found.clear();
            self.relied_on = newest;
            return &self.relied_on;
        }
        let last = self.found.back().map_or(&self.relied_on, |(_, last)| last);
        if *last != newest {
            // One that was set aside as damaged is not gone back to.
            if newest.is_behind(last) {
                self.found.clear();
            }
            self.found.push_back((now, newest));
        }
        while self.found.front().is_some_and(|(since, _)| now.duration_since(*since) >= SETTLES) {
            if let Some((_, settled)) = self.found.pop_front() {
                self.relied_on = settled;
            }
        }
        &self.relied_on
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_has_the_steps_of_each_trainer() {
        let some = Durable::UpTo(vec![40, 50]);
        for (durable, source, step, has) in [
            (&Durable::Nothing, Source::Job, 0, false),
            (&Durable::All, Source::Trainer(7), 99, true),
            (&some, Source::Trainer(0), 40, true),
            (&some, Source::Trainer(0), 41, false),
            (&some, Source::Trainer(1), 50, true),
            (&some, Source::Trainer(2), 1, false),
            (&some, Source::Job, 40, true),
            (&some, Source::Job, 41, false),
        ] {
            assert_eq!(durable.has(source, step), has, "{durable:?} {source} {step}");
        }
    }

    #[test]
    fn a_checkpoint_is_relied_on_when_its_points_are_there() {
        let begin = Instant::now();
        let mut settling = Settling::default();
        let up_to = |step| Durable::UpTo(vec![step]);
        for (seconds, newest, relied_on) in [
            (0, Durable::Nothing, Durable::Nothing),
            (1, up_to(10), Durable::Nothing),
            (5, up_to(20), Durable::Nothing),
            (10, up_to(20), Durable::Nothing),
            (11, up_to(20), up_to(10)),
            (14, up_to(30), up_to(10)),
            (15, up_to(30), up_to(20)),
            // The newest one was damaged and set aside.
            (16, up_to(20), up_to(20)),
            (25, up_to(20), up_to(20)),
            (26, up_to(40), up_to(20)),
            (36, up_to(40), up_to(40)),
            (61, Durable::All, Durable::All),
        ] {
            let found = settling.observe(newest, begin + Duration::from_secs(seconds));
            assert_eq!(*found, relied_on, "after {seconds} s");
        }
    }
}
