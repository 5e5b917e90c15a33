//! One reconcile of a job: read the caches, decide, and carry the decision out.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::api::ListParams;
use kube::core::PartialObjectMeta;
use kube::runtime::controller::Action;
use kube::{Api, ResourceExt as _};
use psjobs_api::crd::{MANAGER, ParameterServerJob};
use tracing::{Instrument as _, Span, debug, info_span, warn};

use super::cache::observed_state::observed_state;
use super::carry_out::carry_out;
use super::context::Context;
use super::decide::{decide, refuse};
use super::error::ReconcileError;
use super::handover::{self, Handover};
use super::model::{Child, Decision, ObservedState};
use super::validate::{ValidJob, validate};
use super::write::children::create_children;
use crate::error_chain::chain;
use crate::traces;

/// Reconciles a job, measures that, and notes whether it succeeded.
pub async fn reconcile(cached: Arc<ParameterServerJob>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    // Waits only at the start of a term. A decision on half a cache would be right, but cost the API server many requests.
    context.children.wait_until_ready().await;
    let timer = context.metrics.start_reconcile();
    let object = context.jobs.newest(cached);
    let uid = object.uid().unwrap_or_default();
    let trace = traces::reconcile(&object);
    let job = trace.in_scope(|| info_span!("job", namespace = object.namespace(), name = object.name_any()));
    let result = reconcile_one(object, &context).instrument(job).instrument(trace.clone()).await;
    traces::end(&trace, &result);
    timer.stop(result.is_ok());
    match &result {
        Ok(_) => context.jobs.reconcile_succeeded(&uid),
        Err(ReconcileError::Disputed { .. }) => context.jobs.set_disputed(&uid, true),
        Err(_) => {}
    }
    result
}

async fn reconcile_one(object: Arc<ParameterServerJob>, context: &Context) -> Result<Action, ReconcileError> {
    if object.metadata.deletion_timestamp.is_some() {
        // Its children are being deleted with it, and a new one would delay that.
        return Ok(Action::await_change());
    }
    if object.spec.managed_by.as_deref().is_some_and(|manager| manager != MANAGER) {
        // Another controller manages it, and spec.managedBy cannot be changed.
        return Ok(Action::await_change());
    }
    if handover::is_due(&context.shard, &object, &context.jobs) {
        match handover::take_over(context, &object).await? {
            Handover::Done => {}
            Handover::UnderWay => return Ok(Action::requeue(handover::LOOK_AGAIN)),
            // The watch is about to remove it from the cache.
            Handover::NotOurs => return Ok(Action::await_change()),
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
    let debouncing = carry_out(&object, &decision, context).await?;
    // Later rather than earlier: the condition must hold by then.
    let margin = Duration::from_millis(10);
    let wait = decision.requeue.map(|wait| Duration::try_from(wait).unwrap_or_default() + margin);
    Ok(wait.into_iter().chain(debouncing).min().map_or_else(Action::await_change, Action::requeue))
}

/// Decides, creates the children that the decision wants, and decides again on the result.
async fn decide_and_create(
    job: &ValidJob,
    object: &ParameterServerJob,
    context: &Context,
    now: Timestamp,
) -> Result<Decision, ReconcileError> {
    let status = object.status.clone().unwrap_or_default();
    let observing = async {
        let observed = observed_state(job, &status, &context.children, context.jobs.progress(&job.uid));
        Ok(ObservedState { checkpoints: context.jobs.checkpoints(&job.uid), ..observed })
    };
    let mut observed = context.step("dereference", observing).await?;
    let decision = context.step("decide", async { Ok(decide(job, &status, &observed, now)) }).await?;
    if decision.create.is_empty() {
        return Ok(decision);
    }
    let is_replacement = |child: &Child| matches!(child, Child::Pod(pod) if pod.incarnation > 0);
    if context.writer.caches_may_be_behind() || decision.create.iter().any(is_replacement) {
        confirm(object, context).await?;
    }
    debug!(children = decision.create.len(), "creating");
    let Context { writer, children, worker_image, jobs, .. } = context;
    let creating = async {
        let created =
            create_children(writer, (children, jobs), job, &decision.create, worker_image, &mut observed).await?;
        traces::attribute("psjobs.created", created as i64);
        traces::attribute("psjobs.refused", observed.refused.len() as i64);
        Ok(created)
    };
    let created = context.step("apply", creating).await?;
    context.metrics.created(created, observed.refused.len());
    context.step("decide", async { Ok(decide(job, &status, &observed, now)) }).await
}

/// Reads the version of a job, and refuses to go on with an older one: its pods seem to be missing where it was suspended
/// or has ended meanwhile.
async fn confirm(object: &ParameterServerJob, context: &Context) -> Result<(), ReconcileError> {
    let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
    let jobs = Api::<ParameterServerJob>::namespaced(context.writer.client.clone(), &namespace);
    let named = ListParams::default().fields(&format!("metadata.name={name}"));
    let found = jobs.list_metadata(&named).await.map_err(|source| {
        let what = format!("read job {name} again before its pods are created");
        ReconcileError::Api { what, source: Box::new(source) }
    })?;
    let is_same = |found: &PartialObjectMeta<ParameterServerJob>| {
        found.metadata.uid == object.metadata.uid && found.metadata.resource_version == object.metadata.resource_version
    };
    if found.iter().any(is_same) { Ok(()) } else { Err(ReconcileError::OutOfDate) }
}

/// Logs why a reconcile failed, and returns when it is tried again.
pub fn retry(job: Arc<ParameterServerJob>, error: &ReconcileError, context: Arc<Context>) -> Action {
    let delay = context.jobs.reconcile_failed(&job.uid().unwrap_or_default());
    match error {
        // The watch brings the newer job in a moment, the next term a new try.
        ReconcileError::OutOfDate | ReconcileError::Disputed { .. } | ReconcileError::NotLeading => {
            debug!(job = job.name_any(), "{error}")
        }
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
