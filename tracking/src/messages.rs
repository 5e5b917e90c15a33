//! Requests and answers of MLflow's REST API, as JSON: <https://mlflow.org/docs/latest/api_reference/rest-api.html>.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

/// The tag by which the run of a job is found.
const UID: &str = "psjobs.uid";

/// The job that a run is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Its name, which the run gets.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Its unique id, by which its run is found.
    pub uid: String,
    /// Its settings, by name.
    pub parameters: BTreeMap<String, String>,
}

/// A value of a metric at a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Metric {
    /// Name of the curve.
    pub key: String,
    /// Steps that were done.
    pub step: u64,
    /// When, in milliseconds since 1970.
    pub unix_milliseconds: i64,
    /// The value, which may be no number.
    pub value: f32,
}

/// A run, as MLflow tells of it.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct Run {
    /// Its id, status and place of artefacts.
    pub info: RunInfo,
    /// Its parameters and metrics.
    #[serde(default)]
    pub data: RunData,
}

/// Name and state of a run.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct RunInfo {
    /// Its id.
    pub run_id: String,
    /// RUNNING, FINISHED or another one.
    #[serde(default)]
    pub status: String,
    /// Where its artefacts are.
    #[serde(default)]
    pub artifact_uri: String,
}

/// Metrics and parameters of a run.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct RunData {
    #[serde(default)]
    metrics: Vec<Latest>,
    #[serde(default)]
    params: Vec<Parameter>,
}

/// The latest value of a metric: the one of its highest step.
#[derive(Clone, Debug, PartialEq, Deserialize)]
struct Latest {
    key: String,
    #[serde(default, deserialize_with = "whole_number")]
    step: u64,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
struct Parameter {
    key: String,
}

/// The answer to a request for one run.
#[derive(Debug, Deserialize)]
pub struct OneRun {
    /// It.
    pub run: Run,
}

/// The answer to a search for runs.
#[derive(Debug, Default, Deserialize)]
pub struct Found {
    /// Runs that fit.
    #[serde(default)]
    pub runs: Vec<Run>,
}

/// An experiment, or the answer to the request that makes one.
#[derive(Debug, Deserialize)]
pub struct Experiment {
    /// Its id.
    pub experiment_id: String,
}

/// The answer to a request for an experiment.
#[derive(Debug, Deserialize)]
pub struct OneExperiment {
    /// It.
    pub experiment: Experiment,
}

/// The answer to a request that nothing is to be known of.
#[derive(Debug, Deserialize)]
pub struct Done {}

/// A refusal.
#[derive(Debug, Default, Deserialize)]
pub struct Refusal {
    /// Name of the error.
    #[serde(default)]
    pub error_code: Option<String>,
    /// Words.
    #[serde(default)]
    pub message: Option<String>,
}

impl Run {
    /// Returns the highest step of each metric that the run has.
    pub fn positions(&self) -> BTreeMap<String, u64> {
        self.data.metrics.iter().map(|latest| (latest.key.clone(), latest.step)).collect()
    }

    /// Returns those of `wanted` that the run has no value for. MLflow refuses another value, so that the first one stays.
    pub fn missing(&self, wanted: &BTreeMap<String, String>) -> Vec<(String, String)> {
        let has = |key: &String| self.data.params.iter().any(|parameter| parameter.key == *key);
        wanted.iter().filter(|(key, _)| !has(key)).map(|(key, value)| (key.clone(), value.clone())).collect()
    }
}

/// Returns the request that finds the run of the job `uid`: the first one, if there should be several.
pub fn search(experiment: &str, uid: &str) -> Value {
    // An id that is chosen by hand may have one of the quotes.
    let quote = if uid.contains('\'') { '"' } else { '\'' };
    json!({
        "experiment_ids": [experiment],
        "filter": format!("tags.`{UID}` = {quote}{uid}{quote}"),
        "order_by": ["attributes.start_time ASC"],
        "max_results": 1,
    })
}

/// Returns the request that makes the run of `job`, which begins at `unix_milliseconds`.
pub fn create(experiment: &str, job: &Job, unix_milliseconds: i64) -> Value {
    let tag = |key: &str, value: &str| json!({"key": key, "value": value});
    json!({
        "experiment_id": experiment,
        "run_name": job.name,
        "start_time": unix_milliseconds,
        "tags": [
            tag(UID, &job.uid),
            tag("psjobs.job", &job.name),
            tag("psjobs.namespace", &job.namespace),
            tag("mlflow.source.name", "psjobs"),
        ],
    })
}

/// Returns the request that gives `run` values of metrics.
pub fn log_metrics(run: &str, metrics: &[Metric]) -> Value {
    let metric = |Metric { key, step, unix_milliseconds, value }: &Metric| json!({"key": key, "value": number(*value), "timestamp": unix_milliseconds, "step": step});
    json!({"run_id": run, "metrics": metrics.iter().map(metric).collect::<Vec<_>>()})
}

/// Returns the request that gives `run` parameters.
pub fn log_parameters(run: &str, parameters: &[(String, String)]) -> Value {
    let parameter = |(key, value): &(String, String)| json!({"key": key, "value": value});
    json!({"run_id": run, "params": parameters.iter().map(parameter).collect::<Vec<_>>()})
}

/// Returns the request that gives `run` a status; one that is over has an end.
pub fn update(run: &str, status: &str, end_unix_milliseconds: Option<i64>) -> Value {
    match end_unix_milliseconds {
        Some(end) => json!({"run_id": run, "status": status, "end_time": end}),
        None => json!({"run_id": run, "status": status}),
    }
}

/// Returns a value as the JSON of protobuf has it: one that is no number by its name. Others are those of an f64, of which the
/// f32 is got back bit by bit.
fn number(value: f32) -> Value {
    if value.is_nan() {
        json!("NaN")
    } else if value.is_infinite() {
        json!(if value > 0.0 { "Infinity" } else { "-Infinity" })
    } else {
        json!(f64::from(value))
    }
}

/// Reads a number that the JSON of protobuf may have as text.
fn whole_number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    Ok(match Value::deserialize(deserializer)? {
        Value::Number(number) => number.as_u64().unwrap_or(0),
        Value::String(text) => text.parse().unwrap_or(0),
        _ => 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_keep_their_bits() {
        for value in [0.1, -0.0, f32::from_bits(1), f32::MIN_POSITIVE, f32::MAX, 1.0 / 3.0] {
            let text = number(value).to_string();
            let back: f64 = text.parse().expect("a number");
            assert_eq!((back as f32).to_bits(), value.to_bits(), "{text}");
        }
        for (value, name) in [(f32::NAN, "NaN"), (f32::INFINITY, "Infinity"), (f32::NEG_INFINITY, "-Infinity")] {
            assert_eq!(number(value), json!(name));
        }
    }

    #[test]
    fn a_run_says_how_far_it_is() {
        let text = r#"{"run": {"info": {"run_id": "a1", "status": "RUNNING", "artifact_uri": "mlflow-artifacts:/1/a1/artifacts",
            "start_time": 1}, "data": {"metrics": [{"key": "job/trainers", "value": 2.0, "timestamp": 1, "step": 7},
            {"key": "trainer-0/loss", "value": "NaN", "timestamp": "1", "step": "9"}, {"key": "x", "value": 1.0}],
            "params": [{"key": "seed", "value": "1"}, {"key": "empty"}]}}}"#;
        let OneRun { run } = serde_json::from_str(text).expect("an answer");
        let wanted = [("job/trainers", 7), ("trainer-0/loss", 9), ("x", 0)];
        assert_eq!(run.positions(), BTreeMap::from(wanted.map(|(key, step)| (key.to_owned(), step))));
        let wanted = BTreeMap::from(["empty", "seed", "trainers"].map(|key| (key.to_owned(), "1".to_owned())));
        assert_eq!(run.missing(&wanted), [("trainers".to_owned(), "1".to_owned())]);
        let new: Run = serde_json::from_str(r#"{"info": {"run_id": "b"}}"#).expect("an answer");
        assert!(new.positions().is_empty());
        let none: Found = serde_json::from_str("{}").expect("an answer");
        assert!(none.runs.is_empty());
    }

    #[test]
    fn requests_are_those_of_the_api() {
        let filter = |uid: &str| search("1", uid)["filter"].as_str().map(str::to_owned).unwrap_or_default();
        assert_eq!(filter("0b6c"), "tags.`psjobs.uid` = '0b6c'");
        assert_eq!(filter("it's"), "tags.`psjobs.uid` = \"it's\"");
        let metric = Metric { key: "job/trainers".into(), step: 3, unix_milliseconds: 1500, value: 2.0 };
        let wanted = json!({"run_id": "a", "metrics": [
            {"key": "job/trainers", "value": 2.0, "timestamp": 1500, "step": 3},
        ]});
        assert_eq!(log_metrics("a", &[metric]), wanted);
        assert_eq!(update("a", "RUNNING", None), json!({"run_id": "a", "status": "RUNNING"}));
        let job = Job { name: "mnist".into(), namespace: "n".into(), uid: "u".into(), parameters: BTreeMap::new() };
        let made = create("1", &job, 5);
        assert_eq!((&made["tags"][0], &made["run_name"]), (&json!({"key": UID, "value": "u"}), &json!("mnist")));
        let parameters = [("seed".to_owned(), "1".to_owned())];
        assert_eq!(log_parameters("a", &parameters)["params"], json!([{"key": "seed", "value": "1"}]));
    }
}
