//! Decides when a trainer reports: a line in the log every so many steps, metrics for the servers every second. Does
//! no I/O; the time comes from the caller.

use std::time::{Duration, Instant};

use psjobs_api::ReplicaResult;
use tracing::info;

use crate::workload::Metrics;

/// Shortest time between two reports to the servers.
const REPORT_EVERY: Duration = Duration::from_secs(1);

/// Steps for one point in the series of metrics, unless the log has a line for fewer.
const POINT_EVERY: u64 = 10;

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
    /// The steps since the last point in the series of metrics.
    point: Window,
    /// The last point, until it is taken.
    full: Option<Metrics>,
    /// The step after the last one that was done.
    done: u64,
    last: Instant,
}

#[derive(Clone, Debug)]
struct Window {
    since: Instant,
    steps: u64,
    examples: u64,
    /// Steps whose loss is finite, and its sum over them.
    losses: u64,
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
        Self { since, steps: 0, examples: 0, losses: 0, loss: 0.0, waiting_before }
    }

    fn add(&mut self, done: Done) {
        self.steps += 1;
        self.examples += done.examples as u64;
        if done.loss.is_finite() {
            self.losses += 1;
            self.loss += done.loss;
        }
    }

    /// Returns the mean of the losses that are finite, if one is.
    fn mean_loss(&self) -> Option<f64> {
        (self.losses > 0).then(|| self.loss / self.losses as f64)
    }

    /// Returns the steps and examples per second until `now`, and the part of the time that was spent waiting.
    fn speed(&self, waiting: Duration, now: Instant) -> [f64; 3] {
        let seconds = (now - self.since).as_secs_f64().max(1e-9);
        let waited = waiting.saturating_sub(self.waiting_before).as_secs_f64();
        [self.steps as f64 / seconds, self.examples as f64 / seconds, waited / seconds]
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
            point: Window::new(now, Duration::ZERO),
            full: None,
            done: 0,
            last: now,
        }
    }

    /// A step is done. Logs when it is time to; true when it is time to report.
    pub fn step(&mut self, done: Done, now: Instant) -> bool {
        let Done { next, examples, loss: _, waiting } = done;
        self.steps += 1;
        self.examples += examples as u64;
        (self.last, self.done) = (now, self.done.max(next));
        self.window.add(done);
        self.point.add(done);
        if self.window.steps >= self.log_every || next == self.total {
            self.log(next, waiting, now);
            self.loss = self.window.mean_loss().or(self.loss);
            self.window = Window::new(now, waiting);
        }
        if self.point.steps >= self.log_every.min(POINT_EVERY) || next == self.total {
            let [_, examples, waited] = self.point.speed(waiting, now);
            let speed = [("examples_per_second", examples), ("waiting", waited)];
            let point = speed.into_iter().chain(self.point.mean_loss().map(|loss| ("loss", loss)));
            self.full = Some(point.map(|(name, value)| (name.to_owned(), value)).collect());
            self.point = Window::new(now, waiting);
        }
        // The last step at once: an evaluation may follow, which is no time of training.
        let due = next == self.total || now - self.reported >= REPORT_EVERY;
        if due {
            self.reported = now;
        }
        due
    }

    /// The update of the last step has ended, which was under way when the step was counted where exchanges overlap.
    pub fn settled(&mut self, now: Instant) {
        self.last = now;
    }

    fn log(&self, done: u64, waiting: Duration, now: Instant) {
        let [steps, examples, waited] = self.window.speed(waiting, now);
        info!(
            step = done,
            total_steps = self.total,
            loss = rounded(self.window.mean_loss().unwrap_or(f64::NAN), 4),
            steps_per_second = rounded(steps, 1),
            examples_per_second = rounded(examples, 0),
            waiting = rounded(waited, 3),
            "training"
        );
    }

    /// Returns the next point in the series of metrics, once it is there: mean loss, examples per second, and the part of the
    /// time that was spent waiting for others, of the steps since the one before.
    pub fn take_point(&mut self) -> Option<Metrics> {
        self.full.take()
    }

    /// Returns the step after the last one that was done.
    #[must_use]
    pub fn done(&self) -> u64 {
        self.done
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
        let loss = self.loss.or_else(|| self.window.mean_loss()).map(|loss| ("loss".to_owned(), loss));
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
        assert_eq!((progress.examples(), progress.done()), (128, 14));
    }

    #[test]
    fn a_point_has_the_steps_since_the_one_before_and_is_taken_once() {
        let start = Instant::now();
        let mut progress = Progress::new(100, 2, start);
        progress.step(done(1, 32, 4.0), start + Duration::from_secs(1));
        assert_eq!(progress.take_point(), None);
        let second = Done { waiting: Duration::from_secs(1), ..done(2, 32, 2.0) };
        progress.step(second, start + Duration::from_secs(4));
        let window = [("loss", 3.0), ("examples_per_second", 16.0), ("waiting", 0.25)];
        assert_eq!(progress.take_point(), Some(window.map(|(name, value)| (name.to_owned(), value)).into()));
        assert_eq!(progress.take_point(), None);
    }

    #[test]
    fn a_loss_that_is_not_finite_is_in_no_mean() {
        let start = Instant::now();
        let mut progress = Progress::new(100, 2, start);
        for (next, loss, want) in [(1, f64::NAN, None), (2, 4.0, Some(4.0)), (3, f64::INFINITY, Some(4.0))] {
            progress.step(done(next, 32, loss), start);
            assert_eq!(progress.metrics().get("loss").copied(), want, "after {loss}");
        }
        progress.step(done(4, 32, f64::NAN), start);
        assert_eq!(progress.metrics()["loss"], 4.0, "the window before");
        assert_eq!(progress.take_point().expect("it is due").get("loss"), None);
        assert_eq!((progress.result(Duration::ZERO).steps, progress.examples()), (4, 128));
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
