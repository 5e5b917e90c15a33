use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod};
use psjobs_api::{Environment, Role};

use super::defaults::NON_ROOT;
use super::*;
use crate::controller::fixtures::{replica, valid_job};
use crate::controller::model::NewPod;
use crate::controller::observe::Replica;

const IMAGE: &str = "psjobs-worker:0.1.0";

fn build(spec: &str, who: &str) -> Pod {
    pod(
        &valid_job(spec),
        &NewPod {
            replica: replica(who),
            incarnation: 2,
            failures: 1,
            failures_in_a_row: 3,
            failed_incarnation: Some(1),
            finished_trainers: Vec::new(),
            closing: false,
            server: None,
        },
        IMAGE,
    )
}

/// The first pod of a replica.
fn first(who: &str) -> NewPod {
    NewPod::first(replica(who))
}

fn main_container(pod: &Pod) -> Container {
    pod.spec.clone().expect("a spec").containers[0].clone()
}

fn value(pod: &Pod, name: &str) -> String {
    let env = main_container(pod).env.expect("an environment");
    let found = env.iter().filter(|var| var.name == name).collect::<Vec<_>>();
    assert_eq!(found.len(), 1, "{name} is set once");
    found[0].value.clone().expect("a plain value")
}

#[test]
fn pods_know_their_place() {
    let pod = build("ps: {replicas: 2, replicationFactor: 2, connections: 3}", "trainer-1");
    for (name, want) in [
        ("RANK", "3"),
        ("WORLD_SIZE", "4"),
        ("MASTER_ADDR", "mnist-ps-0.mnist.team.svc"),
        ("MASTER_PORT", "29500"),
        ("PSJOB_SERVERS", "mnist-ps-0.mnist.team.svc:29500,mnist-ps-1.mnist.team.svc:29500"),
        ("PSJOB_ROLE", "trainer"),
        ("PSJOB_INDEX", "1"),
        ("PSJOB_INCARNATION", "2"),
        ("PSJOB_SUPERVISED", "1"),
        ("PSJOB_UID", "0b6c"),
        ("PSJOB_RESULT_FILE", "/dev/termination-log"),
    ] {
        assert_eq!(value(&pod, name), want, "{name}");
    }
    let environment = Environment::from_vars(|name| {
        let env = main_container(&pod).env?;
        env.into_iter().find(|var| var.name == name)?.value
    });
    let environment = environment.expect("readable").expect("the worker can read what the operator writes");
    assert_eq!((environment.replication_factor, environment.connections), (2, Some(3)));

    let spec = pod.spec.as_ref().expect("a spec");
    assert_eq!((spec.hostname.as_deref(), spec.subdomain.as_deref()), (Some("mnist-trainer-1"), Some("mnist")));
    assert_eq!(spec.restart_policy.as_deref(), Some("Never"));
    let owner = &pod.metadata.owner_references.as_ref().expect("owned")[0];
    assert_eq!((owner.uid.as_str(), owner.controller, owner.block_owner_deletion), ("0b6c", Some(true), Some(true)));
}

#[test]
fn a_server_learns_which_trainers_have_finished() {
    let server = pod(&valid_job(""), &NewPod { finished_trainers: vec![0, 1], ..first("ps-0") }, IMAGE);
    assert_eq!(value(&server, "PSJOB_FINISHED_TRAINERS"), "0-1");
}

#[test]
fn pods_of_an_elastic_job_stay_as_they_are_when_it_is_scaled() {
    let elastic = |trainers| {
        let job = valid_job("elasticPolicy: {minReplicas: 2, maxReplicas: 8}");
        crate::controller::validate::ValidJob { trainers, ..job }
    };
    for who in ["ps-0", "trainer-1"] {
        let two = pod(&elastic(2), &first(who), IMAGE);
        assert_eq!(pod(&elastic(5), &first(who), IMAGE), two, "{who}");
        for (name, want) in [("PSJOB_TRAINERS", "8"), ("WORLD_SIZE", "9"), ("PSJOB_MIN_TRAINERS", "2")] {
            assert_eq!(value(&two, name), want, "{who}: {name}");
        }
    }
    let closing = pod(&elastic(2), &NewPod { closing: true, ..first("ps-0") }, IMAGE);
    assert_eq!(value(&closing, "PSJOB_MIN_TRAINERS"), "1", "the others have ended, and do not come");
    let fixed = main_container(&build("", "trainer-1")).env.expect("an environment");
    assert!(fixed.iter().all(|var| var.name != "PSJOB_MIN_TRAINERS"));
}

#[test]
fn what_is_built_is_what_is_observed() {
    let (who, pod) = crate::controller::observe::observe(&build("", "trainer-1")).expect("labels are right");
    assert_eq!(who, replica("trainer-1"));
    assert_eq!((pod.incarnation, pod.failures, pod.failures_in_a_row, pod.failed_incarnation), (2, 1, 3, Some(1)));
}

#[test]
fn of_equal_variables_the_jobs_stays() {
    let template = "
  replicas: 2
  template: {spec: {containers: [{name: t, image: i, env: [{name: RANK, value: '9'}, {name: MY, value: 'r$(RANK)'}]}]}}";
    let pod = pod(&crate::controller::fixtures::valid_job_with_trainer(template), &first("trainer-0"), IMAGE);
    assert_eq!(value(&pod, "RANK"), "1");
    assert_eq!(value(&pod, "MY"), "r$(RANK)");
    let env = main_container(&pod).env.expect("an environment");
    assert_eq!(env.last().map(|var| var.name.as_str()), Some("MY"), "it can refer to the job's");
}

#[test]
fn gpus_are_a_limit_of_the_trainers_only() {
    let trainer = "
  gpus: 2
  gpuResourceName: example.com/gpu
  template: {spec: {containers: [{name: t, image: i, resources: {limits: {memory: 1Gi}}}]}}";
    let job = crate::controller::fixtures::valid_job_with_trainer(trainer);
    let limits = |who| main_container(&pod(&job, &first(who), IMAGE)).resources.and_then(|r| r.limits);
    let trainer = limits("trainer-0").expect("limits");
    assert_eq!(trainer["example.com/gpu"].0, "2");
    assert_eq!(trainer["memory"].0, "1Gi", "other limits stay");
    assert_eq!(limits("ps-0"), None);
    let variable = |who| {
        let env = main_container(&pod(&job, &first(who), IMAGE)).env.unwrap_or_default();
        env.into_iter().find(|variable| variable.name == "PSJOB_GPUS").and_then(|variable| variable.value)
    };
    assert_eq!(
        (variable("trainer-0").as_deref(), variable("ps-0")),
        (Some("2"), None),
        "a trainer knows what it was given"
    );
}

#[test]
fn a_server_knows_the_gpus_of_its_limits() {
    let template = "{spec: {containers: [{name: s, image: i, resources: {limits: {nvidia.com/gpu: 2}}}]}}";
    let server = build(&format!("ps: {{template: {template}}}"), "ps-0");
    assert_eq!(value(&server, "PSJOB_GPUS"), "2");
    let limits = main_container(&server).resources.and_then(|resources| resources.limits).expect("limits");
    assert_eq!(limits["nvidia.com/gpu"].0, "2", "they stay");
}

#[test]
fn trainers_with_gpus_share_memory_between_their_loaders() {
    let shared = |trainer: &str, who| {
        let job = crate::controller::fixtures::valid_job_with_trainer(trainer);
        let pod = pod(&job, &first(who), IMAGE);
        let mounts = main_container(&pod).volume_mounts.into_iter().flatten();
        let mounts = mounts.filter(|mount| mount.mount_path == "/dev/shm").map(|mount| mount.name).collect::<Vec<_>>();
        let volumes = pod.spec.and_then(|spec| spec.volumes).into_iter().flatten();
        let mounted = volumes.filter(|volume| mounts.contains(&volume.name));
        mounted.map(|volume| volume.empty_dir.and_then(|folder| folder.medium)).collect::<Vec<_>>()
    };
    let memory = || Some("Memory".to_owned());
    let gpus = "{gpus: 1, template: {spec: {containers: [{name: t, image: i}]}}}";
    let own = "{gpus: 1, template: {spec: {containers: [{name: t, image: i, \
               volumeMounts: [{name: own, mountPath: /dev/shm}]}], volumes: [{name: own, emptyDir: {}}]}}}";
    let none = "{template: {spec: {containers: [{name: t, image: i}]}}}";
    assert_eq!(shared(gpus, "trainer-0"), [memory()]);
    assert_eq!(shared(gpus, "ps-0"), []);
    assert_eq!(shared(none, "trainer-0"), []);
    assert_eq!(shared(own, "trainer-0"), [None], "the template's own stays");
}

#[test]
fn servers_without_a_template_serve_the_worker_image() {
    let server = main_container(&build("", "ps-0"));
    assert_eq!((server.image.as_deref(), server.args), (Some(IMAGE), Some(vec!["serve".to_owned()])));
    let probe = server.readiness_probe.expect("a probe");
    assert_eq!((probe.http_get.and_then(|get| get.path).as_deref(), probe.period_seconds), (Some("/readyz"), Some(1)));
}

#[test]
fn pods_have_no_rights_that_training_does_not_need() {
    for who in ["ps-0", "trainer-0"] {
        let pod = build("", who);
        let container = main_container(&pod);
        let spec = pod.spec.expect("a spec");
        let context = spec.security_context.expect("a context");
        assert_eq!((context.run_as_non_root, context.run_as_user), (Some(true), Some(NON_ROOT)), "{who}");
        assert_eq!(context.seccomp_profile.expect("set").type_, "RuntimeDefault");
        assert_eq!((spec.automount_service_account_token, spec.enable_service_links), (Some(false), Some(false)));
        let context = container.security_context.expect("a context");
        assert_eq!(context.allow_privilege_escalation, Some(false));
        assert_eq!(context.read_only_root_filesystem, Some(true));
        assert_eq!(context.capabilities.and_then(|c| c.drop), Some(vec!["ALL".to_owned()]));
        let scratch = container.volume_mounts.into_iter().flatten().find(|mount| mount.mount_path == "/tmp");
        let name = scratch.expect("a folder to write to").name;
        let volume = spec.volumes.into_iter().flatten().find(|volume| volume.name == name);
        assert!(volume.expect("its volume").empty_dir.is_some());
        assert_eq!(container.termination_message_policy.as_deref(), Some("FallbackToLogsOnError"));
    }
}

#[test]
fn what_a_template_sets_it_keeps() {
    let trainer = "
  template:
    metadata: {labels: {team: vision, psjobs.dev/index: '7'}}
    spec:
      automountServiceAccountToken: true
      runtimeClassName: nvidia
      nodeSelector: {gpu: h200}
      tolerations: [{key: nvidia.com/gpu, operator: Exists}]
      containers:
        - name: t
          image: i
          terminationMessagePath: /tmp/last-words
          securityContext: {runAsUser: 0, readOnlyRootFilesystem: false}";
    let pod = pod(&crate::controller::fixtures::valid_job_with_trainer(trainer), &first("trainer-0"), IMAGE);
    let labels = pod.metadata.labels.clone().expect("labels");
    assert_eq!((labels["team"].as_str(), labels["psjobs.dev/index"].as_str()), ("vision", "0"));
    assert_eq!(value(&pod, "PSJOB_RESULT_FILE"), "/tmp/last-words");
    let container = main_container(&pod);
    let spec = pod.spec.expect("a spec");
    assert_eq!(spec.automount_service_account_token, Some(true));
    assert_eq!(spec.runtime_class_name.as_deref(), Some("nvidia"));
    assert_eq!(spec.node_selector.expect("a selector")["gpu"], "h200");
    let tolerated = spec.tolerations.into_iter().flatten().map(|toleration| toleration.key).collect::<Vec<_>>();
    assert_eq!(tolerated, [Some("nvidia.com/gpu".to_owned())]);
    assert_eq!(spec.security_context.expect("a context").run_as_non_root, None, "a container asks for root");
    assert_eq!(container.security_context.expect("a context").read_only_root_filesystem, Some(false));
    let scratch = container.volume_mounts.into_iter().flatten().find(|mount| mount.mount_path == "/tmp");
    assert_eq!(scratch, None, "a writable root needs no scratch folder");
}

#[test]
fn the_service_names_pods_before_they_are_ready() {
    let service = service(&valid_job(""));
    let spec = service.spec.expect("a spec");
    assert_eq!(spec.cluster_ip.as_deref(), Some("None"));
    assert_eq!(spec.publish_not_ready_addresses, Some(true));
    let ports = spec.ports.expect("ports").iter().map(|port| port.port).collect::<Vec<_>>();
    assert_eq!(ports, [29500, 9464]);
}

#[test]
fn the_scheduler_receives_priority_nearness_and_queue() {
    let policy = "{priorityClassName: high, topologyKey: zone, queue: team-a}";
    for who in ["ps-0", "trainer-1"] {
        let pod = build(&format!("schedulingPolicy: {policy}"), who);
        let (labels, annotations) =
            (pod.metadata.labels.expect("labels"), pod.metadata.annotations.expect("annotations"));
        assert_eq!(
            (labels["kueue.x-k8s.io/queue-name"].as_str(), labels["kueue.x-k8s.io/pod-group-name"].as_str()),
            ("team-a", "0b6c")
        );
        assert_eq!(annotations["kueue.x-k8s.io/pod-group-total-count"], "3", "1 server and 2 trainers");
        let spec = pod.spec.expect("a spec");
        assert_eq!(spec.priority_class_name.as_deref(), Some("high"));
        let near = spec
            .affinity
            .and_then(|a| a.pod_affinity)
            .and_then(|a| a.required_during_scheduling_ignored_during_execution);
        let near = near.expect("near the others");
        assert_eq!(near[0].topology_key, "zone");
        let selector = near[0].label_selector.clone().and_then(|selector| selector.match_labels).expect("by label");
        assert_eq!(selector["psjobs.dev/job-name"], "mnist");
    }
    let plain = build("", "trainer-0");
    assert_eq!(plain.spec.map(|spec| (spec.affinity, spec.priority_class_name)), Some((None, None)));
}

#[test]
fn servers_get_the_checkpoint_folder_and_trainers_do_not() {
    let volume = "{size: 1Gi, accessMode: ReadWriteMany, storageClassName: fast}";
    let job = valid_job(&format!("checkpoint: {{volumeClaim: {volume}, intervalSeconds: 5, keep: 3, resume: false}}"));
    let claim = claim(&job).expect("a claim to make");
    assert_eq!(claim.metadata.name.as_deref(), Some("mnist-checkpoints"));
    let wanted = claim.spec.expect("a spec");
    assert_eq!(wanted.access_modes, Some(vec!["ReadWriteMany".to_owned()]));
    assert_eq!(wanted.storage_class_name.as_deref(), Some("fast"));
    assert_eq!(wanted.resources.and_then(|r| r.requests).expect("a size")["storage"].0, "1Gi");
    for (role, there) in [(Role::Server, true), (Role::Trainer, false)] {
        let replica = Replica { role, index: 0 };
        let new = NewPod::first(replica);
        let spec = pod(&job, &new, "worker").spec.expect("a spec");
        let main = &spec.containers[0];
        let mounted = main.volume_mounts.iter().flatten().find(|mount| mount.mount_path == "/checkpoints");
        assert_eq!(mounted.and_then(|mount| mount.sub_path.as_deref()), there.then_some("mnist"), "{role}");
        let variable = main.env.iter().flatten().find(|var| var.name == "PSJOB_CHECKPOINT");
        let variable = variable.and_then(|var| var.value.as_deref());
        for policy in [r#""intervalSeconds":5"#, r#""keep":3"#, r#""resume":false"#] {
            assert_eq!(variable.is_some_and(|value| value.contains(policy)), there, "{role}: {policy}");
        }
    }
    let existing = valid_job("checkpoint: {existingClaim: shared, path: runs/a}");
    assert!(super::claim(&existing).is_none());
}

#[test]
fn servers_have_time_to_write_the_last_checkpoint_unless_their_template_says_otherwise() {
    let template = "ps: {template: {spec: {terminationGracePeriodSeconds: 7, containers: [{name: s, image: i}]}}}";
    for (checkpoint, ps, who, want) in [
        ("checkpoint: {volumeClaim: {size: 1Gi}}", "", "ps-0", Some(300)),
        ("checkpoint: {objectStore: {url: 's3://bucket'}}", "", "ps-0", Some(300)),
        ("checkpoint: {volumeClaim: {size: 1Gi}}", template, "ps-0", Some(7)),
        ("checkpoint: {volumeClaim: {size: 1Gi}}", "", "trainer-0", None),
        ("", "", "ps-0", None),
    ] {
        let spec = build(&format!("{checkpoint}\n{ps}"), who).spec.expect("a spec");
        assert_eq!(spec.termination_grace_period_seconds, want, "{who}, {checkpoint} {ps}");
    }
}

#[test]
fn servers_get_the_folder_and_the_credentials_of_an_object_store_and_trainers_do_not() {
    for (spec, folder, secret) in [
        ("{url: 's3://bucket/jobs/', secret: keys}", "s3://bucket/jobs/mnist", Some("keys")),
        ("{url: 'gs://bucket'}", "gs://bucket/mnist", None),
    ] {
        let job = valid_job(&format!("checkpoint: {{objectStore: {spec}}}"));
        assert!(super::claim(&job).is_none());
        for role in [Role::Server, Role::Trainer] {
            let replica = Replica { role, index: 0 };
            let new = NewPod::first(replica);
            let spec = pod(&job, &new, "worker").spec.expect("a spec");
            let main = &spec.containers[0];
            let variable = main.env.iter().flatten().find(|var| var.name == "PSJOB_CHECKPOINT_DIR");
            let is_server = role == Role::Server;
            assert_eq!(variable.and_then(|var| var.value.as_deref()), is_server.then_some(folder), "{role}");
            let from = main.env_from.iter().flatten().filter_map(|from| from.secret_ref.as_ref());
            let names: Vec<&str> = from.map(|secret| secret.name.as_str()).collect();
            assert_eq!(names.first().copied(), secret.filter(|_| is_server), "{role}");
            let mounts = main.volume_mounts.iter().flatten();
            assert!(mounts.into_iter().all(|mount| mount.mount_path != "/checkpoints"), "{role}");
        }
    }
}

#[test]
fn servers_get_the_tracking_server_and_its_credentials_and_trainers_do_not() {
    let store = "checkpoint: {objectStore: {url: 's3://bucket', secret: keys}}";
    for (spec, experiment, secrets) in [
        ("{uri: 'http://mlflow:5000', experiment: digits, secret: token}", "digits", vec!["token", "keys"]),
        ("{uri: 'http://mlflow:5000'}", "Default", vec!["keys"]),
    ] {
        let job = valid_job(&format!("{store}\ntracking: {{mlflow: {spec}}}"));
        for role in [Role::Server, Role::Trainer] {
            let replica = Replica { role, index: 0 };
            let new = NewPod::first(replica);
            let spec = pod(&job, &new, "worker").spec.expect("a spec");
            let main = &spec.containers[0];
            let is_server = role == Role::Server;
            for (name, value) in [("PSJOB_MLFLOW_URI", "http://mlflow:5000"), ("PSJOB_MLFLOW_EXPERIMENT", experiment)] {
                let variable = main.env.iter().flatten().find(|var| var.name == name);
                assert_eq!(variable.and_then(|var| var.value.as_deref()), is_server.then_some(value), "{role} {name}");
            }
            let from = main.env_from.iter().flatten().filter_map(|from| from.secret_ref.as_ref());
            let names: Vec<&str> = from.map(|secret| secret.name.as_str()).collect();
            assert_eq!(names, if is_server { secrets.clone() } else { Vec::new() }, "{role}");
        }
    }
}

const SECRET_KEYS: [&str; 5] = ["ca.crt", "ps.crt", "ps.key", "trainer.crt", "trainer.key"];

#[test]
fn a_pod_mounts_the_key_of_its_role_and_not_that_of_the_other() {
    let mut shown = Vec::new();
    for (who, role) in [("ps-0", "ps"), ("trainer-0", "trainer")] {
        let volumes = build("", who).spec.and_then(|spec| spec.volumes).expect("volumes");
        let items = volumes.into_iter().find_map(|volume| volume.secret?.items).expect("only some files are mounted");
        let items: Vec<_> = items.into_iter().map(|item| (item.key, item.path)).collect();
        let want =
            [("ca.crt".to_owned(), "ca.crt"), (format!("{role}.crt"), "tls.crt"), (format!("{role}.key"), "tls.key")];
        assert_eq!(items, want.map(|(key, path)| (key, path.to_owned())), "{who}");
        shown.extend(items.into_iter().map(|(key, _)| key));
    }
    let mut data = super::secret(&valid_job(""), Timestamp::UNIX_EPOCH).expect("made").and_then(|made| made.data);
    for key in &shown {
        assert!(data.as_mut().is_some_and(|data| data.contains_key(key)), "{key} is mounted and not made");
    }
    let data = data.take().expect("a Secret");
    assert_ne!(data["ps.key"], data["trainer.key"]);
}

#[test]
fn pods_show_certificates_of_their_own_job_unless_it_wants_none() {
    for (spec, secret, protocol) in
        [("", Some("mnist-tls-0b6c-0"), "https"), ("network: {mutualTLS: false}", None, "kubernetes.io/h2c")]
    {
        let job = valid_job(spec);
        let made = super::secret(&job, Timestamp::UNIX_EPOCH).expect("certificates can be made");
        assert_eq!(made.as_ref().and_then(|made| made.metadata.name.as_deref()), secret, "{spec}");
        let files = made.and_then(|made| made.data).unwrap_or_default().into_keys().collect::<Vec<_>>();
        assert_eq!(files, if secret.is_some() { SECRET_KEYS.to_vec() } else { vec![] });
        let ports = super::service(&job).spec.and_then(|spec| spec.ports).expect("ports");
        assert_eq!(ports[0].app_protocol.as_deref(), Some(protocol));
        for who in ["ps-0", "trainer-0"] {
            let pod = build(spec, who);
            let main = main_container(&pod);
            let variable = main.env.iter().flatten().find(|var| var.name == "PSJOB_TLS_DIR");
            let variable = variable.and_then(|var| var.value.clone());
            let volumes = pod.spec.and_then(|spec| spec.volumes).expect("volumes");
            let volume = volumes.iter().find_map(|volume| Some((&volume.name, volume.secret.as_ref()?)));
            assert_eq!(volume.and_then(|(_, of)| of.secret_name.as_deref()), secret, "{who}: {spec}");
            let mount =
                main.volume_mounts.iter().flatten().find(|mount| volume.is_some_and(|(name, _)| mount.name == *name));
            assert_eq!(mount.map(|mount| &mount.mount_path), variable.as_ref(), "{who}: {spec}");
            assert_eq!(mount.and_then(|mount| mount.read_only), secret.map(|_| true), "{who}: {spec}");
        }
    }
}
