//! Makes a trainer slower than its machine, to see how a job copes with uneven ones.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use psjobs_ps::splitmix::{GOLDEN, finalize};

/// How slow the trainers of this job are to be.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pace {
    /// An example takes at least as long.
    pub example: Duration,
    /// A step that several of these mean takes as much longer as all say.
    pub slowdowns: Vec<Slowdown>,
}

/// Whose steps take longer, how much, and how many of them: `TRAINER|all:FACTOR[:SHARE]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slowdown {
    /// The trainer; all if it is not set.
    trainer: Option<usize>,
    /// A step takes so many times as long.
    factor: f64,
    /// The share of the steps that are slow, drawn at random.
    share: f64,
}

/// A slowdown that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "write TRAINER:FACTOR, for example 1:3 (trainer 1 takes three times as long), or all:5:0.02 (every trainer, five times as long in a random 2 % of its steps)"
)]
pub struct Unreadable;

impl FromStr for Slowdown {
    type Err = Unreadable;

    fn from_str(text: &str) -> Result<Self, Unreadable> {
        let parts: Vec<&str> = text.split(':').collect();
        let (trainer, factor, share) = match parts[..] {
            [trainer, factor] => (trainer, factor, "1"),
            [trainer, factor, share] => (trainer, factor, share),
            _ => return Err(Unreadable),
        };
        let trainer = if trainer == "all" { None } else { Some(trainer.parse().map_err(|_| Unreadable)?) };
        let number = |text: &str| text.parse::<f64>().ok().filter(|number| number.is_finite()).ok_or(Unreadable);
        let slowdown = Self { trainer, factor: number(factor)?, share: number(share)? };
        let fits = (1.0..=1000.0).contains(&slowdown.factor) && (0.0..=1.0).contains(&slowdown.share);
        if fits { Ok(slowdown) } else { Err(Unreadable) }
    }
}

impl fmt::Display for Slowdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.trainer {
            Some(trainer) => write!(f, "{trainer}:{}:{}", self.factor, self.share),
            None => write!(f, "all:{}:{}", self.factor, self.share),
        }
    }
}

impl Pace {
    /// How long `trainer` is to rest after `step`, in which it computed with `examples` for `busy`. The same
    /// steps are slow each time that the job runs with `seed`.
    #[must_use]
    pub fn rest(&self, trainer: usize, step: u64, seed: u64, examples: usize, busy: Duration) -> Duration {
        let factors = self.slowdowns.iter().filter(|slow| slow.means(trainer, step, seed)).map(|slow| slow.factor);
        let least = self.example.mul_f64(examples as f64);
        busy.max(least).mul_f64(factors.product()).saturating_sub(busy)
    }
}

impl Slowdown {
    fn means(&self, trainer: usize, step: u64, seed: u64) -> bool {
        let meant = self.trainer.is_none_or(|slow| slow == trainer);
        meant && draw(seed, trainer as u64, step) < self.share
    }
}

/// A number in 0..1 that depends on all arguments.
fn draw(seed: u64, trainer: u64, step: u64) -> f64 {
    let mixed = finalize(seed ^ (trainer << 48) ^ step.wrapping_mul(GOLDEN));
    (mixed >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn pace(slowdowns: &[&str]) -> Pace {
        let slowdowns = slowdowns.iter().map(|text| text.parse().expect("readable")).collect();
        Pace { slowdowns, ..Pace::default() }
    }

    #[test]
    fn one_trainer_rests_after_each_of_its_steps() {
        let slow = pace(&["1:3"]);
        assert_eq!(slow.rest(1, 7, 1, 32, SECOND), 2 * SECOND);
        assert_eq!(slow.rest(0, 7, 1, 32, SECOND), Duration::ZERO);
    }

    #[test]
    fn an_example_takes_as_long_as_was_said_and_several_slowdowns_add_up() {
        let slow = Pace { example: SECOND / 4, ..pace(&["1:3", "all:2"]) };
        for (trainer, busy, want) in [(0, 0, 16), (0, 3, 13), (1, 3, 45), (0, 10, 10)] {
            assert_eq!(slow.rest(trainer, 0, 1, 32, busy * SECOND), want * SECOND, "trainer {trainer}, busy {busy} s");
        }
    }

    #[test]
    fn a_share_of_the_steps_is_slow() {
        let slow = pace(&["all:5:0.02"]);
        for trainer in 0..4 {
            let rests = (0..10_000).filter(|step| slow.rest(trainer, *step, 3, 1, SECOND) == 4 * SECOND).count();
            assert!((150..250).contains(&rests), "{rests} of 10,000 steps of trainer {trainer}");
        }
    }

    #[test]
    fn what_is_written_is_read_back_and_nonsense_is_not() {
        let slow: Slowdown = "2:1.5:0.5".parse().expect("readable");
        assert_eq!(slow.to_string().parse(), Ok(slow));
        for text in ["", "1", "one:3", "1:0.5", "1:3:2", "1:inf", "1:3:0.5:7", "1:x"] {
            assert_eq!(text.parse::<Slowdown>(), Err(Unreadable), "{text}");
        }
    }
}
