//! From what server 0 answers to `Status` to what the page of a job shows of its trainers.

use psjobs_api::trainers_report::TimeSpent;
use psjobs_api::{TrainerReport, TrainerState, TrainersReport};

use crate::proto;

impl From<&proto::StatusReply> for TrainersReport {
    fn from(status: &proto::StatusReply) -> Self {
        let trainer = |trainer: &proto::TrainerStatus| TrainerReport {
            is_slow: status.stragglers.contains(&trainer.index),
            ..TrainerReport::from(trainer)
        };
        let trainers = status.trainers.iter().map(trainer).collect();
        Self { step: status.step, trainers, staleness: status.staleness.clone() }
    }
}

impl From<&proto::TrainerStatus> for TrainerReport {
    fn from(trainer: &proto::TrainerStatus) -> Self {
        let finite = |(name, value): (&String, &f64)| value.is_finite().then(|| (name.clone(), *value));
        Self {
            index: trainer.index,
            state: match trainer.state() {
                proto::TrainerState::Awaited | proto::TrainerState::Unspecified => TrainerState::Awaited,
                proto::TrainerState::Active => TrainerState::Active,
                proto::TrainerState::Lost => TrainerState::Silent,
                proto::TrainerState::Left => TrainerState::Left,
                proto::TrainerState::Finished => TrainerState::Finished,
            },
            step: trainer.step,
            examples_per_second: trainer.examples_per_second,
            // JSON has no word for the loss of a model that has diverged.
            metrics: trainer.metrics.iter().filter_map(finite).collect(),
            is_slow: false,
            spent: trainer.spent.map(|spent| TimeSpent {
                total: spent.total,
                data: spent.data,
                forward: spent.forward,
                backward: spent.backward,
                compute: spent.compute,
                exchange: spent.exchange,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trainer_is_reported_with_its_pace_and_without_what_json_cannot_say() {
        let metrics = [("loss".to_owned(), f64::NAN), ("accuracy".to_owned(), 0.5)].into();
        let state = proto::TrainerState::Lost.into();
        let trainers = vec![
            proto::TrainerStatus { index: 0, step: 7, ..proto::TrainerStatus::default() },
            proto::TrainerStatus { index: 1, state, metrics, ..proto::TrainerStatus::default() },
        ];
        let status = proto::StatusReply { trainers, stragglers: vec![1], step: 7, ..proto::StatusReply::default() };
        let report = TrainersReport::from(&status);
        let said: Vec<_> = report.trainers.iter().map(|it| (it.index, it.state, it.step, it.is_slow)).collect();
        assert_eq!(said, [(0, TrainerState::Awaited, 7, false), (1, TrainerState::Silent, 0, true)]);
        assert_eq!(report.trainers[1].metrics, [("accuracy".to_owned(), 0.5)].into());
    }
}
