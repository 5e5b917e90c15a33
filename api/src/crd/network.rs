//! `spec.network`: who may reach the job's pods.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Who may reach the job's pods.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NetworkSpec {
    /// Make a NetworkPolicy that lets only the job's own pods and the operator's namespace reach the
    /// job's pods; metrics stay open to the cluster. It takes effect where the cluster's network
    /// enforces policies. Default false.
    #[serde(default)]
    pub network_policy: bool,
}
