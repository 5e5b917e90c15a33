//! The lines of a report, and progress.

use std::fmt;
use std::io::IsTerminal as _;

use serde::Serialize;

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Case {
    pub bench: &'static str,
    pub case: &'static str,
    pub unit: &'static str,
    pub value: f64,
    pub limit: f64,
    pub ratio: f64,
    pub min: f64,
    pub max: f64,
    pub runs: usize,
}

impl Case {
    /// Summarizes `values` and `limits`: one of each a run, at least one.
    pub fn new(bench: &'static str, case: &'static str, unit: &'static str, values: &[f64], limits: &[f64]) -> Self {
        let (value, limit) = (median(values), median(limits));
        let min = values.iter().copied().fold(f64::INFINITY, f64::min);
        let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        Self { bench, case, unit, value, limit, ratio: value / limit, min, max, runs: values.len() }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { case, unit, value, limit, ratio, min, max, .. } = self;
        write!(f, "{case:<24}{unit:<12}{value:>10.2}{limit:>10.2}{ratio:>8.3}{min:>10.2}{max:>10.2}")
    }
}

pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 }
}

/// Prints what is being measured, if a terminal shows it.
pub fn say(text: &str) {
    if std::io::stderr().is_terminal() {
        eprintln!("{text}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_holds_medians_and_the_extremes_of_its_values() {
        let case = Case::new("b", "c", "steps/s", &[4.0, 1.0, 2.0], &[10.0, 2.0, 4.0, 6.0]);
        assert_eq!((case.value, case.limit, case.ratio), (2.0, 5.0, 0.4));
        assert_eq!((case.min, case.max, case.runs), (1.0, 4.0, 3));
    }
}
