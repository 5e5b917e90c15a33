//! A real API server, an operator in this process, and hands that play the kubelet.

mod apiserver;

use std::fmt::Debug;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, Namespace, Pod, Service};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, Client, Resource, ResourceExt as _};
use psjobs_api::crd::{ParameterServerJob, ParameterServerJobStatus, Phase};
use psjobs_operator::operate::operate;
use psjobs_operator::settings::Settings;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;

#[allow(unused_imports, reason = "of the programs that share this file, few need the second")]
pub use apiserver::{ApiServer, gang_scheduling};

/// Longer than anything here takes on a busy machine.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// The API server of this test program, with the definition installed; `None` where there is none.
pub async fn api_server() -> Option<&'static ApiServer> {
    static SERVER: OnceCell<Option<ApiServer>> = OnceCell::const_new();
    let start = || async {
        let server = ApiServer::find().await?;
        install_definition(&server.client()).await;
        Some(server)
    };
    SERVER.get_or_init(start).await.as_ref()
}

/// Installs the definition as `crds/` has it, and waits until it is served.
pub async fn install_definition(client: &Client) {
    let text = include_str!("../../../crds/parameterserverjobs.psjobs.dev.yaml");
    let definition: CustomResourceDefinition = serde_yaml::from_str(text).expect("crds/ holds a definition");
    let definitions = Api::<CustomResourceDefinition>::all(client.clone());
    let params = PatchParams::apply("psjobs-test").force();
    let name = definition.name_any();
    definitions.patch(&name, &params, &Patch::Apply(definition)).await.expect("the API server takes the definition");
    within(await_condition(definitions, &name, conditions::is_crd_established())).await;
}

/// Installs the PodGroup of a scheduler that is not there, with the fields that its definition has.
pub async fn install_pod_groups(client: &Client, group: &str, version: &str) {
    let fields = json!({
        "minMember": {"type": "integer", "format": "int32"},
        "queue": {"type": "string"},
        "priorityClassName": {"type": "string"},
        "scheduleTimeoutSeconds": {"type": "integer", "format": "int32"},
    });
    let spec = json!({"type": "object", "properties": {"spec": {"type": "object", "properties": fields}}});
    let definition = serde_json::from_value(json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        // Without the annotation a group of Kubernetes' own domain is refused.
        "metadata": {
            "name": format!("podgroups.{group}"),
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": group,
            "names": {"kind": "PodGroup", "plural": "podgroups", "singular": "podgroup"},
            "scope": "Namespaced",
            "versions": [{"name": version, "served": true, "storage": true, "schema": {"openAPIV3Schema": spec}}],
        },
    }));
    let definition: CustomResourceDefinition = definition.expect("a definition");
    let (definitions, name) = (Api::<CustomResourceDefinition>::all(client.clone()), definition.name_any());
    definitions.create(&PostParams::default(), &definition).await.expect("the API server takes the definition");
    within(await_condition(definitions, &name, conditions::is_crd_established())).await;
}

/// Waits for it, but not for ever.
pub async fn within<T, E: Debug>(future: impl Future<Output = Result<T, E>>) -> T {
    tokio::time::timeout(DEADLINE, future).await.expect("it happens within the deadline").expect("it can be watched")
}

/// A namespace of one test, with what the test does in it.
pub struct Team {
    pub client: Client,
    pub namespace: String,
    config: kube::Config,
}

impl Team {
    /// A fresh namespace on the shared API server; `None` where there is no API server.
    pub async fn new(name: &str) -> Option<Self> {
        Some(Self::on(api_server().await?, name).await)
    }

    pub async fn on(server: &ApiServer, name: &str) -> Self {
        let client = server.client();
        let namespace = Namespace {
            metadata: kube::core::ObjectMeta { generate_name: Some(format!("{name}-")), ..Default::default() },
            ..Namespace::default()
        };
        let created = Api::all(client.clone()).create(&PostParams::default(), &namespace).await;
        let namespace = created.expect("a namespace can be made").name_any();
        Self { client, namespace, config: server.config.clone() }
    }

    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Starts an operator for this namespace.
    pub fn operator(&self) -> Operator {
        self.operator_with(&[])
    }

    pub fn operator_with(&self, flags: &[&str]) -> Operator {
        self.operator_on(self.config.clone(), flags)
    }

    /// The address of the API server.
    pub fn server(&self) -> (String, u16) {
        let url = &self.config.cluster_url;
        (url.host().expect("a host").to_owned(), url.port_u16().unwrap_or(443))
    }

    /// Starts an operator that reaches the API server at a port of this machine.
    pub fn operator_through(&self, port: u16, flags: &[&str]) -> Operator {
        let url = format!("https://127.0.0.1:{port}").parse().expect("a URL");
        let mut config = self.config.clone();
        (config.cluster_url, config.accept_invalid_certs) = (url, true);
        self.operator_on(config, flags)
    }

    fn operator_on(&self, config: kube::Config, flags: &[&str]) -> Operator {
        let common = ["psjobs-operator", "--metrics-addr=127.0.0.1:0", "--namespace", &self.namespace];
        let settings = <Settings as clap::Parser>::try_parse_from(common.iter().chain(flags)).expect("flags are right");
        Operator::start(settings, config)
    }

    /// Applies a job: `mnist` with 1 server and 2 trainers, whose pods are created together unless `spec`
    /// says otherwise; `spec` is YAML, one more field a line.
    pub async fn apply(&self, spec: &str) -> ParameterServerJob {
        let startup = if spec.contains("startupPolicy") { "" } else { "startupPolicy: AnyOrder" };
        let template = "{spec: {containers: [{name: trainer, image: 'psjobs-worker:0.1.0'}]}}";
        let yaml = format!(
            "apiVersion: psjobs.dev/v1alpha1\nkind: ParameterServerJob\nmetadata: {{name: mnist}}\nspec: {{}}\n---\n\
             trainer: {{replicas: 2, template: {template}}}\n{startup}\n{spec}"
        );
        let (job, spec) = yaml.split_once("---").expect("two documents");
        let mut job: Value = serde_yaml::from_str(job).expect("YAML");
        job["spec"] = serde_yaml::from_str(spec).expect("YAML");
        let job = serde_json::from_value(job).expect("a job");
        Box::pin(self.api().create(&PostParams::default(), &job)).await.expect("the job is accepted")
    }

    pub async fn patch(&self, spec: Value) {
        let patch = Patch::Merge(json!({ "spec": spec }));
        let jobs = self.api::<ParameterServerJob>();
        jobs.patch("mnist", &PatchParams::default(), &patch).await.expect("the change is accepted");
    }

    /// As `kubectl scale` does.
    pub async fn scale(&self, trainers: u32) {
        let patch = Patch::Merge(json!({"spec": {"replicas": trainers}}));
        let jobs = self.api::<ParameterServerJob>();
        jobs.patch_scale("mnist", &PatchParams::default(), &patch).await.expect("the job can be scaled");
    }

    pub async fn job(&self) -> ParameterServerJob {
        self.api().get("mnist").await.expect("the job exists")
    }

    /// Waits until the job's status is as wanted, and returns it.
    pub async fn status(&self, wanted: impl Fn(&ParameterServerJobStatus) -> bool) -> ParameterServerJobStatus {
        let is = |job: Option<&ParameterServerJob>| job.and_then(|job| job.status.as_ref()).is_some_and(&wanted);
        let waiting = tokio::time::timeout(DEADLINE, Box::pin(await_condition(self.api(), "mnist", is))).await;
        match waiting {
            Ok(job) => job.expect("watched").and_then(|job| job.status).expect("it has a status"),
            Err(_) => panic!("the status stays at {:#?}", self.job().await.status),
        }
    }

    pub async fn phase(&self, phase: Phase) -> ParameterServerJobStatus {
        self.status(|status| status.phase == Some(phase)).await
    }

    /// Waits for an object to be as wanted; `None` is one that does not exist.
    pub async fn until<K>(&self, name: &str, wanted: impl Fn(Option<&K>) -> bool) -> Option<K>
    where
        K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
        K: Clone + Debug + DeserializeOwned + Send + 'static,
    {
        // On the heap: reading a job takes much of a test thread's stack where nothing is optimised.
        within(Box::pin(await_condition(self.api(), name, wanted))).await
    }

    /// Waits for a pod of that incarnation.
    pub async fn pod(&self, name: &str, incarnation: u32) -> Pod {
        let is = |pod: Option<&Pod>| pod.is_some_and(|pod| incarnation_of(pod) == incarnation.to_string());
        self.until(name, is).await.expect("it exists")
    }

    /// Names of the namespace's pods, sorted.
    pub async fn pods(&self) -> Vec<String> {
        let pods = self.api::<Pod>().list(&ListParams::default()).await.expect("pods can be listed");
        pods.iter().map(|pod| pod.name_any()).collect()
    }

    pub async fn delete_pod(&self, name: &str) {
        self.api::<Pod>().delete(name, &DeleteParams::default()).await.expect("the pod can be deleted");
    }

    pub async fn delete_service(&self, name: &str) {
        self.api::<Service>().delete(name, &DeleteParams::default()).await.expect("the service can be deleted");
    }

    /// The kubelet says that the pod's main container runs.
    pub async fn run(&self, name: &str) {
        let ready = json!([{"type": "Ready", "status": "True"}]);
        self.kubelet(name, json!({"phase": "Running", "conditions": ready}), json!({"running": {}})).await;
    }

    /// The kubelet says that the pod's main container ended.
    pub async fn end(&self, name: &str, code: i32, message: &str) {
        let phase = if code == 0 { "Succeeded" } else { "Failed" };
        let finished = jiff::Timestamp::now().to_string();
        let ended = json!({"exitCode": code, "message": message, "finishedAt": finished, "reason": "Error"});
        self.kubelet(name, json!({"phase": phase}), json!({"terminated": ended})).await;
    }

    async fn kubelet(&self, name: &str, mut status: Value, state: Value) {
        let pod = self.until(name, |pod: Option<&Pod>| pod.is_some()).await.expect("it exists");
        let container = &pod.spec.expect("a spec").containers[0].name;
        status["containerStatuses"] = json!([{
            "name": container, "image": "i", "imageID": "i", "ready": true, "restartCount": 0, "state": state
        }]);
        let patch = Patch::Merge(json!({ "status": status }));
        self.api::<Pod>().patch_status(name, &PatchParams::default(), &patch).await.expect("a pod status");
    }

    /// Runs all pods of the job, and waits until the operator says so.
    pub async fn run_all(&self) -> ParameterServerJobStatus {
        for name in ["mnist-ps-0", "mnist-trainer-0", "mnist-trainer-1"] {
            self.run(name).await;
        }
        self.phase(Phase::Running).await
    }

    /// As [`Team::run_all`], after pods were replaced, until the status has that number of `restarts`.
    pub async fn run_all_again(&self, restarts: i32) -> ParameterServerJobStatus {
        self.run_all().await;
        self.status(|status| status.phase == Some(Phase::Running) && status.restarts == restarts).await
    }

    /// Waits until the API server refuses a plain pod with an error that contains these words: admission may see a change of the
    /// namespace or its quota later than the one who made it.
    pub async fn until_pods_are_refused(&self, words: &str) {
        let plain = json!({"metadata": {"name": "plain"}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
        let plain: Pod = serde_json::from_value(plain).expect("a pod");
        let trial = PostParams { dry_run: true, ..PostParams::default() };
        eventually(words, async || match self.api::<Pod>().create(&trial, &plain).await {
            Err(kube::Error::Api(status)) if status.message.contains(words) => Some(()),
            _ => None,
        })
        .await;
    }

    /// Waits for an event, and returns its note.
    pub async fn event(&self, reason: &str) -> String {
        let events = self.api::<Event>();
        let reasons = ListParams::default().fields(&format!("reason={reason}"));
        eventually(&format!("event {reason}"), async || {
            let found = events.list(&reasons).await.expect("events can be listed");
            found.items.into_iter().next().map(|event| event.message.unwrap_or_default())
        })
        .await
    }
}

/// Repeats `attempt`, for at most a minute, until it returns something.
pub async fn eventually<T>(what: &str, mut attempt: impl AsyncFnMut() -> Option<T>) -> T {
    let mut attempts = tokio::time::interval(Duration::from_millis(100));
    for _ in 0..600 {
        attempts.tick().await;
        if let Some(found) = attempt().await {
            return found;
        }
    }
    panic!("waited in vain for {what}")
}

fn incarnation_of(pod: &Pod) -> String {
    pod.annotations().get("psjobs.dev/incarnation").cloned().unwrap_or_default()
}

/// An operator with threads of its own, so that it can be killed like a process.
pub struct Operator {
    runtime: Option<Runtime>,
    stop: CancellationToken,
    work: Option<tokio::task::JoinHandle<anyhow::Result<()>>>,
}

impl Operator {
    fn start(settings: Settings, config: kube::Config) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime starts");
        let stop = CancellationToken::new();
        let work = runtime.spawn(operate(settings, config, stop.clone()));
        Self { runtime: Some(runtime), stop, work: Some(work) }
    }

    /// Ends it as SIGTERM does.
    pub async fn terminate(mut self) {
        self.stop.cancel();
        let work = self.work.take().expect("started once");
        let ended = tokio::time::timeout(DEADLINE, work).await.expect("it ends").expect("it does not panic");
        ended.expect("it ends well");
    }
}

impl Drop for Operator {
    /// Ends it as SIGKILL does: nothing that it holds is given back.
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
