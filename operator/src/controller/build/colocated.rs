//! Adds to a trainer's pod the server that shares it (spec.ps.placement Colocated): a second container, which finds the trainer's
//! memory because both have one network namespace and one user.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::PodSpec;
use psjobs_api::crd::{Placement, names};

use crate::controller::model::ColocatedServer;

/// How long Kubernetes lets a pod end if its template does not say so.
const DEFAULT_GRACE: i64 = 30;

/// Adds the container of `server` with its volumes to `pod`, in which it is alone if the trainer's work is done.
pub fn add(server: PodSpec, is_alone: bool, pod: &mut PodSpec) {
    if is_alone {
        // Sidecars and what prepares the trainer belong to it.
        pod.containers.clear();
        pod.init_containers = None;
    }
    // Both may have volumes of one name, each with the files of its role.
    let own = |name: &str| format!("{name}-of-server");
    let volumes = server.volumes.unwrap_or_default();
    let container = server.containers.into_iter().next().map(|mut container| {
        container.name = names::SERVER_CONTAINER.into();
        for mount in container.volume_mounts.iter_mut().flatten() {
            if volumes.iter().any(|volume| volume.name == mount.name) {
                mount.name = own(&mount.name);
            }
        }
        container
    });
    pod.containers.extend(container);
    let volumes = volumes.into_iter().map(|mut volume| {
        volume.name = own(&volume.name);
        volume
    });
    pod.volumes.get_or_insert_default().extend(volumes);
    if let Some(needed) = server.termination_grace_period_seconds {
        let grace = pod.termination_grace_period_seconds.unwrap_or(DEFAULT_GRACE);
        pod.termination_grace_period_seconds = Some(grace.max(needed));
    }
}

/// Notes in labels and annotations that the pod has a server, and that server's history. Replaces those of the template.
pub fn mark(
    server: Option<&ColocatedServer>,
    labels: &mut BTreeMap<String, String>,
    annotations: &mut BTreeMap<String, String>,
) {
    labels.remove(names::LABEL_PLACEMENT);
    annotations.remove(names::ANNOTATION_SERVER_FAILED_INCARNATION);
    let Some(ColocatedServer { failures, failures_in_a_row, failed_incarnation, .. }) = server else { return };
    labels.insert(names::LABEL_PLACEMENT.into(), format!("{:?}", Placement::Colocated));
    annotations.insert(names::ANNOTATION_SERVER_FAILURES.into(), failures.to_string());
    annotations.insert(names::ANNOTATION_SERVER_FAILURES_IN_A_ROW.into(), failures_in_a_row.to_string());
    if let Some(failed) = failed_incarnation {
        annotations.insert(names::ANNOTATION_SERVER_FAILED_INCARNATION.into(), failed.to_string());
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{Container, Pod};

    use crate::controller::build::pod;
    use crate::controller::fixtures::{replica, valid_job};
    use crate::controller::model::{ColocatedServer, NewPod};

    const SPEC: &str = "ps: {placement: Colocated, replicationFactor: 2}";

    fn build(spec: &str, is_alone: bool) -> Pod {
        let server = ColocatedServer { failures: 2, is_alone, ..ColocatedServer::default() };
        let new = NewPod { incarnation: 3, server: Some(server), ..NewPod::first(replica("trainer-1")) };
        pod(&valid_job(spec), &new, "worker")
    }

    fn variable(container: &Container, name: &str) -> Option<String> {
        container.env.iter().flatten().find(|variable| variable.name == name)?.value.clone()
    }

    /// The container's paths, each with the source of the volume.
    fn mounts(pod: &Pod, container: &Container) -> Vec<(String, String)> {
        let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()).collect::<Vec<_>>();
        let source = |name: &str| {
            let found = volumes.iter().filter(|volume| volume.name == name).collect::<Vec<_>>();
            assert_eq!(found.len(), 1, "one volume {name}");
            let items = found[0].secret.iter().flat_map(|secret| secret.items.iter().flatten());
            items.map(|item| item.key.as_str()).collect::<Vec<_>>().join(" ")
        };
        let mounts = container.volume_mounts.iter().flatten();
        mounts.map(|mount| (mount.mount_path.clone(), source(&mount.name))).collect()
    }

    #[test]
    fn a_colocated_pod_has_a_server_beside_its_trainer() {
        let pod =
            build(&format!("{SPEC}\ncheckpoint: {{volumeClaim: {{size: 1Gi, accessMode: ReadWriteMany}}}}"), false);
        let spec = pod.spec.clone().expect("a spec");
        let [trainer, server] = &spec.containers[..] else { panic!("{:#?}", spec.containers) };
        assert_eq!((trainer.name.as_str(), server.name.as_str()), ("trainer", "psjobs-server"));
        assert_eq!((server.image.as_deref(), &server.args), (Some("worker"), &Some(vec!["serve".to_owned()])));
        let of = |container, names: [&str; 4]| names.map(|name| variable(container, name).unwrap_or_default());
        let names = ["PSJOB_ROLE", "PSJOB_INDEX", "RANK", "PSJOB_INCARNATION"];
        assert_eq!(of(trainer, names), ["trainer", "1", "3", "3"]);
        assert_eq!(of(server, names), ["ps", "1", "1", "3"]);
        for container in [trainer, server] {
            let servers = "mnist-trainer-0.mnist.team.svc:29500,mnist-trainer-1.mnist.team.svc:29500";
            assert_eq!(variable(container, "PSJOB_SERVERS").as_deref(), Some(servers), "{}", container.name);
            assert_eq!(variable(container, "MASTER_ADDR").as_deref(), Some("mnist-trainer-0.mnist.team.svc"));
        }
        let tls = |role: &str| ("/etc/psjobs/tls".to_owned(), format!("ca.crt {role}.crt {role}.key"));
        assert_eq!(mounts(&pod, trainer), [tls("trainer"), ("/tmp".into(), String::new())]);
        let folder = ("/checkpoints".to_owned(), String::new());
        assert_eq!(mounts(&pod, server), [folder, tls("ps"), ("/tmp".into(), String::new())]);
        assert_eq!(spec.termination_grace_period_seconds, Some(300), "that of the last checkpoint");
        assert_eq!(spec.hostname.as_deref(), Some("mnist-trainer-1"));
        let apart = spec.affinity.and_then(|affinity| affinity.pod_anti_affinity).expect("copies keep apart");
        let apart = serde_json::to_string(&apart).expect("JSON");
        assert!(apart.contains("\"psjobs.dev/role\":\"trainer\""), "{apart}");
        for container in &spec.containers {
            let context = container.security_context.as_ref().expect("a context");
            assert_eq!(context.allow_privilege_escalation, Some(false), "{}", container.name);
        }
        let (labels, annotations) = (pod.metadata.labels.expect("labels"), pod.metadata.annotations.expect("set"));
        assert_eq!(labels["psjobs.dev/role"], "trainer");
        assert_eq!(labels["psjobs.dev/placement"], "Colocated");
        assert_eq!(annotations["psjobs.dev/failures"], "0");
        assert_eq!(annotations["psjobs.dev/server-failures"], "2");
    }

    #[test]
    fn a_pod_whose_trainer_is_done_has_the_server_alone() {
        let pod = build(SPEC, true);
        let containers = &pod.spec.as_ref().expect("a spec").containers;
        assert_eq!(containers.iter().map(|container| container.name.as_str()).collect::<Vec<_>>(), ["psjobs-server"]);
        assert_eq!(pod.metadata.name.as_deref(), Some("mnist-trainer-1"), "others find it by the same name");
    }

    #[test]
    fn the_servers_template_is_its_container() {
        let template = "{spec: {terminationGracePeriodSeconds: 7, containers: [{name: own, image: mine, resources: {limits: {memory: 2Gi}}}]}}";
        let pod = build(&format!("ps: {{placement: Colocated, template: {template}}}"), false);
        let spec = pod.spec.expect("a spec");
        let server = spec.containers.last().expect("a container");
        assert_eq!((server.name.as_str(), server.image.as_deref()), ("psjobs-server", Some("mine")));
        let limits = server.resources.as_ref().and_then(|resources| resources.limits.clone()).expect("limits");
        assert_eq!(limits["memory"].0, "2Gi");
        assert_eq!(spec.termination_grace_period_seconds, Some(30), "the trainer has what it had");
    }

    #[test]
    fn groups_have_as_many_pods_as_trainers() {
        let job = valid_job("ps: {placement: Colocated}\nschedulingPolicy: {backend: Volcano}");
        let group = super::super::groups(&job).into_iter().next().expect("a group");
        assert_eq!(group.object.data["spec"]["minMember"], 2);
        let pod = build("ps: {placement: Colocated}\nschedulingPolicy: {queue: team-a}", false);
        assert_eq!(pod.metadata.annotations.expect("set")["kueue.x-k8s.io/pod-group-total-count"], "2");
    }
}
