//! The nodes of the servers: one node where they share a volume that only one node may mount, else different nodes where
//! each holds a copy of another's parameters.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Affinity, PodAffinityTerm, PodAntiAffinity, PodSpec, WeightedPodAffinityTerm};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use psjobs_api::Role;
use psjobs_api::crd::names;

use crate::controller::validate::ValidJob;

/// The label of nodes that distinguishes one machine from another.
const NODE: &str = "kubernetes.io/hostname";

/// Places a server beside the others where it must be, or away from them where that is better and the template sets no
/// affinity.
pub fn place(job: &ValidJob, spec: &mut PodSpec) {
    if job.servers_share_node() {
        let affinity = spec.affinity.get_or_insert_default().pod_affinity.get_or_insert_default();
        // The scheduler lets the first pod of a group that is near itself go anywhere.
        affinity.required_during_scheduling_ignored_during_execution.get_or_insert_default().push(near_servers(job));
        return;
    }
    if job.servers_are_replicated() && spec.affinity.is_none() {
        let apart = WeightedPodAffinityTerm { weight: 100, pod_affinity_term: near_servers(job) };
        let apart = PodAntiAffinity {
            preferred_during_scheduling_ignored_during_execution: Some(vec![apart]),
            ..PodAntiAffinity::default()
        };
        spec.affinity = Some(Affinity { pod_anti_affinity: Some(apart), ..Affinity::default() });
    }
}

/// Selects the nodes that have a server of the job.
fn near_servers(job: &ValidJob) -> PodAffinityTerm {
    let labels =
        [(names::LABEL_JOB, job.name.clone()), (names::LABEL_ROLE, job.object.spec.pod_role(Role::Server).to_string())];
    let labels: BTreeMap<_, _> = labels.map(|(name, value)| (name.to_owned(), value)).into();
    PodAffinityTerm {
        topology_key: NODE.to_owned(),
        label_selector: Some(LabelSelector { match_labels: Some(labels), ..LabelSelector::default() }),
        ..PodAffinityTerm::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::build::pod;
    use crate::controller::fixtures::{replica, valid_job};
    use crate::controller::model::NewPod;

    fn affinity(spec: &str, who: &str) -> Option<Affinity> {
        let new = NewPod::first(replica(who));
        pod(&valid_job(spec), &new, "worker").spec.expect("a spec").affinity
    }

    fn is_of_servers(term: &PodAffinityTerm) -> bool {
        let labels = term.label_selector.as_ref().and_then(|selector| selector.match_labels.clone());
        let want = [("psjobs.dev/job-name", "mnist"), ("psjobs.dev/role", "ps")];
        term.topology_key == NODE && labels == Some(want.map(|(k, v)| (k.to_owned(), v.to_owned())).into())
    }

    #[test]
    fn servers_keep_apart_or_together_as_their_copies_and_their_volume_want() {
        const TEMPLATE: &str = "template: {spec: {affinity: {nodeAffinity: {}}, containers: [{name: s, image: i}]}}";
        const ONCE: &str = "checkpoint: {volumeClaim: {size: 1Gi}}";
        const MANY: &str = "checkpoint: {volumeClaim: {size: 1Gi, accessMode: ReadWriteMany}}";
        const THEIRS: &str = "checkpoint: {existingClaim: shared}";
        let (plain, copies) = ("ps: {replicas: 2}", "ps: {replicas: 2, replicationFactor: 2}");
        let custom = format!("ps: {{replicas: 2, replicationFactor: 2, {TEMPLATE}}}");
        let rows = [
            (plain.to_owned(), "ps-0", false, false),
            (copies.to_owned(), "ps-0", true, false),
            (copies.to_owned(), "ps-1", true, false),
            (copies.to_owned(), "trainer-0", false, false),
            (custom.clone(), "ps-0", false, false),
            (format!("{plain}\n{ONCE}"), "ps-1", false, true),
            (format!("{plain}\n{ONCE}"), "trainer-0", false, false),
            (format!("{plain}\n{MANY}"), "ps-1", false, false),
            (format!("{plain}\n{THEIRS}"), "ps-1", false, false),
            (ONCE.to_owned(), "ps-0", false, false),
            (format!("{copies}\n{ONCE}"), "ps-0", false, true),
            (format!("{copies}\n{MANY}"), "ps-0", true, false),
            (format!("{custom}\n{ONCE}"), "ps-0", false, true),
        ];
        for (spec, who, apart, together) in rows {
            let affinity = affinity(&spec, who).unwrap_or_default();
            let apart_from = affinity.pod_anti_affinity.unwrap_or_default();
            let preferred = apart_from.preferred_during_scheduling_ignored_during_execution.unwrap_or_default();
            let near = affinity.pod_affinity.unwrap_or_default();
            let required = near.required_during_scheduling_ignored_during_execution.unwrap_or_default();
            assert_eq!((preferred.len(), required.len()), (apart.into(), together.into()), "{who}: {spec}");
            let by_weight =
                |term: &WeightedPodAffinityTerm| term.weight == 100 && is_of_servers(&term.pod_affinity_term);
            assert!(preferred.iter().all(by_weight) && required.iter().all(is_of_servers), "{who}: {spec}");
            assert_eq!(affinity.node_affinity.is_some(), spec.contains(TEMPLATE), "the template's stays: {spec}");
        }
    }
}
