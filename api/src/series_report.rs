//! The answer of server 0 at `/series` on its metrics port, as JSON: the curves of the job until now, as the page of the job shows them.
//! psjobs-web asks for what it has not seen itself.

use serde::{Deserialize, Serialize};

use crate::curves::every_second;

/// Most trainers of a job whose metrics the page has one by one, beside those of the whole job.
pub const TRAINERS: usize = 8;
/// Most curves of all these trainers.
pub const CURVES_OF_TRAINERS: usize = 40;
/// Bytes of an answer.
pub const MOST_BYTES: usize = 256 << 10;

/// A table: each curve has a value or none for each moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SeriesReport {
    /// Steps done until each moment, summed over the trainers; in an elastic job batches.
    pub steps: Vec<u64>,
    /// Each moment in milliseconds since 1970.
    pub times: Vec<u64>,
    /// Over all trainers.
    pub examples_per_second: Vec<Option<f64>>,
    /// The metrics.
    pub curves: Vec<SeriesCurve>,
}

/// A metric over the moments of a report.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SeriesCurve {
    /// Its name.
    pub metric: String,
    /// The index of the trainer that reports it; `None` is that of the whole job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trainer: Option<u32>,
    /// None before the first value, and where it is no finite number.
    pub values: Vec<Option<f64>>,
}

impl SeriesReport {
    /// Returns the report as JSON of at most [`MOST_BYTES`]: every second moment goes until it fits. The last one stays.
    ///
    /// # Errors
    /// If it cannot be written as JSON.
    pub fn to_json(mut self) -> serde_json::Result<String> {
        loop {
            let text = serde_json::to_string(&self)?;
            if text.len() <= MOST_BYTES || self.steps.len() <= 1 {
                return Ok(text);
            }
            every_second(&mut self.steps);
            every_second(&mut self.times);
            every_second(&mut self.examples_per_second);
            self.curves.iter_mut().for_each(|curve| every_second(&mut curve.values));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_thinned_until_it_fits() {
        let moments = 2_000;
        let value = |moment: u64| (!moment.is_multiple_of(7)).then_some(1.0 / (moment + 1) as f64);
        for (curves, wanted) in [(0, 2_000), (1, 2_000), (20, 500), (72, 125)] {
            let curve = |number| SeriesCurve {
                metric: format!("metric-{number}"),
                trainer: (number > 32).then_some(number),
                values: (0..moments).map(value).collect(),
            };
            let report = SeriesReport {
                steps: (0..moments).map(|moment| moment * 1_000).collect(),
                times: (0..moments).map(|moment| 1_800_000_000_000 + moment).collect(),
                examples_per_second: vec![Some(1.5); moments as usize],
                curves: (0..curves).map(curve).collect(),
            };
            let text = report.clone().to_json().expect("JSON");
            assert!(text.len() <= MOST_BYTES, "{curves} curves: {} bytes", text.len());
            let read: SeriesReport = serde_json::from_str(&text).expect("a report");
            assert_eq!((read.steps.len(), read.steps.last()), (wanted, Some(&1_999_000)), "{curves} curves");
            assert!(
                read.curves
                    .iter()
                    .all(|curve| curve.values.len() == wanted && curve.values.last() == Some(&value(1_999)))
            );
        }
    }
}
