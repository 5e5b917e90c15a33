//! Traces for OpenTelemetry: a span for each reconcile, in it one for each step, in those the requests to the API server.
//!
//! The standard's environment variables name the collector; spans are sent to it by gRPC. Without
//! `OTEL_EXPORTER_OTLP_ENDPOINT` no span is made. Sending has a thread and a bounded queue of its own: spans that the
//! collector does not take in time are dropped, and delay no reconcile.

use std::error::Error;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kube::ResourceExt as _;
use opentelemetry::trace::{Status, TracerProvider as _};
use opentelemetry::{KeyValue, Value};
use opentelemetry_otlp::tonic_types::transport::{Certificate, ClientTlsConfig};
use opentelemetry_otlp::{ExporterBuildError, WithExportConfig as _, WithTonicConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::resource::EnvResourceDetector;
use opentelemetry_sdk::trace::{SdkTracerProvider, SpanData, SpanExporter};
use psjobs_api::crd::ParameterServerJob;
use tokio::runtime::Handle;
use tracing::subscriber::Interest;
use tracing::{Metadata, Span, Subscriber, debug_span, info, warn};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{DynFilterFn, LevelFilter};
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use crate::error_chain::chain;

/// Target of the spans made here. Logs leave it out: they have a span of the job already.
pub const TARGET: &str = "psjobs_traces";
/// Target of the spans that the client makes for its requests.
const REQUESTS: &str = "kube_client::client::builder";
const SERVICE: &str = "psjobs-operator";
/// How long one batch may take, with all its tries. A connection attempt that gets no answer would take minutes.
const DEADLINE: Duration = Duration::from_secs(15);
/// How long the last spans may take at the end.
const LAST_SPANS: Duration = Duration::from_secs(3);

/// An error in the environment variables.
#[derive(Debug, thiserror::Error)]
pub enum TracesError {
    #[error("OTEL_TRACES_EXPORTER is {0:?}; this operator knows otlp and none")]
    Exporter(String),
    #[error("OTEL_EXPORTER_OTLP_PROTOCOL is {0:?}; this operator knows grpc, which collectors take on port 4317")]
    Protocol(String),
    #[error("cannot read {}, which OTEL_EXPORTER_OTLP_CERTIFICATE names", path.display())]
    Certificate { path: PathBuf, source: std::io::Error },
    #[error("OTEL_EXPORTER_OTLP_ENDPOINT is {endpoint:?}; write one like http://collector:4317")]
    Endpoint { endpoint: String, source: ExporterBuildError },
}

/// Sends spans until it is flushed.
pub struct Traces(SdkTracerProvider);

impl Traces {
    /// Creates the exporter that the environment asks for; `None` if it asks for none. Must be called within a runtime.
    ///
    /// # Errors
    /// Values that cannot be meant, and a certificate that cannot be read. The collector need not be there.
    pub fn from_env() -> Result<Option<Self>, TracesError> {
        let env = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let Some(endpoint) = endpoint(env)? else { return Ok(None) };
        let mut exporter = opentelemetry_otlp::SpanExporter::builder().with_tonic().with_endpoint(&endpoint);
        // One without a scheme is https, as the standard has it.
        if !endpoint.contains("://") || endpoint.starts_with("https://") {
            exporter = exporter.with_tls_config(authorities(env)?);
        }
        let exporter =
            exporter.build().map_err(|source| TracesError::Endpoint { endpoint: endpoint.clone(), source })?;
        let exporter =
            LoggedExporter { exporter, endpoint, runtime: Handle::current(), last_lost: AtomicBool::new(false) };
        let provider = SdkTracerProvider::builder().with_resource(resource(env)).with_batch_exporter(exporter);
        Ok(Some(Self(provider.build())))
    }

    /// Returns the subscriber layer that collects the spans.
    pub fn layer<S>(&self) -> impl Layer<S> + Send + Sync + use<S>
    where
        S: Subscriber + for<'span> LookupSpan<'span> + Send + Sync,
    {
        let layer = tracing_opentelemetry::layer().with_tracer(self.0.tracer(SERVICE));
        let layer = layer.with_location(false).with_threads(false).with_target(false).with_level(false);
        let layer = layer.with_tracked_inactivity(false).with_context_activation(false);
        let filter = DynFilterFn::new(is_traced).with_max_level_hint(LevelFilter::DEBUG);
        layer.with_filter(filter.with_callsite_filter(|metadata| match concerns_us(metadata) {
            true => Interest::sometimes(),
            false => Interest::never(),
        }))
    }

    /// Sends the remaining spans and stops.
    pub async fn flush(self) {
        // The shutdown blocks, and needs the runtime meanwhile.
        let flushing = tokio::task::spawn_blocking(move || self.0.shutdown_with_timeout(LAST_SPANS));
        match flushing.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!("the last spans are lost: {error}"),
            Err(error) => warn!("the last spans are lost: {error}"),
        }
    }
}

/// Returns the collector's address, if traces are wanted.
fn endpoint(env: impl Fn(&str) -> Option<String>) -> Result<Option<String>, TracesError> {
    let of_traces = |name: &str| {
        let name = name.strip_prefix("OTEL_EXPORTER_OTLP_").expect("all names begin so");
        env(&format!("OTEL_EXPORTER_OTLP_TRACES_{name}")).or_else(|| env(&format!("OTEL_EXPORTER_OTLP_{name}")))
    };
    let Some(endpoint) = of_traces("OTEL_EXPORTER_OTLP_ENDPOINT") else { return Ok(None) };
    if env("OTEL_SDK_DISABLED").is_some_and(|disabled| disabled.eq_ignore_ascii_case("true")) {
        return Ok(None);
    }
    match env("OTEL_TRACES_EXPORTER").as_deref() {
        None | Some("otlp") => {}
        Some("none") => return Ok(None),
        Some(other) => return Err(TracesError::Exporter(other.to_owned())),
    }
    match of_traces("OTEL_EXPORTER_OTLP_PROTOCOL") {
        None => Ok(Some(endpoint)),
        Some(protocol) if protocol == "grpc" => Ok(Some(endpoint)),
        Some(protocol) => Err(TracesError::Protocol(protocol)),
    }
}

/// Reads the certificate authorities that the collector may have: those of the named file, else those of the machine.
fn authorities(env: impl Fn(&str) -> Option<String>) -> Result<ClientTlsConfig, TracesError> {
    let tls = ClientTlsConfig::new();
    let named = env("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE").or_else(|| env("OTEL_EXPORTER_OTLP_CERTIFICATE"));
    let Some(path) = named.map(PathBuf::from) else { return Ok(tls.with_native_roots()) };
    let pem = std::fs::read(&path).map_err(|source| TracesError::Certificate { path, source })?;
    Ok(tls.ca_certificate(Certificate::from_pem(pem)))
}

/// Describes the sender of the spans: this program, or the name and attributes that the environment gives it.
fn resource(env: impl Fn(&str) -> Option<String>) -> Resource {
    let own = [KeyValue::new("service.name", SERVICE), KeyValue::new("service.version", env!("CARGO_PKG_VERSION"))];
    let named = env("OTEL_SERVICE_NAME").map(|name| KeyValue::new("service.name", name));
    let resource = Resource::builder_empty().with_attributes(own);
    resource.with_detector(Box::new(EnvResourceDetector::new())).with_attributes(named).build()
}

/// Selects the operator's spans and the requests within them, and leaves out watches and other requests.
fn is_traced<S>(metadata: &Metadata<'_>, context: &Context<'_, S>) -> bool
where
    S: Subscriber + for<'span> LookupSpan<'span>,
{
    concerns_us(metadata) && (metadata.target() == TARGET || context.lookup_current().is_some())
}

fn concerns_us(metadata: &Metadata<'_>) -> bool {
    metadata.is_span() && [TARGET, REQUESTS].contains(&metadata.target())
}

/// Wraps an exporter; logs once when spans begin to be lost, and once when they arrive again.
#[derive(Debug)]
struct LoggedExporter<E> {
    exporter: E,
    endpoint: String,
    runtime: Handle,
    /// The last batch was lost.
    last_lost: AtomicBool,
}

impl<E: SpanExporter> SpanExporter for LoggedExporter<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let sending = {
            // The timeout needs a runtime, which the thread of the queue does not have.
            let _runtime = self.runtime.enter();
            tokio::time::timeout(DEADLINE, self.exporter.export(batch))
        };
        let result = sending.await.unwrap_or(Err(OTelSdkError::Timeout(DEADLINE)));
        match (&result, self.last_lost.swap(result.is_err(), Ordering::Relaxed)) {
            (Err(error), false) => warn!(
                "traces do not arrive at {}: {error}; they are lost, the work goes on, and a line says when they arrive again",
                self.endpoint
            ),
            (Ok(()), true) => info!("traces arrive at {} again", self.endpoint),
            _ => {}
        }
        result
    }

    fn shutdown(&self) -> OTelSdkResult {
        self.exporter.shutdown()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

/// Begins the span of a reconcile, the parent of the others.
pub fn reconcile(job: &ParameterServerJob) -> Span {
    debug_span!(
        target: TARGET,
        parent: None,
        "reconcile",
        k8s.namespace.name = job.namespace(),
        psjobs.job.name = job.name_any(),
        psjobs.job.uid = job.uid(),
        psjobs.job.generation = job.metadata.generation,
    )
}

/// Begins the span of a step.
pub fn step(name: &'static str) -> Span {
    debug_span!(target: TARGET, "step", otel.name = name)
}

/// Begins the span of a child's creation; `child` is for example `pod mnist-ps-0`.
pub fn child(child: impl FnOnce() -> String) -> Span {
    debug_span!(target: TARGET, "create", psjobs.child = child())
}

/// Adds an attribute to the current span.
pub fn attribute(key: &'static str, value: impl Into<Value>) {
    Span::current().set_attribute(key, value);
}

/// Sets the status of a span whose step failed to the error.
pub fn end<T>(span: &Span, result: &Result<T, impl Error>) {
    if let Err(error) = result
        && !span.is_disabled()
    {
        span.set_status(Status::error(chain(error)));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    #[test]
    fn traces_go_where_the_standards_variables_say() {
        const ENDPOINT: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317");
        const OF_TRACES: (&str, &str) = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://t:4317");
        let protocol = ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf");
        type Want = Result<Option<&'static str>, &'static str>;
        let rows: [(&[(&str, &str)], Want); 8] = [
            (&[], Ok(None)),
            (&[ENDPOINT], Ok(Some("http://c:4317"))),
            (&[ENDPOINT, OF_TRACES], Ok(Some("http://t:4317"))),
            (&[ENDPOINT, ("OTEL_SDK_DISABLED", "TRUE")], Ok(None)),
            (&[ENDPOINT, ("OTEL_TRACES_EXPORTER", "none")], Ok(None)),
            (&[ENDPOINT, ("OTEL_TRACES_EXPORTER", "zipkin")], Err("zipkin")),
            (&[ENDPOINT, protocol], Err("port 4317")),
            (&[ENDPOINT, protocol, ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")], Ok(Some("http://c:4317"))),
        ];
        for (variables, want) in rows {
            let env = |name: &str| variables.iter().find(|set| set.0 == name).map(|set| set.1.to_owned());
            match (endpoint(env), want) {
                (Ok(found), Ok(want)) => assert_eq!(found.as_deref(), want, "{variables:?}"),
                (Err(error), Err(want)) => assert!(error.to_string().contains(want), "{variables:?}: {error}"),
                (found, want) => panic!("{variables:?}: {found:?} instead of {want:?}"),
            }
        }
    }

    /// Keeps the spans.
    #[derive(Clone, Debug, Default)]
    struct Kept(Arc<Mutex<Vec<SpanData>>>);

    impl SpanExporter for Kept {
        async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
            self.0.lock().expect("not poisoned").extend(batch);
            Ok(())
        }
    }

    #[test]
    fn an_error_is_the_spans_status_with_its_causes() {
        let kept = Kept::default();
        let traces = Traces(SdkTracerProvider::builder().with_simple_exporter(kept.clone()).build());
        let subscriber = tracing_subscriber::registry().with(traces.layer());
        tracing::subscriber::with_default(subscriber, || {
            let outside = debug_span!(target: REQUESTS, "HTTP");
            drop(outside);
            let span = step("apply");
            span.in_scope(|| drop(debug_span!(target: REQUESTS, "HTTP")));
            let source = std::io::Error::other("it is full");
            let error = TracesError::Certificate { path: "/ca".into(), source };
            end(&span, &Err::<(), _>(error));
            end(&step("decide"), &Ok::<_, TracesError>(()));
        });
        let spans = kept.0.lock().expect("not poisoned");
        let found = spans.iter().map(|span| (span.name.as_ref(), span.status.clone())).collect::<Vec<_>>();
        let why = "cannot read /ca, which OTEL_EXPORTER_OTLP_CERTIFICATE names: it is full";
        assert_eq!(
            found,
            [("HTTP", Status::Unset), ("decide", Status::Unset), ("apply", Status::error(why))],
            "a request outside of a reconcile is left out"
        );
        assert_eq!(spans[0].parent_span_id, spans[2].span_context.span_id());
    }
}
