//! The lines of a report, and progress.

use std::fmt;
use std::io::IsTerminal as _;

use serde::Serialize;

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Line {
    Measured(Case),
    LeftOut(LeftOut),
}

/// A case that cannot be measured here.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LeftOut {
    pub bench: &'static str,
    pub case: &'static str,
    /// Why, and what to do about it.
    pub left_out: String,
}

/// The figures of one case.
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

impl From<Case> for Line {
    fn from(case: Case) -> Self {
        Self::Measured(case)
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Measured(case) => case.fmt(f),
            Self::LeftOut(LeftOut { case, left_out, .. }) => write!(f, "{case:<24}left out: {left_out}"),
        }
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

    #[test]
    fn a_case_that_is_left_out_says_why_in_both_reports() {
        let line = Line::LeftOut(LeftOut { bench: "b", case: "c", left_out: "no rights; run it as root".into() });
        assert_eq!(line.to_string(), format!("{:<24}left out: no rights; run it as root", "c"));
        let json = serde_json::to_string(&line).expect("plain fields");
        assert_eq!(json, r#"{"bench":"b","case":"c","left_out":"no rights; run it as root"}"#);
        let json = serde_json::to_string(&Line::from(Case::new("b", "c", "s", &[1.0], &[2.0]))).expect("plain fields");
        assert!(
            json.starts_with(r#"{"bench":"b","case":"c","unit":"s","value":1.0,"limit":2.0,"ratio":0.5,"#),
            "{json}"
        );
    }
}
