//! Handover of a job to another shard, after its label psjobs.dev/shard changed. The new operator first writes its label
//! to the job's pods, so that its own cache has them, and decides only then. Writes that the old operator still sends
//! are refused by the API server, because the job has another resource version by then.

use std::time::Duration;

use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, Patch, PatchParams};
use kube::core::PartialObjectMeta;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt as _};
use psjobs_api::crd::{ParameterServerJob, names};
use serde_json::json;

use super::cache::job_state::JobStates;
use super::cache::observed_state::is_owned;
use super::context::Context;
use super::error::ReconcileError;
use super::shard::Shard;
use super::write::request::ignore_gone;
use super::write::write_priority::WritePriority;

/// How long to wait for the watch to show the labelled pods; mostly it triggers the reconcile earlier.
pub const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// State of a handover.
#[derive(Debug, PartialEq, Eq)]
pub enum Handover {
    /// The cache has all pods.
    Done,
    UnderWay,
    /// The job has another label by now, or is gone.
    NotOurs,
}

/// Returns whether pods of the job may carry another shard's label: another operator decided last, or created one since.
pub fn is_due(shard: &Shard, job: &ParameterServerJob, jobs: &JobStates) -> bool {
    let decided_by_another = job.status.as_ref().is_some_and(|status| status.shard != shard.0);
    decided_by_another || jobs.is_disputed(job.metadata.uid.as_deref().unwrap_or_default())
}

/// Writes this shard's label to the job's pods, and returns whether the cache has all of them.
pub async fn take_over(context: &Context, job: &ParameterServerJob) -> Result<Handover, ReconcileError> {
    let (namespace, name, uid) = (job.namespace().unwrap_or_default(), job.name_any(), job.uid().unwrap_or_default());
    let api = |what: &str| {
        let what = format!("{what} before job {name} is taken over");
        move |source| ReconcileError::Api { what, source: Box::new(source) }
    };
    // The job may have got another shard's label that the cache does not have yet; that operator labels the pods then.
    let jobs = Api::<ParameterServerJob>::namespaced(context.writer.client.clone(), &namespace);
    let ours = ListParams::default().fields(&format!("metadata.name={name}")).labels(&context.shard.selector());
    let found = jobs.list_metadata(&ours).await.map_err(api("list jobs"))?;
    if !found.iter().any(|job| job.uid().as_deref() == Some(&uid)) {
        return Ok(Handover::NotOurs);
    }
    let pods = Api::<Pod>::namespaced(context.writer.client.clone(), &namespace);
    let of_job = ListParams::default().labels(&format!("{}={name}", names::LABEL_JOB));
    let mut listed = pods.list_metadata(&of_job).await.map_err(api("list pods"))?.items;
    listed.retain(|pod| is_owned(pod, &uid));
    try_join_all(listed.iter().filter(|pod| !context.shard.has(*pod)).map(|pod| label(context, &pods, pod))).await?;

    let cached = |pod: &PartialObjectMeta<Pod>| {
        let cached = context.children.pods.get(&ObjectRef::new(&pod.name_any()).within(&namespace));
        cached.is_some_and(|cached| Some(&cached.observed.uid) == pod.metadata.uid.as_ref())
    };
    if !listed.iter().all(cached) {
        return Ok(Handover::UnderWay);
    }
    context.jobs.set_disputed(&uid, false);
    Ok(Handover::Done)
}

async fn label(context: &Context, pods: &Api<Pod>, pod: &PartialObjectMeta<Pod>) -> Result<(), ReconcileError> {
    let _permit = context.writer.permit(WritePriority::Child).await?;
    let name = pod.name_any();
    let patch = json!({"metadata": {"uid": pod.uid(), "labels": {names::LABEL_SHARD: context.shard.0}}});
    let patched = pods.patch_metadata(&name, &PatchParams::default(), &Patch::Merge(patch)).await;
    ignore_gone(patched.map(drop), || format!("label pod {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::fixtures::job;

    #[test]
    fn pods_are_taken_over_from_another_shard_or_when_one_is_disputed() {
        let named = |name: &str| Some(name.to_owned());
        let rows = [
            ("a job that no operator decided about", None, Shard(named("a")), false, false),
            ("our own", Some(named("a")), Shard(named("a")), false, false),
            ("another shard's", Some(named("b")), Shard(named("a")), false, true),
            ("one of before shards", Some(None), Shard(named("a")), false, true),
            ("one that was in a shard", Some(named("a")), Shard(None), false, true),
            ("our own in a cluster without shards", Some(None), Shard(None), false, false),
            ("our own, of which another made a pod", Some(named("a")), Shard(named("a")), true, true),
        ];
        for (label, decided_by, shard, disputed, want) in rows {
            let mut job = job("");
            job.status =
                decided_by.map(|shard| psjobs_api::crd::ParameterServerJobStatus { shard, ..Default::default() });
            let jobs = JobStates::default();
            jobs.set_disputed(&job.uid().expect("it has one"), disputed);
            assert_eq!(is_due(&shard, &job, &jobs), want, "{label}");
        }
    }
}
