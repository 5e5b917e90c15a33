//! One line of the report for each case.

use serde_json::json;

/// Prints a case; value and limit are medians, `limits` may be one for all runs, or empty.
pub fn print(case: &str, unit: &str, values: &[f64], limits: &[f64]) {
    let value = quantile(values, 0.5);
    let limit = (!limits.is_empty()).then(|| quantile(limits, 0.5));
    let line = json!({
        "bench": "kubectl",
        "case": case,
        "unit": unit,
        "value": round(value),
        "limit": limit.map(round),
        "ratio": limit.map(|limit| round(value / limit)),
        "min": round(quantile(values, 0.0)),
        "max": round(quantile(values, 1.0)),
        "runs": values.len(),
    });
    println!("{line}");
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
