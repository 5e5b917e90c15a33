//! Adds the fields of spec.schedulingPolicy to a pod: priority, affinity to the job's other pods, queue.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{PodAffinityTerm, PodSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use psjobs_api::crd::{SchedulingBackend, SchedulingPolicy, names};

use crate::controller::validate::ValidJob;

/// Labels and annotation that Kueue's integration for groups of plain pods reads.
const QUEUE: &str = "kueue.x-k8s.io/queue-name";
const GROUP: &str = "kueue.x-k8s.io/pod-group-name";
const GROUP_SIZE: &str = "kueue.x-k8s.io/pod-group-total-count";

/// Adds the fields that the template does not set.
pub fn apply(
    job: &ValidJob,
    policy: &SchedulingPolicy,
    spec: &mut PodSpec,
    labels: &mut BTreeMap<String, String>,
    annotations: &mut BTreeMap<String, String>,
) {
    let SchedulingPolicy { priority_class_name, topology_key, queue, backend, .. } = policy;
    let of_kueue = *backend != Some(SchedulingBackend::Volcano);
    if spec.priority_class_name.is_none() {
        spec.priority_class_name.clone_from(priority_class_name);
    }
    if let Some(key) = topology_key {
        let own = [(names::LABEL_JOB.to_owned(), job.name.clone())].into();
        let near = PodAffinityTerm {
            topology_key: key.clone(),
            label_selector: Some(LabelSelector { match_labels: Some(own), ..LabelSelector::default() }),
            ..PodAffinityTerm::default()
        };
        // The scheduler lets the first pod of a group that is near itself go anywhere.
        let affinity = spec.affinity.get_or_insert_default().pod_affinity.get_or_insert_default();
        affinity.required_during_scheduling_ignored_during_execution.get_or_insert_default().push(near);
    }
    if let Some(queue) = queue.as_ref().filter(|_| of_kueue) {
        labels.insert(QUEUE.into(), queue.clone());
        // The uid distinguishes the job from an earlier one of its name, whose group Kueue may still know.
        labels.insert(GROUP.into(), job.uid.clone());
        annotations.insert(GROUP_SIZE.into(), job.pods(job.trainers).to_string());
    }
}
