//! The watches of jobs and of the objects that they own.

use std::collections::BTreeSet;

use futures::TryStreamExt as _;
use futures::channel::mpsc;
use k8s_openapi::api::core::v1::{Node, Pod, Service};
use kube::core::{DeserializeGuard, PartialObjectMeta};
use kube::runtime::controller::{self, Controller};
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::utils::WatchStreamExt as _;
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt as _};
use psjobs_api::crd::{ParameterServerJob, names};

use super::expectations::Expectations;
use super::metadata::remove_unread_metadata;
use super::nodes::{self, Nodes};
use super::observed_state::ChildCaches;
use super::pods::{self, CachedPod};
use super::readable_jobs::readable;
use crate::controller::shard::Shard;

/// Reconciles under way at once. Most of them wait for a permit to write, and a job whose status waits must not keep the
/// next job from creating its pods.
const CONCURRENCY: u16 = 1024;

/// The watches of one term as leader. They start with a list, so the caches begin up to date.
pub struct Watches {
    controller: Controller<ParameterServerJob>,
    children: ChildCaches,
}

impl Watches {
    /// Sets the watches up; [`run`](crate::controller::run) starts them. Without a namespace they watch the cluster.
    pub fn new(
        client: &Client,
        namespace: Option<&str>,
        shard: &Shard,
        progress: mpsc::Receiver<ObjectRef<ParameterServerJob>>,
    ) -> Self {
        let of_shard = shard.selector();
        let pods_of_shard = format!("{},{of_shard}", names::LABEL_JOB);
        let (jobs, job_writer) = reflector::store();
        let (services, service_writer) = reflector::store();

        let pod_watch = watcher(api::<Pod>(client, namespace), watcher::Config::default().labels(&pods_of_shard));
        let (new_pods, new_services) = (Expectations::default(), Expectations::default());
        let (pods, jobs_of_pods) = pods::cache(pod_watch.default_backoff(), new_pods.clone());
        // Services of all shards, so that a handover need not label them; only the metadata of one per job.
        let of_jobs = watcher::Config::default().labels(names::LABEL_JOB);
        let service_watch = watcher(api::<PartialObjectMeta<Service>>(client, namespace), of_jobs)
            .default_backoff()
            .modify(remove_unread_metadata)
            .reflect(service_writer)
            .inspect_ok({
                let new_services = new_services.clone();
                move |event| new_services.observe_event(event)
            })
            .touched_objects();
        let jobs_of_shard = watcher::Config::default().labels(&of_shard);
        let job_watch = watcher(api::<DeserializeGuard<ParameterServerJob>>(client, namespace), jobs_of_shard)
            .default_backoff()
            .try_filter_map(async |event| Ok(readable(event)))
            .modify(remove_unread_metadata)
            .reflect(job_writer)
            .applied_objects();
        let controller = Controller::for_stream(job_watch, jobs)
            .with_config(controller::Config::default().concurrency(CONCURRENCY))
            .reconcile_on(jobs_of_pods)
            .owns_stream::<PartialObjectMeta<Service>>(service_watch)
            .reconcile_on(progress);
        let children = |pods, nodes| ChildCaches::new((pods, new_pods), (services, new_services), nodes);
        if namespace.is_some() {
            // Nodes are in no namespace, and an operator of one namespace has rights only there.
            return Self { controller, children: children(pods, Nodes::new(None)) };
        }
        let (nodes, node_writer) = reflector::store();
        let node_watch = watcher(Api::<Node>::all(client.clone()), watcher::Config::default())
            .default_backoff()
            .modify(nodes::slim)
            .reflect(node_writer)
            .touched_objects();
        let on_nodes = pods.clone();
        let controller = controller.watches_stream(node_watch, move |node: Node| {
            let jobs = jobs_on(&node, &on_nodes).into_iter();
            jobs.map(|(namespace, job)| ObjectRef::new(&job).within(&namespace))
        });
        Self { controller, children: children(pods, Nodes::new(Some(nodes))) }
    }

    pub fn jobs(&self) -> Store<ParameterServerJob> {
        self.controller.store()
    }

    pub fn children(&self) -> ChildCaches {
        self.children.clone()
    }

    /// Returns the controller, which has not started yet.
    pub fn into_controller(self) -> Controller<ParameterServerJob> {
        self.controller
    }
}

/// Returns the jobs that have a pod on a node which does not answer; none if it answers, because then its pods' events
/// say the rest.
fn jobs_on(node: &Node, pods: &Store<CachedPod>) -> BTreeSet<(String, String)> {
    if nodes::lost_since(node).is_none() {
        return BTreeSet::new();
    }
    let name = node.name_any();
    let pods = pods.state();
    let here = pods.iter().filter(|pod| pod.observed.node.as_ref() == Some(&name));
    here.map(|pod| (pod.namespace.clone(), pod.job.clone())).collect()
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
