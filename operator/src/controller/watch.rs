//! Watches jobs and what they own, and runs a reconcile of a job for every change to any of them.

use std::sync::Arc;

use futures::StreamExt as _;
use futures::channel::mpsc;
use k8s_openapi::api::core::v1::{Pod, Service};
use kube::core::PartialObjectMeta;
use kube::runtime::controller::{self, Controller};
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::utils::WatchStreamExt as _;
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt as _};
use psjobs_api::crd::{ParameterServerJob, names};
use tracing::{debug, warn};

use super::dereference::Children;
use super::observe::slim;
use super::{Context, reconcile, retry};

/// Reconciles under way at once. Each is mostly waiting for its turn to write; a job whose status waits must
/// not keep the next one from creating its pods.
const CONCURRENCY: u16 = 512;

/// The watches of one term as leader. They start with a list, so the caches begin up to date.
pub struct Watches {
    controller: Controller<ParameterServerJob>,
    children: Children,
}

impl Watches {
    /// Sets the watches up; [`run`] starts them. `namespace` none: the whole cluster.
    pub fn new(
        client: &Client,
        namespace: Option<&str>,
        progress: mpsc::Receiver<ObjectRef<ParameterServerJob>>,
    ) -> Self {
        let of_jobs = || watcher::Config::default().labels(names::LABEL_JOB);
        let (pods, pod_writer) = reflector::store();
        let (services, service_writer) = reflector::store();

        let pod_watch = watcher(api::<Pod>(client, namespace), of_jobs())
            .default_backoff()
            .modify(slim)
            .reflect(pod_writer)
            .touched_objects();
        let service_watch = watcher(api::<PartialObjectMeta<Service>>(client, namespace), of_jobs())
            .default_backoff()
            .modify(|service| service.managed_fields_mut().clear())
            .reflect(service_writer)
            .touched_objects();
        let controller = Controller::new(api::<ParameterServerJob>(client, namespace), watcher::Config::default())
            .with_config(controller::Config::default().concurrency(CONCURRENCY))
            .owns_stream(pod_watch)
            .owns_stream::<PartialObjectMeta<Service>>(service_watch)
            .reconcile_on(progress);
        Self { controller, children: Children { pods, services } }
    }

    pub fn jobs(&self) -> Store<ParameterServerJob> {
        self.controller.store()
    }

    pub fn children(&self) -> Children {
        self.children.clone()
    }
}

fn api<K>(client: &Client, namespace: Option<&str>) -> Api<K>
where
    K: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
{
    match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

/// Reconciles until `stop`; those under way then are finished.
pub async fn run(watches: Watches, context: Arc<Context>, stop: impl Future<Output = ()> + Send + Sync + 'static) {
    let reconciles = watches.controller.graceful_shutdown_on(stop).run(reconcile, retry, context);
    reconciles.for_each(async |result| tell(result)).await;
}

fn tell(result: Result<impl Sized, controller::Error<super::ReconcileError, watcher::Error>>) {
    match result {
        Ok(_) => {}
        // Told by `retry`, which knows more.
        Err(controller::Error::ReconcilerFailed(..)) => {}
        // A pod outlived its job by a moment.
        Err(controller::Error::ObjectNotFound(object)) => debug!(%object, "the job is gone"),
        Err(error) => warn!("a watch was interrupted and starts again: {}", crate::chain(&error)),
    }
}
