//! `spec.tracking`: the servers outside of the cluster's own that keep what a job did.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::env::{DEFAULT_EXPERIMENT, Mlflow};

/// Tracking servers that get the job's metrics over time, its parameters and its model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TrackingSpec {
    /// A tracking server of MLflow, which gets one run for the job, through restarts of servers and trainers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mlflow: Option<MlflowSpec>,
}

/// A tracking server of MLflow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MlflowSpec {
    /// Address that the servers' pods reach it at, for example http://mlflow.mlflow:5000.
    #[schemars(length(min = 1, max = 1024))]
    pub uri: String,
    /// Name of the experiment that the run belongs to; it is made if there is none. Default Default, which every tracking
    /// server has.
    #[serde(default = "default_experiment")]
    #[schemars(length(min = 1, max = 250))]
    pub experiment: String,
    /// Name of a Secret whose keys become variables of the servers: MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or
    /// MLFLOW_TRACKING_TOKEN. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub secret: Option<String>,
}

impl MlflowSpec {
    /// Returns the part that the servers receive.
    #[must_use]
    pub fn server(&self) -> Mlflow {
        Mlflow { uri: self.uri.clone(), experiment: self.experiment.clone() }
    }
}

fn default_experiment() -> String {
    DEFAULT_EXPERIMENT.to_owned()
}
