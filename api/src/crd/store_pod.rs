//! The pod through which a user reads what a job keeps in an object store. The servers of the job have the credentials, and the
//! user's machine often has none: so the pod has those of the servers, and runs their program, `psjobs-worker store`.

use serde_json::{Map, Value, json};

use super::{GROUP, KIND, ParameterServerJob, VERSION};

/// Name of the pod's container.
pub const CONTAINER: &str = "read";
/// Seconds after which the pod ends by itself.
pub const LIFE_SECONDS: u32 = 3600;

/// The program of servers without a template, and the name of its image in a registry.
const PROGRAM: &str = "psjobs-worker";
/// Name of the image of trainers that are PyTorch scripts, beside it.
const TORCH: &str = "psjobs-torch";
/// User and group of servers whose template names none.
const NON_ROOT: i64 = 65_532;
/// Fields of the servers' template that decide as whom a pod reaches the store, where, and how its image is pulled.
const AS_SERVERS: [&str; 9] = [
    "serviceAccountName",
    "serviceAccount",
    "automountServiceAccountToken",
    "imagePullSecrets",
    "nodeSelector",
    "tolerations",
    "hostAliases",
    "dnsPolicy",
    "dnsConfig",
];
/// Kinds of volumes that may hold credentials.
const CREDENTIALS: [&str; 3] = ["secret", "configMap", "projected"];

/// Returns a pod that can read the object store of `job`, without a name: its metadata has `generateName`. It idles until
/// something is executed in it. Secret, variables, service account and labels are those of the job's servers, its rights those
/// of the restricted pod security standard; it belongs to the job, if that has a uid.
#[must_use]
pub fn pod(job: &ParameterServerJob, image: &str) -> Value {
    let name = job.metadata.name.as_deref().unwrap_or_default();
    let server = Server::new(job);
    let mut spec = json!({
        "restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "activeDeadlineSeconds": LIFE_SECONDS,
        "enableServiceLinks": false, "automountServiceAccountToken": false,
        "securityContext": {
            "runAsNonRoot": true, "runAsUser": server.id("runAsUser"), "runAsGroup": server.id("runAsGroup"),
            "fsGroup": server.id("fsGroup"), "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [server.reader(job, image)],
        "volumes": server.volumes(),
    });
    let trainer = serde_json::to_value(&job.spec.trainer.template.spec).unwrap_or_default();
    if let Some(secrets) = trainer.get("imagePullSecrets") {
        spec["imagePullSecrets"] = secrets.clone();
    }
    for field in AS_SERVERS {
        if let Some(value) = server.pod.get(field) {
            spec[field] = value.clone();
        }
    }
    let mut metadata = json!({ "generateName": format!("{name}-read-") });
    for field in ["labels", "annotations"] {
        // Some clouds know by these who a pod is. Those of the operator are its own pods'.
        let all = server.metadata[field].as_object().into_iter().flatten();
        let theirs = all.filter(|(key, _)| !key.starts_with(&format!("{GROUP}/")));
        metadata[field] = theirs.map(|(key, value)| (key.clone(), value.clone())).collect::<Map<_, _>>().into();
    }
    if let Some(uid) = &job.metadata.uid {
        let kind = json!({"apiVersion": format!("{GROUP}/{VERSION}"), "kind": KIND, "name": name, "uid": uid});
        metadata["ownerReferences"] = json!([kind]);
    }
    json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec })
}

/// Returns the words in front of `store` that run the program of the job's servers in its image: those of the template's
/// command in front of `serve`, or `psjobs-worker`.
#[must_use]
pub fn program(job: &ParameterServerJob) -> Vec<String> {
    let container = Server::new(job).container;
    let words = |field: &str| -> Vec<String> {
        let words = container[field].as_array().into_iter().flatten();
        words.filter_map(|word| word.as_str().map(str::to_owned)).collect()
    };
    let (mut program, arguments) = (words("command"), words("args"));
    if program.is_empty() {
        return vec![PROGRAM.to_owned()];
    }
    program.extend(arguments);
    match program.iter().position(|word| word == "serve") {
        Some(at) if at > 0 => program.drain(..at).collect(),
        _ => vec![PROGRAM.to_owned()],
    }
}

/// Returns the image that has the program of the job's servers: that of their template; without one that of `running`, a
/// server's pod, if there is one. Else it is a guess: the `psjobs-worker` beside the trainers' image, or that of this version.
#[must_use]
pub fn image(job: &ParameterServerJob, running: Option<String>) -> String {
    let of_template = Server::new(job).container["image"].as_str().map(str::to_owned);
    let trainer = job.spec.trainer.template.spec.as_ref().and_then(|spec| spec.containers.first()?.image.as_deref());
    of_template
        .or(running)
        .or_else(|| trainer.and_then(beside))
        .unwrap_or_else(|| format!("{PROGRAM}:{}", env!("CARGO_PKG_VERSION")))
}

/// Returns the image `psjobs-worker` in the registry of an image of psjobs, with its tag.
fn beside(image: &str) -> Option<String> {
    let (registry, rest) = image.rsplit_once('/').unwrap_or(("", image));
    let name = rest.split([':', '@']).next().unwrap_or_default();
    if name == PROGRAM {
        return Some(image.to_owned());
    }
    // Another image has another digest.
    let tag = rest.split('@').next().unwrap_or_default().strip_prefix(TORCH)?;
    let slash = if registry.is_empty() { "" } else { "/" };
    (name == TORCH && !tag.is_empty()).then(|| format!("{registry}{slash}{PROGRAM}{tag}"))
}

/// The template of a job's servers, as JSON: null where it has none.
struct Server {
    metadata: Value,
    pod: Value,
    container: Value,
}

impl Server {
    fn new(job: &ParameterServerJob) -> Self {
        let json = |template| serde_json::to_value(template).unwrap_or_default();
        let (container, pod): (Value, Value) = (json(job.spec.ps.template.as_ref()), json(job.spec.server_pod()));
        let (metadata, pod) = (pod["metadata"].clone(), pod["spec"].clone());
        Self { container: container["spec"]["containers"][0].clone(), metadata, pod }
    }

    /// Returns the id of a user or group that the template asks for, unless it is root's.
    fn id(&self, field: &str) -> i64 {
        let asked = [&self.container, &self.pod].map(|of| of["securityContext"][field].as_i64());
        asked.into_iter().flatten().find(|id| *id != 0).unwrap_or(NON_ROOT)
    }

    /// Returns the volumes of the template that the server mounts and that may hold credentials.
    fn volumes(&self) -> Vec<Value> {
        let all = self.pod["volumes"].as_array().into_iter().flatten();
        let mounted = |volume: &Value| self.mounts().any(|mount| mount["name"] == volume["name"]);
        let credentials = |volume: &Value| CREDENTIALS.iter().any(|kind| volume.get(kind).is_some());
        all.filter(|volume| credentials(volume) && mounted(volume)).cloned().collect()
    }

    fn mounts(&self) -> impl Iterator<Item = &Value> {
        self.container["volumeMounts"].as_array().into_iter().flatten()
    }

    /// Returns the container that reads. Variables of the Secret come before those of the template, which count more.
    fn reader(&self, job: &ParameterServerJob, image: &str) -> Value {
        let store = job.spec.checkpoint.as_ref().and_then(|checkpoint| checkpoint.object_store.as_ref());
        let secret = store.and_then(|store| store.secret.as_ref()).map(|name| json!({"secretRef": {"name": name}}));
        let theirs = self.container["envFrom"].as_array().into_iter().flatten().cloned();
        let volumes = self.volumes();
        let has_volume = |mount: &&Value| volumes.iter().any(|volume| volume["name"] == mount["name"]);
        let mut container = json!({
            "name": CONTAINER, "image": image, "command": ["sleep", LIFE_SECONDS.to_string()],
            "envFrom": secret.into_iter().chain(theirs).collect::<Vec<_>>(),
            "volumeMounts": self.mounts().filter(has_volume).collect::<Vec<_>>(),
            "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
            "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
        });
        for field in ["env", "imagePullPolicy"] {
            if let Some(value) = self.container.get(field) {
                container[field] = value.clone();
            }
        }
        container
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;

    use super::*;

    fn job(spec: &str) -> ParameterServerJob {
        let text = format!(
            "{{apiVersion: psjobs.dev/v1alpha1, kind: ParameterServerJob, metadata: {{name: mnist, uid: u1}}, spec: {{\
             checkpoint: {{objectStore: {{url: 's3://bucket/jobs', secret: store-keys}}}}, {spec}}}}}"
        );
        serde_yaml::from_str(&text).expect("a job")
    }

    const TRAINER: &str = "trainer: {template: {spec: {containers: [{name: trainer, image: registry/own:1}]}}}";
    const SERVER: &str = "ps: {template: {metadata: {labels: {azure.workload.identity/use: 'true', psjobs.dev/role: ps}}, \
         spec: {serviceAccountName: reader, securityContext: {runAsUser: 1000, runAsGroup: 0}, \
         volumes: [{name: keys, secret: {secretName: keys}}, {name: data, persistentVolumeClaim: {claimName: data}}, \
         {name: other, configMap: {name: other}}], containers: [{name: server, image: registry/server:1, args: [serve], \
         env: [{name: AWS_ENDPOINT, value: 'http://minio'}], envFrom: [{configMapRef: {name: region}}], \
         resources: {limits: {nvidia.com/gpu: '2'}}, securityContext: {privileged: true}, \
         volumeMounts: [{name: keys, mountPath: /keys}, {name: data, mountPath: /data}]}, {name: side, image: other}]}}}";

    fn typed(pod: &Value) -> Pod {
        serde_json::from_value(pod.clone()).expect("a pod")
    }

    #[test]
    fn the_pod_passes_the_restricted_standard_and_belongs_to_its_job() {
        for spec in [TRAINER.to_owned(), format!("{TRAINER}, {SERVER}")] {
            let found = pod(&job(&spec), "image:1");
            let Pod { metadata, spec: Some(spec), .. } = typed(&found) else { panic!("{found}") };
            let owner = &metadata.owner_references.expect("an owner")[0];
            assert_eq!((owner.kind.as_str(), owner.uid.as_str(), owner.controller), (KIND, "u1", None));
            assert_eq!(metadata.generate_name.as_deref(), Some("mnist-read-"));
            assert_eq!((spec.active_deadline_seconds, spec.restart_policy.as_deref()), (Some(3600), Some("Never")));
            let context = spec.security_context.expect("a context");
            assert_eq!((context.run_as_non_root, context.run_as_user == Some(0)), (Some(true), false));
            assert_eq!(context.run_as_group, Some(NON_ROOT), "root's group is nobody's");
            assert_eq!(context.seccomp_profile.expect("a profile").type_, "RuntimeDefault");
            let [container] = &spec.containers[..] else { panic!("{found}") };
            let context = container.security_context.as_ref().expect("a context");
            assert_eq!((context.allow_privilege_escalation, context.privileged), (Some(false), None));
            let dropped = context.capabilities.as_ref().and_then(|all| all.drop.as_ref()).expect("what is dropped");
            assert_eq!(dropped, &["ALL"]);
            let resources = container.resources.as_ref().expect("requests");
            assert!(resources.limits.is_none() && resources.requests.is_some(), "it needs no GPU");
        }
    }

    #[test]
    fn the_store_is_reached_as_the_servers_reach_it() {
        let found = pod(&job(&format!("{TRAINER}, {SERVER}")), "image:1");
        let container = &found["spec"]["containers"][0];
        let secret = json!({"secretRef": {"name": "store-keys"}});
        assert_eq!(container["envFrom"], json!([secret, {"configMapRef": {"name": "region"}}]));
        assert_eq!(container["env"], json!([{"name": "AWS_ENDPOINT", "value": "http://minio"}]));
        assert_eq!(container["volumeMounts"], json!([{"name": "keys", "mountPath": "/keys"}]));
        assert_eq!(found["spec"]["volumes"], json!([{"name": "keys", "secret": {"secretName": "keys"}}]));
        assert_eq!(found["spec"]["serviceAccountName"], "reader");
        assert_eq!(found["spec"]["securityContext"]["runAsUser"], 1000);
        assert_eq!(found["metadata"]["labels"], json!({"azure.workload.identity/use": "true"}));
        let plain = pod(&job(TRAINER), "image:1");
        assert_eq!(plain["spec"]["containers"][0]["envFrom"], json!([secret]));
        assert_eq!((&plain["spec"]["serviceAccountName"], &plain["metadata"]["labels"]), (&Value::Null, &json!({})));
        let mut without = job(TRAINER);
        without.metadata.uid = None;
        assert_eq!(pod(&without, "image:1")["metadata"].get("ownerReferences"), None);
    }

    #[test]
    fn the_program_is_that_of_the_servers() {
        for (server, want) in [
            ("", "psjobs-worker"),
            ("args: [serve]", "psjobs-worker"),
            ("command: [clothes], args: [serve, evaluate]", "clothes"),
            ("command: [python3, -m, own, serve]", "python3 -m own"),
            ("command: [sh, -c, exec psjobs-worker serve]", "psjobs-worker"),
            ("command: [serve]", "psjobs-worker"),
        ] {
            let spec = format!("{TRAINER}, ps: {{template: {{spec: {{containers: [{{name: server, {server}}}]}}}}}}");
            assert_eq!(program(&job(&spec)).join(" "), want, "{server}");
        }
        assert_eq!(program(&job(TRAINER)), ["psjobs-worker"]);
    }

    #[test]
    fn the_image_is_that_of_the_servers_or_the_one_beside_the_trainers() {
        let own = format!("psjobs-worker:{}", env!("CARGO_PKG_VERSION"));
        for (trainer, running, want) in [
            ("registry/own:1", Some("registry/server:2"), "registry/server:2"),
            ("registry/own:1", None, own.as_str()),
            ("registry:5000/a/psjobs-torch:1", None, "registry:5000/a/psjobs-worker:1"),
            ("registry/psjobs-torch:1@sha256:0", None, "registry/psjobs-worker:1"),
            ("registry/psjobs-torch@sha256:0", None, own.as_str()),
            ("psjobs-torch:1", None, "psjobs-worker:1"),
            ("registry/psjobs-worker@sha256:0", None, "registry/psjobs-worker@sha256:0"),
        ] {
            let spec = TRAINER.replace("registry/own:1", &format!("'{trainer}'"));
            assert_eq!(image(&job(&spec), running.map(str::to_owned)), want, "{trainer}");
        }
        let template = job(&format!("{TRAINER}, {SERVER}"));
        assert_eq!(image(&template, Some("registry/running:1".into())), "registry/server:1");
    }
}
