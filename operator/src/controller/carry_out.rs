//! Carries a decision out, after its children were created: writes the status, then deletes and records events.

use std::time::{Duration, Instant};

use kube::ResourceExt as _;
use psjobs_api::crd::{ParameterServerJob, ParameterServerJobStatus, Phase};

use super::context::Context;
use super::decide::timing::WRITE_TIMEOUT;
use super::error::ReconcileError;
use super::model::Decision;
use super::status_difference::{Difference, difference};
use super::write::delete::{delete_job, delete_pods};
use super::write::update_status::update_status;
use super::write::write_priority::{Permit, WritePriority};
use crate::traces;

/// How long the details of a status may wait for further ones: pods start and end in groups.
const DETAILS_DEBOUNCE: Duration = Duration::from_secs(2);

/// When to check again whether a status can be written without a wait. Until then a later decision may replace it, which
/// saves a write.
const BUSY_RETRY: Duration = Duration::from_millis(500);

/// Writes the status, then deletes pods and records events, so that a failure is on record before its evidence is
/// deleted. Returns how long the status still waits to be written, if it does; nothing else happens then.
pub async fn carry_out(
    object: &ParameterServerJob,
    decision: &Decision,
    context: &Context,
) -> Result<Option<Duration>, ReconcileError> {
    let uid = object.metadata.uid.as_deref().unwrap_or_default();
    let before = object.status.clone().unwrap_or_default();
    let difference = difference(&before, &decision.status);
    let debounce = debounce(difference, decision);
    if let Some(wait) = debounce.and_then(|timeout| context.jobs.debounce_status(uid, timeout, Instant::now())) {
        return Ok(Some(wait));
    }
    if difference != Difference::None {
        let priority = status_priority(difference, decision);
        let timeout = debounce.unwrap_or_default() + WRITE_TIMEOUT;
        let Some(permit) = status_permit(priority, uid, timeout, context).await? else {
            return Ok(Some(BUSY_RETRY));
        };
        write_status(object, &before, &decision.status, difference, permit, context).await?;
    }
    context.jobs.flush_status(uid);
    delete(object, decision, context).await?;
    context.events.record(object, &decision.events);
    if decision.delete_job {
        delete_job(&context.writer, object).await?;
    }
    Ok(None)
}

/// Returns how long a decision may wait for later ones, which may make its writes unnecessary.
fn debounce(difference: Difference, decision: &Decision) -> Option<Duration> {
    match difference {
        _ if !decision.delete.is_empty() => None,
        Difference::Facts if decision.transient_for.is_some() => decision.transient_for,
        Difference::Details if decision.events.is_empty() => Some(DETAILS_DEBOUNCE),
        _ => None,
    }
}

fn status_priority(difference: Difference, decision: &Decision) -> WritePriority {
    let is_final = decision.status.phase.is_some_and(Phase::is_final);
    if difference == Difference::Facts && is_final {
        WritePriority::TerminalStatus
    } else if decision.delete.is_empty() {
        WritePriority::Status
    } else {
        // The deletion waits for it.
        WritePriority::Child
    }
}

/// Returns the permit to write a status; `None` if other writes are under way and this one may wait up to `timeout` for
/// them.
async fn status_permit<'a>(
    priority: WritePriority,
    uid: &str,
    timeout: Duration,
    context: &'a Context,
) -> Result<Option<Permit<'a>>, ReconcileError> {
    let may_wait = || context.jobs.debounce_status(uid, timeout, Instant::now()).is_some();
    match context.writer.try_permit(priority)? {
        Some(permit) => Ok(Some(permit)),
        None if priority == WritePriority::Status && may_wait() => Ok(None),
        None => context.writer.permit(priority).await.map(Some),
    }
}

/// Writes the status, and holds the permit until the write is counted.
async fn write_status(
    object: &ParameterServerJob,
    before: &ParameterServerJobStatus,
    status: &ParameterServerJobStatus,
    difference: Difference,
    _permit: Permit<'_>,
    context: &Context,
) -> Result<(), ReconcileError> {
    let writing = async {
        traces::attribute("psjobs.change", format!("{difference:?}"));
        traces::attribute("psjobs.phase", status.phase.map_or_else(String::new, |phase| format!("{phase:?}")));
        update_status(&context.writer.client, object, status).await
    };
    if let Some(stored) = context.step("update_status", writing).await? {
        context.metrics.wrote(before, status);
        context.jobs.status_written(stored);
    }
    Ok(())
}

/// Deletes the pods that the decision names.
async fn delete(object: &ParameterServerJob, decision: &Decision, context: &Context) -> Result<(), ReconcileError> {
    if !decision.delete.is_empty() {
        let namespace = object.namespace().unwrap_or_default();
        let deleting = async {
            traces::attribute("psjobs.deleted", decision.delete.len() as i64);
            delete_pods(&context.writer, &namespace, &decision.delete).await
        };
        context.step("delete", deleting).await?;
    }
    context.metrics.deleted(decision.delete.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::decide::timing::COMPLETING_DEBOUNCE;
    use crate::controller::model::{Deletion, Event};

    #[test]
    fn only_what_no_user_misses_waits() {
        let delete = Deletion { name: "p".into(), uid: "u".into(), force: false };
        let event = Event { warning: false, reason: "R".into(), note: String::new(), pod: None };
        let none = Decision::default;
        let rows = [
            ("nothing new", Difference::None, none(), None),
            ("a count", Difference::Details, none(), Some(DETAILS_DEBOUNCE)),
            ("a count, with an event", Difference::Details, Decision { events: vec![event.clone()], ..none() }, None),
            ("a phase", Difference::Facts, none(), None),
            (
                "a phase that mostly passes at once",
                Difference::Facts,
                Decision { transient_for: Some(COMPLETING_DEBOUNCE), events: vec![event], ..none() },
                Some(COMPLETING_DEBOUNCE),
            ),
            (
                "the same, with a pod to delete after it is on record",
                Difference::Facts,
                Decision { transient_for: Some(COMPLETING_DEBOUNCE), delete: vec![delete], ..none() },
                None,
            ),
        ];
        for (label, difference, decision, want) in rows {
            assert_eq!(debounce(difference, &decision), want, "{label}");
        }
    }
}
