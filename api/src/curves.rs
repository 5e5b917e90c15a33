//! A curve of bounded length: the values of a metric over the steps of a job. Server 0 and the page of a job thin theirs alike.

/// Points of a curve.
pub const POINTS: usize = 2_000;
/// Points of another curve that are filled in between two neighbours. Fewer are no gap: they change nothing that can be seen, and
/// whoever reads the curve would have to read it anew.
const GAP: usize = 8;

/// A value at a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    /// Steps of the job that were done.
    pub step: u64,
    /// Milliseconds since 1970.
    pub time: u64,
    /// The value.
    pub value: f64,
}

/// Points with increasing steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curve(Vec<Point>);

impl Curve {
    /// Returns the points.
    #[must_use]
    pub fn points(&self) -> &[Point] {
        &self.0
    }

    /// Returns the value at `time`: that of the last point until then.
    #[must_use]
    pub fn at(&self, time: u64) -> Option<f64> {
        let behind = self.0.partition_point(|point| point.time <= time);
        Some(self.0.get(behind.checked_sub(1)?)?.value)
    }

    /// Adds a point; of a curve that is full every second point goes. A step that is there already, or beyond which the curve has
    /// gone, was made again: the points from it on go. A step that comes again with the same value adds no point. Returns whether
    /// points went.
    pub fn push(&mut self, point: Point) -> bool {
        let points = &mut self.0;
        if points.last().is_some_and(|last| last.step == point.step && last.value.to_bits() == point.value.to_bits()) {
            return false;
        }
        let kept = points.partition_point(|known| known.step < point.step);
        let goes_back = kept < points.len();
        points.truncate(kept);
        points.push(point);
        let is_full = points.len() > POINTS;
        if is_full {
            every_second(points);
        }
        goes_back || is_full
    }

    /// Takes away the points above `step`, which are made again.
    pub fn rewind(&mut self, step: u64) {
        self.0.truncate(self.0.partition_point(|point| point.step <= step));
    }

    /// Takes away every second point. The last one stays.
    pub fn thin(&mut self) {
        every_second(&mut self.0);
        self.0.shrink_to_fit();
    }

    /// Returns the curve with every `every`th point, the last one among them.
    #[must_use]
    pub fn thinned(&self, every: usize) -> Self {
        let count = self.0.len();
        let kept = self.0.iter().enumerate().filter(|(at, _)| (count - 1 - at).is_multiple_of(every.max(1)));
        Self(kept.map(|(_, point)| *point).collect())
    }

    /// Adds the points of `past`, which have increasing steps, that this curve lacks: those before its first point, and those of gaps.
    /// A point whose time is not between those of its neighbours is left out, because two machines have two clocks. Returns
    /// whether there were such points.
    pub fn fill(&mut self, past: &[Point]) -> bool {
        let own = std::mem::take(&mut self.0);
        let (count, mut rest) = (own.len(), past);
        self.0.reserve(count);
        for (place, point) in own.into_iter().enumerate() {
            let (lacking, behind) = rest.split_at(rest.partition_point(|past| past.step < point.step));
            rest = &behind[behind.partition_point(|past| past.step == point.step)..];
            if place == 0 || lacking.len() >= GAP {
                self.append(lacking, Some(point));
            }
            self.0.push(point);
        }
        if count == 0 || rest.len() >= GAP {
            self.append(rest, None);
        }
        let has_more = self.0.len() > count;
        while self.0.len() > POINTS {
            every_second(&mut self.0);
        }
        has_more
    }

    /// Appends those of `points` that are behind the last point and before `next`.
    fn append(&mut self, points: &[Point], next: Option<Point>) {
        for point in points {
            let follows = self.0.last().is_none_or(|last| last.step < point.step && last.time <= point.time);
            if follows && next.is_none_or(|next| point.step < next.step && point.time <= next.time) {
                self.0.push(*point);
            }
        }
    }
}

/// Takes every second element from a list. The last one stays.
pub fn every_second<T>(list: &mut Vec<T>) {
    let mut left = list.len();
    list.retain(|_| {
        left -= 1;
        left.is_multiple_of(2)
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The curve of these steps, each made at the second of its number, `late` seconds later by the clock.
    fn curve(steps: impl IntoIterator<Item = u64>, late: u64) -> Curve {
        Curve(steps.into_iter().map(|step| Point { step, time: (step + late) * 1000, value: step as f64 }).collect())
    }

    fn steps(curve: &Curve) -> Vec<u64> {
        curve.points().iter().map(|point| point.step).collect()
    }

    #[test]
    fn a_curve_is_thinned_when_it_is_full_and_goes_back_with_its_job() {
        let mut full = Curve::default();
        let cuts = (0..10_000).filter(|&step| full.push(Point { step, time: step, value: 1.0 })).count();
        assert!(cuts > 0 && full.points().len() <= POINTS, "{} points", full.points().len());
        assert_eq!((full.points()[0].step, full.points().last().map(|point| point.step)), (0, Some(9_999)));
        let mut short = curve(1..=5, 0);
        let same = Point { step: 5, time: 9, value: 5.0 };
        for (label, point, cut, wanted) in [
            ("the same again", same, false, vec![1, 2, 3, 4, 5]),
            ("another value", Point { value: f64::NAN, ..same }, true, vec![1, 2, 3, 4, 5]),
            ("made again", Point { step: 3, ..same }, true, vec![1, 2, 3]),
            ("the next one", Point { step: 7, ..same }, false, vec![1, 2, 3, 7]),
        ] {
            assert_eq!((short.push(point), steps(&short)), (cut, wanted), "{label}");
        }
        short.rewind(2);
        assert_eq!(steps(&short), [1, 2]);
        assert_eq!([500, 1_000, 1_999, 9_000].map(|time| short.at(time)), [None, Some(1.0), Some(1.0), Some(2.0)]);
    }

    #[test]
    fn what_a_curve_lacks_is_filled_in_once_and_in_order() {
        let range = |from: u64, to: u64| (from..to).collect::<Vec<_>>();
        let with_gap = || [range(50, 60), range(90, 100)].concat();
        for (label, own, past, late, wanted) in [
            ("all", vec![], range(1, 9), 0, range(1, 9)),
            ("the beginning", range(50, 60), range(1, 60), 0, range(1, 60)),
            ("a gap", with_gap(), range(60, 90), 0, range(50, 100)),
            ("the beginning and a gap", with_gap(), range(1, 100), 0, range(1, 100)),
            ("the end", range(1, 5), range(1, 90), 0, range(1, 90)),
            ("the last moment alone", range(1, 5), range(1, 9), 0, range(1, 5)),
            ("nothing between neighbours", vec![1, 5, 9], range(1, 9), 0, vec![1, 5, 9]),
            ("nothing", range(1, 5), vec![], 0, range(1, 5)),
            ("not what another clock puts in the wrong order", with_gap(), range(1, 100), 3, {
                [range(1, 48), with_gap()].concat().into_iter().chain(range(60, 88)).collect()
            }),
        ] {
            let mut wanted = wanted;
            wanted.sort_unstable();
            let (mut filled, past) = (curve(own.clone(), 0), curve(past, late));
            let has_more = filled.fill(past.points());
            assert_eq!(steps(&filled), wanted, "{label}");
            assert_eq!(has_more, wanted != own, "{label}");
            assert!(filled.points().is_sorted_by_key(|point| point.time), "{label}");
            assert!(!filled.fill(past.points()), "{label}: each point once");
        }
    }

    #[test]
    fn a_curve_that_is_filled_is_bounded_and_ordered_whatever_it_is_filled_with() {
        let mut long = curve(5_000..6_900, 0);
        assert!(long.fill(curve((0..20_000).step_by(3), 0).points()));
        let found = steps(&long);
        assert!((POINTS / 2..=POINTS).contains(&found.len()) && found.is_sorted(), "{} points", found.len());
        assert!(found[0] < 20 && found.last() == Some(&19_998), "{} to {:?}", found[0], found.last());
        let mut disordered = curve([5, 3, 3, 900, 1, 40, 7, 7, 2, 30, 8, 6, 9, 4], 0).0;
        disordered.push(Point { step: u64::MAX, time: 0, value: f64::NAN });
        for own in [vec![], vec![6], vec![5, 600]] {
            let mut filled = curve(own, 0);
            filled.fill(&disordered);
            assert!(steps(&filled).is_sorted_by(|a, b| a < b), "{filled:?}");
        }
    }
}
