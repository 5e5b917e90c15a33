//! The operator's HTTP side: `/metrics` for Prometheus, `/healthz` and `/readyz` for the kubelet.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::metrics;

/// The operator's readiness: an error is the sentence that says why it cannot work.
#[derive(Clone)]
pub struct Readiness(Arc<Mutex<Result<(), String>>>);

impl Default for Readiness {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Err("the operator is starting".into()))))
    }
}

impl Readiness {
    pub fn set(&self, state: Result<(), String>) {
        *self.0.lock() = state;
    }

    fn get(&self) -> Result<(), String> {
        self.0.lock().clone()
    }
}

#[derive(Clone)]
struct Shared {
    registry: Arc<Registry>,
    readiness: Readiness,
}

/// Serves on a bound listener until `stop`.
pub async fn serve(
    listener: TcpListener,
    registry: Registry,
    readiness: Readiness,
    stop: CancellationToken,
) -> std::io::Result<()> {
    let router = Router::new()
        .route("/metrics", get(metrics_text))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .with_state(Shared { registry: Arc::new(registry), readiness });
    axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned()).await
}

async fn metrics_text(State(shared): State<Shared>) -> impl IntoResponse {
    const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, OPEN_METRICS)], metrics::text(&shared.registry))
}

async fn ready(State(shared): State<Shared>) -> (StatusCode, String) {
    match shared.readiness.get() {
        Ok(()) => (StatusCode::OK, "ok\n".into()),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
    }
}
