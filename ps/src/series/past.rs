//! The curves of a job until now, for a page that has begun to look at the job later. They are made of the series, and are what
//! `Status` has said since the job began.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use psjobs_api::curves::{Curve, Point};
use psjobs_api::series_report::{CURVES_OF_TRAINERS, TRAINERS};
use psjobs_api::{SeriesCurve, SeriesReport};
use tokio::sync::Mutex;

use super::reader::SeriesReader;
use super::writer::Entry;
use super::{LONGEST_NAME, MOST_METRICS, Source, event_file};
use crate::checkpoint::Folder;
use crate::proto::StatusReply;

/// Curves of all sources: 14 MB.
const CURVES: usize = (1 + TRAINERS) * MOST_METRICS;
/// The metric of server 0 that the page shows of the whole job.
const RATE: &str = "examples_per_second";

/// The series of a job, thinned.
#[derive(Debug, Default)]
pub struct Past {
    curves: BTreeMap<(Source, String), Curve>,
    /// The moments at which server 0 has measured.
    moments: Curve,
}

impl Past {
    /// Takes the next piece of the series of a source. Those of trainers that the page does not show one by one are left out.
    pub fn take(&mut self, source: Source, entry: Entry) {
        if matches!(source, Source::Trainer(index) if index as usize >= TRAINERS) {
            return;
        }
        match entry {
            Entry::Rewind(step) => {
                let of_source = self.curves.iter_mut().filter(|((known, _), _)| *known == source);
                of_source.for_each(|(_, curve)| curve.rewind(step));
                if source == Source::Job {
                    self.moments.rewind(step);
                }
            }
            Entry::Point(event_file::Point { step, unix_seconds, values }) => {
                let time = (unix_seconds * 1000.0) as u64;
                if source == Source::Job {
                    self.moments.push(Point { step, time, value: 0.0 });
                }
                for (name, value) in values {
                    let key = (source, name);
                    if self.curves.contains_key(&key) || (self.curves.len() < CURVES && key.1.len() <= LONGEST_NAME) {
                        self.curves.entry(key).or_default().push(Point { step, time, value: value.into() });
                    }
                }
            }
        }
    }

    /// Returns the curves of the metrics that `status` has, at the moments at which server 0 has measured. One of its steps is
    /// `steps` steps of the job.
    #[must_use]
    pub fn report(&self, status: &StatusReply, steps: u64) -> SeriesReport {
        let moments = self.moments.points();
        let values = |curve: &Curve| moments.iter().map(|moment| finite(curve.at(moment.time)?)).collect();
        let find = |source, name: &String| self.curves.get(&(source, name.clone()));
        // As the status: of the first trainer that has said it, else of an evaluation by server 0.
        let of_job = |name: &String| {
            let mut trainers = (0..TRAINERS as u32).filter_map(|index| find(Source::Trainer(index), name));
            let curve = trainers.next().or_else(|| find(Source::Job, name))?;
            Some(SeriesCurve { metric: name.clone(), trainer: None, values: values(curve) })
        };
        let is_small = (2..=TRAINERS).contains(&status.trainers.len());
        let of_trainers = status.trainers.iter().filter(|_| is_small).flat_map(|trainer| {
            trainer.metrics.keys().filter_map(move |name| {
                let curve = find(Source::Trainer(trainer.index), name)?;
                Some(SeriesCurve { metric: name.clone(), trainer: Some(trainer.index), values: values(curve) })
            })
        });
        let rate = find(Source::Job, &RATE.to_owned());
        SeriesReport {
            steps: moments.iter().map(|moment| moment.step.saturating_mul(steps)).collect(),
            times: moments.iter().map(|moment| moment.time).collect(),
            examples_per_second: rate.map_or_else(|| vec![None; moments.len()], values),
            curves: status.metrics.keys().filter_map(of_job).chain(of_trainers.take(CURVES_OF_TRAINERS)).collect(),
        }
    }
}

/// Returns a value as it is written in decimal, if it is a finite number: JSON has no word for the others. The f64 of an f32 has
/// twice the digits.
fn finite(value: f64) -> Option<f64> {
    (value as f32).to_string().parse().ok().filter(|value: &f64| value.is_finite())
}

/// The past of a job as server 0 keeps it. One at a time uses it.
#[derive(Clone, Debug, Default)]
pub struct SharedPast(Arc<Mutex<Kept>>);

#[derive(Debug, Default)]
struct Kept {
    past: Past,
    /// Reads what has come into the folder since it was asked last.
    reader: Option<SeriesReader>,
}

impl SharedPast {
    /// Takes pieces of a series that is in no folder.
    pub async fn take(&self, pieces: impl IntoIterator<Item = (Source, Entry)>) {
        let mut kept = self.0.lock().await;
        pieces.into_iter().for_each(|(source, entry)| kept.past.take(source, entry));
    }

    /// Returns the curves of the series in `folder`, or of those that it was given, as JSON.
    ///
    /// # Errors
    /// If the folder cannot be read. The next call goes on where this one has ended.
    pub async fn json(&self, folder: Option<Folder>, status: StatusReply, steps: u64) -> io::Result<String> {
        let mut kept = self.0.clone().lock_owned().await;
        let Some(folder) = folder else { return Ok(kept.past.report(&status, steps).to_json()?) };
        let disk = folder.disk().clone();
        let read = move || {
            let Kept { past, reader } = &mut *kept;
            let reader = reader.get_or_insert_with(|| SeriesReader::new(folder));
            reader.read(|source, entry| past.take(source, entry))?;
            Ok(past.report(&status, steps).to_json()?)
        };
        disk.work(read).await
    }
}

#[cfg(test)]
mod tests {
    use psjobs_api::series_report::MOST_BYTES;

    use super::*;
    use crate::proto::TrainerStatus;
    use crate::series::writer::SeriesWriter;

    fn at(step: u64, second: f64, values: &[(&str, f32)]) -> Entry {
        let values = values.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        Entry::Point(event_file::Point { step, unix_seconds: second, values })
    }

    /// The status of a job of so many trainers, which report these metrics.
    fn status(trainers: u32, metrics: &[&str]) -> StatusReply {
        let metrics: BTreeMap<String, f64> = metrics.iter().map(|name| ((*name).to_owned(), 0.0)).collect();
        let trainer = |index| TrainerStatus { index, metrics: metrics.clone(), ..TrainerStatus::default() };
        StatusReply {
            trainers: (0..trainers).map(trainer).collect(),
            metrics: metrics.clone(),
            ..StatusReply::default()
        }
    }

    fn curve<'a>(report: &'a SeriesReport, metric: &str, trainer: Option<u32>) -> Option<&'a [Option<f64>]> {
        let found = report.curves.iter().find(|curve| (curve.metric.as_str(), curve.trainer) == (metric, trainer));
        found.map(|curve| curve.values.as_slice())
    }

    /// Two trainers, of which the second one reports first, and what server 0 measures in the seconds 2 and 4.
    fn past() -> Past {
        let mut past = Past::default();
        let (job, first, second) = (Source::Job, Source::Trainer(0), Source::Trainer(1));
        for (source, entry) in [
            (second, at(5, 1.0, &[("loss", 0.9), ("waiting", 0.1)])),
            (job, at(10, 2.0, &[("examples_per_second", 100.0), ("staleness", 3.0), ("accuracy", 0.5)])),
            (first, at(10, 3.0, &[("loss", 0.1)])),
            (second, at(10, 3.5, &[("loss", f32::NAN)])),
            (job, at(20, 4.0, &[("examples_per_second", 50.0)])),
            (first, at(30, 5.0, &[("loss", 0.0)])),
        ] {
            past.take(source, entry);
        }
        past
    }

    #[test]
    fn the_curves_are_what_the_status_would_have_said() {
        let report = past().report(&status(2, &["loss", "accuracy"]), 2);
        assert_eq!((&report.steps[..], &report.times[..]), (&[20, 40][..], &[2_000, 4_000][..]));
        assert_eq!(report.examples_per_second, [Some(100.0), Some(50.0)]);
        for (metric, trainer, wanted) in [
            ("loss", None, Some(&[None, Some(0.1)][..])),
            ("accuracy", None, Some(&[Some(0.5), Some(0.5)][..])),
            ("loss", Some(0), Some(&[None, Some(0.1)][..])),
            ("loss", Some(1), Some(&[Some(0.9), None][..])),
            ("waiting", Some(1), None),
            ("staleness", None, None),
        ] {
            assert_eq!(curve(&report, metric, trainer), wanted, "{metric} of {trainer:?}");
        }
        for trainers in [1, 9] {
            let report = past().report(&status(trainers, &["loss"]), 2);
            assert!(report.curves.iter().all(|curve| curve.trainer.is_none()), "{trainers} trainers");
        }
        assert_eq!(Past::default().report(&status(2, &["loss"]), 2), SeriesReport::default());
    }

    #[test]
    fn steps_that_are_made_again_are_there_once() {
        let mut past = past();
        past.take(Source::Job, Entry::Rewind(10));
        past.take(Source::Trainer(0), Entry::Rewind(9));
        past.take(Source::Trainer(0), at(10, 7.0, &[("loss", 0.2)]));
        past.take(Source::Job, at(12, 8.0, &[("examples_per_second", 70.0)]));
        let report = past.report(&status(2, &["loss"]), 1);
        assert_eq!((&report.steps[..], &report.times[..]), (&[10, 12][..], &[2_000, 8_000][..]));
        assert_eq!(report.examples_per_second, [Some(100.0), Some(70.0)]);
        assert_eq!(curve(&report, "loss", Some(0)), Some(&[None, Some(0.2)][..]));
    }

    #[test]
    fn the_past_is_bounded_however_long_the_job_and_however_many_its_metrics() {
        let (mut past, names) = (Past::default(), (0..40).map(|number| format!("m{number:02}")).collect::<Vec<_>>());
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        for step in 1..=2_100 {
            let values: Vec<(&str, f32)> = names.iter().map(|name| (*name, (step as f32).sqrt())).collect();
            past.take(Source::Job, at(step, step as f64, &[("examples_per_second", 1.5)]));
            (0..9).for_each(|index| past.take(Source::Trainer(index), at(step, step as f64 - 0.5, &values)));
        }
        past.take(Source::Job, at(2_101, 2_101.0, &[(&"n".repeat(LONGEST_NAME + 1), 1.0)]));
        assert_eq!(past.curves.len(), CURVES);
        assert!(
            !past.curves.keys().any(|(source, _)| *source == Source::Trainer(8)),
            "the page shows none of that trainer"
        );
        let report = past.report(&status(8, &names[..MOST_METRICS]), 8);
        assert_eq!(report.curves.len(), MOST_METRICS + CURVES_OF_TRAINERS);
        let json = report.to_json().expect("JSON");
        assert!(json.len() <= MOST_BYTES, "{} bytes", json.len());
        let read: SeriesReport = serde_json::from_str(&json).expect("a report");
        assert_eq!(read.steps.last(), Some(&(2_101 * 8)));
    }

    #[tokio::test]
    async fn a_folder_is_read_as_far_as_it_has_grown_since_it_was_asked_last() {
        let scratch = tempfile::tempdir().expect("a folder");
        let folder = Folder::from(scratch.path());
        let (shared, mut writer) = (SharedPast::default(), SeriesWriter::new(folder.clone(), 1));
        let steps = async || {
            let json = shared.json(Some(folder.clone()), status(1, &["loss"]), 1).await.expect("readable");
            let report: SeriesReport = serde_json::from_str(&json).expect("a report");
            (report.steps.clone(), curve(&report, "loss", None).map(<[_]>::len))
        };
        assert_eq!(steps().await, (vec![], None), "nothing is written yet");
        writer.append(Source::Trainer(0), &[at(1, 1.0, &[("loss", 0.5)])]).expect("written");
        writer.append(Source::Job, &[at(1, 2.0, &[]), at(2, 4.0, &[("trainers", 1.0)])]).expect("written");
        assert_eq!(steps().await, (vec![2], Some(1)), "a point without values is not written");
        writer.append(Source::Job, &[at(3, 6.0, &[("trainers", 1.0)])]).expect("written");
        assert_eq!(steps().await, (vec![2, 3], Some(2)));
        // A process that was started anew reads all of it.
        let again = SharedPast::default();
        let json = again.json(Some(folder.clone()), status(1, &["loss"]), 1).await.expect("readable");
        assert_eq!(serde_json::from_str::<SeriesReport>(&json).expect("a report").steps, [2, 3]);
    }

    #[tokio::test]
    async fn without_a_folder_the_past_is_what_was_measured() {
        let shared = SharedPast::default();
        shared.take([(Source::Job, at(4, 2.0, &[("examples_per_second", 7.0)]))]).await;
        let json = shared.json(None, status(1, &[]), 3).await.expect("no disk");
        assert_eq!(json, r#"{"steps":[12],"times":[2000],"examplesPerSecond":[7.0],"curves":[]}"#);
    }
}
