//! Finds the fields of a manifest that only mean something on a cluster, so that none is dropped silently.

use k8s_openapi::api::core::v1::PodTemplateSpec;
use psjobs_api::crd::{FailureRule, ParameterServerJobSpec};
use psjobs_policy::deadlines::{ENDED_EARLY, STALLED};
use serde_json::Value;

use super::lifecycle::ERROR;

/// Fields of the spec beside the templates and rules, with the value that says nothing; `null` where absence does.
const FIELDS: [(&str, &str); 16] = [
    ("managedBy", "null"),
    ("checkpoint.existingClaim", "null"),
    // The credentials of an object store are those of this process.
    ("checkpoint.objectStore.secret", "null"),
    // So are those of a tracking server.
    ("tracking.mlflow.secret", "null"),
    ("checkpoint.volumeClaim.storageClassName", "null"),
    ("checkpoint.volumeClaim.accessMode", "\"ReadWriteOnce\""),
    ("runPolicy.cleanPodPolicy", "\"Running\""),
    ("runPolicy.ttlSecondsAfterFinished", "null"),
    ("runPolicy.forceDeleteAfterSeconds", "30"),
    ("schedulingPolicy.backend", "null"),
    ("schedulingPolicy.minAvailable", "null"),
    ("schedulingPolicy.scheduleTimeoutSeconds", "null"),
    ("schedulingPolicy.priorityClassName", "null"),
    ("schedulingPolicy.topologyKey", "null"),
    ("schedulingPolicy.queue", "null"),
    ("network.networkPolicy", "false"),
];
/// Fields of a pod that mean something here.
const POD: [&str; 2] = ["containers", "terminationGracePeriodSeconds"];
/// Fields of a container that mean something here, and those of an image: the program of this machine stands for it.
/// A list of ports informs people, on a cluster too.
const CONTAINER: [&str; 7] = ["name", "command", "args", "env", "image", "imagePullPolicy", "ports"];
/// Reasons that a failure may have here.
const REASONS: [&str; 3] = [ERROR, ENDED_EARLY, STALLED];

/// Returns the one warning about a manifest, if it has fields that mean nothing on one machine.
pub fn warning(spec: &ParameterServerJobSpec) -> Option<String> {
    let fields = fields(spec);
    (!fields.is_empty()).then(|| {
        format!("these fields of the manifest mean nothing on one machine and are ignored: {}", fields.join(", "))
    })
}

/// Returns the paths of fields that are set and mean nothing on one machine.
fn fields(spec: &ParameterServerJobSpec) -> Vec<String> {
    let values = serde_json::to_value(spec).unwrap_or_default();
    let is_set = |path: &str, silent: &str| {
        let value = path.split('.').try_fold(&values, |value, name| value.get(name));
        let silent = serde_json::from_str::<Value>(silent).unwrap_or_default();
        value.is_some_and(|value| !value.is_null() && *value != silent)
    };
    let fields = FIELDS.into_iter().filter(|(path, silent)| is_set(path, silent));
    let mut found: Vec<_> = fields.map(|(path, _)| format!("spec.{path}")).collect();
    found.extend(spec.failure_policy.rules.iter().flat_map(of_rule));
    let gpu = spec.trainer.gpu_resource_name.as_str();
    found.extend(spec.ps.template.iter().flat_map(|template| of_template("ps", template, Some(gpu))));
    found.extend(of_template("trainer", &spec.trainer.template, None));
    found
}

/// Conditions of pods and reasons of the kubelet do not exist here.
fn of_rule(rule: &FailureRule) -> Vec<String> {
    let never = !rule.on_reasons.is_empty() && !rule.on_reasons.iter().any(|reason| REASONS.contains(&reason.as_str()));
    let parts = [(never, "onReasons"), (!rule.on_pod_conditions.is_empty(), "onPodConditions")];
    let path = |part: &str| format!("spec.failurePolicy.rules[{}].{part}", rule.name);
    parts.into_iter().filter(|(ignored, _)| *ignored).map(|(_, part)| path(part)).collect()
}

/// A container's limit of the resource `gpu` means something here.
fn of_template(role: &str, template: &PodTemplateSpec, gpu: Option<&str>) -> Vec<String> {
    let path = format!("spec.{role}.template");
    let value = serde_json::to_value(template).unwrap_or_default();
    let pod = &value["spec"];
    let mut found = Vec::new();
    if value.get("metadata").is_some() {
        found.push(format!("{path}.metadata"));
    }
    let others = |value: &Value, known: &[&str]| -> Vec<String> {
        let names = value.as_object().into_iter().flat_map(|fields| fields.keys());
        names.filter(|name| !known.contains(&name.as_str())).cloned().collect()
    };
    found.extend(others(pod, &POD).into_iter().map(|name| format!("{path}.spec.{name}")));
    let containers = pod["containers"].as_array().map(Vec::as_slice).unwrap_or_default();
    for (index, container) in containers.iter().enumerate() {
        let path = format!("{path}.spec.containers[{index}]");
        if index > 0 {
            found.push(path);
            continue;
        }
        // The servers' probe makes the trainers wait until they listen.
        let others = others(container, &CONTAINER).into_iter();
        let others = others.filter(|name| !(role == "ps" && name == "readinessProbe"));
        let others = others.flat_map(|name| match name.as_str() {
            "resources" => of_resources(&container["resources"], gpu),
            _ => vec![name],
        });
        found.extend(others.map(|name| format!("{path}.{name}")));
        let variables = container["env"].as_array().into_iter().flatten();
        let taken = variables.filter(|variable| !variable["valueFrom"].is_null());
        found.extend(taken.map(|variable| {
            let name = variable["name"].as_str().unwrap_or_default();
            format!("{path}.env[{name}].valueFrom")
        }));
    }
    found
}

/// Limits and requests mean nothing here, but for a limit of `gpu`.
fn of_resources(resources: &Value, gpu: Option<&str>) -> Vec<String> {
    let limits = resources["limits"].as_object();
    let Some((gpu, limits)) = gpu.zip(limits).filter(|(gpu, limits)| limits.contains_key(*gpu)) else {
        return vec!["resources".to_owned()];
    };
    let parts = resources.as_object().into_iter().flat_map(|parts| parts.keys());
    let parts = parts.filter(|part| *part != "limits").map(|part| format!("resources.{part}"));
    let limits = limits.keys().filter(|limit| *limit != gpu).map(|limit| format!("resources.limits.{limit}"));
    parts.chain(limits).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use psjobs_api::crd::definition;

    use super::*;

    /// Fields that mean here what they mean on a cluster, each with all fields below it.
    const HONOURED: [&str; 30] = [
        "suspend",
        "training",
        "startupPolicy",
        "successPolicy",
        "failurePolicy",
        "elasticPolicy",
        "ps.replicas",
        // The processes of one machine share its memory; the number of servers is the trainers'.
        "ps.placement",
        "ps.replicationFactor",
        "ps.connections",
        "ps.restartPolicy",
        "ps.template",
        "trainer.replicas",
        "trainer.gpus",
        // The limit in a server's template that counts.
        "trainer.gpuResourceName",
        "trainer.restartPolicy",
        "trainer.template",
        "checkpoint.path",
        "checkpoint.intervalSeconds",
        "checkpoint.keep",
        "checkpoint.resume",
        "checkpoint.objectStore.url",
        "tracking.mlflow.uri",
        "tracking.mlflow.experiment",
        // The folder of --checkpoint-dir stands for the claim.
        "checkpoint.volumeClaim.size",
        "runPolicy.activeDeadlineSeconds",
        "runPolicy.startupDeadlineSeconds",
        "runPolicy.progressDeadlineSeconds",
        "runPolicy.serverDrainSeconds",
        // The processes talk on the loopback interface, which no other machine can read.
        "network.mutualTLS",
    ];

    fn spec(text: &str) -> ParameterServerJobSpec {
        serde_yaml::from_str(text).expect("a spec")
    }

    const PLAIN: &str = "trainer: {template: {spec: {containers: [{name: t, image: i, args: [train, mlp]}]}}}";

    #[test]
    fn a_plain_manifest_has_no_such_field() {
        assert_eq!(warning(&spec(PLAIN)), None);
    }

    #[test]
    fn every_field_that_is_set_is_named_once_in_one_warning() {
        let text = "
managedBy: kueue.x-k8s.io/multikueue
ps:
  template:
    metadata: {labels: {a: b}}
    spec:
      nodeSelector: {zone: a}
      containers:
        - {name: s, image: i, args: [serve], resources: {limits: {memory: 1Gi}}, readinessProbe: {tcpSocket: {port: 1}}}
        - {name: sidecar, image: i}
trainer:
  gpuResourceName: amd.com/gpu
  template:
    metadata: {annotations: {a: b}}
    spec:
      affinity: {}
      initContainers: [{name: i, image: i}]
      priorityClassName: high
      tolerations: [{operator: Exists}]
      volumes: [{name: v, emptyDir: {}}]
      terminationGracePeriodSeconds: 3
      containers:
        - name: t
          image: i
          workingDir: /data
          envFrom: [{secretRef: {name: s}}]
          env: [{name: A, value: b}, {name: SECRET, valueFrom: {secretKeyRef: {name: s, key: k}}}]
          volumeMounts: [{name: v, mountPath: /v}]
failurePolicy:
  rules:
    - {name: memory, action: FailJob, onReasons: [OOMKilled, Evicted]}
    - {name: own, action: FailJob, onReasons: [Error, OOMKilled]}
    - {name: spot, action: Ignore, onPodConditions: [DisruptionTarget]}
checkpoint: {volumeClaim: {size: 1Gi, storageClassName: fast, accessMode: ReadWriteMany}}
tracking: {mlflow: {uri: 'http://mlflow:5000', experiment: digits, secret: s}}
runPolicy: {cleanPodPolicy: All, ttlSecondsAfterFinished: 60, forceDeleteAfterSeconds: 5, activeDeadlineSeconds: 9}
schedulingPolicy: {backend: Volcano, minAvailable: 3, scheduleTimeoutSeconds: 9, priorityClassName: p, topologyKey: t, queue: q}
network: {networkPolicy: true}";
        let mut want = vec![
            "managedBy",
            "tracking.mlflow.secret",
            "checkpoint.volumeClaim.storageClassName",
            "checkpoint.volumeClaim.accessMode",
            "runPolicy.cleanPodPolicy",
            "runPolicy.ttlSecondsAfterFinished",
            "runPolicy.forceDeleteAfterSeconds",
            "schedulingPolicy.backend",
            "schedulingPolicy.minAvailable",
            "schedulingPolicy.scheduleTimeoutSeconds",
            "schedulingPolicy.priorityClassName",
            "schedulingPolicy.topologyKey",
            "schedulingPolicy.queue",
            "network.networkPolicy",
            "ps.template.metadata",
            "failurePolicy.rules[memory].onReasons",
            "failurePolicy.rules[spot].onPodConditions",
            "ps.template.spec.nodeSelector",
            "ps.template.spec.containers[0].resources",
            "ps.template.spec.containers[1]",
            "trainer.template.metadata",
            "trainer.template.spec.affinity",
            "trainer.template.spec.initContainers",
            "trainer.template.spec.priorityClassName",
            "trainer.template.spec.tolerations",
            "trainer.template.spec.volumes",
            "trainer.template.spec.containers[0].envFrom",
            "trainer.template.spec.containers[0].volumeMounts",
            "trainer.template.spec.containers[0].workingDir",
            "trainer.template.spec.containers[0].env[SECRET].valueFrom",
        ];
        want.sort_unstable();
        let mut found = fields(&spec(text));
        found.sort_unstable();
        assert_eq!(found, want.iter().map(|path| format!("spec.{path}")).collect::<Vec<_>>());
        let warning = warning(&spec(text)).expect("there is something to say");
        assert_eq!(warning.lines().count(), 1);
    }

    #[test]
    fn a_limit_of_gpus_means_something_to_servers() {
        let resources = |resources: &str| {
            let container = format!("{{name: s, image: i, args: [serve], resources: {resources}}}");
            let server = format!("ps: {{template: {{spec: {{containers: [{container}]}}}}}}");
            fields(&spec(&format!("{server}\n{PLAIN}")))
        };
        let path = |part: &str| format!("spec.ps.template.spec.containers[0].resources{part}");
        assert_eq!(resources("{limits: {nvidia.com/gpu: 1}}"), Vec::<String>::new());
        let both = resources("{limits: {memory: 1Gi, nvidia.com/gpu: 1}, requests: {cpu: 1}}");
        assert_eq!(both, [path(".requests"), path(".limits.memory")]);
        assert_eq!(resources("{limits: {amd.com/gpu: 1}}"), [path("")]);
    }

    /// Collects the paths of a schema's fields that have no fields of their own, without those that are honoured.
    fn paths(schema: &Value, path: &str, found: &mut BTreeSet<String>) {
        let Some(fields) = schema["properties"].as_object() else {
            found.insert(path.to_owned());
            return;
        };
        for (name, field) in fields {
            let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            if !HONOURED.contains(&path.as_str()) {
                paths(field, &path, found);
            }
        }
    }

    #[test]
    fn every_field_of_the_definition_is_honoured_or_named() {
        let definition = serde_json::to_value(definition()).expect("JSON");
        let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
        let mut found = BTreeSet::new();
        paths(schema, "", &mut found);
        let named: BTreeSet<_> = FIELDS.iter().map(|(path, _)| (*path).to_owned()).collect();
        let unknown: Vec<_> = found.difference(&named).collect();
        assert!(found.len() > 10 && unknown.is_empty(), "`psjobs run` says nothing about {unknown:?}");
    }
}
