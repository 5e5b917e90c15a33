//! What a trainer says about itself while it trains: a line in the log every so many steps, metrics
//! for the servers every second. Pure: the time comes from the caller.

use std::time::{Duration, Instant};

use psjobs_api::ReplicaResult;
use tracing::info;

use crate::workload::Metrics;

/// Shortest time between two reports to the servers.
const REPORT_EVERY: Duration = Duration::from_secs(1);

/// Counts this process's steps.
#[derive(Clone, Debug)]
pub struct Progress {
    total: u64,
    batch: usize,
    log_every: u64,
    steps: u64,
    started: Instant,
    /// The steps since the last line in the log.
    window: Window,
    reported: Instant,
    /// Mean loss of the last full window, or of the steps so far.
    loss: Option<f64>,
    /// What the last evaluation gave.
    evaluation: Metrics,
    last: Instant,
}

#[derive(Clone, Debug)]
struct Window {
    since: Instant,
    steps: u64,
    loss: f64,
    waiting_before: Duration,
}

impl Window {
    fn new(since: Instant, waiting_before: Duration) -> Self {
        Self { since, steps: 0, loss: 0.0, waiting_before }
    }

    fn mean_loss(&self) -> f64 {
        self.loss / self.steps as f64
    }
}

impl Progress {
    /// Steps of `batch` examples are done from `now` on, until step `total`.
    #[must_use]
    pub fn new(total: u64, batch: usize, log_every: u64, now: Instant) -> Self {
        let window = Window::new(now, Duration::ZERO);
        Self {
            total,
            batch,
            log_every,
            steps: 0,
            started: now,
            window,
            reported: now,
            loss: None,
            evaluation: Metrics::new(),
            last: now,
        }
    }

    /// A step is done: the next one, its loss, the time spent waiting so far in all, and the time. Logs when it is
    /// time to; true when it is time to report.
    pub fn step(&mut self, next: u64, loss: f64, waiting: Duration, now: Instant) -> bool {
        self.steps += 1;
        self.last = now;
        self.window.steps += 1;
        self.window.loss += loss;
        if self.window.steps >= self.log_every || next == self.total {
            self.log(next, waiting, now);
            self.loss = Some(self.window.mean_loss());
            self.window = Window::new(now, waiting);
        }
        let due = now - self.reported >= REPORT_EVERY;
        if due {
            self.reported = now;
        }
        due
    }

    fn log(&self, done: u64, waiting: Duration, now: Instant) {
        let seconds = (now - self.window.since).as_secs_f64().max(1e-9);
        let speed = self.window.steps as f64 / seconds;
        let waited = (waiting - self.window.waiting_before).as_secs_f64() / seconds;
        info!(
            step = done,
            total_steps = self.total,
            loss = rounded(self.window.mean_loss(), 4),
            steps_per_second = rounded(speed, 1),
            examples_per_second = rounded(speed * self.batch as f64, 0),
            waiting = rounded(waited, 3),
            "training"
        );
    }

    /// The model was evaluated while it trains: logged, and reported until the next time.
    pub fn evaluated(&mut self, step: u64, metrics: Metrics) {
        let shown: Vec<String> = metrics.iter().map(|(name, value)| format!("{name}={}", rounded(*value, 4))).collect();
        info!(step, metrics = shown.join(" "), "evaluated");
        self.evaluation = metrics;
    }

    /// Examples read so far.
    #[must_use]
    pub fn examples(&self) -> u64 {
        self.steps * self.batch as u64
    }

    /// The training loss, once there is one, and what the last evaluation gave.
    #[must_use]
    pub fn metrics(&self) -> Metrics {
        let so_far = (self.window.steps > 0).then(|| self.window.mean_loss());
        let loss = self.loss.or(so_far).map(|loss| ("loss".to_owned(), loss));
        self.evaluation.clone().into_iter().chain(loss).collect()
    }

    /// What this process did.
    #[must_use]
    pub fn result(&self, waiting: Duration) -> ReplicaResult {
        ReplicaResult {
            steps: self.steps,
            examples: self.examples(),
            seconds: (self.last - self.started).as_secs_f64(),
            waiting_seconds: Some(waiting.as_secs_f64()),
            metrics: self.metrics(),
            ..ReplicaResult::default()
        }
    }
}

fn rounded(value: f64, digits: i32) -> f64 {
    let scale = 10_f64.powi(digits);
    (value * scale).round() / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loss_is_the_mean_of_the_last_full_window() {
        let start = Instant::now();
        let mut progress = Progress::new(100, 32, 2, start);
        assert!(progress.metrics().is_empty());
        for (next, loss, want) in [(11, 4.0, 4.0), (12, 2.0, 3.0), (13, 9.0, 3.0), (14, 1.0, 5.0)] {
            progress.step(next, loss, Duration::ZERO, start);
            assert_eq!(progress.metrics()["loss"], want, "after {loss}");
        }
        assert_eq!(progress.examples(), 128);
    }

    #[test]
    fn an_evaluation_is_reported_until_the_next_one() {
        let start = Instant::now();
        let mut progress = Progress::new(100, 1, 10, start);
        progress.step(1, 4.0, Duration::ZERO, start);
        for perplexity in [300.0, 200.0] {
            progress.evaluated(1, Metrics::from([("perplexity".to_owned(), perplexity)]));
            assert_eq!(progress.metrics()["perplexity"], perplexity);
            assert_eq!(progress.metrics()["loss"], 4.0);
        }
    }

    #[test]
    fn reports_are_due_once_a_second() {
        let start = Instant::now();
        let mut progress = Progress::new(100, 1, 10, start);
        let due: Vec<bool> = [300, 900, 1100, 1500, 2100, 2200]
            .map(|ms| progress.step(1, 1.0, Duration::ZERO, start + Duration::from_millis(ms)))
            .into();
        assert_eq!(due, [false, false, true, false, true, false]);
    }

    #[test]
    fn the_result_spans_the_first_step_to_the_last() {
        let start = Instant::now();
        let mut progress = Progress::new(7, 4, 10, start);
        progress.step(6, 1.0, Duration::from_millis(20), start + Duration::from_millis(100));
        progress.step(7, 0.5, Duration::from_millis(50), start + Duration::from_millis(200));
        let result = progress.result(Duration::from_millis(50));
        assert_eq!((result.steps, result.examples, result.seconds), (2, 8, 0.2));
        assert_eq!(result.waiting_seconds, Some(0.05));
    }
}
