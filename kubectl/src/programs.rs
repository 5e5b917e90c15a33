//! The programs of a pod: a server or a trainer, or in the pod of a colocated job both.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use psjobs_api::Role;
use psjobs_api::crd::names::{LABEL_PLACEMENT, LABEL_ROLE, SERVER_CONTAINER};

/// Returns a pod for each program: itself, or with a server beside its trainer the server's part, and the trainer's if that is
/// there.
pub fn programs(pod: Pod) -> Vec<Pod> {
    if !pod.labels().contains_key(LABEL_PLACEMENT) {
        return vec![pod];
    }
    let mut server = part(pod.clone(), |container| container == SERVER_CONTAINER);
    server.labels_mut().insert(LABEL_ROLE.into(), Role::Server.to_string());
    let trainer = part(pod, |container| container != SERVER_CONTAINER);
    let is_there = |part: &Pod| part.spec.as_ref().is_some_and(|spec| !spec.containers.is_empty());
    [server, trainer].into_iter().filter(is_there).collect()
}

/// Leaves some containers of a pod. Its phase is then that of the first one, if that has ended.
fn part(mut pod: Pod, keeps: impl Fn(&str) -> bool) -> Pod {
    let mut first = None;
    if let Some(spec) = &mut pod.spec {
        spec.containers.retain(|container| keeps(&container.name));
        first = spec.containers.first().map(|container| container.name.clone());
    }
    if let Some(status) = &mut pod.status {
        let statuses = status.container_statuses.get_or_insert_default();
        statuses.retain(|container| keeps(&container.name));
        let main = statuses.iter().find(|container| Some(&container.name) == first.as_ref());
        if let Some(end) = main.and_then(|main| main.state.as_ref()?.terminated.as_ref()) {
            status.phase = Some(if end.exit_code == 0 { "Succeeded" } else { "Failed" }.to_owned());
        }
    }
    pod
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use serde_json::{Value, json};

    use super::*;
    use crate::top::board::{line, place};

    fn pod(labels: Value, containers: &[(&str, Value)]) -> Pod {
        let specs: Vec<_> = containers.iter().map(|(name, _)| json!({"name": name})).collect();
        let status = |(name, state): &(&str, Value)| {
            let ready = state.get("running").is_some();
            json!({"name": name, "ready": ready, "restartCount": 0, "image": "i", "imageID": "", "state": state})
        };
        let statuses: Vec<_> = containers.iter().map(status).collect();
        serde_json::from_value(json!({
            "metadata": {"name": "mnist-trainer-1", "labels": labels},
            "spec": {"containers": specs},
            "status": {"phase": "Running", "containerStatuses": statuses},
        }))
        .expect("a pod")
    }

    #[test]
    fn a_colocated_pod_is_a_server_and_a_trainer() {
        let colocated =
            json!({"psjobs.dev/role": "trainer", "psjobs.dev/index": "1", "psjobs.dev/placement": "Colocated"});
        let separate = json!({"psjobs.dev/role": "trainer", "psjobs.dev/index": "1"});
        let (runs, ended) = (json!({"running": {}}), json!({"terminated": {"exitCode": 0}}));
        let both = [("trainer", ended.clone()), ("psjobs-server", runs.clone())];
        let rows = [
            (&colocated, &both[..], vec![("ps-1", "Running", true), ("trainer-1", "ended, exit code 0", true)]),
            (&colocated, &both[1..], vec![("ps-1", "Running", true)]),
            (&separate, &both[..1], vec![("trainer-1", "ended, exit code 0", false)]),
        ];
        for (labels, containers, want) in rows {
            let programs = programs(pod(labels.clone(), containers));
            let lines = programs.iter().map(|program| {
                let (role, index, name) = place(program).expect("labelled");
                assert_eq!(name, "mnist-trainer-1", "the pod's own");
                line(role, index, program, &[], Timestamp::UNIX_EPOCH)
            });
            let lines = lines.collect::<Vec<_>>();
            let found = lines.iter().map(|line| (line.process.as_str(), line.state.as_str(), line.is_well));
            assert_eq!(found.collect::<Vec<_>>(), want, "{containers:?}");
        }
    }
}
