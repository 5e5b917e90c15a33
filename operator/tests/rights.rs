//! The rights that the chart gives the operator are those it uses: all it needs, and no verb more. The
//! API server's audit log says what it used.

#[expect(dead_code, reason = "the other test programs use the rest")]
mod support;

use std::collections::BTreeSet;
use std::fs;

use clap::Parser as _;
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, DynamicObject};
use kube::{Api, ResourceExt as _};
use psjobs_api::crd::{ParameterServerJob, ParameterServerJobStatus, Phase, names};
use psjobs_operator::operate::operate;
use psjobs_operator::settings::Settings;
use serde_json::{Value, json};
use support::{ApiServer, Team, eventually, gang_scheduling, install_definition, install_pod_groups};
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
    let mut flags = vec![flag("audit-policy-file", &policy), flag("audit-log-path", &log)];
    flags.extend(gang_scheduling().into_iter().flatten());
    let Some(server) = ApiServer::start_with(&flags, None).await else { return };
    install_definition(&server.client()).await;
    let mut granted = rules();
    grant(&server.client(), &granted).await;
    let operator = Operator::start(&server, &["--leader-elect", "--lease-namespace=default"]);

    // On the heap: they are large where nothing is optimised.
    Box::pin(live_through_everything(&server)).await;
    for (group, version, backend) in
        [("scheduling.volcano.sh", "v1beta1", "Volcano"), ("scheduling.x-k8s.io", "v1alpha1", "Coscheduling")]
    {
        install_pod_groups(&server.client(), group, version).await;
        Box::pin(be_scheduled_together(&server, backend, &[resource(group, version, "PodGroup")])).await;
    }
    const OWN: &str = "scheduling.k8s.io";
    if gang_scheduling().is_some() {
        let kinds = ["Workload", "PodGroup"].map(|kind| resource(OWN, "v1beta1", kind));
        Box::pin(be_scheduled_together(&server, "Workload", &kinds)).await;
    } else {
        eprintln!("SKIPPED: this version of Kubernetes schedules no gangs itself");
        granted.retain(|rule| rule.api_groups.iter().flatten().all(|group| group != OWN));
    }
    Box::pin(be_handed_over(&server)).await;
    operator.stop().await;
    let requests = requests(&fs::read_to_string(&log).expect("there is a log"));
    let refused = requests.iter().filter(|request| request.1 == 403).map(|request| &request.0).collect::<BTreeSet<_>>();
    assert!(refused.is_empty(), "the role lacks {refused:#?}");
    let used = requests.into_iter().map(|request| request.0).collect::<BTreeSet<_>>();
    let mut granted = granted.iter().flat_map(verbs).collect::<BTreeSet<_>>();
    assert!(granted.remove(BY_ADMISSION), "{granted:#?}");
    let idle = granted.difference(&used).collect::<Vec<_>>();
    assert!(idle.is_empty(), "the role grants what is not used: {idle:#?}");
}

/// An operator of the whole cluster, with the chart's rights and no others.
struct Operator {
    stop: CancellationToken,
    work: tokio::task::JoinHandle<anyhow::Result<()>>,
}

impl Operator {
    fn start(server: &ApiServer, flags: &[&str]) -> Self {
        let arguments = ["operator", "--metrics-addr=127.0.0.1:0"];
        let settings = Settings::try_parse_from(arguments.iter().chain(flags)).expect("flags are right");
        let mut config = server.config.clone();
        config.auth_info.impersonate = Some(OPERATOR.into());
        let stop = CancellationToken::new();
        let work = tokio::spawn(Box::pin(operate(settings, config, stop.clone())));
        Self { stop, work }
    }

    async fn stop(self) {
        self.stop.cancel();
        self.work.await.expect("it does not panic").expect("it ends well");
    }
}

fn resource(group: &str, version: &str, kind: &str) -> ApiResource {
    let (api_version, plural) = (format!("{group}/{version}"), format!("{}s", kind.to_lowercase()));
    ApiResource { group: group.into(), version: version.into(), api_version, kind: kind.into(), plural }
}

/// A job whose pods are scheduled together meets groups of somebody else, and is suspended and resumed.
async fn be_scheduled_together(server: &ApiServer, backend: &str, kinds: &[ApiResource]) {
    let team = Team::on(server, "gang").await;
    let groups = |kind| Api::<DynamicObject>::namespaced_with(team.client.clone(), &team.namespace, kind);
    let policy = json!({"basic": {}});
    for kind in kinds {
        let spec = match (backend, kind.kind.as_str()) {
            ("Workload", "Workload") => json!({"podGroupTemplates": [{"name": "a", "schedulingPolicy": policy}]}),
            ("Workload", _) => json!({"schedulingPolicy": policy}),
            _ => json!({"minMember": 1}),
        };
        let foreign = DynamicObject::new("mnist-0", kind).data(json!({ "spec": spec }));
        groups(kind).create(&PostParams::default(), &foreign).await.expect("a group can be made");
    }
    team.apply(&format!("schedulingPolicy: {{backend: {backend}}}")).await;
    for kind in kinds {
        let words = format!("another {} mnist-0 that does not belong to this job", kind.kind.to_lowercase());
        let reported = |status: &ParameterServerJobStatus| status.conditions.iter().any(|c| c.message.contains(&words));
        team.status(reported).await;
        // The test does not play the controllers that let a group go.
        let free = Patch::Merge(json!({"metadata": {"finalizers": null}}));
        groups(kind).patch("mnist-0", &PatchParams::default(), &free).await.expect("the group can be freed");
        groups(kind).delete("mnist-0", &DeleteParams::default()).await.expect("the group can be deleted");
    }
    team.pod("mnist-trainer-1", 0).await;
    team.patch(json!({"suspend": true})).await;
    team.phase(Phase::Suspended).await;
    team.patch(json!({"suspend": false})).await;
    team.pod("mnist-trainer-1", 1).await;
    for kind in kinds {
        let left = groups(kind).list(&Default::default()).await.expect("groups can be listed");
        let left = left.iter().filter(|group| group.metadata.deletion_timestamp.is_none());
        assert_eq!(left.map(|group| group.name_any()).collect::<Vec<_>>(), ["mnist-1"], "{backend}");
    }
}

/// One job that meets everything an operator reacts to.
async fn live_through_everything(server: &ApiServer) {
    let team = Team::on(server, "rights").await;
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
    let foreign: NetworkPolicy =
        serde_json::from_value(json!({"metadata": {"name": "mnist"}, "spec": {"podSelector": {}}})).expect("a policy");
    let rules = team.api::<NetworkPolicy>();
    rules.create(&params, &foreign).await.expect("a policy can be made");
    let policies = "runPolicy: {ttlSecondsAfterFinished: 1}\nfailurePolicy: {maxRestarts: 1}";
    team.apply(&format!("{policies}\ncheckpoint: {{volumeClaim: {{size: 1Gi}}}}\nnetwork: {{networkPolicy: true}}"))
        .await;
    let refused = |what: &'static str| {
        team.status(move |status| status.conditions.iter().any(|condition| condition.message.contains(what)))
    };
    refused("another persistentvolumeclaim mnist-checkpoints").await;
    // The test does not play the controller that lets unused claims go.
    let free = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    claims.patch("mnist-checkpoints", &PatchParams::default(), &free).await.expect("the claim can be freed");
    claims.delete("mnist-checkpoints", &DeleteParams::default()).await.expect("the claim can be deleted");
    refused("another networkpolicy mnist").await;
    rules.delete("mnist", &DeleteParams::default()).await.expect("the policy can be deleted");
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
}

/// A job goes to another shard's operator and comes back.
async fn be_handed_over(server: &ApiServer) {
    let of_shard = Operator::start(server, &["--shard=a"]);
    let team = Team::on(server, "handover").await;
    team.apply("").await;
    team.run_all().await;
    for shard in [Some("a"), None] {
        let label = Patch::Merge(json!({"metadata": {"labels": {names::LABEL_SHARD: shard}}}));
        let jobs = team.api::<ParameterServerJob>();
        jobs.patch("mnist", &PatchParams::default(), &label).await.expect("the job can be labelled");
        team.status(|status| status.shard.as_deref() == shard).await;
    }
    of_shard.stop().await;
}

/// The rules of all roles in the chart, as an operator of the whole cluster has them.
fn rules() -> Vec<PolicyRule> {
    let lines = RBAC.lines().filter(|line| !line.trim_start().starts_with("{{"));
    let rbac = lines.map(without_template).collect::<Vec<_>>().join("\n");
    let blocks = rbac.split("\nrules:\n").skip(1);
    let yaml = blocks.map(|block| block.split("\n---").next().expect("split yields one"));
    yaml.flat_map(|yaml| serde_yaml::from_str::<Vec<PolicyRule>>(yaml).expect("rules are YAML")).collect()
}

/// A line without what the template puts into it.
fn without_template(line: &str) -> String {
    match (line.split_once("{{"), line.rsplit_once("}}")) {
        (Some((before, _)), Some((_, behind))) => format!("{before}{behind}"),
        _ => line.to_owned(),
    }
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
    // The authorizer learns of both from a watch.
    let attributes = json!({"verb": "list", "group": "psjobs.dev", "resource": "parameterserverjobs"});
    let question: SubjectAccessReview =
        serde_json::from_value(json!({"spec": {"user": OPERATOR, "resourceAttributes": attributes}}))
            .expect("a review");
    eventually("the operator's rights", async || {
        let answer = Api::all(client.clone()).create(&PostParams::default(), &question).await.expect("a review");
        answer.status.filter(|status| status.allowed)
    })
    .await;
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
