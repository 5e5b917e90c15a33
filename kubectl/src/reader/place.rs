//! Where a job keeps its checkpoints, and the pod that can read there.

use anyhow::Context as _;
use k8s_openapi::api::core::v1::{PodSecurityContext, PodSpec, SeccompProfile};
use psjobs::BadInput;
use psjobs_api::Role;
use psjobs_api::checkpoint::is_object_store;
use psjobs_api::crd::{GROUP, KIND, ParameterServerJob, VERSION, names, store_pod};
use serde_json::{Value, json};

/// Where the pod has the volume.
const MOUNT: &str = "/checkpoints";
/// User and group of servers whose template names none.
const NON_ROOT: i64 = 65_532;
/// Prints the size of the file `$1`, and the file.
const PRINT_FILE: &str = r#"stat -c %s "$1" && exec cat "$1""#;
/// Prints the records of runs and the manifests of the folder `$1`, each in a line behind its time and path. Prints nothing
/// if there is no such folder.
pub const PRINT_FOLDER: &str = r#"if cd "$1" 2>/dev/null; then
for file in run-*/run.json run-*/step-*/manifest.json; do
if [ -f "$file" ]; then printf '%s %s ' "$(stat -c %Y "$file")" "$file"; tr -d '\n' < "$file"; echo; fi
done; fi"#;

/// Where the checkpoints of a job are, as its pod sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// On a volume, which the shell of the pod reads.
    Volume,
    /// In an object store below `url`, which the program of the job's servers reads.
    Store { url: String, program: Vec<String> },
}

impl Place {
    /// Returns the command that prints what is in the job's folder `path`.
    pub fn list(&self, path: &str) -> Vec<String> {
        self.command(PRINT_FOLDER, "list", path)
    }

    /// Returns the command that prints the file at `path` behind its size.
    pub fn read(&self, path: &str) -> Vec<String> {
        self.command(PRINT_FILE, "read", path)
    }

    fn command(&self, script: &str, word: &str, path: &str) -> Vec<String> {
        match self {
            Self::Volume => {
                let words = ["sh", "-c", &format!("cd {MOUNT} && {script}"), "sh", path];
                words.map(str::to_owned).into()
            }
            Self::Store { url, program } => {
                // The path of a model in a store is the whole URL.
                let place = if is_object_store(path) { path.to_owned() } else { format!("{url}/{path}") };
                program.iter().cloned().chain(["store".to_owned(), word.to_owned(), place]).collect()
            }
        }
    }
}

/// Returns where `job` keeps its checkpoints, and a pod that reads there, which ends by itself, and with the job. `image` is the
/// one that the user names, `running` that of a server's pod.
///
/// # Errors
/// [`BadInput`] if the job keeps no checkpoints.
pub fn of(job: &ParameterServerJob, image: Option<&str>, running: Option<String>) -> anyhow::Result<(Place, Value)> {
    let name = job.metadata.name.as_deref().unwrap_or_default();
    let Some(checkpoint) = &job.spec.checkpoint else {
        return Err(
            BadInput::new(format!("{name} keeps no checkpoints; spec.checkpoint says where a job keeps them")).into()
        );
    };
    if let Some(store) = &checkpoint.object_store {
        let image = image.map_or_else(|| store_pod::image(job, running), str::to_owned);
        let url = store.url.trim_end_matches('/').to_owned();
        return Ok((Place::Store { url, program: store_pod::program(job) }, store_pod::pod(job, &image)));
    }
    let claim = checkpoint.claim(name).context("checkpoints that are in no object store have a claim")?;
    Ok((Place::Volume, volume_pod(name, job, &claim, image)?))
}

/// Returns a pod of the trainers' image with the volume of the job's checkpoints. It runs as the user of the servers,
/// which have written the files, on nodes where they may run: beside them if it can, as no other may have the volume.
fn volume_pod(name: &str, job: &ParameterServerJob, claim: &str, image: Option<&str>) -> anyhow::Result<Value> {
    let template = job.spec.trainer.template.spec.as_ref().context("the template has a spec")?;
    let of_trainer = template.containers.first().and_then(|container| container.image.as_deref());
    let image = image.or(of_trainer).context("the trainer has an image")?;
    let mount = json!({"name": "checkpoints", "mountPath": MOUNT, "readOnly": true});
    // The strictest of Kubernetes' pod security standards asks for these.
    let security = json!({"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}});
    let servers = job.spec.server_pod().and_then(|template| template.spec.as_ref());
    let labels = json!({(names::LABEL_JOB): name, (names::LABEL_ROLE): job.spec.pod_role(Role::Server).as_str()});
    let near = json!({"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels}});
    let affinity = json!({
        "nodeAffinity": servers.and_then(|pod| pod.affinity.as_ref()?.node_affinity.as_ref()),
        "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": near}]},
    });
    let life = store_pod::LIFE_SECONDS;
    let container = json!({
        "name": store_pod::CONTAINER, "image": image, "command": ["sleep", life.to_string()], "volumeMounts": [mount],
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}}, "securityContext": security,
    });
    let owner = json!({
        "apiVersion": format!("{GROUP}/{VERSION}"), "kind": KIND, "name": name, "uid": job.metadata.uid,
    });
    Ok(json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"generateName": format!("{name}-read-"), "ownerReferences": [owner]},
        "spec": {
            "restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "activeDeadlineSeconds": life,
            "imagePullSecrets": template.image_pull_secrets, "containers": [container],
            "securityContext": as_servers(servers), "affinity": affinity,
            "nodeSelector": servers.and_then(|pod| pod.node_selector.as_ref()),
            "tolerations": servers.and_then(|pod| pod.tolerations.as_ref()),
            "volumes": [{"name": "checkpoints", "persistentVolumeClaim": {"claimName": claim}}],
        },
    }))
}

/// Returns the user and the groups of the job's servers, by their template and the operator's defaults.
fn as_servers(servers: Option<&PodSpec>) -> PodSecurityContext {
    let of_pod = servers.and_then(|pod| pod.security_context.clone()).unwrap_or_default();
    let of_container = servers.and_then(|pod| pod.containers.first()?.security_context.clone()).unwrap_or_default();
    let user = of_container.run_as_user.or(of_pod.run_as_user).unwrap_or(NON_ROOT);
    PodSecurityContext {
        run_as_user: Some(user),
        run_as_group: Some(of_container.run_as_group.or(of_pod.run_as_group).unwrap_or(NON_ROOT)),
        run_as_non_root: Some(user != 0),
        fs_group: Some(of_pod.fs_group.unwrap_or(NON_ROOT)),
        fs_group_change_policy: of_pod.fs_group_change_policy.or_else(|| Some("OnRootMismatch".into())),
        supplemental_groups: of_pod.supplemental_groups,
        se_linux_options: of_container.se_linux_options.or(of_pod.se_linux_options),
        seccomp_profile: Some(SeccompProfile { type_: "RuntimeDefault".into(), ..SeccompProfile::default() }),
        ..PodSecurityContext::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(checkpoint: &Value) -> ParameterServerJob {
        let container = json!({"name": "trainer", "image": "registry/own:1"});
        serde_json::from_value(json!({
            "apiVersion": "psjobs.dev/v1alpha1", "kind": "ParameterServerJob", "metadata": {"name": "mnist", "uid": "u1"},
            "spec": {"trainer": {"template": {"spec": {"containers": [container]}}}, "checkpoint": checkpoint},
        }))
        .expect("a job")
    }

    #[test]
    fn the_image_is_the_one_that_is_named_else_that_of_who_writes_there() {
        let volume = json!({"existingClaim": "shared"});
        let store = json!({"objectStore": {"url": "s3://bucket/jobs/"}});
        for (checkpoint, named, running, want) in [
            (&volume, None, None, "registry/own:1"),
            (&volume, Some("named:1"), None, "named:1"),
            (&store, None, Some("server:1".to_owned()), "server:1"),
            (&store, Some("named:1"), Some("server:1".to_owned()), "named:1"),
        ] {
            let (_, pod) = of(&job(checkpoint), named, running).expect("a place");
            assert_eq!(pod["spec"]["containers"][0]["image"], want, "{checkpoint}");
            assert_eq!(pod["spec"]["containers"][0]["name"], store_pod::CONTAINER, "{checkpoint}");
            // A namespace with a quota refuses a pod without them.
            let requests = json!({"cpu": "100m", "memory": "128Mi"});
            assert_eq!(pod["spec"]["containers"][0]["resources"]["requests"], requests, "{checkpoint}");
        }
        let none = of(&job(&Value::Null), None, None).expect_err("it keeps none");
        assert!(none.to_string().contains("mnist keeps no checkpoints"), "{none}");
    }

    #[test]
    fn a_volume_is_read_as_the_servers_write_it_and_where_they_may_run() {
        let volume = json!({"existingClaim": "shared"});
        let spec = |job: &ParameterServerJob| -> PodSpec {
            let (_, pod) = of(job, None, None).expect("a place");
            serde_json::from_value(pod["spec"].clone()).expect("a pod's spec")
        };
        let ids = |spec: &PodSpec| {
            let context = spec.security_context.as_ref().expect("a context");
            (context.run_as_user, context.run_as_group, context.fs_group, context.run_as_non_root)
        };
        let plain = spec(&job(&volume));
        assert_eq!(ids(&plain), (Some(NON_ROOT), Some(NON_ROOT), Some(NON_ROOT), Some(true)));
        assert!(plain.node_selector.is_none() && plain.tolerations.is_none());
        let near = plain.affinity.and_then(|affinity| affinity.pod_affinity).expect("near the servers");
        assert_eq!(near.preferred_during_scheduling_ignored_during_execution.expect("one term").len(), 1);
        assert!(near.required_during_scheduling_ignored_during_execution.is_none(), "they may be gone");

        let mut of_template = job(&volume);
        let terms = json!([{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]);
        let nodes = json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}});
        of_template.spec.ps.template = serde_json::from_value(json!({"spec": {
            "nodeSelector": {"disk": "fast"}, "tolerations": [{"key": "training", "operator": "Exists"}],
            "affinity": {"nodeAffinity": nodes}, "securityContext": {"runAsUser": 1, "runAsGroup": 2, "fsGroup": 3},
            "containers": [{"name": "server", "securityContext": {"runAsUser": 1000}}],
        }}))
        .expect("a template");
        let found = spec(&of_template);
        assert_eq!(ids(&found), (Some(1000), Some(2), Some(3), Some(true)));
        let servers = of_template.spec.ps.template.and_then(|template| template.spec).expect("a spec");
        assert_eq!((found.node_selector, found.tolerations), (servers.node_selector, servers.tolerations));
        let nodes = |affinity: Option<k8s_openapi::api::core::v1::Affinity>| affinity.and_then(|all| all.node_affinity);
        assert_eq!(nodes(found.affinity), nodes(servers.affinity));
    }

    #[test]
    fn a_store_is_read_by_the_program_of_the_servers() {
        let (place, _) = of(&job(&json!({"objectStore": {"url": "s3://bucket/jobs/"}})), None, None).expect("a place");
        for (command, want) in [
            (place.list("mnist"), "psjobs-worker store list s3://bucket/jobs/mnist"),
            (
                place.read("mnist/run-00001/run.json"),
                "psjobs-worker store read s3://bucket/jobs/mnist/run-00001/run.json",
            ),
            (place.read("s3://bucket/jobs/mnist/model"), "psjobs-worker store read s3://bucket/jobs/mnist/model"),
        ] {
            assert_eq!(command.join(" "), want);
        }
    }
}
