//! Divides the data among trainers: pure, no clock and no network. How many examples of a step each trainer reads, by
//! its measured speed (`spec.training.batch.adaptive`): [`deal`] divides the examples of one step,
//! [`sharing::Sharing`] decides when to do so anew. In an elastic job [`assigner::BatchAssigner`] assigns whole
//! batches to trainers that ask. [`sampler::Sampler`] says which examples a batch has.

pub mod assigner;
pub mod sampler;
pub mod sharing;

use psjobs_api::training::Batch;

/// The limits of a trainer's share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Examples of a step, over the trainers.
    pub base: u32,
    /// The fewest of one trainer, at most `base`.
    pub min: u32,
    /// The most of one trainer, at least `base`.
    pub max: u32,
}

impl From<&Batch> for Bounds {
    fn from(batch: &Batch) -> Self {
        Self { base: batch.base, min: batch.min, max: batch.most() }
    }
}

/// Halvings of an interval that leave nothing of it for an f64.
const HALVINGS: u32 = 128;

/// The examples of a step for trainers of these speeds (examples a second, above 0), so that all need the same
/// time for theirs, as far as the bounds let them. Together they are always `base` for each trainer.
#[must_use]
pub fn deal(speeds: &[f64], bounds: Bounds) -> Vec<u32> {
    let total = u64::from(bounds.base) * speeds.len() as u64;
    let (min, max) = (f64::from(bounds.min), f64::from(bounds.max));
    let within = |seconds: f64| speeds.iter().map(move |speed| (speed * seconds).clamp(min, max));
    // The longest time in which they do not read too much.
    let (mut low, mut high) = (0.0, speeds.iter().map(|speed| max / speed).fold(0.0, f64::max));
    for _ in 0..HALVINGS {
        let middle = f64::midpoint(low, high);
        if within(middle).sum::<f64>() <= total as f64 { low = middle } else { high = middle }
    }
    let mut shares: Vec<u32> = within(low).map(|share| share as u32).collect();
    let mut left = total.saturating_sub(shares.iter().copied().map(u64::from).sum());
    // What is left goes, one each, to those that are done with one more the soonest.
    let mut order: Vec<usize> = (0..speeds.len()).collect();
    order.sort_by(|a, b| {
        let done = |trainer: usize| f64::from(shares[trainer] + 1) / speeds[trainer];
        done(*a).total_cmp(&done(*b))
    });
    while left > 0 {
        let before = left;
        for trainer in &order {
            if left > 0 && shares[*trainer] < bounds.max {
                shares[*trainer] += 1;
                left -= 1;
            }
        }
        assert!(left < before, "base is at most max, so that somebody can take more");
    }
    shares
}

/// How long a step takes in which trainers of these speeds read these shares.
#[must_use]
pub fn step_seconds(shares: &[u32], speeds: &[f64]) -> f64 {
    shares.iter().zip(speeds).map(|(share, speed)| f64::from(*share) / speed).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn examples_follow_the_speeds_within_the_bounds() {
        let wide = Bounds { base: 32, min: 1, max: 128 };
        let rows: [(&str, &[f64], Bounds, &[u32]); 7] = [
            ("alone", &[7.0], wide, &[32]),
            ("even", &[500.0, 500.0, 500.0], wide, &[32, 32, 32]),
            ("one of four is three times slower", &[300.0, 300.0, 300.0, 100.0], wide, &[39, 39, 38, 12]),
            ("one of two is three times slower", &[100.0, 300.0], wide, &[16, 48]),
            ("the most is reached", &[1.0, 1e6], Bounds { max: 40, ..wide }, &[24, 40]),
            ("the least is reached", &[1.0, 1e6, 1e6], Bounds { min: 8, ..wide }, &[8, 44, 44]),
            ("no room", &[1.0, 1000.0], Bounds { base: 5, min: 5, max: 5 }, &[5, 5]),
        ];
        for (what, speeds, bounds, want) in rows {
            assert_eq!(deal(speeds, bounds), want, "{what}");
        }
    }

    fn cases() -> impl Strategy<Value = (Vec<f64>, Bounds)> {
        let bounds = (1u32..200)
            .prop_flat_map(|base| (1..=base, base..=base * 5).prop_map(move |(min, max)| Bounds { base, min, max }));
        (prop::collection::vec(1e-3..1e6_f64, 1..40), bounds)
    }

    proptest! {
        #[test]
        fn the_step_keeps_its_examples_and_everybody_the_bounds((speeds, bounds) in cases()) {
            let shares = deal(&speeds, bounds);
            prop_assert_eq!(shares.iter().sum::<u32>(), bounds.base * speeds.len() as u32);
            prop_assert!(shares.iter().all(|share| (bounds.min..=bounds.max).contains(share)), "{:?}", shares);
        }

        #[test]
        fn who_is_faster_never_reads_less((speeds, bounds) in cases()) {
            let shares = deal(&speeds, bounds);
            for (i, a) in speeds.iter().enumerate() {
                for (j, b) in speeds.iter().enumerate() {
                    prop_assert!(a <= b || shares[i] >= shares[j], "{:?} of {:?}", shares, speeds);
                }
            }
        }

        #[test]
        fn no_step_takes_longer_than_an_even_one((speeds, bounds) in cases()) {
            let even = vec![bounds.base; speeds.len()];
            prop_assert!(step_seconds(&deal(&speeds, bounds), &speeds) <= step_seconds(&even, &speeds) * (1.0 + 1e-9));
        }
    }
}
