//! One reconcile of a job: read the caches, decide, and carry the decision out.

use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use kube::ResourceExt as _;
use kube::runtime::controller::Action;
use psjobs_api::crd::{MANAGER, ParameterServerJob, ParameterServerJobStatus, Phase};
use tracing::{Instrument as _, Span, debug, info_span, warn};

use super::cache::job_state;
use super::cache::observed_state::dereference;
use super::context::Context;
use super::decide::{decide, refuse, timing};
use super::error::ReconcileError;
use super::handover::{self, Takeover};
use super::model::Decision;
use super::validate::{ValidJob, validate};
use super::write::apply;
use super::write::update_status::{self, Difference, difference};
use super::write::write_priority::Write;
use crate::error_chain::chain;
use crate::traces;

pub async fn reconcile(cached: Arc<ParameterServerJob>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    // Only at the start of a term: a decision on half a cache would be right, but ask much of the API server.
    context.children.wait_until_ready().await;
    let timer = context.metrics.start_reconcile();
    let object = context.memory.newest(cached);
    let uid = object.uid().unwrap_or_default();
    let trace = traces::reconcile(&object);
    let job = trace.in_scope(|| info_span!("job", namespace = object.namespace(), name = object.name_any()));
    let result = reconcile_one(object, &context).instrument(job).instrument(trace.clone()).await;
    traces::end(&trace, &result);
    timer.stop(result.is_ok());
    match &result {
        Ok(_) => context.memory.succeeded(&uid),
        Err(ReconcileError::Disputed { .. }) => context.memory.dispute(&uid, true),
        Err(_) => {}
    }
    result
}

async fn reconcile_one(object: Arc<ParameterServerJob>, context: &Context) -> Result<Action, ReconcileError> {
    if object.metadata.deletion_timestamp.is_some() {
        // Its children are being deleted with it; anything done now would only be in the way.
        return Ok(Action::await_change());
    }
    if object.spec.managed_by.as_deref().is_some_and(|manager| manager != MANAGER) {
        // Another controller takes care of it; it cannot become ours.
        return Ok(Action::await_change());
    }
    if handover::is_due(&context.shard, &object, &context.memory) {
        match handover::take_over(context, &object).await? {
            Takeover::Done => {}
            Takeover::UnderWay => return Ok(Action::requeue(handover::LOOK_AGAIN)),
            // Its watch will say so in a moment.
            Takeover::NotOurs => return Ok(Action::await_change()),
        }
    }
    let now = Timestamp::now();
    let validating = async {
        let valid = validate(object.clone());
        traces::end(&Span::current(), &valid);
        Ok(valid)
    };
    let mut decision = match context.step("validate", validating).await? {
        Ok(job) => decide_and_create(&job, &object, context, now).await?,
        Err(error) => refuse(&error, &object.status.clone().unwrap_or_default(), object.metadata.generation, now),
    };
    decision.status.shard = context.shard.0.clone();
    let gathering = settle(&object, &decision, context).await?;
    // A little late rather than a little early: the condition must hold by then.
    let margin = Duration::from_millis(10);
    let wait = decision.requeue.map(|wait| Duration::try_from(wait).unwrap_or_default() + margin);
    Ok(wait.into_iter().chain(gathering).min().map_or_else(Action::await_change, Action::requeue))
}

async fn decide_and_create(
    job: &ValidJob,
    object: &ParameterServerJob,
    context: &Context,
    now: Timestamp,
) -> Result<Decision, ReconcileError> {
    let status = object.status.clone().unwrap_or_default();
    let looking = async { Ok(dereference(job, &status, &context.children, context.memory.progress(&job.uid))) };
    let mut world = context.step("dereference", looking).await?;
    let decision = context.step("decide", async { Ok(decide(job, &status, &world, now)) }).await?;
    if decision.create.is_empty() {
        return Ok(decision);
    }
    debug!(children = decision.create.len(), "creating");
    let creating = async {
        let created = apply::create(context, job, &decision.create, &mut world).await?;
        traces::attribute("psjobs.created", created as i64);
        traces::attribute("psjobs.refused", world.refused.len() as i64);
        Ok(created)
    };
    let created = context.step("apply", creating).await?;
    context.metrics.created(created, world.refused.len());
    context.step("decide", async { Ok(decide(job, &status, &world, now)) }).await
}

/// Writes the status, then deletes and tells: the failure is on record before its evidence goes.
/// How long the status still waits to be written, if it does.
async fn settle(
    object: &ParameterServerJob,
    decision: &Decision,
    context: &Context,
) -> Result<Option<Duration>, ReconcileError> {
    // What is still to be created was refused just now, or will be created in the next reconcile.
    let Decision { create: _, status, delete, delete_job, notices, passing: _, requeue: _ } = decision;
    let uid = object.metadata.uid.as_deref().unwrap_or_default();
    let before = object.status.clone().unwrap_or_default();
    let difference = difference(&before, status);
    let patience = patience(difference, decision);
    if let Some(wait) = patience.and_then(|patience| context.memory.gather(uid, patience, Instant::now())) {
        return Ok(Some(wait));
    }
    if difference != Difference::None {
        let patience = patience.unwrap_or_default() + timing::WRITE_TIMEOUT;
        let may_wait = || context.memory.gather(uid, patience, Instant::now()).is_some();
        let write = if ends(difference, status) {
            Write::End
        } else if delete.is_empty() {
            Write::Status
        } else {
            Write::Child
        };
        let _turn = match context.turns.turn_now(write) {
            Some(turn) => turn,
            None if write == Write::Status && may_wait() => return Ok(Some(job_state::BUSY)),
            None => context.turn(write).await,
        };
        let writing = async {
            traces::attribute("psjobs.change", format!("{difference:?}"));
            traces::attribute("psjobs.phase", status.phase.map_or_else(String::new, |phase| format!("{phase:?}")));
            update_status::update_status(&context.client, object, status).await
        };
        if let Some(stored) = context.step("update_status", writing).await? {
            context.metrics.wrote(&before, status);
            context.memory.wrote(stored);
        }
    }
    context.memory.gathered(uid);
    let namespace = object.namespace().unwrap_or_default();
    if !delete.is_empty() {
        let deleting = async {
            traces::attribute("psjobs.deleted", delete.len() as i64);
            apply::delete(context, &namespace, delete).await
        };
        context.step("delete", deleting).await?;
    }
    context.metrics.deleted(delete.len());
    context.teller.tell(object, notices);
    if *delete_job {
        apply::delete_job(&context.client, object).await?;
    }
    Ok(None)
}

/// The job has just succeeded or failed.
fn ends(difference: Difference, status: &ParameterServerJobStatus) -> bool {
    difference == Difference::Facts && status.phase.is_some_and(Phase::is_final)
}

/// How long a decision may wait for those that follow it, which may make its writes needless.
fn patience(difference: Difference, decision: &Decision) -> Option<Duration> {
    match difference {
        _ if !decision.delete.is_empty() => None,
        Difference::Facts if decision.passing.is_some() => decision.passing,
        Difference::Details if decision.notices.is_empty() => Some(job_state::GATHER),
        _ => None,
    }
}

pub fn retry(job: Arc<ParameterServerJob>, error: &ReconcileError, context: Arc<Context>) -> Action {
    let delay = context.memory.failed(&job.uid().unwrap_or_default());
    match error {
        // The watch brings the newer job in a moment.
        ReconcileError::OutOfDate | ReconcileError::Disputed { .. } => debug!(job = job.name_any(), "{error}"),
        error => warn!(
            namespace = job.namespace(),
            name = job.name_any(),
            retry_in = ?delay,
            "{}",
            chain(error)
        ),
    }
    Action::requeue(delay)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::model::{Deletion, Notice};

    #[test]
    fn only_what_nobody_misses_waits() {
        let delete = Deletion { name: "p".into(), uid: "u".into(), force: false };
        let notice = Notice { warning: false, reason: "R".into(), note: String::new(), pod: None };
        let none = Decision::default;
        let rows = [
            ("nothing new", Difference::None, none(), None),
            ("a count", Difference::Details, none(), Some(job_state::GATHER)),
            ("a count, with an event", Difference::Details, Decision { notices: vec![notice.clone()], ..none() }, None),
            ("a phase", Difference::Facts, none(), None),
            (
                "a phase that mostly passes at once",
                Difference::Facts,
                Decision { passing: Some(timing::COMPLETING_DEBOUNCE), notices: vec![notice], ..none() },
                Some(timing::COMPLETING_DEBOUNCE),
            ),
            (
                "the same, with a pod to delete after it is on record",
                Difference::Facts,
                Decision { passing: Some(timing::COMPLETING_DEBOUNCE), delete: vec![delete], ..none() },
                None,
            ),
        ];
        for (label, difference, decision, want) in rows {
            assert_eq!(patience(difference, &decision), want, "{label}");
        }
    }
}
