//! The controller: one reconcile reads the caches, decides, and carries the decision out.
//!
//! ```text
//! dereference -> validate -> decide -> create -> decide again -> write the status -> delete, tell
//! ```
//!
//! Deciding again after creating is what makes the status true at once: it counts the pods that the
//! API server returned, and names the ones that it refused.

pub mod apply;
pub mod build;
pub mod decide;
pub mod dereference;
mod events;
#[cfg(test)]
pub mod fixtures;
pub mod memory;
pub mod observe;
pub mod update_status;
pub mod validate;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::runtime::controller::Action;
use kube::runtime::events::Recorder;
use kube::{Client, ResourceExt as _};
use psjobs_api::crd::ParameterServerJob;
use tracing::{Instrument as _, debug, info_span, warn};

pub use self::watch::{Watches, run};

use self::decide::{Decision, decide, refuse};
use self::dereference::{Children, dereference};
use self::memory::Memory;
use self::validate::{ValidJob, validate};
use crate::metrics::Metrics;

/// What reconciles share.
pub struct Context {
    pub client: Client,
    pub children: Children,
    pub memory: Arc<Memory>,
    pub recorder: Recorder,
    pub metrics: Metrics,
    /// Image of servers whose job has no template for them.
    pub worker_image: String,
}

/// Why a reconcile has to be tried again.
#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    #[error("cannot {what}")]
    Api { what: String, source: Box<kube::Error> },
    #[error("the job changed while it was looked at")]
    OutOfDate,
    #[error("the status does not fit JSON")]
    Json(#[source] serde_json::Error),
}

async fn reconcile(cached: Arc<ParameterServerJob>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    let span = info_span!("job", namespace = cached.namespace(), name = cached.name_any());
    // Only at the start of a term: a decision on half a cache would be right, but ask much of the API server.
    context.children.wait_until_ready().await;
    let timer = context.metrics.start_reconcile();
    let uid = cached.uid().unwrap_or_default();
    let result = reconcile_one(cached, &context).instrument(span).await;
    timer.stop(result.is_ok());
    if result.is_ok() {
        context.memory.succeeded(&uid);
    }
    result
}

async fn reconcile_one(cached: Arc<ParameterServerJob>, context: &Context) -> Result<Action, ReconcileError> {
    let object = context.memory.newest(cached);
    if object.metadata.deletion_timestamp.is_some() {
        // Its children are being deleted with it; anything done now would only be in the way.
        return Ok(Action::await_change());
    }
    let now = Timestamp::now();
    let decision = match validate(object.clone()) {
        Ok(job) => decide_and_create(&job, &object, context, now).await?,
        Err(error) => refuse(&error, &object.status.clone().unwrap_or_default(), object.metadata.generation, now),
    };
    settle(&object, &decision, context).await?;
    Ok(match decision.requeue {
        // A little late rather than a little early: the condition must hold by then.
        Some(wait) => Action::requeue(Duration::try_from(wait).unwrap_or_default() + Duration::from_millis(10)),
        None => Action::await_change(),
    })
}

async fn decide_and_create(
    job: &ValidJob,
    object: &ParameterServerJob,
    context: &Context,
    now: Timestamp,
) -> Result<Decision, ReconcileError> {
    let status = object.status.clone().unwrap_or_default();
    let mut world = dereference(job, &status, &context.children, context.memory.progress(&job.uid));
    let decision = decide(job, &status, &world, now);
    if decision.create.is_empty() {
        return Ok(decision);
    }
    debug!(children = decision.create.len(), "creating");
    apply::create(&context.client, job, &decision.create, &context.worker_image, &mut world).await?;
    let refused = world.refused.len();
    context.metrics.created(decision.create.len() - refused, refused);
    Ok(decide(job, &status, &world, now))
}

/// Writes the status, then deletes and tells: the failure is on record before its evidence goes.
async fn settle(object: &ParameterServerJob, decision: &Decision, context: &Context) -> Result<(), ReconcileError> {
    // What is still to be created was refused just now, or will be created in the next reconcile.
    let Decision { create: _, status, delete, delete_job, notices, requeue: _ } = decision;
    if let Some(stored) = update_status::update_status(&context.client, object, status).await? {
        context.metrics.wrote_status();
        context.memory.wrote(stored);
    }
    let namespace = object.namespace().unwrap_or_default();
    apply::delete(&context.client, &namespace, delete).await?;
    context.metrics.deleted(delete.len());
    events::publish(&context.recorder, object, notices).await;
    if *delete_job {
        apply::delete_job(&context.client, object).await?;
    }
    Ok(())
}

fn retry(job: Arc<ParameterServerJob>, error: &ReconcileError, context: Arc<Context>) -> Action {
    let delay = context.memory.failed(&job.uid().unwrap_or_default());
    match error {
        // The watch brings the newer job in a moment.
        ReconcileError::OutOfDate => debug!(job = job.name_any(), "{error}"),
        error => warn!(
            namespace = job.namespace(),
            name = job.name_any(),
            retry_in = ?delay,
            "{}",
            crate::chain(error)
        ),
    }
    Action::requeue(delay)
}
