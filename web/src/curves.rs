//! The metrics of a job over its steps, within bounds: of a curve that is full every second point goes.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

/// Points of a curve.
const POINTS: usize = 2_000;
/// Curves of a job, and of these most that are of one trainer.
const CURVES: usize = 64;
const OF_TRAINERS: usize = 40;

/// Name of a metric, and of the trainer that reports it; no trainer is the mean or sum over all.
pub type Key = (String, Option<String>);

/// All curves of a job.
#[derive(Clone, Debug)]
pub struct Curves {
    /// Random: the curves of another job of the name are others.
    id: u64,
    all: BTreeMap<Key, Curve>,
}

/// A value at a step.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Point {
    step: u64,
    /// Milliseconds since 1970.
    time: u64,
    value: f64,
}

#[derive(Clone, Debug, Default)]
struct Curve {
    points: Vec<Point>,
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
    /// Adds a point. A step that is there already, or beyond which the curve has gone, was made again: the points from it on go.
    /// A step that comes again with the same value adds no point.
    pub fn push(&mut self, metric: &str, trainer: Option<&str>, step: u64, time: u64, value: f64) {
        let key = (metric.to_owned(), trainer.map(str::to_owned));
        if !self.all.contains_key(&key) {
            let of_trainers = self.all.keys().filter(|(_, trainer)| trainer.is_some()).count();
            if self.all.len() == CURVES || (trainer.is_some() && of_trainers == OF_TRAINERS) {
                return;
            }
        }
        let Curve { points, cuts } = self.all.entry(key).or_default();
        if points.last().is_some_and(|last| last.step == step && last.value.to_bits() == value.to_bits()) {
            return;
        }
        let kept = points.partition_point(|point| point.step < step);
        if kept < points.len() {
            points.truncate(kept);
            *cuts += 1;
        }
        points.push(Point { step, time, value });
        if points.len() > POINTS {
            let mut number = 0;
            points.retain(|_| {
                number += 1;
                number % 2 == 1
            });
            *cuts += 1;
        }
    }

    /// Returns how many points there are.
    pub fn points(&self) -> usize {
        self.all.values().map(|curve| curve.points.len()).sum()
    }

    /// Takes every second point from the longest curve until all together have at most `points`, or two each. The last point of
    /// a curve stays. For a program that shows many jobs.
    pub fn bound(&mut self, points: usize) {
        while self.points() > points {
            let longest = self.all.values_mut().max_by_key(|curve| curve.points.len());
            let Some(Curve { points, cuts }) = longest.filter(|curve| curve.points.len() > 2) else { return };
            let mut left = points.len();
            points.retain(|_| {
                left -= 1;
                left.is_multiple_of(2)
            });
            points.shrink_to_fit();
            *cuts += 1;
        }
    }

    /// Returns the curves with at most `points` points together, the last of each among them.
    pub fn thinned(&self, points: usize) -> Self {
        let share = (points / self.all.len().max(1)).max(1);
        let thin = |curve: &Curve| {
            let (count, every) = (curve.points.len(), curve.points.len().div_ceil(share).max(1));
            let kept = curve.points.iter().enumerate().filter(|(at, _)| (count - 1 - at).is_multiple_of(every));
            Curve { points: kept.map(|(_, point)| *point).collect(), cuts: 0 }
        };
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
        for (key, curve) in &self.all {
            let read = seen.read.entry(key.clone()).or_default();
            let from = if read.cuts == curve.cuts { read.points } else { 0 };
            if from == curve.points.len() {
                continue;
            }
            *read = Read { cuts: curve.cuts, points: curve.points.len() };
            let points: Vec<Value> = curve.points[from..].iter().flat_map(Point::as_values).collect();
            news.push(json!({"metric": key.0, "trainer": key.1, "from": from, "points": points}));
        }
        (anew || !news.is_empty()).then(|| json!({"anew": anew, "curves": news}))
    }
}

impl Point {
    fn as_values(&self) -> [Value; 3] {
        let value = if self.value.is_finite() { json!(self.value) } else { json!(self.value.to_string()) };
        [json!(self.step), json!(self.time), value]
    }
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
        assert_eq!(thinned.all.values().map(|curve| curve.points.len()).collect::<Vec<_>>(), [1, 100]);
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
        assert!(curves.all.values().all(|curve| (1..=2).contains(&curve.points.len())));
    }
}
