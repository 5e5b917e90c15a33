//! Builds the objects of spec.schedulingPolicy.backend, which show schedulers which pods start together, and marks each
//! pod as a member. A cluster needs to have these kinds only if a job asks for them.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::PodSpec;
use kube::core::{ApiResource, DynamicObject};
use psjobs_api::crd::{KIND, SchedulingBackend, SchedulingPolicy, names};
use serde_json::{Value, json};

use super::metadata::metadata;
use crate::controller::validate::ValidJob;

/// An object of a kind that the cluster may not have.
pub struct Group {
    pub resource: ApiResource,
    pub object: DynamicObject,
    /// The message if the cluster does not have the kind.
    pub missing: String,
}

/// Returns the backend that schedules the job's pods together, if one does.
fn backend(job: &ValidJob) -> Option<(SchedulingBackend, &SchedulingPolicy)> {
    let policy = job.object.spec.scheduling_policy.as_ref()?;
    let backend = policy.backend.filter(|backend| *backend != SchedulingBackend::None)?;
    Some((backend, policy))
}

/// Returns the name of the group of the pods that start now.
fn name(job: &ValidJob) -> String {
    names::pod_group(&job.name, job.first_incarnation())
}

/// Builds the objects that are created before the pods, in this order.
pub fn groups(job: &ValidJob) -> Vec<Group> {
    let Some((backend, policy)) = backend(job) else { return Vec::new() };
    // A group stays as it is when the job is scaled.
    let needed = job.pods(job.least_trainers()).cast_signed();
    let min = policy.min_available.unwrap_or(needed);
    let gang = json!({"gang": {"minCount": min}});
    let priority = &policy.priority_class_name;
    match backend {
        SchedulingBackend::None => Vec::new(),
        SchedulingBackend::Workload => {
            const TEMPLATE: &str = "pods";
            let controller = json!({"apiGroup": psjobs_api::crd::GROUP, "kind": KIND, "name": job.name});
            let template = json!({"name": TEMPLATE, "schedulingPolicy": gang, "priorityClassName": priority});
            let made_from = json!({"workloadName": name(job), "templateName": TEMPLATE});
            let spec = json!({"schedulingPolicy": gang, "priorityClassName": priority, "workloadRef": made_from});
            vec![
                group(job, backend, "Workload", json!({"controllerRef": controller, "podGroupTemplates": [template]})),
                group(job, backend, "PodGroup", spec),
            ]
        }
        SchedulingBackend::Volcano => {
            let spec = json!({"minMember": min, "queue": policy.queue, "priorityClassName": priority});
            vec![group(job, backend, "PodGroup", spec)]
        }
        SchedulingBackend::Coscheduling => {
            let spec = json!({"minMember": min, "scheduleTimeoutSeconds": policy.schedule_timeout_seconds});
            vec![group(job, backend, "PodGroup", spec)]
        }
    }
}

fn group(job: &ValidJob, backend: SchedulingBackend, kind: &str, mut spec: Value) -> Group {
    let (group, version, install) = match backend {
        SchedulingBackend::Volcano => ("scheduling.volcano.sh", "v1beta1", "install Volcano"),
        SchedulingBackend::Coscheduling => {
            ("scheduling.x-k8s.io", "v1alpha1", "install the scheduler plugin Coscheduling with its definitions")
        }
        SchedulingBackend::Workload | SchedulingBackend::None => (
            "scheduling.k8s.io",
            "v1beta1",
            "turn on the feature GenericWorkload and the API scheduling.k8s.io/v1beta1 of Kubernetes 1.37 or newer",
        ),
    };
    if let Some(fields) = spec.as_object_mut() {
        // Fields that the job does not set are left to the scheduler.
        fields.retain(|_, value| !value.is_null());
    }
    let resource = ApiResource {
        group: group.into(),
        version: version.into(),
        api_version: format!("{group}/{version}"),
        kind: kind.into(),
        plural: format!("{}s", kind.to_lowercase()),
    };
    let mut object = DynamicObject::new(&name(job), &resource).data(json!({ "spec": spec }));
    object.metadata = metadata(job, name(job));
    let missing = format!(
        "this cluster has no {kind} of {group}/{version}, which spec.schedulingPolicy.backend {backend:?} needs; {install}, or suspend the job and remove the backend"
    );
    Group { resource, object, missing }
}

/// Marks a pod as a member of its group for schedulers that read that from labels or annotations.
pub fn join(
    job: &ValidJob,
    spec: &mut PodSpec,
    labels: &mut BTreeMap<String, String>,
    annotations: &mut BTreeMap<String, String>,
) {
    match backend(job) {
        Some((SchedulingBackend::Volcano, _)) => {
            annotations.insert("scheduling.k8s.io/group-name".into(), name(job));
            spec.scheduler_name.get_or_insert_with(|| "volcano".into());
        }
        Some((SchedulingBackend::Coscheduling, _)) => {
            labels.insert("scheduling.x-k8s.io/pod-group".into(), name(job));
            spec.scheduler_name.get_or_insert_with(|| "scheduler-plugins-scheduler".into());
        }
        Some((SchedulingBackend::Workload | SchedulingBackend::None, _)) | None => {}
    }
}

/// Returns the value of spec.schedulingGroup, which Kubernetes' own scheduler reads; the field is newer than the pod type
/// of this program.
pub fn scheduling_group(job: &ValidJob) -> Option<Value> {
    let (backend, _) = backend(job)?;
    (backend == SchedulingBackend::Workload).then(|| json!({"podGroupName": name(job)}))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::build::pod;
    use crate::controller::fixtures::{job, replica, valid_job};
    use crate::controller::model::NewPod;
    use crate::controller::validate::validate;

    fn made(spec: &str) -> Vec<(String, Value)> {
        let groups = groups(&valid_job(spec)).into_iter();
        groups.map(|group| (group.resource.plural.clone(), group.object.data["spec"].clone())).collect()
    }

    #[test]
    fn each_backend_has_its_own_group_of_all_pods_or_as_many_as_said() {
        let rows = [
            ("{}", vec![]),
            ("{backend: None}", vec![]),
            ("{queue: team-a}", vec![]),
            (
                "{backend: Volcano, queue: gold, priorityClassName: high}",
                vec![("podgroups", json!({"minMember": 3, "queue": "gold", "priorityClassName": "high"}))],
            ),
            (
                "{backend: Coscheduling, minAvailable: 2, scheduleTimeoutSeconds: 60}",
                vec![("podgroups", json!({"minMember": 2, "scheduleTimeoutSeconds": 60}))],
            ),
            (
                "{backend: Workload, minAvailable: 2, priorityClassName: high}",
                vec![
                    (
                        "workloads",
                        json!({
                            "controllerRef": {"apiGroup": "psjobs.dev", "kind": "ParameterServerJob", "name": "mnist"},
                            "podGroupTemplates": [{
                                "name": "pods",
                                "schedulingPolicy": {"gang": {"minCount": 2}},
                                "priorityClassName": "high",
                            }],
                        }),
                    ),
                    (
                        "podgroups",
                        json!({
                            "schedulingPolicy": {"gang": {"minCount": 2}},
                            "priorityClassName": "high",
                            "workloadRef": {"workloadName": "mnist-0", "templateName": "pods"},
                        }),
                    ),
                ],
            ),
        ];
        for (policy, want) in rows {
            let want = want.into_iter().map(|(plural, spec)| (plural.to_owned(), spec)).collect::<Vec<_>>();
            assert_eq!(made(&format!("schedulingPolicy: {policy}")), want, "{policy}");
        }
    }

    #[test]
    fn the_group_of_an_elastic_job_is_the_least_that_it_can_train_with() {
        let elastic = "elasticPolicy: {minReplicas: 1, maxReplicas: 9}\nps: {replicas: 2}\nschedulingPolicy: ";
        for (policy, want) in [("{backend: Volcano}", 3), ("{backend: Volcano, minAvailable: 2}", 2)] {
            let made = made(&format!("{elastic}{policy}"));
            assert_eq!(made, [("podgroups".to_owned(), json!({ "minMember": want }))], "{policy}");
        }
    }

    #[test]
    fn pods_say_which_group_they_belong_to_in_their_schedulers_way() {
        let new = |who| NewPod { incarnation: 4, ..NewPod::first(replica(who)) };
        let rows = [
            ("Volcano", Some("volcano"), Some("scheduling.k8s.io/group-name"), None),
            ("Coscheduling", Some("scheduler-plugins-scheduler"), None, Some("scheduling.x-k8s.io/pod-group")),
            ("Workload", None, None, None),
            ("None", None, None, None),
        ];
        for (backend, scheduler, annotation, label) in rows {
            let mut object = job(&format!("schedulingPolicy: {{backend: {backend}}}"));
            // The second time that all pods start: their incarnations begin at 4.
            object.status.get_or_insert_default().first_incarnation = 4;
            let job = validate(object.into()).expect("valid");
            for who in ["ps-0", "trainer-1"] {
                let pod = pod(&job, &new(who), "image");
                let group =
                    |map: Option<BTreeMap<String, String>>, key: &str| map.and_then(|map| map.get(key).cloned());
                assert_eq!(pod.spec.expect("a spec").scheduler_name.as_deref(), scheduler, "{backend}");
                for (key, map) in [(annotation, pod.metadata.annotations), (label, pod.metadata.labels)] {
                    assert_eq!(key.and_then(|key| group(map, key)), key.map(|_| "mnist-4".to_owned()), "{backend}");
                }
            }
            let want = (backend == "Workload").then(|| json!({"podGroupName": "mnist-4"}));
            assert_eq!(scheduling_group(&job), want, "{backend}");
        }
    }

    #[test]
    fn a_volcano_queue_is_none_of_kueue_and_a_scheduler_of_the_template_stays() {
        let mut object = job("schedulingPolicy: {backend: Volcano, queue: gold}");
        object.spec.trainer.template.spec.as_mut().expect("a spec").scheduler_name = Some("mine".into());
        let job = validate(object.into()).expect("valid");
        let new = NewPod::first(replica("trainer-0"));
        let pod = pod(&job, &new, "image");
        let labels = pod.metadata.labels.expect("labels");
        assert!(labels.keys().all(|key| !key.starts_with("kueue")), "{labels:?}");
        assert_eq!(pod.spec.expect("a spec").scheduler_name.as_deref(), Some("mine"));
    }
}
