//! Creates the children that a decision wants: first the objects that pods need, then the service and the pods at the
//! same time.

use std::time::Instant;

use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::{Pod, Service};
use kube::{Api, ResourceExt as _};
use tracing::Instrument as _;

use super::create::{Creation, Outcome, create};
use super::pods::create_pod;
use super::prerequisites::create_prerequisites;
use super::writer::{REQUESTS_OF_JOB, Writer};
use crate::controller::build;
use crate::controller::cache::expectations::Expectations;
use crate::controller::cache::job_state::JobStates;
use crate::controller::cache::observed_state::ChildCaches;
use crate::controller::error::ReconcileError;
use crate::controller::model::{Child, ObservedState, Refusal};
use crate::controller::observe::{observe, observe_server_beside};
use crate::controller::validate::ValidJob;
use crate::traces;

/// Creates children, and adds them, or their refusals, to the observed state. Returns how many exist now.
pub async fn create_children(
    writer: &Writer,
    (caches, states): (&ChildCaches, &JobStates),
    job: &ValidJob,
    children: &[Child],
    worker_image: &str,
    observed: &mut ObservedState,
) -> Result<usize, ReconcileError> {
    if starts_job(job, children, observed)
        && let Some(refusal) = Box::pin(create_prerequisites(writer, states, job, observed)).await?
    {
        observed.refused.push(refusal);
        return Ok(0);
    }
    let service = async {
        match children.contains(&Child::Service) {
            // Boxed: together the states of the requests would overflow a thread's stack.
            true => Box::pin(create_service(writer, &caches.new_services, job)).await.map(Some),
            false => Ok(None),
        }
    };
    let mut requests = Vec::new();
    for child in children {
        if let Child::Pod(new) = child {
            let span = traces::child(|| format!("pod {}", new.name(&job.name)));
            requests.push(create_pod(writer, &caches.new_pods, job, new, worker_image).instrument(span));
        }
    }
    let pods = stream::iter(requests).buffered(REQUESTS_OF_JOB).try_collect::<Vec<_>>();
    let (service, pods) = futures::try_join!(service, pods)?;
    add_to(observed, service, pods);
    Ok(children.len() - observed.refused.len())
}

/// Returns whether the job starts now, the first time, or again after a suspension or a restart: no pod of this start exists.
fn starts_job(job: &ValidJob, children: &[Child], observed: &ObservedState) -> bool {
    let started = observed.pods.values().any(|pod| pod.incarnation >= job.first_incarnation());
    children.contains(&Child::Service) || !started && !children.is_empty()
}

async fn create_service(
    writer: &Writer,
    expectations: &Expectations<String>,
    job: &ValidJob,
) -> Result<Outcome<Service>, ReconcileError> {
    let service = build::service(job);
    let services = Api::<Service>::namespaced(writer.client.clone(), &job.namespace);
    let request = expectations.request(&job.namespace, &service.name_any());
    let outcome = create(writer, &services, &Creation::new(&service, &job.uid)).await?;
    if let Outcome::Created(_) = outcome {
        request.created(job.uid.clone(), Instant::now());
    }
    Ok(outcome)
}

fn add_to(observed: &mut ObservedState, service: Option<Outcome<Service>>, pods: Vec<Result<Pod, Refusal>>) {
    match service {
        Some(Outcome::Created(_) | Outcome::Exists(_)) => observed.service = true,
        Some(Outcome::Refused(refusal)) => observed.refused.push(refusal),
        None => {}
    }
    for pod in pods {
        match pod {
            Ok(pod) => observed.pods.extend(observe(&pod).into_iter().chain(observe_server_beside(&pod))),
            Err(refusal) => observed.refused.push(refusal),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::fixtures::{pod, replica, valid_job};
    use crate::controller::model::NewPod;

    #[test]
    fn the_first_pods_of_a_start_need_the_objects_that_all_pods_need() {
        let job = valid_job("");
        let child = |who| Child::Pod(NewPod::first(replica(who)));
        // The pods that exist, what is created, and whether the job starts.
        let rows = [
            (vec![], vec![Child::Service, child("ps-0"), child("trainer-0")], true),
            (vec![], vec![child("trainer-0")], true),
            (vec!["trainer-0"], vec![child("ps-0")], false),
            (vec!["trainer-0"], vec![Child::Service], true),
            (vec![], vec![], false),
        ];
        for (exist, children, starts) in rows {
            let pods = exist.iter().map(|who| (replica(who), pod(replica(who)))).collect();
            let observed = ObservedState { pods, ..ObservedState::default() };
            assert_eq!(starts_job(&job, &children, &observed), starts, "{exist:?}, {children:?}");
        }
    }
}
