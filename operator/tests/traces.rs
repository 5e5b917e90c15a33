//! Traces, as a collector gets them from the operator's process.

#[path = "support/process.rs"]
mod process;
#[expect(dead_code, reason = "the other test programs use the rest")]
mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::fs;
use std::net::SocketAddr;
use std::process::{Command, ExitStatus};
use std::time::{Duration, SystemTime};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use process::Operator;
use psjobs_api::certificates::Certificates;
use psjobs_api::crd::{ConditionType, Phase};
use support::{DEADLINE, Team, api_server, within};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::{Identity, Server, ServerTlsConfig};
use tonic::{Request, Response, Status};

/// Keeps what it is sent.
struct Collector(mpsc::UnboundedSender<ExportTraceServiceRequest>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0.send(request.into_inner()).map_err(|_| Status::unavailable("the test is over"))?;
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// A collector on a bound port, with TLS if it has an identity.
fn collect(listener: TcpListener, identity: Option<Identity>) -> mpsc::UnboundedReceiver<ExportTraceServiceRequest> {
    let (sender, batches) = mpsc::unbounded_channel();
    let mut server = Server::builder();
    if let Some(identity) = identity {
        server = server.tls_config(ServerTlsConfig::new().identity(identity)).expect("a usable identity");
    }
    let serving = server.add_service(TraceServiceServer::new(Collector(sender)));
    tokio::spawn(serving.serve_with_incoming(TcpListenerStream::new(listener)));
    batches
}

/// The operator, for one namespace.
async fn start(team: &Team, variables: &[(&str, &str)]) -> Operator {
    let server = api_server().await.expect("the team has one");
    Operator::start(&server.kubeconfig, &["--namespace", &team.namespace], variables)
}

impl Operator {
    /// Lines of its log with these words.
    fn said(&self, words: &str) -> Vec<String> {
        let log = fs::read_to_string(self.folder.path().join("log")).expect("it has a log");
        log.lines().filter(|line| line.contains(words)).map(str::to_owned).collect()
    }

    /// Waits for such a line.
    async fn says(&self, words: &str) {
        look(|| (!self.said(words).is_empty()).then_some(())).await;
    }

    /// Ends it as a kubelet does.
    async fn terminate(&mut self) -> ExitStatus {
        let id = self.process.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().expect("kill is installed").success());
        look(|| self.process.try_wait().expect("our own process")).await
    }
}

/// Looks until it is there.
async fn look<T>(mut found: impl FnMut() -> Option<T>) -> T {
    let mut looks = tokio::time::interval(Duration::from_millis(20));
    within(async {
        loop {
            looks.tick().await;
            if let Some(found) = found() {
                return Ok::<_, Infallible>(found);
            }
        }
    })
    .await
}

fn texts(attributes: &[KeyValue]) -> BTreeMap<&str, String> {
    let text = |value: &Option<AnyValue>| match value.as_ref().and_then(|value| value.value.as_ref()) {
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::IntValue(number)) => number.to_string(),
        other => format!("{other:?}"),
    };
    attributes.iter().map(|pair| (pair.key.as_str(), text(&pair.value))).collect()
}

/// Spans by their parents.
struct Tree(Vec<Span>);

impl Tree {
    fn roots(&self) -> impl Iterator<Item = &Span> {
        self.0.iter().filter(|span| span.parent_span_id.is_empty())
    }

    fn below(&self, parent: &Span) -> Vec<&Span> {
        self.0.iter().filter(|span| span.parent_span_id == parent.span_id).collect()
    }

    /// The only span of that name below another one.
    fn only(&self, parent: &Span, name: &str) -> &Span {
        let found = self.below(parent).into_iter().filter(|span| span.name == name).collect::<Vec<_>>();
        assert_eq!(found.len(), 1, "{name} below {}: {:#?}", parent.name, self.names(parent));
        found[0]
    }

    fn names(&self, parent: &Span) -> BTreeSet<&str> {
        self.below(parent).iter().map(|span| span.name.as_str()).collect()
    }
}

#[tokio::test]
async fn a_reconcile_is_a_trace_of_its_steps_and_the_last_arrive_at_the_end() {
    let Some(team) = Team::new("traces").await else { return };
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let endpoint = format!("http://{}", listener.local_addr().expect("bound"));
    let mut batches = collect(listener, None);
    let variables = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
        ("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test"),
        // Nothing is sent of itself within this test.
        ("OTEL_BSP_SCHEDULE_DELAY", "3600000"),
    ];
    let mut operator = start(&team, &variables).await;
    let job = team.apply("").await;
    team.status(|status| status.conditions.iter().any(|c| c.type_ == ConditionType::Created && c.status == "True"))
        .await;
    assert!(operator.terminate().await.success());
    assert_eq!(operator.said("spans are lost"), [""; 0]);

    let mut spans = Vec::new();
    while let Ok(batch) = batches.try_recv() {
        for of_resource in batch.resource_spans {
            let resource = of_resource.resource.expect("it says who sends");
            let resource = texts(&resource.attributes);
            assert_eq!(resource["service.name"], "psjobs-operator");
            assert_eq!(resource["deployment.environment.name"], "test");
            spans.extend(of_resource.scope_spans.into_iter().flat_map(|of_scope| of_scope.spans));
        }
    }
    let tree = Tree(spans);
    let (uid, generation) = (job.uid().expect("stored"), job.metadata.generation.expect("stored").to_string());
    for root in tree.roots() {
        assert_eq!(root.name, "reconcile", "watches and leases have no trace");
        let about = texts(&root.attributes);
        assert_eq!(about["k8s.namespace.name"], team.namespace);
        assert_eq!(about["psjobs.job.name"], "mnist");
        assert_eq!((&about["psjobs.job.uid"], &about["psjobs.job.generation"]), (&uid, &generation));
    }
    let created = tree.roots().find(|root| tree.names(root).contains("apply")).expect("one made the pods");
    for step in ["validate", "dereference"] {
        tree.only(created, step);
    }
    assert!(tree.names(created).contains("decide"));
    let apply = tree.only(created, "apply");
    let written = texts(&apply.attributes);
    assert_eq!((written["psjobs.created"].as_str(), written["psjobs.refused"].as_str()), ("4", "0"));
    let children =
        tree.below(apply).into_iter().filter(|span| span.name == "create" && span.kind != SpanKind::Client as i32);
    let children =
        children.map(|span| (texts(&span.attributes)["psjobs.child"].clone(), span)).collect::<BTreeMap<_, _>>();
    assert_eq!(
        children.keys().collect::<Vec<_>>(),
        ["pod mnist-ps-0", "pod mnist-trainer-0", "pod mnist-trainer-1", "service mnist"]
    );
    let pod = children["pod mnist-ps-0"];
    tree.only(pod, "build");
    let request = tree.only(pod, "create");
    assert_eq!(request.kind, SpanKind::Client as i32);
    assert!(texts(&request.attributes)["http.url"].ends_with("/pods?&fieldManager=psjobs-operator"), "{request:#?}");

    let wrote = tree.roots().find(|root| tree.names(root).contains("update_status")).expect("one wrote the status");
    let wrote = texts(&tree.only(wrote, "update_status").attributes);
    assert_eq!((wrote["psjobs.change"].as_str(), wrote["psjobs.phase"].as_str()), ("Facts", "Pending"));
}

#[tokio::test]
async fn a_collector_that_is_not_there_costs_a_line_and_no_job() {
    let Some(team) = Team::new("collector").await else { return };
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address: SocketAddr = listener.local_addr().expect("bound");
    drop(listener);
    let certificates = Certificates::make(&["127.0.0.1".into()], SystemTime::now(), Duration::from_secs(3600));
    let certificates = certificates.expect("certificates can be made");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let authority = folder.path().join("ca.crt");
    fs::write(&authority, &certificates.authority).expect("a file");
    let endpoint = format!("https://{address}");
    let variables = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", authority.to_str().expect("a path of ASCII")),
        ("OTEL_SERVICE_NAME", "mine"),
        ("OTEL_BSP_SCHEDULE_DELAY", "20"),
    ];
    let mut operator = start(&team, &variables).await;
    team.apply("").await;
    team.run_all().await;
    for pod in ["mnist-trainer-0", "mnist-trainer-1"] {
        team.end(pod, 0, "").await;
    }
    team.until("mnist-ps-0", |pod: Option<&Pod>| pod.is_some()).await;
    team.end("mnist-ps-0", 0, "").await;
    team.phase(Phase::Succeeded).await;

    operator.says("traces do not arrive").await;

    // Now it is there, and the spans of one more change arrive.
    let listener = TcpListener::bind(address).await.expect("the port is still free");
    let identity = Identity::from_pem(&certificates.server.certificate, &certificates.server.key);
    let mut batches = collect(listener, Some(identity));
    let arrived = async {
        for attempt in 1.. {
            team.patch(serde_json::json!({"runPolicy": {"ttlSecondsAfterFinished": 1000 + attempt}})).await;
            if let Ok(batch) = tokio::time::timeout(Duration::from_secs(2), batches.recv()).await {
                return batch.expect("the collector goes on");
            }
        }
        unreachable!("there is always another number")
    };
    let batch = tokio::time::timeout(DEADLINE, arrived).await.expect("spans arrive");
    let resource = batch.resource_spans[0].resource.as_ref().expect("it says who sends");
    assert_eq!(texts(&resource.attributes)["service.name"], "mine");
    assert!(operator.terminate().await.success());
    for (words, times) in [("traces do not arrive", 1), ("traces arrive", 1)] {
        assert_eq!(operator.said(words).len(), times, "{words}: {:#?}", operator.said("traces"));
    }
}
