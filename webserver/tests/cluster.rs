//! The page at a real API server: who sees what, and that a job looks the same before and after it was deleted. The server has the
//! rights that the chart gives it.

#[path = "../../operator/tests/support/apiserver.rs"]
mod apiserver;

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use apiserver::ApiServer;
use clap::Parser as _;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule, Role, RoleBinding};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, Client, ResourceExt as _};
use psjobs_api::crd::ParameterServerJob;
use psjobs_web_server::settings::Settings;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

const DEADLINE: Duration = Duration::from_secs(60);
const CHART: &str = include_str!("../../charts/psjobs/templates/web.yaml");

/// A namespace on the API server.
struct Team {
    client: Client,
    namespace: String,
}

/// A running page.
struct Page {
    address: SocketAddr,
    stop: CancellationToken,
    work: JoinHandle<anyhow::Result<()>>,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_is_shown_to_those_who_may_list_it_and_looks_the_same_after_it_was_deleted() {
    let Some(server) = ApiServer::find().await else { return };
    let client = server.client();
    install_definition(&client).await;
    let (team, others) = (Team::new(&client).await, Team::new(&client).await);
    let user = format!("the-page-of-{}", team.namespace);
    grant_chart(&client, &user).await;
    let mut config = server.config.clone();
    config.auth_info.impersonate = Some(user);
    let folder = tempfile::tempdir().expect("a folder");

    let jobs = json!({"apiGroups": ["psjobs.dev"], "resources": ["parameterserverjobs"], "verbs": ["list"]});
    let logs = json!({"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]});
    let nobody = team.token("nobody", &[]).await;
    let reader = team.token("reader", std::slice::from_ref(&jobs)).await;
    let writer = team.token("writer", &[jobs, logs]).await;

    let page = Page::start(&config, folder.path()).await;
    team.create("mnist").await;
    others.create("secret").await;
    let mnist = format!("/events/{}/mnist", team.namespace);
    let secret = format!("/events/{}/secret", others.namespace);

    for path in ["/", "/events", mnist.as_str(), secret.as_str(), "/page.js", "/nothing"] {
        for token in [None, Some("wrong")] {
            let answer = page.get(path, token, "").await;
            assert!(answer.starts_with("HTTP/1.1 401 ") && answer.contains("kubectl create token"), "{path}: {answer}");
            assert!(answer.contains("content-security-policy: "), "{answer}");
        }
    }
    let form = page.get("/", None, "Accept: text/html\r\n").await;
    assert!(form.starts_with("HTTP/1.1 401 ") && form.contains("<form method=\"post\" action=\"/login\""), "{form}");
    let entered = page.login(&reader).await;
    let cookie = entered.lines().find_map(|line| line.strip_prefix("set-cookie: ")).expect("a cookie");
    let cookie = format!("Cookie: {}\r\n", cookie.split(';').next().expect("a value"));
    assert!(page.get("/", None, &cookie).await.starts_with("HTTP/1.1 200 "));
    assert!(page.login("wrong").await.starts_with("HTTP/1.1 401 "));

    team.status("mnist", json!({"phase": "Running", "reason": "Running", "progress": progress(10, 0.5)})).await;
    page.until(&mnist, &reader, |job| job["progress"]["step"] == 10).await;
    page.until("/events", &reader, |jobs| jobs[format!("{}/mnist", team.namespace)]["phase"] == "Running").await;

    // The cluster's answers say nothing of jobs that a visitor may not see.
    assert_eq!(page.first("/events", &nobody).await, json!({}));
    let seen = page.first("/events", &reader).await;
    assert_eq!(seen.as_object().expect("an object").len(), 1, "{seen}");
    let body = |answer: String| answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).expect("a body");
    let missing = page.get(&format!("/events/{}/missing", others.namespace), Some(&reader), "").await;
    for (path, token) in [(&mnist, &nobody), (&secret, &nobody), (&secret, &reader)] {
        let answer = page.get(path, Some(token), "").await;
        assert!(answer.starts_with("HTTP/1.1 403 "), "{answer}");
        assert_eq!(body(answer), body(missing.clone()));
    }
    let log = format!("/logs/trainer-0/{}/mnist", team.namespace);
    assert!(page.get(&log, Some(&reader), "").await.starts_with("HTTP/1.1 403 "));
    assert!(page.get(&log, Some(&writer), "").await.ends_with("trainer-0 has no pod at the moment"));

    let ended = json!({"phase": "Succeeded", "reason": "Succeeded", "progress": progress(20, 0.25)});
    team.status("mnist", ended).await;
    eventually("a record", async || {
        let names = std::fs::read_dir(folder.path().join(&team.namespace)).ok()?;
        let is_record = |name: &str| name.starts_with("mnist_") && name.ends_with(".json");
        names.filter_map(Result::ok).find(|entry| entry.file_name().to_str().is_some_and(is_record))
    })
    .await;
    let before = page.until(&mnist, &reader, |job| job["isOver"] == true).await;
    let points = &before["curves"]["curves"];
    let loss = points.as_array().expect("curves").iter().find(|curve| curve["metric"] == "loss").expect("a loss");
    let steps: Vec<&Value> = loss["points"].as_array().expect("points").iter().step_by(3).collect();
    assert_eq!(steps, [&json!(10), &json!(20)]);
    assert!(before["manifest"].as_str().is_some_and(|manifest| manifest.contains("kind: ParameterServerJob")));

    team.delete("mnist").await;
    // The watch tells of a later job after the deletion.
    team.create("later").await;
    let later = format!("{}/later", team.namespace);
    let listed = page.until("/events", &reader, |jobs| !jobs[&later].is_null()).await;
    assert_eq!(listed[format!("{}/mnist", team.namespace)]["phase"], "Succeeded", "{listed}");
    assert_eq!(page.first(&mnist, &reader).await, before);
    page.end().await;

    let again = Page::start(&config, folder.path()).await;
    // The records are read while the jobs of the cluster are shown.
    let recorded = format!("{}/mnist", team.namespace);
    let listed = again.until("/events", &reader, |jobs| !jobs[&later].is_null() && !jobs[&recorded].is_null()).await;
    assert_eq!(listed[&recorded]["phase"], "Succeeded", "{listed}");
    assert_eq!(again.first(&mnist, &reader).await, before);
    assert!(again.get(&mnist, Some(&nobody), "").await.starts_with("HTTP/1.1 403 "));
    again.end().await;
}

fn progress(step: u32, loss: f64) -> Value {
    let metrics = json!([{"name": "loss", "value": loss}]);
    json!({"step": step, "totalSteps": 20, "percent": step * 5, "summary": "some", "metrics": metrics})
}

impl Team {
    async fn new(client: &Client) -> Self {
        let metadata = kube::core::ObjectMeta { generate_name: Some("page-".into()), ..Default::default() };
        let namespace = Namespace { metadata, ..Namespace::default() };
        let created = Api::all(client.clone()).create(&PostParams::default(), &namespace).await;
        Self { client: client.clone(), namespace: created.expect("a namespace can be made").name_any() }
    }

    fn jobs(&self) -> Api<ParameterServerJob> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    async fn create(&self, name: &str) {
        let template = json!({"spec": {"containers": [{"name": "trainer", "image": "psjobs-worker:0.1.0"}]}});
        let job = serde_json::from_value(json!({
            "apiVersion": "psjobs.dev/v1alpha1", "kind": "ParameterServerJob", "metadata": {"name": name},
            "spec": {"trainer": {"replicas": 1, "template": template}},
        }));
        let job: ParameterServerJob = job.expect("a job");
        Box::pin(self.jobs().create(&PostParams::default(), &job)).await.expect("the job is accepted");
    }

    async fn status(&self, name: &str, status: Value) {
        let patch = Patch::Merge(json!({ "status": status }));
        let patched = Box::pin(self.jobs().patch_status(name, &PatchParams::default(), &patch)).await;
        patched.expect("the status is accepted");
    }

    async fn delete(&self, name: &str) {
        self.jobs().delete(name, &DeleteParams::default()).await.expect("the job can be deleted");
    }

    /// Returns a token of a service account that has rights by these rules in this namespace.
    async fn token(&self, name: &str, rules: &[Value]) -> String {
        let metadata = json!({"name": name, "namespace": self.namespace});
        let accounts = Api::<ServiceAccount>::namespaced(self.client.clone(), &self.namespace);
        let account = serde_json::from_value(json!({ "metadata": metadata })).expect("an account");
        accounts.create(&PostParams::default(), &account).await.expect("an account can be made");
        if !rules.is_empty() {
            let role: Role = serde_json::from_value(json!({"metadata": metadata, "rules": rules})).expect("a role");
            let roles = Api::namespaced(self.client.clone(), &self.namespace);
            roles.create(&PostParams::default(), &role).await.expect("a role can be made");
            let binding: RoleBinding = serde_json::from_value(json!({
                "metadata": metadata,
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
                "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": self.namespace}],
            }))
            .expect("a binding");
            let bindings = Api::namespaced(self.client.clone(), &self.namespace);
            bindings.create(&PostParams::default(), &binding).await.expect("a binding can be made");
            let user = format!("system:serviceaccount:{}:{name}", self.namespace);
            for rule in rules {
                let text = |field: &str| rule[field][0].as_str().expect("a text").to_owned();
                let (resource, subresource) = match text("resources").split_once('/') {
                    Some((resource, below)) => (resource.to_owned(), below.to_owned()),
                    None => (text("resources"), String::new()),
                };
                let attributes = json!({
                    "namespace": self.namespace, "verb": text("verbs"), "group": text("apiGroups"),
                    "resource": resource, "subresource": subresource,
                });
                until_allowed(&self.client, &user, attributes).await;
            }
        }
        let wanted: TokenRequest = serde_json::from_value(json!({"spec": {"audiences": []}})).expect("a request");
        let made = accounts.create_token_request(name, &PostParams::default(), &wanted).await;
        made.expect("a token can be made").status.expect("it has a status").token
    }
}

impl Page {
    async fn start(config: &kube::Config, records: &Path) -> Self {
        let records = records.to_str().expect("a path").to_owned();
        let settings = Settings::try_parse_from(["psjobs-web", "--records", &records]).expect("flags are right");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let (address, stop) = (listener.local_addr().expect("it listens"), CancellationToken::new());
        let run = psjobs_web_server::run(settings, config.clone(), listener, stop.clone());
        let page = Self { address, stop, work: tokio::spawn(Box::pin(run)) };
        eventually("a page that is ready", async || {
            let answer = page.get("/readyz", None, "").await;
            answer.starts_with("HTTP/1.1 200 ").then_some(())
        })
        .await;
        page
    }

    async fn end(self) {
        self.stop.cancel();
        let ended = tokio::time::timeout(DEADLINE, self.work).await.expect("it ends").expect("it does not panic");
        ended.expect("it ends well");
    }

    async fn send(&self, request: String) -> BufReader<TcpStream> {
        let mut stream = TcpStream::connect(self.address).await.expect("it listens");
        stream.write_all(request.as_bytes()).await.expect("it reads");
        BufReader::new(stream)
    }

    async fn open(&self, path: &str, token: Option<&str>, headers: &str) -> BufReader<TcpStream> {
        let bearer = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
        let fixed = "Host: localhost\r\nConnection: close\r\n";
        self.send(format!("GET {path} HTTP/1.1\r\n{fixed}{bearer}{headers}\r\n")).await
    }

    /// Returns the whole answer.
    async fn get(&self, path: &str, token: Option<&str>, headers: &str) -> String {
        read_all(self.open(path, token, headers).await).await
    }

    /// Sends the form.
    async fn login(&self, token: &str) -> String {
        let body = format!("token={token}\r\n");
        let headers = format!("Content-Type: text/plain\r\nContent-Length: {}\r\n", body.len());
        let fixed = "Host: localhost\r\nConnection: close\r\n";
        read_all(self.send(format!("POST /login HTTP/1.1\r\n{fixed}{headers}\r\n{body}")).await).await
    }

    /// Returns the first event, which has everything.
    async fn first(&self, path: &str, token: &str) -> Value {
        let mut events = self.open(path, Some(token), "").await;
        let mut line = String::new();
        while !line.starts_with("data:") {
            line.clear();
            let read = tokio::time::timeout(DEADLINE, events.read_line(&mut line)).await.expect("it answers in time");
            assert!(read.expect("it answers") > 0, "{path}: an event");
        }
        serde_json::from_str(&line["data:".len()..]).expect("JSON")
    }

    /// Waits until the first event is as wanted, and returns it.
    async fn until(&self, path: &str, token: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        eventually(path, async || Some(self.first(path, token).await).filter(&wanted)).await
    }
}

async fn read_all(mut answer: BufReader<TcpStream>) -> String {
    let mut text = String::new();
    let read = tokio::time::timeout(DEADLINE, answer.read_to_string(&mut text)).await.expect("it answers in time");
    read.expect("it answers");
    text
}

/// Repeats `attempt`, for at most a minute, until it returns something.
async fn eventually<T>(what: &str, mut attempt: impl AsyncFnMut() -> Option<T>) -> T {
    let mut attempts = tokio::time::interval(Duration::from_millis(100));
    for _ in 0..600 {
        attempts.tick().await;
        if let Some(found) = attempt().await {
            return found;
        }
    }
    panic!("waited in vain for {what}")
}

async fn install_definition(client: &Client) {
    let text = include_str!("../../crds/parameterserverjobs.psjobs.dev.yaml");
    let definition: CustomResourceDefinition = serde_yaml::from_str(text).expect("crds/ holds a definition");
    let definitions = Api::<CustomResourceDefinition>::all(client.clone());
    let (params, name) = (PatchParams::apply("psjobs-test").force(), definition.name_any());
    definitions.patch(&name, &params, &Patch::Apply(definition)).await.expect("the API server takes the definition");
    let established = await_condition(definitions, &name, conditions::is_crd_established());
    tokio::time::timeout(DEADLINE, established).await.expect("in time").expect("it can be watched");
}

/// Gives a user the rights that the chart gives the page.
async fn grant_chart(client: &Client, user: &str) {
    let lines = CHART.lines().filter(|line| !line.trim_start().starts_with("{{")).collect::<Vec<_>>().join("\n");
    let blocks = lines.split("\nrules:\n").skip(1).map(|block| block.split("\n---").next().unwrap_or_default());
    let rules: Vec<PolicyRule> =
        blocks.flat_map(|block| serde_yaml::from_str::<Vec<PolicyRule>>(block).expect("rules are YAML")).collect();
    assert_eq!(rules.len(), 5, "{rules:?}");
    let metadata = kube::core::ObjectMeta { name: Some(user.to_owned()), ..Default::default() };
    let role = ClusterRole { metadata, rules: Some(rules), ..ClusterRole::default() };
    Api::all(client.clone()).create(&PostParams::default(), &role).await.expect("a role can be made");
    let binding: ClusterRoleBinding = serde_json::from_value(json!({
        "metadata": {"name": user},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": user},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
    }))
    .expect("a binding");
    Api::all(client.clone()).create(&PostParams::default(), &binding).await.expect("a binding can be made");
    let attributes = json!({"verb": "create", "group": "authorization.k8s.io", "resource": "subjectaccessreviews"});
    until_allowed(client, user, attributes).await;
}

/// Waits until the authorizer, which learns of roles from a watch, allows something.
async fn until_allowed(client: &Client, user: &str, attributes: Value) {
    let question = serde_json::from_value(json!({"spec": {"user": user, "resourceAttributes": attributes}}));
    let question: SubjectAccessReview = question.expect("a review");
    eventually("a right", async || {
        let answer = Api::all(client.clone()).create(&PostParams::default(), &question).await.expect("a review");
        answer.status.filter(|status| status.allowed)
    })
    .await;
}
