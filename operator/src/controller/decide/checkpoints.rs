//! Reports that the servers cannot write checkpoints, or can again, as server 0 says.

use jiff::Timestamp;
use psjobs_api::FailedCheckpoint;
use psjobs_api::crd::ConditionType;

use super::draft::Draft;
use crate::conditions::{self, ConditionUpdate};

/// Reason of the condition, and of the event when it begins.
const FAILING: &str = "CheckpointFailing";
/// Reason of the condition when the fault is over.
const WRITTEN: &str = "CheckpointWritten";
/// The most characters of a server's words: a pod may answer with any.
const MOST_CHARACTERS: usize = 900;

impl Draft<'_, '_> {
    /// Sets the condition CheckpointFailing. A report from before the job was suspended says nothing of it now. The condition
    /// ends with a checkpoint that was written since it began: a new process of server 0 knows of no fault until it writes.
    pub(super) fn report_checkpoints(&mut self) {
        let facts = self.facts;
        let Some(report) = facts.observed.checkpoints.as_ref().filter(|report| report.at >= facts.start_time()) else {
            return;
        };
        let Some(failure) = &report.failure else {
            let newest = facts.observed.progress.as_ref().and_then(|progress| progress.checkpoint.as_ref());
            let written = newest.and_then(|newest| i64::try_from(newest.unix_seconds).ok());
            let since = conditions::since(facts.prev, ConditionType::CheckpointFailing);
            if since.zip(written).is_some_and(|(since, written)| written >= since.as_second()) {
                self.clear(ConditionType::CheckpointFailing, WRITTEN);
            }
            return;
        };
        let message = sentence(failure);
        if !conditions::holds(facts.prev, ConditionType::CheckpointFailing) {
            self.warning(FAILING, message.clone(), None);
        }
        self.set(ConditionType::CheckpointFailing, ConditionUpdate::yes(FAILING, message));
    }
}

/// Returns the words of server 0, with the time since when it is so, if that is known.
fn sentence(failure: &FailedCheckpoint) -> String {
    let words: String = failure.message.chars().take(MOST_CHARACTERS).collect();
    let since = failure.unix_seconds.and_then(|at| i64::try_from(at).ok());
    match since.and_then(|at| Timestamp::from_second(at).ok()) {
        Some(since) => format!("{words} (since {since})"),
        None => words,
    }
}
