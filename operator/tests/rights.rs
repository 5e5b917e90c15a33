//! The rights that the chart gives the operator are those it uses: all it needs, and no verb more. The
//! API server's audit log says what it used.

#[expect(dead_code, reason = "the other test programs use the rest")]
mod support;

use std::collections::BTreeSet;
use std::fs;

use clap::Parser as _;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use psjobs_api::crd::{ParameterServerJob, Phase};
use psjobs_operator::operate::operate;
use psjobs_operator::settings::Settings;
use serde_json::{Value, json};
use support::{ApiServer, Team, install_definition};
use tokio_util::sync::CancellationToken;

const RBAC: &str = include_str!("../../charts/psjobs/templates/rbac.yaml");
const OPERATOR: &str = "the-operator";

/// Needed where an admission plugin checks owner references, which asks no request of the operator.
const BY_ADMISSION: &str = "update psjobs.dev/parameterserverjobs/finalizers";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_operator_has_the_rights_that_it_uses_and_no_others() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (policy, log) = (folder.path().join("policy.yaml"), folder.path().join("audit.log"));
    let all = "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules: [{level: Metadata}]\n";
    fs::write(&policy, all).expect("the folder is writable");
    let flag = |name: &str, path: &std::path::Path| format!("--{name}={}", path.display());
    let flags = [flag("audit-policy-file", &policy), flag("audit-log-path", &log)];
    let Some(server) = ApiServer::start_with(&flags).await else { return };
    install_definition(&server.client()).await;
    let granted = rules();
    grant(&server.client(), &granted).await;

    // On the heap: it is large where nothing is optimised.
    Box::pin(live_through_everything(&server)).await;
    let requests = requests(&fs::read_to_string(&log).expect("there is a log"));
    let refused = requests.iter().filter(|request| request.1 == 403).map(|request| &request.0).collect::<BTreeSet<_>>();
    assert!(refused.is_empty(), "the role lacks {refused:#?}");
    let used = requests.into_iter().map(|request| request.0).collect::<BTreeSet<_>>();
    let mut granted = granted.iter().flat_map(verbs).collect::<BTreeSet<_>>();
    assert!(granted.remove(BY_ADMISSION), "{granted:#?}");
    let idle = granted.difference(&used).collect::<Vec<_>>();
    assert!(idle.is_empty(), "the role grants what nobody uses: {idle:#?}");
}

/// One job that meets everything an operator reacts to.
async fn live_through_everything(server: &ApiServer) {
    let team = Team::on(server, "rights").await;
    let arguments = ["operator", "--metrics-addr=127.0.0.1:0", "--leader-elect"];
    let lease = ["--lease-namespace", &team.namespace];
    let settings = Settings::try_parse_from(arguments.iter().chain(&lease)).expect("flags are right");
    let mut config = server.config.clone();
    config.auth_info.impersonate = Some(OPERATOR.into());
    let stop = CancellationToken::new();
    let operator = tokio::spawn(Box::pin(operate(settings, config, stop.clone())));

    // A service and a pod of somebody else: two refusals, two looks at what is there.
    let service = json!({"metadata": {"name": "mnist"}, "spec": {"ports": [{"port": 80}]}});
    let pod = json!({"metadata": {"name": "mnist-trainer-0"}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let params = PostParams::default();
    let foreign: Service = serde_json::from_value(service).expect("a service");
    team.api::<Service>().create(&params, &foreign).await.expect("a service can be made");
    let foreign: Pod = serde_json::from_value(pod).expect("a pod");
    team.api::<Pod>().create(&params, &foreign).await.expect("a pod can be made");
    let claim = json!({"metadata": {"name": "mnist-checkpoints"}, "spec": {
        "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}
    }});
    let foreign: PersistentVolumeClaim = serde_json::from_value(claim).expect("a claim");
    let claims = team.api::<PersistentVolumeClaim>();
    claims.create(&params, &foreign).await.expect("a claim can be made");
    let policies = "runPolicy: {ttlSecondsAfterFinished: 1}\nfailurePolicy: {maxRestarts: 1}";
    team.apply(&format!("{policies}\ncheckpoint: {{volumeClaim: {{size: 1Gi}}}}")).await;
    let refused = |what: &'static str| {
        team.status(move |status| status.conditions.iter().any(|condition| condition.message.contains(what)))
    };
    refused("another persistentvolumeclaim mnist-checkpoints").await;
    // Nobody plays the controller that lets unused claims go.
    let free = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    claims.patch("mnist-checkpoints", &PatchParams::default(), &free).await.expect("the claim can be freed");
    claims.delete("mnist-checkpoints", &DeleteParams::default()).await.expect("the claim can be deleted");
    refused("another service mnist").await;
    team.delete_service("mnist").await;
    refused("another pod mnist-trainer-0").await;
    team.delete_pod("mnist-trainer-0").await;
    team.run_all().await;
    team.end("mnist-trainer-1", 3, "").await;
    team.pod("mnist-trainer-1", 1).await;
    team.run_all().await;
    team.end("mnist-trainer-1", 3, "").await;
    team.phase(Phase::Failed).await;
    team.until("mnist", |job: Option<&ParameterServerJob>| job.is_none()).await;
    stop.cancel();
    operator.await.expect("it does not panic").expect("it ends well");
}

/// The rules of all roles in the chart, as an operator of the whole cluster has them.
fn rules() -> Vec<PolicyRule> {
    let lines = RBAC.lines().filter(|line| !line.trim_start().starts_with("{{"));
    let rbac = lines.collect::<Vec<_>>().join("\n");
    let blocks = rbac.split("\nrules:\n").skip(1);
    let yaml = blocks.map(|block| block.split("\n---").next().expect("split yields one"));
    yaml.flat_map(|yaml| serde_yaml::from_str::<Vec<PolicyRule>>(yaml).expect("rules are YAML")).collect()
}

async fn grant(client: &kube::Client, rules: &[PolicyRule]) {
    let metadata = kube::core::ObjectMeta { name: Some(OPERATOR.into()), ..Default::default() };
    let role = ClusterRole { metadata, rules: Some(rules.to_vec()), ..ClusterRole::default() };
    Api::all(client.clone()).create(&PostParams::default(), &role).await.expect("a role can be made");
    let binding: ClusterRoleBinding = serde_json::from_value(json!({
        "metadata": {"name": OPERATOR},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": OPERATOR},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": OPERATOR}],
    }))
    .expect("a binding");
    Api::all(client.clone()).create(&PostParams::default(), &binding).await.expect("a binding can be made");
}

/// `patch psjobs.dev/parameterserverjobs/status` for each verb of a rule.
fn verbs(rule: &PolicyRule) -> Vec<String> {
    let groups = rule.api_groups.iter().flatten();
    let resources = groups.flat_map(|group| rule.resources.iter().flatten().map(move |r| format!("{group}/{r}")));
    resources.flat_map(|resource| rule.verbs.iter().map(move |verb| format!("{verb} {resource}"))).collect()
}

/// The operator's requests and how they were answered.
fn requests(log: &str) -> Vec<(String, u64)> {
    let entries = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let of_operator = entries.filter(|entry| entry["impersonatedUser"]["username"] == OPERATOR);
    let request = |entry: Value| {
        let object = &entry["objectRef"];
        let text = |field: &str| object[field].as_str().unwrap_or_default().to_owned();
        let below = object["subresource"].as_str().map(|name| format!("/{name}")).unwrap_or_default();
        let verb = entry["verb"].as_str().unwrap_or_default();
        let code = entry["responseStatus"]["code"].as_u64().unwrap_or_default();
        (format!("{verb} {}/{}{below}", text("apiGroup"), text("resource")), code)
    };
    of_operator.map(request).collect()
}
