//! The ways beside the one that a paper compares its own with: bytes, and how good the models are, over all seeds.

use std::fmt::Write as _;

use serde::Serialize;

use super::record::Record;

/// A way beside the baseline.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Against {
    pub way: &'static str,
    pub against: &'static str,
    pub seeds: usize,
    /// Means of all seeds.
    pub bytes: f64,
    pub metric: f64,
    /// The bytes of the baseline over those of this way.
    pub times_fewer_bytes: f64,
    pub difference_percent: Spread,
}

/// How much higher the metric is than the baseline's with the same seed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    pub mean: f64,
    pub lowest: f64,
    pub highest: f64,
}

/// Bytes and metric of a run, and those of the baseline with the same seed.
type Pair = ((f64, f64), (f64, f64));

/// Compares each way with `baseline`, in the order of the records: by the seeds with which both came to their end.
pub fn against(baseline: &'static str, records: &[Record]) -> Vec<Against> {
    let mut ways: Vec<&'static str> = Vec::new();
    for record in records {
        if !ways.contains(&record.way) {
            ways.push(record.way);
        }
    }
    let figures = |record: &Record| Some((record.bytes? as f64, record.end.1?));
    let of =
        |way: &str, seed: u32| records.iter().find(|record| record.way == way && record.seed == seed).and_then(figures);
    let compare = |way: &'static str| {
        let seeds = records.iter().filter(|record| record.way == way).map(|record| record.seed);
        let pairs: Vec<_> = seeds.filter_map(|seed| of(way, seed).zip(of(baseline, seed))).collect();
        let mean = |figure: fn(&Pair) -> f64| pairs.iter().map(figure).sum::<f64>() / pairs.len() as f64;
        let difference = |((_, here), (_, there)): &Pair| (here / there - 1.0) * 100.0;
        let spread = Spread {
            mean: mean(difference),
            lowest: pairs.iter().map(difference).fold(f64::MAX, f64::min),
            highest: pairs.iter().map(difference).fold(f64::MIN, f64::max),
        };
        let (bytes, of_baseline) = (mean(|((bytes, _), _)| *bytes), mean(|(_, (bytes, _))| *bytes));
        (!pairs.is_empty()).then(|| Against {
            way,
            against: baseline,
            seeds: pairs.len(),
            bytes,
            metric: mean(|((_, metric), _)| *metric),
            times_fewer_bytes: of_baseline / bytes,
            difference_percent: spread,
        })
    };
    ways.into_iter().filter_map(compare).collect()
}

/// Writes the comparison as a table.
pub fn table(rows: &[Against], metric: &str) -> String {
    let Some(first) = rows.first() else { return String::new() };
    let over = format!("{}'s over it", first.against);
    let mut text = format!(
        "{:<14}{:>6}{:>12}{over:>24}{metric:>14}   {metric} over {}'s, lowest to highest\n",
        "way", "seeds", "MB sent", first.against
    );
    for row in rows {
        let Spread { mean, lowest, highest } = row.difference_percent;
        let _ = writeln!(
            text,
            "{:<14}{:>6}{:>12.1}{:>24.1}{:>14.1}   {mean:+.1} % ({lowest:+.1} to {highest:+.1})",
            row.way,
            row.seeds,
            row.bytes / 1e6,
            row.times_fewer_bytes,
            row.metric
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::grid::{Experiment, Run};
    use super::*;

    fn record(way: &'static str, seed: u32, figures: Option<(u64, f64)>) -> Record {
        let (metric, run) = (Experiment::Local.metric(), Run { section: 0, way: 0, seed });
        let (bytes, end) = figures.unzip();
        Record { bytes, end: (metric, end), ..Record::new(run, "Local steps", way, metric) }
    }

    #[test]
    fn a_way_is_compared_by_the_seeds_that_both_have_ended_with() {
        let records = [
            record("Sync", 1, Some((5_000_000, 100.0))),
            record("50 steps", 1, Some((100_000, 103.0))),
            record("50, Async", 1, None),
            record("Sync", 2, Some((5_000_000, 110.0))),
            record("50 steps", 2, Some((100_000, 108.9))),
            record("50, Async", 2, None),
            record("Sync", 3, None),
            record("50 steps", 3, Some((1, 900.0))),
        ];
        let rows = against("Sync", &records);
        assert_eq!(rows.iter().map(|row| (row.way, row.seeds)).collect::<Vec<_>>(), [("Sync", 2), ("50 steps", 2)]);
        let Spread { mean, lowest, highest } = rows[1].difference_percent;
        for (found, want) in [(mean, 1.0), (lowest, -1.0), (highest, 3.0), (rows[1].times_fewer_bytes, 50.0)] {
            assert!((found - want).abs() < 1e-9, "{rows:?}");
        }
        let text = table(&rows, "perplexity");
        assert!(text.contains("50.0") && text.contains("+1.0 % (-1.0 to +3.0)"), "{text}");
        assert!(against("Sync", &records[1..3]).is_empty(), "without the baseline there is nothing to compare with");
    }
}
