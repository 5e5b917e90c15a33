//! `spec.successPolicy`: which trainers' success is the job's.

use psjobs_api::crd::{SuccessOperator, SuccessPolicy};

/// The trainers that must end well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Success {
    /// All of them.
    All,
    /// Any of this number.
    Any(u32),
    /// Trainer 0.
    RankZero,
}

impl Success {
    /// Reads the policy of a spec.
    #[must_use]
    pub fn new(policy: &SuccessPolicy) -> Self {
        match policy.operator {
            SuccessOperator::All => Self::All,
            SuccessOperator::RankZero => Self::RankZero,
            SuccessOperator::Any => Self::Any(policy.min_succeeded.map_or(1, i32::unsigned_abs)),
        }
    }

    /// Returns true if enough of so many trainers, by index, have ended well.
    #[must_use]
    pub fn is_reached(self, trainers: u32, is_done: impl Fn(u32) -> bool) -> bool {
        let done = || (0..trainers).filter(|&index| is_done(index)).count();
        match self {
            Self::All => done() == trainers as usize,
            Self::Any(enough) => done() >= enough as usize,
            Self::RankZero => is_done(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_operator_says_whose_success_is_enough() {
        let rows: [(Success, &[u32], bool); 8] = [
            (Success::All, &[0], false),
            (Success::All, &[0, 1, 2], true),
            (Success::RankZero, &[1, 2], false),
            (Success::RankZero, &[0], true),
            (Success::Any(1), &[], false),
            (Success::Any(1), &[2], true),
            (Success::Any(2), &[2], false),
            (Success::Any(2), &[1, 2], true),
        ];
        for (success, done, want) in rows {
            assert_eq!(success.is_reached(3, |index| done.contains(&index)), want, "{success:?} with {done:?}");
        }
    }
}
