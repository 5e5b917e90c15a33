//! Progress in words.

use std::collections::BTreeMap;
use std::time::Instant;

use psjobs_ps::proto::StatusReply;

/// Metrics that a line has room for.
const METRICS: usize = 3;
/// Trainers whose batches a line has room for.
const BATCHES: usize = 8;

/// How fast a job goes, from what was seen of it.
#[derive(Debug, Default)]
pub struct Pace {
    first: Option<(Instant, u64)>,
}

impl Pace {
    /// Seconds until all steps are done, once there is something to go by.
    pub fn remaining(&mut self, status: &StatusReply, now: Instant) -> Option<f64> {
        let (since, first) = *self.first.get_or_insert((now, status.step));
        let left = status.total_steps.checked_sub(status.step)?;
        let seen = status.step.checked_sub(first)?;
        (left > 0 && seen > 0).then(|| left as f64 * (now - since).as_secs_f64() / seen as f64)
    }
}

/// `step 512 of 1876 (27 %), 1530 examples/s, loss 0.2134, 45 s left`; `None` before training.
pub fn progress(status: &StatusReply, pace: &mut Pace, now: Instant) -> Option<String> {
    if status.step == 0 {
        return None;
    }
    let mut parts = Vec::new();
    parts.push(match status.total_steps {
        0 => format!("step {}", status.step),
        total => format!("step {} of {total} ({} %)", status.step, percent(status.step, total)),
    });
    parts.extend(rate(status.examples_per_second));
    parts.extend(metrics(&status.metrics));
    parts.extend(pace.remaining(status, now).map(|seconds| format!("{} left", duration(seconds))));
    if status.trainers.iter().any(|trainer| trainer.batch > 0) {
        let batches = status.trainers.iter().take(BATCHES).map(|trainer| trainer.batch.to_string());
        let more = if status.trainers.len() > BATCHES { " and more" } else { "" };
        parts.push(format!("batches {}{more}", batches.collect::<Vec<_>>().join(", ")));
    }
    if !status.stragglers.is_empty() {
        let slow = status.stragglers.iter().map(u32::to_string).collect::<Vec<_>>();
        parts.push(format!("slower than the others: trainer {}", slow.join(", ")));
    }
    Some(parts.join(", "))
}

/// `1530 examples/s`.
pub fn rate(examples_per_second: f64) -> Option<String> {
    (examples_per_second > 0.0).then(|| format!("{examples_per_second:.0} examples/s"))
}

/// `accuracy 0.981`, for the first few.
pub fn metrics(metrics: &BTreeMap<String, f64>) -> impl Iterator<Item = String> {
    metrics.iter().take(METRICS).map(|(name, value)| format!("{name} {}", number(*value)))
}

/// Four digits that mean something.
pub fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        size if !(1e-3..1e6).contains(&size) => format!("{value:.2e}"),
        size if size < 1.0 => format!("{value:.4}"),
        size if size < 100.0 => format!("{value:.2}"),
        _ => format!("{value:.0}"),
    }
}

/// `45 s`, `3 min 20 s`, `2 h 5 min`.
pub fn duration(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        0..60 => format!("{whole} s"),
        60..3600 => format!("{} min {} s", whole / 60, whole % 60),
        _ => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
    }
}

fn percent(step: u64, total: u64) -> u64 {
    (step * 100 / total).min(100)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use psjobs_ps::proto::TrainerStatus;

    use super::*;

    #[test]
    fn progress_is_reported_in_one_line() {
        let began = Instant::now();
        let mut pace = Pace::default();
        let mut status = StatusReply { total_steps: 1000, ..StatusReply::default() };
        assert_eq!(progress(&status, &mut pace, began), None, "nothing to report yet");
        status.step = 100;
        assert_eq!(progress(&status, &mut pace, began).as_deref(), Some("step 100 of 1000 (10 %)"));
        status.step = 250;
        status.examples_per_second = 1530.4;
        status.metrics = [("loss".to_owned(), 0.213_44)].into();
        let line = progress(&status, &mut pace, began + Duration::from_secs(15));
        let want = "step 250 of 1000 (25 %), 1530 examples/s, loss 0.2134, 1 min 15 s left";
        assert_eq!(line.as_deref(), Some(want));
        status.stragglers = vec![1, 3];
        let line = progress(&status, &mut pace, began + Duration::from_secs(15));
        assert_eq!(line, Some(format!("{want}, slower than the others: trainer 1, 3")));
        status.stragglers.clear();
        status.trainers = [48, 16].map(|batch| TrainerStatus { batch, ..TrainerStatus::default() }).into();
        let line = progress(&status, &mut pace, began + Duration::from_secs(15));
        assert_eq!(line, Some(format!("{want}, batches 48, 16")));
    }

    #[test]
    fn numbers_and_durations_are_short() {
        let numbers = [0.0, 1e-5, -0.5, 0.981_25, 57.123, 1828.4, 3e9].map(number);
        assert_eq!(numbers, ["0", "1.00e-5", "-0.5000", "0.9812", "57.12", "1828", "3.00e9"]);
        let durations = [0.4, 59.4, 61.0, 7500.0].map(duration);
        assert_eq!(durations, ["0 s", "59 s", "1 min 1 s", "2 h 5 min"]);
    }
}
