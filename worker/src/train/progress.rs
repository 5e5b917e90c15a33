//! Decides when a trainer reports: a line in the log every so many steps, metrics for the servers every second. Does
//! no I/O; the time comes from the caller.

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
    log_every: u64,
    steps: u64,
    examples: u64,
    started: Instant,
    /// The steps since the last line in the log.
    window: Window,
    reported: Instant,
    /// Mean loss of the last full window, or of the steps so far.
    loss: Option<f64>,
    /// The metrics of the last evaluation.
    evaluation: Metrics,
    last: Instant,
}

#[derive(Clone, Debug)]
struct Window {
    since: Instant,
    steps: u64,
    examples: u64,
    loss: f64,
    waiting_before: Duration,
}

/// A step that is done.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// The next one.
    pub next: u64,
    /// Examples that this trainer has read in it.
    pub examples: usize,
    /// Mean loss.
    pub loss: f64,
    /// Time spent waiting so far in all.
    pub waiting: Duration,
}

impl Window {
    fn new(since: Instant, waiting_before: Duration) -> Self {
        Self { since, steps: 0, examples: 0, loss: 0.0, waiting_before }
    }

    fn mean_loss(&self) -> f64 {
        self.loss / self.steps as f64
    }
}

impl Progress {
    /// Steps are done from `now` on, until step `total`.
    #[must_use]
    pub fn new(total: u64, log_every: u64, now: Instant) -> Self {
        let window = Window::new(now, Duration::ZERO);
        Self {
            total,
            log_every,
            steps: 0,
            examples: 0,
            started: now,
            window,
            reported: now,
            loss: None,
            evaluation: Metrics::new(),
            last: now,
        }
    }

    /// A step is done. Logs when it is time to; true when it is time to report.
    pub fn step(&mut self, done: Done, now: Instant) -> bool {
        let Done { next, examples, loss, waiting } = done;
        self.steps += 1;
        self.examples += examples as u64;
        self.last = now;
        self.window.steps += 1;
        self.window.examples += examples as u64;
        self.window.loss += loss;
        if self.window.steps >= self.log_every || next == self.total {
            self.log(next, waiting, now);
            self.loss = Some(self.window.mean_loss());
            self.window = Window::new(now, waiting);
        }
        // The last step at once: an evaluation may follow, which is no time of training.
        let due = next == self.total || now - self.reported >= REPORT_EVERY;
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
            examples_per_second = rounded(self.window.examples as f64 / seconds, 0),
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
        self.examples
    }

    /// The training loss, once there is one, and what the last evaluation gave.
    #[must_use]
    pub fn metrics(&self) -> Metrics {
        let so_far = (self.window.steps > 0).then(|| self.window.mean_loss());
        let loss = self.loss.or(so_far).map(|loss| ("loss".to_owned(), loss));
        self.evaluation.clone().into_iter().chain(loss).collect()
    }

    /// Returns the result of this process.
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

    fn done(next: u64, examples: usize, loss: f64) -> Done {
        Done { next, examples, loss, waiting: Duration::ZERO }
    }

    #[test]
    fn the_loss_is_the_mean_of_the_last_full_window() {
        let start = Instant::now();
        let mut progress = Progress::new(100, 2, start);
        assert!(progress.metrics().is_empty());
        for (next, loss, want) in [(11, 4.0, 4.0), (12, 2.0, 3.0), (13, 9.0, 3.0), (14, 1.0, 5.0)] {
            progress.step(done(next, 32, loss), start);
            assert_eq!(progress.metrics()["loss"], want, "after {loss}");
        }
        assert_eq!(progress.examples(), 128);
    }

    #[test]
    fn an_evaluation_is_reported_until_the_next_one() {
        let start = Instant::now();
        let mut progress = Progress::new(100, 10, start);
        progress.step(done(1, 1, 4.0), start);
        for perplexity in [300.0, 200.0] {
            progress.evaluated(1, Metrics::from([("perplexity".to_owned(), perplexity)]));
            assert_eq!(progress.metrics()["perplexity"], perplexity);
            assert_eq!(progress.metrics()["loss"], 4.0);
        }
    }

    #[test]
    fn reports_are_due_once_a_second_and_after_the_last_step() {
        let start = Instant::now();
        let mut progress = Progress::new(100, 10, start);
        let due: Vec<bool> = [(1, 300), (2, 900), (3, 1100), (4, 1500), (5, 2100), (99, 2200), (100, 2300)]
            .map(|(next, ms)| progress.step(done(next, 1, 1.0), start + Duration::from_millis(ms)))
            .into();
        assert_eq!(due, [false, false, true, false, true, false, true]);
    }

    #[test]
    fn the_result_spans_the_first_step_to_the_last() {
        let start = Instant::now();
        let mut progress = Progress::new(7, 10, start);
        for (next, examples, ms) in [(6, 3, 100), (7, 5, 200)] {
            progress.step(done(next, examples, 1.0), start + Duration::from_millis(ms));
        }
        let result = progress.result(Duration::from_millis(50));
        assert_eq!((result.steps, result.examples, result.seconds), (2, 8, 0.2));
        assert_eq!(result.waiting_seconds, Some(0.05));
    }
}
