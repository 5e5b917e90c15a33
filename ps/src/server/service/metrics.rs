//! Serves `/metrics` for Prometheus, `/status` for the operator, `/trainers` and `/series` for the page of a job and the probes over
//! HTTP. Clients need no certificate, so nothing here is secret.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use psjobs_api::{CheckpointResult, FailedCheckpoint, TrainersReport, TrainingStatus};
use serde::Serialize;
use tokio::net::TcpListener;

use super::coordination;
use crate::network::Network;
use crate::proto::{self, TrainerState};
use crate::server::state::ServerState;
use crate::server::task::series;
use crate::sparse::TableCounts;
use crate::staleness::Histogram;

/// Number of blocks in the metrics: the busiest ones, because a large model has thousands.
const BUSIEST_BLOCKS: usize = 10;
const NO_STATE: &str = "this server does not have the state of the job yet\n";

/// Serves `/metrics`, `/status`, `/trainers`, `/series`, `/healthz` and `/readyz` until `shutdown`.
pub async fn serve(
    listener: TcpListener,
    state: Arc<ServerState>,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let router = Router::new()
        .route("/metrics", get(|State(state): State<Arc<ServerState>>| async move { render(&state) }))
        .route("/status", get(|State(state): State<Arc<ServerState>>| async move { progress(&state) }))
        .route("/trainers", get(|State(state): State<Arc<ServerState>>| async move { trainers(&state) }))
        .route("/series", get(|State(state): State<Arc<ServerState>>| async move { past(&state).await }))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(|| async { "ok\n" }))
        .with_state(state);
    axum::serve(listener, router).with_graceful_shutdown(shutdown).await
}

/// How far training is, as JSON for the operator. A server that was started anew does not say before it has the state of the
/// job: it knows of no step until then, and the job would seem to have gone back. If it waits for the checkpoint folder, it says
/// that and nothing else.
fn progress(state: &ServerState) -> Response {
    let failed_checkpoint = failed_checkpoint(state);
    if !state.has_state() {
        const UNAVAILABLE: StatusCode = StatusCode::SERVICE_UNAVAILABLE;
        if failed_checkpoint.is_none() {
            return (UNAVAILABLE, NO_STATE).into_response();
        }
        let status = TrainingStatus { failed_checkpoint, ..TrainingStatus::default() };
        return json(UNAVAILABLE, &status);
    }
    let status = coordination::status(state);
    let checkpoint = status.checkpoint.map(|newest| CheckpointResult {
        step: newest.step,
        path: newest.path,
        unix_seconds: newest.unix_seconds,
    });
    let status = TrainingStatus {
        step: status.step,
        total_steps: status.total_steps,
        examples_per_second: status.examples_per_second,
        // JSON has no word for the loss of a model that has diverged.
        metrics: status.metrics.into_iter().filter(|(_, value)| value.is_finite()).collect(),
        checkpoint,
        stragglers: status.stragglers,
        failed_checkpoint,
    };
    json(StatusCode::OK, &status)
}

/// The trainers, as JSON for the page; nothing while the state of the job is not known, as [`progress`].
fn trainers(state: &ServerState) -> Response {
    if !state.has_state() {
        return (StatusCode::SERVICE_UNAVAILABLE, NO_STATE).into_response();
    }
    json(StatusCode::OK, &TrainersReport::from(&coordination::status(state)))
}

/// The curves of the job until now, as JSON for a page that has begun to look later; nothing while the state of the job is not
/// known, as [`progress`].
async fn past(state: &ServerState) -> Response {
    let folder = series::folder(state);
    if !state.has_state() || (folder.is_none() && state.series.is_some()) {
        return (StatusCode::SERVICE_UNAVAILABLE, NO_STATE).into_response();
    }
    // Steps of the series are the mean over the trainers, or batches of an elastic job.
    let steps = if state.config.min_trainers.is_some() { 1 } else { state.config.trainers.into() };
    match state.past.json(folder, coordination::status(state), steps).await {
        Ok(text) => written(StatusCode::OK, text),
        Err(error) => {
            let why = format!("the series of metrics cannot be read: {error}; try again\n");
            (StatusCode::SERVICE_UNAVAILABLE, why).into_response()
        }
    }
}

fn json(code: StatusCode, answer: &impl Serialize) -> Response {
    written(code, serde_json::to_string(answer).expect("names and finite numbers serialize"))
}

fn written(code: StatusCode, text: String) -> Response {
    (code, [(header::CONTENT_TYPE, "application/json")], text).into_response()
}

/// Returns the fault for which the servers wait for the checkpoint folder, or cannot write checkpoints, if there is one.
fn failed_checkpoint(state: &ServerState) -> Option<FailedCheckpoint> {
    let waits = state.recovery.trouble().map(|why| FailedCheckpoint {
        message: format!("the servers wait for the checkpoint folder: {why}"),
        unix_seconds: None,
    });
    let failed = || {
        let failed = state.recovery.failed_write()?;
        Some(FailedCheckpoint { message: failed.sentence(), unix_seconds: Some(failed.unix_seconds) })
    };
    waits.or_else(failed)
}

fn render(state: &ServerState) -> String {
    let status = coordination::status(state);
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
    family("gradient_blocks_total", "counter", "Gradient blocks received.", &counter(&state.metrics.gradients));
    family("gradient_bytes_total", "counter", "Bytes of gradients received.", &counter(&state.metrics.gradient_bytes));
    let of_tables: u64 = state.all_tables().iter().map(|tables| tables.counts().not_finite()).sum();
    let not_finite = one((state.metrics.blocks.not_finite() + of_tables) as f64);
    let late = one(state.metrics.blocks.late() as f64);
    family("late_gradients_total", "counter", "Gradients dropped because their round had closed.", &late);
    family("not_finite_gradients_total", "counter", "Gradients with NaN or infinity.", &not_finite);
    family(
        "examples_per_second",
        "gauge",
        "Examples a second over all trainers, lately.",
        &one(status.examples_per_second),
    );
    // As for `progress`.
    if state.has_state() {
        family("step", "gauge", "Steps done, summed over the trainers.", &one(status.step as f64));
        family("total_steps", "gauge", "Steps to do, likewise; 0 while unknown.", &one(status.total_steps as f64));
        let metrics = status.metrics.iter().map(|(name, value)| (format!("{{metric=\"{}\"}}", label(name)), *value));
        family("metric", "gauge", "What trainers and evaluations report, as loss.", &metrics.collect::<Vec<_>>());
    }
    let by_trainer = |value: fn(&proto::TrainerStatus) -> f64| -> Vec<_> {
        status.trainers.iter().map(|t| (format!("{{trainer=\"{}\"}}", t.index), value(t))).collect()
    };
    family("trainer_steps", "gauge", "Last step a trainer gave a gradient for.", &by_trainer(|t| t.step as f64));
    family(
        "trainer_own_steps_per_second",
        "gauge",
        "Steps a second of the time that a trainer does not wait for others; 0 while unknown.",
        &by_trainer(|t| t.steps_per_second),
    );
    let slow: BTreeSet<u32> = status.stragglers.iter().copied().collect();
    let straggles = |index: u32| f64::from(u8::from(slow.contains(&index)));
    let stragglers: Vec<_> =
        status.trainers.iter().map(|t| (format!("{{trainer=\"{}\"}}", t.index), straggles(t.index))).collect();
    family("trainer_straggles", "gauge", "1 for a trainer that is clearly slower than the others.", &stragglers);
    // A trainer that has not come yet, or has left, is silent for good reasons.
    let is_here =
        |trainer: &&proto::TrainerStatus| matches!(trainer.state(), TrainerState::Active | TrainerState::Lost);
    let silent = status.trainers.iter().filter(is_here);
    let silent: Vec<_> = silent.map(|t| (format!("{{trainer=\"{}\"}}", t.index), t.silent_seconds)).collect();
    family("trainer_silent_seconds", "gauge", "Seconds since a trainer that takes part was heard.", &silent);
    if let Some(newest) = state.recovery.newest() {
        family("checkpoint_step", "gauge", "Step of the newest checkpoint.", &one(newest.id.step as f64));
        family("checkpoint_time_seconds", "gauge", "When it was complete.", &one(newest.unix_seconds as f64));
    }
    let busiest: Vec<_> = (state.metrics.blocks.busy_times.busiest(BUSIEST_BLOCKS).into_iter())
        .map(|(block, worked)| {
            let tensor = state.tensor_of(block);
            (format!("{{block=\"{block}\",tensor=\"{}\"}}", label(&tensor)), worked.as_secs_f64())
        })
        .collect();
    if !busiest.is_empty() {
        family("block_busy_seconds_total", "counter", "Work of the ten blocks that worked longest.", &busiest);
    }
    if let Network::Tls(credentials) = &state.config.network {
        let refused = one(credentials.refused() as f64);
        family("refused_peers_total", "counter", "Peers without a certificate of this job.", &refused);
    }
    family("warnings", "gauge", "Things that are wrong; Status lists them.", &one(status.warnings.len() as f64));
    let tables = table_counts(state);
    let by_table = |value: fn(&TableCounts) -> u64| -> Vec<_> {
        tables.iter().map(|t| (format!("{{table=\"{}\"}}", t.table), value(t) as f64)).collect()
    };
    if !tables.is_empty() {
        family("table_rows", "gauge", "Rows of a sparse table held here.", &by_table(|t| t.rows));
        family("table_bytes", "gauge", "Bytes of its rows, optimizer state and index.", &by_table(|t| t.bytes));
        family("table_evicted_rows_total", "counter", "Rows gone, too many or unused.", &by_table(|t| t.evicted));
        family("table_pulled_keys_total", "counter", "Keys that trainers pulled.", &by_table(|t| t.pulled));
        family("table_pushed_keys_total", "counter", "Keys that trainers pushed.", &by_table(|t| t.pushed));
    }
    histogram(&mut text, &state.metrics.blocks.staleness());
    text
}

/// Escapes the value of a label as Prometheus' text format has it: a backslash, a quote and the end of a line.
fn label(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', r#"\""#).replace('\n', r"\n")
}

/// Returns the counters of each table, over all shards that this server holds.
fn table_counts(state: &ServerState) -> Vec<TableCounts> {
    let mut tables: Vec<TableCounts> = Vec::new();
    for shard in state.all_tables() {
        for (place, counts) in shard.counts().tables().enumerate() {
            match tables.get_mut(place) {
                Some(sum) => sum.add(&counts),
                None => tables.push(counts),
            }
        }
    }
    tables
}

/// The staleness of updates, in Prometheus' cumulative buckets.
fn histogram(text: &mut String, staleness: &Histogram) {
    const NAME: &str = "psjobs_ps_staleness";
    // Writing to a String cannot fail.
    let _ =
        writeln!(text, "# HELP {NAME} Updates of a block between its pull and the gradient.\n# TYPE {NAME} histogram");
    let mut below = 0;
    for (bound, count) in Histogram::BOUNDS.iter().zip(staleness.counts()) {
        below += count;
        let _ = writeln!(text, "{NAME}_bucket{{le=\"{bound}\"}} {below}");
    }
    let total = staleness.total();
    let _ =
        writeln!(text, "{NAME}_bucket{{le=\"+Inf\"}} {total}\n{NAME}_sum {}\n{NAME}_count {total}", staleness.sum());
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use psjobs_api::checkpoint::CheckpointPolicy;
    use psjobs_api::env::Checkpoint;
    use psjobs_api::{Environment, SeriesReport, Training};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;

    use super::*;
    use crate::checkpoint::Folder;
    use crate::series::Source;
    use crate::series::event_file::Point;
    use crate::series::writer::{Entry, SeriesWriter};
    use crate::server::config::ServerConfig;

    #[test]
    fn a_label_is_escaped_as_prometheus_reads_it() {
        for (value, want) in [
            ("fc.weight", "fc.weight"),
            (r#"a "b" \c"#, r#"a \"b\" \\c"#),
            ("two\nlines", r"two\nlines"),
            // Rust's escapes of these would end the scrape.
            ("\u{1}\t\u{200b}'", "\u{1}\t\u{200b}'"),
        ] {
            assert_eq!(label(value), want);
        }
    }

    #[tokio::test]
    async fn a_server_without_the_state_of_its_job_reports_no_progress() {
        let servers = vec!["ps-0:29500".to_owned(), "ps-1:29500".to_owned()];
        let plain = Environment::new("mnist", "job-1", servers, 1, Training::default());
        let replicated = Environment { replication_factor: 2, ..plain.clone() };
        for (environment, want) in [(plain, StatusCode::OK), (replicated, StatusCode::SERVICE_UNAVAILABLE)] {
            let config = ServerConfig { shared_memory: false, ..ServerConfig::new(&environment) };
            let state = ServerState::new(config);
            for answer in [progress(&state), trainers(&state), past(&state).await] {
                assert_eq!(answer.status(), want, "{}", environment.replication_factor);
            }
        }
    }

    #[tokio::test]
    async fn the_series_are_answered_from_the_folder_that_has_them() {
        let scratch = tempfile::tempdir().expect("a folder");
        let plain = Environment::new("mnist", "job-1", vec!["ps-0:29500".into()], 2, Training::default());
        let environment = Environment { metrics_folder: Some(scratch.path().display().to_string()), ..plain };
        let state = ServerState::new(ServerConfig { shared_memory: false, ..ServerConfig::new(&environment) });
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        tokio::spawn(serve(listener, state, std::future::pending()));
        let answer = async || {
            let (mut stream, mut text) = (TcpStream::connect(address).await.expect("a connection"), String::new());
            let question = "GET /series HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n";
            stream.write_all(question.as_bytes()).await.expect("written");
            stream.read_to_string(&mut text).await.expect("an answer");
            let (head, body) = text.split_once("\r\n\r\n").expect("a head and a body");
            (head.to_owned(), body.to_owned())
        };
        let report = async || serde_json::from_str::<SeriesReport>(&answer().await.1).expect("a report");
        assert_eq!(report().await, SeriesReport::default());
        let point = |step: u64| {
            let values = [("examples_per_second".to_owned(), 5.0)].into();
            Entry::Point(Point { step, unix_seconds: step as f64, values })
        };
        let mut writer = SeriesWriter::new(Folder::from(scratch.path()), 1);
        writer.append(Source::Job, &[point(3), point(4)]).expect("written");
        let found = report().await;
        assert_eq!((found.steps, found.examples_per_second), (vec![6, 8], vec![Some(5.0); 2]), "of two trainers");
        // A folder that is a file cannot be listed.
        std::fs::remove_dir_all(scratch.path()).expect("removed");
        std::fs::write(scratch.path(), "").expect("written");
        let (head, body) = answer().await;
        assert!(head.starts_with("HTTP/1.1 503 "), "{head}");
        assert!(body.starts_with("the series of metrics cannot be read: "), "{body}");
        std::fs::remove_file(scratch.path()).expect("removed");
    }

    /// The answer at `/status`.
    async fn answer(state: &ServerState) -> (StatusCode, TrainingStatus) {
        let answer = progress(state);
        let code = answer.status();
        let body = axum::body::to_bytes(answer.into_body(), 10_000).await.expect("a short body");
        (code, serde_json::from_slice(&body).expect("JSON"))
    }

    #[tokio::test]
    async fn a_fault_of_checkpoints_is_reported_until_one_is_written_and_before_there_is_a_state() {
        let plain = Environment::new("mnist", "job-1", vec!["ps-0:29500".into()], 1, Training::default());
        let state = ServerState::new(ServerConfig { shared_memory: false, ..ServerConfig::new(&plain) });
        let at = |second| SystemTime::UNIX_EPOCH + Duration::from_secs(second);
        for second in [7, 67] {
            state.recovery.write_failed("no space left for a file; enlarge the volume", at(second));
            let (code, status) = answer(&state).await;
            let failed = status.failed_checkpoint.expect("reported");
            assert_eq!((code, failed.unix_seconds), (StatusCode::OK, Some(7)), "since the first failure");
            assert!(failed.message.contains("enlarge the volume"), "{}", failed.message);
        }
        let warnings = coordination::status(&state).warnings;
        assert!(warnings.iter().any(|warning| warning.contains("enlarge the volume")), "{warnings:?}");
        state.recovery.write_succeeded();
        assert_eq!(answer(&state).await.1.failed_checkpoint, None);
        assert_eq!(coordination::status(&state).warnings.len(), warnings.len() - 1);

        let policy = CheckpointPolicy::default();
        let kept = Environment { checkpoint: Some(Checkpoint { folder: "/checkpoints".into(), policy }), ..plain };
        let state = ServerState::new(ServerConfig { shared_memory: false, ..ServerConfig::new(&kept) });
        state.recovery.set_trouble(Some("NoSuchBucket; create the bucket, or correct its name".into()));
        let (code, status) = answer(&state).await;
        let failed = status.failed_checkpoint.expect("reported");
        assert_eq!((code, failed.unix_seconds), (StatusCode::SERVICE_UNAVAILABLE, None));
        assert!(failed.message.contains("create the bucket"), "{}", failed.message);
    }
}
