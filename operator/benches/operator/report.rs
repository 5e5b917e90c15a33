//! One line of the report for each case.

use serde::Serialize;

/// A case's values over its runs against its limit.
#[derive(Serialize)]
pub struct Case {
    bench: &'static str,
    case: &'static str,
    unit: &'static str,
    value: f64,
    limit: Option<f64>,
    ratio: Option<f64>,
    min: f64,
    max: f64,
    runs: usize,
}

/// Prints a case; value and limit are medians, `limits` may be one for all runs, or empty.
pub fn print(case: &'static str, unit: &'static str, values: &[f64], limits: &[f64]) {
    let value = quantile(values, 0.5);
    let limit = (!limits.is_empty()).then(|| quantile(limits, 0.5));
    let ratio = limit.map(|limit| round(value / limit));
    let (min, max) = (quantile(values, 0.0), quantile(values, 1.0));
    let [value, min, max] = [value, min, max].map(round);
    let limit = limit.map(round);
    let line = Case { bench: "operator", case, unit, value, limit, ratio, min, max, runs: values.len() };
    println!("{}", serde_json::to_string(&line).expect("numbers are JSON"));
}

/// The smallest value that a share `q` of the values does not exceed.
pub fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let place = (q * sorted.len() as f64).ceil() as usize;
    sorted[place.clamp(1, sorted.len()) - 1]
}

fn round(value: f64) -> f64 {
    (value * 10_000.0).round() / 10_000.0
}
