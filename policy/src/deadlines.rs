//! The deadlines of `spec.runPolicy`, and the time that a server's end may be ahead of the trainers'.

use std::time::Duration;

use psjobs_api::crd::RunPolicy;

/// How long a server that ended well may be ahead of the trainers. After that it counts as failed. Normally the trainers'
/// own end, which the server waited for, is a moment away.
pub const EARLY_SERVER_END: Duration = Duration::from_secs(30);

/// Seconds from SIGTERM until a server of a job with checkpoints is killed, unless its template says otherwise. It writes the
/// last state, for which it has two minutes and a second for each 10 MB, maybe after a part that it has begun before.
pub const LAST_CHECKPOINT_SECONDS: u32 = 300;

/// Reason of the failure of a server that ended well while trainers still ran.
pub const ENDED_EARLY: &str = "EndedEarly";

/// Reason of the failure of a job that makes no step.
pub const STALLED: &str = "Stalled";

/// Reason of the failure of a job with checkpoints whose trainers end well without a step.
pub const NEVER_TRAINED: &str = "NeverTrained";

/// Says what a job did that failed for [`NEVER_TRAINED`]; it continues a sentence about the job.
pub const NO_MODEL: &str = "made no step, although all its trainers ended well, so that its servers have no model to write: \
    let the trainers join the job and train, or leave out spec.checkpoint";

/// The age from which a report of server 0 says nothing about now. A job whose reports are older is not called stalled.
pub const FRESH_REPORT: Duration = Duration::from_secs(35);

/// Deadlines of an active job; none: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deadlines {
    /// activeDeadlineSeconds: for the whole job.
    pub active: Option<Duration>,
    /// startupDeadlineSeconds: until all servers and trainers run.
    pub startup: Option<Duration>,
    /// progressDeadlineSeconds: from one step to the next.
    pub progress: Option<Duration>,
}

/// A deadline that a job has missed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missed {
    /// It was active for too long.
    Active(Duration),
    /// It did not run in time.
    Startup(Duration),
}

impl Deadlines {
    /// Reads the deadlines of a spec.
    #[must_use]
    pub fn new(policy: &RunPolicy) -> Self {
        let duration = |seconds: Option<i64>| seconds.map(|seconds| Duration::from_secs(seconds.unsigned_abs()));
        Self {
            active: duration(policy.active_deadline_seconds),
            startup: duration(policy.startup_deadline_seconds),
            progress: duration(policy.progress_deadline_seconds),
        }
    }

    /// Returns how long after its start a job next may miss a deadline, by whether it has run since.
    ///
    /// # Errors
    /// If the job, which has been active for `active`, has missed one.
    pub fn check(&self, active: Duration, has_run: bool) -> Result<Option<Duration>, Missed> {
        let startup = self.startup.filter(|_| !has_run);
        match (self.active, startup) {
            (Some(deadline), _) if deadline <= active => Err(Missed::Active(deadline)),
            (_, Some(deadline)) if deadline <= active => Err(Missed::Startup(deadline)),
            (one, other) => Ok(one.into_iter().chain(other).min()),
        }
    }
}

impl Missed {
    /// Returns one word, for a condition.
    #[must_use]
    pub const fn reason(self) -> &'static str {
        match self {
            Self::Active(_) => "DeadlineExceeded",
            Self::Startup(_) => "StartupDeadlineExceeded",
        }
    }

    /// Returns what continues a sentence about the job, for example `was active for 50 s, ...`.
    #[must_use]
    pub fn what(self) -> String {
        match self {
            Self::Active(deadline) => format!(
                "was active for {} s, as long as spec.runPolicy.activeDeadlineSeconds allows",
                deadline.as_secs()
            ),
            Self::Startup(deadline) => {
                format!("did not run within the {} s of spec.runPolicy.startupDeadlineSeconds", deadline.as_secs())
            }
        }
    }
}

/// Returns what a stalled job did; it continues a sentence about the job.
#[must_use]
pub fn no_step(deadline: Duration, step: u64, total: u64) -> String {
    format!(
        "made no step for {} s, as long as spec.runPolicy.progressDeadlineSeconds allows (step {step} of {total})",
        deadline.as_secs()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_active_deadline_always_holds_and_that_of_the_start_until_the_job_runs() {
        let seconds = Duration::from_secs;
        let both = Deadlines { active: Some(seconds(50)), startup: Some(seconds(20)), progress: None };
        let rows = [
            (both, 19, false, Ok(Some(seconds(20)))),
            (both, 20, false, Err(Missed::Startup(seconds(20)))),
            (both, 20, true, Ok(Some(seconds(50)))),
            (both, 50, true, Err(Missed::Active(seconds(50)))),
            (both, 50, false, Err(Missed::Active(seconds(50)))),
            (Deadlines::default(), 1_000_000, false, Ok(None)),
        ];
        for (deadlines, active, has_run, want) in rows {
            assert_eq!(deadlines.check(seconds(active), has_run), want, "{active} s, has run: {has_run}");
        }
    }
}
