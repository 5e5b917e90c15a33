//! Runs a reconcile of a job for every change to it or to an object that it owns.

use std::sync::Arc;

use futures::StreamExt as _;
use kube::runtime::{controller, watcher};
use tracing::{debug, warn};

use super::cache::watch::Watches;
use super::context::Context;
use super::error::ReconcileError;
use super::reconcile::{reconcile, retry};
use crate::error_chain::chain;

/// Reconciles until `stop`; those under way then are finished.
pub async fn run(watches: Watches, context: Arc<Context>, stop: impl Future<Output = ()> + Send + Sync + 'static) {
    let reconciles = watches.into_controller().graceful_shutdown_on(stop).run(reconcile, retry, context);
    reconciles.for_each(async |result| report(result)).await;
}

fn report(result: Result<impl Sized, controller::Error<ReconcileError, watcher::Error>>) {
    match result {
        Ok(_) => {}
        // `retry` logs it, with more detail.
        Err(controller::Error::ReconcilerFailed(..)) => {}
        // A pod outlived its job by a moment.
        Err(controller::Error::ObjectNotFound(object)) => debug!(%object, "the job is gone"),
        Err(error) => warn!("a watch was interrupted and starts again: {}", chain(&error)),
    }
}
