//! Reads the state of a job's children from the caches that watches fill, and from the children that were created since.
//! Sends no request: a child that neither has is created again, which finds it (see `write::create`).

use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::api::core::v1::Service;
use kube::core::PartialObjectMeta;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Resource, ResourceExt as _};
use psjobs_api::Role;
use psjobs_api::crd::{ParameterServerJobStatus, names};
use tokio::sync::OnceCell;

use super::expectations::Expectations;
use super::nodes::Nodes;
use super::pods::CachedPod;
use crate::controller::decide::ReplicaHistory;
use crate::controller::model::{ObservedState, ProgressReport};
use crate::controller::observe::ObservedPod;
use crate::controller::validate::ValidJob;

/// The caches of jobs' children.
#[derive(Clone)]
pub struct ChildCaches {
    pub pods: Store<CachedPod>,
    pub services: Store<PartialObjectMeta<Service>>,
    pub nodes: Nodes,
    /// Pods that were created and that the cache does not have yet.
    pub new_pods: Expectations<CachedPod>,
    /// Services that were created and that the cache does not have yet, with the uid of the job.
    pub new_services: Expectations<String>,
    ready: Arc<OnceCell<()>>,
}

impl ChildCaches {
    /// Takes caches that their watches are about to fill, with the expectations of each.
    pub fn new(
        (pods, new_pods): (Store<CachedPod>, Expectations<CachedPod>),
        (services, new_services): (Store<PartialObjectMeta<Service>>, Expectations<String>),
        nodes: Nodes,
    ) -> Self {
        Self { pods, services, nodes, new_pods, new_services, ready: Arc::default() }
    }

    /// Waits for the lists that the caches start with.
    pub async fn wait_until_ready(&self) {
        let lists = async {
            // An error means that the watch is gone, and with it the controller that calls this.
            let _ = self.pods.wait_until_ready().await;
            let _ = self.services.wait_until_ready().await;
        };
        // Only one task waits for a store: of several tasks the store wakes only the last.
        self.ready.get_or_init(|| lists).await;
    }
}

/// Reads the state of a job's children.
pub fn observed_state(
    job: &ValidJob,
    status: &ParameterServerJobStatus,
    children: &ChildCaches,
    progress: Option<ProgressReport>,
) -> ObservedState {
    // By name: with thousands of pods in the cache, a search through all of them for every reconcile would be most of the
    // operator's work.
    let pods = [Role::Server, Role::Trainer].into_iter().flat_map(|role| {
        let highest = job.places(role).max(ReplicaHistory::read(status).count(role));
        (0..highest).map(move |index| names::pod(&job.name, role, index))
    });
    let now = Instant::now();
    let pods = pods.filter_map(|name| {
        let cached = || children.pods.get(&ObjectRef::new(&name).within(&job.namespace)).map(Arc::unwrap_or_clone);
        children.new_pods.get(&job.namespace, &name, now).or_else(cached)
    });
    let replicas = pods.filter(|pod| pod.owner == job.uid).flat_map(CachedPod::replicas);
    let pods = replicas.map(|(replica, observed)| {
        let node_lost = observed.node.as_deref().and_then(|node| children.nodes.lost_since(node));
        (replica, ObservedPod { node_lost, ..observed })
    });
    let pods = pods.collect();
    let service = names::service(&job.name);
    let service = match children.new_services.get(&job.namespace, &service, now) {
        Some(owner) => owner == job.uid,
        None => {
            let service = children.services.get(&ObjectRef::new(&service).within(&job.namespace));
            service.is_some_and(|service| is_owned(&*service, &job.uid))
        }
    };
    ObservedState { pods, service, progress, ..ObservedState::default() }
}

/// Returns whether an object's controller is the job with this uid.
pub fn is_owned<K: Resource>(object: &K, uid: &str) -> bool {
    object.owner_references().iter().any(|owner| owner.uid == uid && owner.controller == Some(true))
}

#[cfg(test)]
mod tests {
    use kube::runtime::reflector::store;
    use kube::runtime::watcher::Event;
    use tokio::task::JoinSet;

    use super::*;
    use crate::controller::fixtures::{pod, valid_job};
    use crate::controller::observe::Replica;

    #[test]
    fn what_was_created_is_there_before_the_caches_have_it() {
        let (job, status) = (valid_job(""), ParameterServerJobStatus::default());
        let children = ChildCaches::new(
            (store().0, Expectations::default()),
            (store().0, Expectations::default()),
            Nodes::new(None),
        );
        let replica = Replica::trainer(1);
        let new = |owner: &str| CachedPod {
            namespace: job.namespace.clone(),
            job: job.name.clone(),
            owner: owner.to_owned(),
            replica,
            observed: pod(replica),
            beside: None,
        };
        let (name, service) = (names::pod(&job.name, Role::Trainer, 1), names::service(&job.name));
        for (owner, ours) in [(job.uid.as_str(), true), ("an earlier job's of this name", false)] {
            let new_pod = children.new_pods.request(&job.namespace, &name);
            let new_service = children.new_services.request(&job.namespace, &service);
            assert_eq!(observed_state(&job, &status, &children, None), ObservedState::default());
            new_pod.created(new(owner), Instant::now());
            new_service.created(owner.to_owned(), Instant::now());
            let observed = observed_state(&job, &status, &children, None);
            assert_eq!((observed.pods.contains_key(&replica), observed.service), (ours, ours), "owned by {owner}");
        }
    }

    #[tokio::test]
    async fn all_who_wait_for_the_caches_go_on_when_they_are_filled() {
        let ((pods, mut pod_writer), (services, mut service_writer)) = (store(), store());
        let children =
            ChildCaches::new((pods, Expectations::default()), (services, Expectations::default()), Nodes::new(None));
        let mut waiting = JoinSet::new();
        for _ in 0..10 {
            let children = children.clone();
            waiting.spawn(async move { children.wait_until_ready().await });
        }
        // Each has begun to wait before the first list is there, and waits again before the second is.
        tokio::task::yield_now().await;
        pod_writer.apply_watcher_event(&Event::Init);
        pod_writer.apply_watcher_event(&Event::InitDone);
        tokio::task::yield_now().await;
        assert!(waiting.try_join_next().is_none(), "one list is missing");
        service_writer.apply_watcher_event(&Event::Init);
        service_writer.apply_watcher_event(&Event::InitDone);
        let all = tokio::time::timeout(std::time::Duration::from_secs(5), waiting.join_all()).await;
        assert_eq!(all.expect("all tasks go on").len(), 10);
    }
}
