//! The cache of pods. It holds every pod of every job, so only the fields that decisions read are kept: a tenth of a
//! `Pod`, most of whose fields are empty here and take their space all the same.

use std::borrow::Cow;

use futures::{Stream, StreamExt as _};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::runtime::reflector::{Lookup, ObjectRef, Store, store};
use kube::runtime::watcher::{self, Event};
use psjobs_api::crd::{ParameterServerJob, names};
use tracing::warn;

use super::expectations::Expectations;
use crate::controller::observe::{ObservedPod, Replica, observe, observe_server_beside};
use crate::error_chain::chain;

/// A pod as the cache keeps it.
#[derive(Clone, Debug, PartialEq)]
pub struct CachedPod {
    pub namespace: String,
    /// Name of its job.
    pub job: String,
    /// Uid of the job that owns it.
    pub owner: String,
    pub replica: Replica,
    pub observed: ObservedPod,
    /// The server that shares the pod of this trainer.
    pub beside: Option<Box<(Replica, ObservedPod)>>,
}

impl CachedPod {
    /// Reads a pod; `None` if no job owns it.
    pub fn read(pod: &Pod) -> Option<Self> {
        let (replica, observed) = observe(pod)?;
        let owner = pod.owner_references().iter().find(|owner| owner.controller == Some(true))?;
        let job = pod.labels().get(names::LABEL_JOB)?.clone();
        let (namespace, owner) = (pod.metadata.namespace.clone()?, owner.uid.clone());
        let beside = observe_server_beside(pod).map(Box::new);
        Some(Self { namespace, job, owner, replica, observed, beside })
    }

    /// Returns the replicas in the pod.
    pub fn replicas(self) -> impl Iterator<Item = (Replica, ObservedPod)> {
        std::iter::once((self.replica, self.observed)).chain(self.beside.map(|beside| *beside))
    }
}

impl Lookup for CachedPod {
    type DynamicType = ();

    fn kind((): &()) -> Cow<'_, str> {
        "Pod".into()
    }

    fn group((): &()) -> Cow<'_, str> {
        "".into()
    }

    fn version((): &()) -> Cow<'_, str> {
        "v1".into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        "pods".into()
    }

    fn name(&self) -> Option<Cow<'_, str>> {
        Some(self.observed.name.as_str().into())
    }

    fn namespace(&self) -> Option<Cow<'_, str>> {
        Some(self.namespace.as_str().into())
    }

    fn resource_version(&self) -> Option<Cow<'_, str>> {
        None
    }

    fn uid(&self) -> Option<Cow<'_, str>> {
        Some(self.observed.uid.as_str().into())
    }
}

/// Creates the cache that a watch fills, and the stream of jobs whose pods changed.
pub fn cache(
    watch: impl Stream<Item = watcher::Result<Event<Pod>>> + Send + 'static,
    expectations: Expectations<CachedPod>,
) -> (Store<CachedPod>, impl Stream<Item = ObjectRef<ParameterServerJob>> + Send + 'static) {
    let (cache, mut writer) = store();
    let jobs = watch.filter_map(move |event| {
        let event = event.map_err(|error| warn!("a watch was interrupted and starts again: {}", chain(&error)));
        let event = event.ok().and_then(read);
        if let Some(event) = &event {
            writer.apply_watcher_event(event);
            expectations.observe_event(event);
        }
        std::future::ready(event.and_then(job_of))
    });
    (cache, jobs)
}

fn read(event: Event<Pod>) -> Option<Event<CachedPod>> {
    Some(match event {
        Event::Apply(pod) => Event::Apply(CachedPod::read(&pod)?),
        Event::Delete(pod) => Event::Delete(CachedPod::read(&pod)?),
        Event::InitApply(pod) => Event::InitApply(CachedPod::read(&pod)?),
        Event::Init => Event::Init,
        Event::InitDone => Event::InitDone,
    })
}

fn job_of(event: Event<CachedPod>) -> Option<ObjectRef<ParameterServerJob>> {
    match event {
        Event::Apply(pod) | Event::Delete(pod) | Event::InitApply(pod) => {
            Some(ObjectRef::new(&pod.job).within(&pod.namespace))
        }
        Event::Init | Event::InitDone => None,
    }
}

#[cfg(test)]
mod tests {
    use futures::stream;

    use super::*;

    fn pod(index: u32, controller: bool) -> Pod {
        let yaml = format!(
            "metadata: {{name: mnist-trainer-{index}, namespace: team, uid: u{index}, \
             labels: {{psjobs.dev/job-name: mnist, psjobs.dev/role: trainer, psjobs.dev/index: '{index}'}}, \
             ownerReferences: [{{apiVersion: v, kind: k, name: mnist, uid: 0b6c, controller: {controller}}}]}}"
        );
        serde_yaml::from_str(&yaml).expect("a pod")
    }

    #[tokio::test]
    async fn the_cache_follows_the_watch_and_reports_whose_pods_changed() {
        let events = [
            Event::Init,
            Event::InitApply(pod(0, true)),
            Event::InitApply(pod(1, true)),
            Event::InitApply(pod(2, false)),
            Event::InitDone,
            Event::Delete(pod(0, true)),
            Event::Apply(pod(3, true)),
        ];
        let (cache, jobs) = cache(stream::iter(events.map(Ok)), Expectations::default());
        let jobs = jobs.collect::<Vec<_>>().await;
        assert_eq!(jobs, vec![ObjectRef::new("mnist").within("team"); 4], "the pod that no job owns is left out");
        let mut names = cache.state().iter().map(|pod| pod.observed.name.clone()).collect::<Vec<_>>();
        names.sort();
        assert_eq!(names, ["mnist-trainer-1", "mnist-trainer-3"]);
        let found = cache.get(&ObjectRef::new("mnist-trainer-1").within("team")).expect("by its name");
        assert_eq!((found.owner.as_str(), found.replica), ("0b6c", Replica::trainer(1)));
    }
}
