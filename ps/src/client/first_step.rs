//! The step that a trainer goes on with when it has come to its servers.

/// The step, from the next steps that the servers report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FirstStep {
    pub step: u64,
    /// A server was started anew and has forgotten steps that others have.
    pub is_forgotten: bool,
}

impl FirstStep {
    /// Decides from the first step that each server lacks of this trainer.
    ///
    /// A trainer has one step under way, so servers that have lost nothing differ by one at most, and the lowest says which
    /// step is to be given again. One that is further behind was started anew. It has nothing to catch up on: it takes any step,
    /// and the others, and other trainers, do not come back to earlier ones. Servers with checkpoints, which have an `epoch`
    /// above 0, are never started anew alone: in one of Bounded or Async their parts are of different steps, and each gets
    /// what it misses.
    pub fn of(steps: &[u64], epoch: u64) -> Self {
        let furthest = steps.iter().copied().max().unwrap_or(0);
        let least = if epoch > 0 { 0 } else { furthest.saturating_sub(1) };
        let step = steps.iter().copied().filter(|step| *step >= least).min().unwrap_or(0);
        Self { step, is_forgotten: steps.iter().any(|step| *step < least) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trainer_goes_on_where_the_servers_are_that_have_lost_nothing() {
        for (label, steps, epoch, step, is_forgotten) in [
            ("no server", &[][..], 0, 0, false),
            ("a new job", &[0, 0], 0, 0, false),
            ("all alike", &[4, 4], 0, 4, false),
            ("died while it gave a step", &[7, 8, 7], 0, 7, false),
            ("died while it gave the first", &[1, 0], 0, 0, false),
            ("a server was started anew", &[7, 0, 8], 0, 7, true),
            ("it has had steps since", &[3, 8], 0, 8, true),
            ("parts of a checkpoint", &[7, 3, 6], 2, 3, false),
        ] {
            assert_eq!(FirstStep::of(steps, epoch), FirstStep { step, is_forgotten }, "{label}");
        }
    }
}
