//! What Prometheus reads: counters of the data plane, gauges of the members, over HTTP beside the
//! probes.

use std::fmt::Write as _;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use axum::Router;
use axum::extract::State;
use axum::routing::get;
use tokio::net::TcpListener;

use super::shared::Shared;

/// Counters of the data plane.
#[derive(Debug, Default)]
pub struct Metrics {
    gradients: AtomicU64,
    gradient_bytes: AtomicU64,
}

impl Metrics {
    /// Counts one gradient block.
    pub fn gradient(&self, bytes: usize) {
        self.gradients.fetch_add(1, Relaxed);
        self.gradient_bytes.fetch_add(bytes as u64, Relaxed);
    }
}

/// Serves `/metrics`, `/healthz` and `/readyz` until `shutdown`.
pub async fn serve(
    listener: TcpListener,
    shared: Arc<Shared>,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let router = Router::new()
        .route("/metrics", get(|State(shared): State<Arc<Shared>>| async move { render(&shared) }))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(|| async { "ok\n" }))
        .with_state(shared);
    axum::serve(listener, router).with_graceful_shutdown(shutdown).await
}

fn render(shared: &Shared) -> String {
    let status = shared.members().status(Instant::now());
    let mut text = String::new();
    let mut family = |name: &str, kind: &str, help: &str, rows: &[(String, f64)]| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "# HELP psjobs_ps_{name} {help}\n# TYPE psjobs_ps_{name} {kind}");
        for (labels, value) in rows {
            let _ = writeln!(text, "psjobs_ps_{name}{labels} {value}");
        }
    };
    let one = |value: f64| vec![(String::new(), value)];
    let counter = |value: &AtomicU64| one(value.load(Relaxed) as f64);
    family("gradient_blocks_total", "counter", "Gradient blocks received.", &counter(&shared.metrics.gradients));
    family("gradient_bytes_total", "counter", "Bytes of gradients received.", &counter(&shared.metrics.gradient_bytes));
    family(
        "examples_per_second",
        "gauge",
        "Examples a second over all trainers, lately.",
        &one(status.examples_per_second),
    );
    let by_trainer = |value: fn(&crate::proto::TrainerStatus) -> f64| -> Vec<_> {
        status.trainers.iter().map(|t| (format!("{{trainer=\"{}\"}}", t.index), value(t))).collect()
    };
    family("trainer_steps", "gauge", "Last step a trainer gave a gradient for.", &by_trainer(|t| t.step as f64));
    family("trainer_silent_seconds", "gauge", "Seconds since a trainer was heard.", &by_trainer(|t| t.silent_seconds));
    family("warnings", "gauge", "Things that are wrong; Status tells them.", &one(status.warnings.len() as f64));
    text
}
