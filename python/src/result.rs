//! The result that a trainer leaves behind when it has done its work.

use std::collections::BTreeMap;

use psjobs_api::ReplicaResult;
use pyo3::prelude::*;

/// The text of the result file of a trainer.
#[pyfunction]
pub fn result(steps: u64, examples: u64, seconds: f64, waiting_seconds: f64, metrics: BTreeMap<String, f64>) -> String {
    let metrics = metrics.into_iter().filter(|(_, value)| value.is_finite()).collect();
    let waiting_seconds = Some(waiting_seconds);
    ReplicaResult { steps, examples, seconds, waiting_seconds, metrics, ..ReplicaResult::default() }.to_json()
}
