//! `spec.network`: how the job's pods talk, and who may reach them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How the job's pods talk, and who may reach them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NetworkSpec {
    /// Talk TLS: the operator makes an authority of the job's own and a certificate for its servers and one for its
    /// trainers, in a Secret of which each pod mounts the part of its role. The servers take no client without one, and
    /// take no trainer for a server. Processes find theirs in the folder that PSJOB_TLS_DIR names. False for
    /// clients of yours that speak plain gRPC. Default true.
    #[serde(default = "yes", rename = "mutualTLS")]
    pub mutual_tls: bool,
    /// Make a NetworkPolicy that lets only the job's own pods reach the job's pods; metrics and probes
    /// stay open to the cluster. It takes effect where the cluster's network
    /// enforces policies. Default false.
    #[serde(default)]
    pub network_policy: bool,
}

impl Default for NetworkSpec {
    fn default() -> Self {
        Self { mutual_tls: yes(), network_policy: false }
    }
}

fn yes() -> bool {
    true
}
