//! Writes what server 0 reports of the trainers to what the page shows: how far each is, where its time goes, and its metrics.

use std::collections::{BTreeMap, VecDeque};

use psjobs_api::series_report::TRAINERS;
use psjobs_api::trainers_report::TimeSpent;
use psjobs_api::{TrainerReport, TrainerState, TrainersReport};

use crate::curves::Curves;
use crate::job::{Job, TimeShares, Trainer};

/// Seconds over which the shares of a trainer's time are taken.
const WINDOW: f64 = 10.0;

/// The last reports of each trainer on where its time has gone.
#[derive(Debug, Default)]
pub struct Trainers(BTreeMap<u32, VecDeque<TimeSpent>>);

impl Trainers {
    /// Writes a report that came at the time `now`, in milliseconds since 1970, to a job and its curves.
    pub fn show(&mut self, report: &TrainersReport, job: &mut Job, curves: &mut Curves, now: u64) {
        job.trainers = report.trainers.iter().map(|report| trainer(report, self.shares(report))).collect();
        job.staleness.clone_from(&report.staleness);
        let is_training = report.trainers.iter().any(|trainer| trainer.state == TrainerState::Active);
        if report.step == 0 || !is_training || !(2..=TRAINERS).contains(&report.trainers.len()) {
            return;
        }
        // The axis has the steps of all trainers together.
        for trainer in &report.trainers {
            let name = name_of(trainer);
            for (metric, value) in &trainer.metrics {
                curves.push(metric, Some(&name), report.step, now, *value);
            }
        }
    }

    /// Returns where the time of a trainer went in the last seconds up to its last report, once it has sent two. A trainer whose
    /// steps are longer reports less often, and is shown by the last two.
    fn shares(&mut self, trainer: &TrainerReport) -> Option<TimeShares> {
        let seen = self.0.entry(trainer.index).or_default();
        let Some(now) = trainer.spent else {
            seen.clear();
            return None;
        };
        // Another process has its place.
        if seen.back().is_some_and(|last| last.total > now.total) {
            seen.clear();
        }
        if seen.back().is_none_or(|last| last.total < now.total) {
            seen.push_back(now);
        }
        while seen.get(1).is_some_and(|next| now.total - next.total >= WINDOW) {
            seen.pop_front();
        }
        let before = *seen.front()?;
        let parts = |spent: TimeSpent| [spent.data, spent.forward, spent.backward, spent.compute, spent.exchange];
        let mut seconds = parts(now);
        for (part, before) in seconds.iter_mut().zip(parts(before)) {
            *part = (*part - before).max(0.0);
        }
        // A report that was made during an exchange has all of that exchange, and the total of before its end.
        let total = (now.total - before.total).max(seconds.iter().sum());
        let [data, forward, backward, compute, exchange] = seconds.map(|seconds| seconds / total);
        (seen.len() > 1).then_some(TimeShares { data, forward, backward, compute, exchange })
    }
}

fn trainer(report: &TrainerReport, time: Option<TimeShares>) -> Trainer {
    Trainer {
        name: name_of(report),
        state: report.state.name().into(),
        step: report.step,
        examples_per_second: if report.state == TrainerState::Active { report.examples_per_second } else { 0.0 },
        time,
        is_slow: report.is_slow,
    }
}

/// The name of its process.
fn name_of(trainer: &TrainerReport) -> String {
    format!("trainer-{}", trainer.index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shares_of_a_trainers_time_are_those_of_the_last_seconds() {
        let mut trainers = Trainers::default();
        let mut shares = |said: Option<(f64, f64, f64)>| {
            let spent =
                said.map(|(total, forward, exchange)| TimeSpent { total, forward, exchange, ..TimeSpent::default() });
            let shares = trainers.shares(&TrainerReport { spent, ..TrainerReport::default() });
            shares.map(|shares| (shares.forward, shares.exchange))
        };
        assert_eq!(shares(None), None, "it measures nothing yet");
        assert_eq!(shares(Some((1.0, 0.5, 0.0))), None, "the first report");
        assert_eq!(shares(Some((1.0, 0.5, 0.0))), None, "the same once more");
        assert_eq!(shares(Some((2.0, 1.0, 0.25))), Some((0.5, 0.25)));
        assert_eq!(shares(Some((5.0, 3.0, 0.25))), Some((0.625, 0.0625)));
        assert_eq!(shares(Some((12.0, 3.0, 8.25))), Some((0.2, 0.8)), "of the last 10 s");
        assert_eq!(shares(Some((52.0, 23.0, 28.25))), Some((0.5, 0.5)), "of the last step, which took 40 s");
        assert_eq!(shares(Some((62.0, 28.0, 35.25))), Some((5.0 / 12.0, 7.0 / 12.0)), "they are 1 together");
        assert_eq!(shares(Some((1.0, 0.5, 0.0))), None, "another process has its place");
        assert_eq!(shares(Some((2.0, 1.0, 0.0))), Some((0.5, 0.0)));
        assert_eq!(shares(None), None, "it is not there any more");
    }

    #[test]
    fn the_trainers_of_a_small_job_have_curves_of_their_own() {
        let active = |index, loss| TrainerReport {
            index,
            state: TrainerState::Active,
            metrics: [("loss".to_owned(), loss)].into(),
            ..TrainerReport::default()
        };
        for (count, want) in [(1, 0), (2, 2), (8, 8), (9, 0)] {
            let trainers = (0..count).map(|index| active(index, 0.5)).collect();
            let report = TrainersReport { step: 10, trainers, staleness: vec![3, 1] };
            let (mut job, mut curves) = (Job::default(), Curves::default());
            Trainers::default().show(&report, &mut job, &mut curves, 7);
            assert_eq!((job.trainers.len(), curves.points()), (count as usize, want), "{count}");
            assert_eq!((job.trainers[0].name.as_str(), job.trainers[0].state.as_str()), ("trainer-0", "active"));
            assert_eq!(job.staleness, [3, 1]);
        }
    }
}
