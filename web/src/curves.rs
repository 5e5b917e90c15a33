//! The metrics of a job over its steps, within bounds: of a curve that is full every second point goes.

use std::collections::BTreeMap;

use psjobs_api::SeriesReport;
use psjobs_api::curves::{Curve, Point, every_second};
use psjobs_api::series_report::CURVES_OF_TRAINERS;
use serde_json::{Map, Value, json};

/// The curve of the examples/s of all trainers.
pub const EXAMPLES: &str = "examples/s";
/// Curves of a job, and of these most that are of one trainer.
const CURVES: usize = 64;
const OF_TRAINERS: usize = CURVES_OF_TRAINERS;

/// Name of a metric, and of the trainer that reports it; no trainer is the mean or sum over all.
pub type Key = (String, Option<String>);

/// All curves of a job.
#[derive(Clone, Debug)]
pub struct Curves {
    /// Random: the curves of another job of the name are others.
    id: u64,
    all: BTreeMap<Key, Shown>,
}

#[derive(Clone, Debug, Default)]
struct Shown {
    curve: Curve,
    /// Counts how often points were taken away: who has seen fewer has to read the curve from its beginning.
    cuts: u64,
}

/// How much of a curve a reader has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Read {
    cuts: u64,
    points: usize,
}

/// How much of all curves a reader has.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// The curves that it reads; 0 before it has read any.
    id: u64,
    read: BTreeMap<Key, Read>,
}

impl Default for Curves {
    fn default() -> Self {
        Self { id: rand::random(), all: BTreeMap::new() }
    }
}

impl Curves {
    /// Adds a point, as [`Curve::push`].
    pub fn push(&mut self, metric: &str, trainer: Option<&str>, step: u64, time: u64, value: f64) {
        let Some(Shown { curve, cuts }) = self.curve((metric.to_owned(), trainer.map(str::to_owned))) else { return };
        *cuts += u64::from(curve.push(Point { step, time, value }));
    }

    /// Adds what server 0 has kept and these curves lack, as [`Curve::fill`]. Takes every second of its points until they have room
    /// in curves of `points` together.
    pub fn fill(&mut self, report: &SeriesReport, points: usize) {
        let share = points / (report.curves.len() + 1);
        let job = (EXAMPLES.to_owned(), None);
        let metrics = report.curves.iter().map(|curve| {
            let trainer = curve.trainer.map(|index| format!("trainer-{index}"));
            ((curve.metric.clone(), trainer), &curve.values)
        });
        for (key, values) in [(job, &report.examples_per_second)].into_iter().chain(metrics) {
            let moments = report.steps.iter().zip(&report.times).zip(values);
            let point = |((&step, &time), value): (_, &Option<f64>)| Some(Point { step, time, value: (*value)? });
            let mut past: Vec<Point> = moments.filter_map(point).collect();
            while past.len() > share.max(1) {
                every_second(&mut past);
            }
            if !past.is_empty()
                && let Some(Shown { curve, cuts }) = self.curve(key)
            {
                *cuts += u64::from(curve.fill(&past));
            }
        }
    }

    /// Returns a curve, a new one if there is room.
    fn curve(&mut self, key: Key) -> Option<&mut Shown> {
        if !self.all.contains_key(&key) {
            let of_trainers = self.all.keys().filter(|(_, trainer)| trainer.is_some()).count();
            if self.all.len() == CURVES || (key.1.is_some() && of_trainers == OF_TRAINERS) {
                return None;
            }
        }
        Some(self.all.entry(key).or_default())
    }

    /// Returns how many points there are.
    pub fn points(&self) -> usize {
        self.all.values().map(Shown::points).sum()
    }

    /// Takes every second point from the longest curve until all together have at most `points`, or two each. The last point of
    /// a curve stays. For a program that shows many jobs.
    pub fn bound(&mut self, points: usize) {
        while self.points() > points {
            let longest = self.all.values_mut().max_by_key(|shown| shown.points());
            let Some(Shown { curve, cuts }) = longest.filter(|shown| shown.points() > 2) else { return };
            curve.thin();
            *cuts += 1;
        }
    }

    /// Returns the curves with at most `points` points together, the last of each among them.
    pub fn thinned(&self, points: usize) -> Self {
        let share = (points / self.all.len().max(1)).max(1);
        let thin = |shown: &Shown| Shown { curve: shown.curve.thinned(shown.points().div_ceil(share)), cuts: 0 };
        Self { id: self.id, all: self.all.iter().map(|(key, curve)| (key.clone(), thin(curve))).collect() }
    }

    /// Returns the points that a reader lacks, as a list of curves, and whether it has to forget those that it has; `None` if
    /// nothing is new. Step, time and value of a point follow each other; a value that is no finite number is a string.
    pub fn news(&self, seen: &mut Seen) -> Option<Value> {
        let mut news = Vec::new();
        let anew = seen.id != self.id;
        if anew {
            *seen = Seen { id: self.id, read: BTreeMap::new() };
        }
        for (key, Shown { curve, cuts }) in &self.all {
            let read = seen.read.entry(key.clone()).or_default();
            let (from, points) = (if read.cuts == *cuts { read.points } else { 0 }, curve.points());
            if from == points.len() {
                continue;
            }
            *read = Read { cuts: *cuts, points: points.len() };
            let points: Vec<Value> = points[from..].iter().flat_map(as_values).collect();
            news.push(json!({"metric": key.0, "trainer": key.1, "from": from, "points": points}));
        }
        (anew || !news.is_empty()).then(|| json!({"anew": anew, "curves": news}))
    }
}

impl Shown {
    fn points(&self) -> usize {
        self.curve.points().len()
    }
}

fn as_values(point: &Point) -> [Value; 3] {
    let value = if point.value.is_finite() { json!(point.value) } else { json!(point.value.to_string()) };
    [json!(point.step), json!(point.time), value]
}

impl Seen {
    /// Adds what of `curves` its reader lacks to `news`.
    pub fn read(&mut self, curves: &Curves, news: &mut Map<String, Value>) {
        if let Some(curves) = curves.news(self) {
            news.insert("curves".into(), curves);
        }
    }
}

#[cfg(test)]
mod tests {
    use psjobs_api::SeriesCurve;
    use psjobs_api::curves::POINTS;

    use super::*;

    /// Steps of the only curve as a reader has them who applies `news` to `steps`.
    fn apply(steps: &mut Vec<u64>, news: Option<Value>) {
        let Some(news) = news else { return };
        if news["anew"] == true {
            steps.clear();
        }
        let curve = &news["curves"][0];
        steps.truncate(curve["from"].as_u64().expect("a number") as usize);
        let points = curve["points"].as_array().expect("a list");
        steps.extend(points.chunks(3).map(|point| point[0].as_u64().expect("a step")));
    }

    #[test]
    fn a_reader_gets_each_point_once_and_follows_when_steps_are_made_again() {
        let (mut curves, mut seen, mut steps) = (Curves::default(), Seen::default(), Vec::new());
        for step in [1, 2, 3] {
            curves.push("loss", None, step, step, 0.5);
        }
        apply(&mut steps, curves.news(&mut seen));
        assert_eq!(steps, [1, 2, 3]);
        assert_eq!(curves.news(&mut seen), None);
        curves.push("loss", None, 3, 9, 0.5);
        assert_eq!(curves.news(&mut seen), None, "nothing has changed");
        curves.push("loss", None, 4, 10, f64::NAN);
        let news = curves.news(&mut seen);
        let point = json!([{"metric": "loss", "trainer": null, "from": 3, "points": [4, 10, "NaN"]}]);
        assert_eq!(news, Some(json!({"anew": false, "curves": point})));
        apply(&mut steps, news);
        curves.push("loss", None, 2, 11, 0.4);
        curves.push("loss", None, 5, 12, 0.3);
        apply(&mut steps, curves.news(&mut seen));
        assert_eq!(steps, [1, 2, 5]);
        // Another job of the name, with as many points as the reader has.
        let mut others = Curves::default();
        [7, 8].iter().for_each(|&step| others.push("loss", None, step, step, 0.5));
        apply(&mut steps, others.news(&mut seen));
        assert_eq!(steps, [7, 8]);
    }

    #[test]
    fn thinned_curves_have_their_last_point() {
        let mut curves = Curves::default();
        (0..1_000).for_each(|step| curves.push("loss", None, step, step, 1.0));
        curves.push("accuracy", None, 9, 9, 0.5);
        let (mut seen, mut steps) = (Seen::default(), Vec::new());
        let thinned = curves.thinned(200);
        assert_eq!(thinned.all.values().map(Shown::points).collect::<Vec<_>>(), [1, 100]);
        let news = thinned.news(&mut seen).expect("all is new");
        apply(&mut steps, Some(json!({"anew": true, "curves": [news["curves"][1]]})));
        assert_eq!((steps[0], steps[99]), (9, 999));
    }

    #[test]
    fn curves_are_bounded() {
        let (mut curves, mut seen, mut steps) = (Curves::default(), Seen::default(), Vec::new());
        for step in 0..10_000 {
            curves.push("loss", None, step, step, 1.0);
            if step % 7 == 0 {
                apply(&mut steps, curves.news(&mut seen));
            }
        }
        apply(&mut steps, curves.news(&mut seen));
        assert!(steps.len() <= POINTS && steps.is_sorted(), "{}", steps.len());
        assert_eq!((steps[0], steps.last()), (0, Some(&9_999)));
        for trainer in 0..100 {
            curves.push("loss", Some(&format!("trainer-{trainer}")), 1, 1, 1.0);
        }
        assert_eq!(curves.all.len(), 1 + OF_TRAINERS);
        for metric in 0..100 {
            curves.push(&format!("metric-{metric}"), None, 1, 1, 1.0);
        }
        assert_eq!(curves.all.len(), CURVES, "those of all trainers have room behind those of each");
    }

    #[test]
    fn the_curves_of_a_job_among_many_are_bounded_together() {
        let (mut curves, mut seen, mut steps) = (Curves::default(), Seen::default(), Vec::new());
        for step in 1..=500 {
            curves.push("loss", None, step, 0, 1.0 / step as f64);
            curves.bound(100);
            apply(&mut steps, curves.news(&mut seen));
        }
        assert!((50..=100).contains(&steps.len()) && steps.last() == Some(&500), "{steps:?}");
        curves.push("accuracy", None, 500, 0, 0.5);
        curves.bound(0);
        assert!(curves.all.values().all(|shown| (1..=2).contains(&shown.points())));
    }

    #[test]
    fn what_server_0_has_kept_comes_before_what_the_page_has_seen() {
        let (mut curves, mut seen, mut steps) = (Curves::default(), Seen::default(), Vec::new());
        curves.push("loss", None, 100, 100_000, 0.25);
        apply(&mut steps, curves.news(&mut seen));
        let curve = |trainer, values: [f64; 3]| SeriesCurve {
            metric: "loss".into(),
            trainer,
            values: values.into_iter().map(|value| (value > 0.0).then_some(value)).collect(),
        };
        let report = SeriesReport {
            steps: vec![20, 40, 60],
            times: vec![20_000, 40_000, 60_000],
            examples_per_second: vec![None; 3],
            curves: vec![curve(None, [0.75, 0.0, 0.5]), curve(Some(1), [0.0, 0.5, 0.5])],
        };
        curves.fill(&report, 9);
        assert_eq!(
            curves.all.keys().cloned().collect::<Vec<_>>(),
            [("loss".to_owned(), None), ("loss".to_owned(), Some("trainer-1".to_owned()))]
        );
        apply(&mut steps, curves.news(&mut seen));
        assert_eq!(steps, [20, 60, 100], "without the moment of which there is no value");
        curves.fill(&report, 9);
        assert_eq!(curves.news(&mut seen), None, "each point once");
        let many = (0..1_000).map(|number| SeriesCurve { metric: number.to_string(), ..curve(None, [1.0; 3]) });
        curves.fill(&SeriesReport { curves: many.collect(), ..report }, 1_001);
        assert_eq!(curves.all.len(), CURVES);
        assert_eq!(curves.all[&("0".to_owned(), None)].points(), 1, "of three, because the others have no room");
    }
}
