//! The operator's flags. Every one can come from the environment, as a Deployment likes it.

use std::net::SocketAddr;

use clap::{Parser, ValueEnum};

/// Watches ParameterServerJobs, starts their pods, heals and ends them.
#[derive(Parser, Clone, Debug)]
#[command(version, about)]
pub struct Settings {
    /// Image of parameter servers whose job has no spec.ps.template.
    #[arg(long, env = "PSJOBS_WORKER_IMAGE", default_value = concat!("psjobs-worker:", env!("CARGO_PKG_VERSION")))]
    pub worker_image: String,
    /// Watch jobs in this namespace only; without it in the whole cluster.
    #[arg(long, env = "PSJOBS_NAMESPACE")]
    pub namespace: Option<String>,
    /// Address of /metrics, /healthz and /readyz.
    #[arg(long, env = "PSJOBS_METRICS_ADDR", default_value = "0.0.0.0:9464")]
    pub metrics_addr: SocketAddr,
    /// Work only while holding the lease psjobs-operator, so that several operators can stand by.
    #[arg(long, env = "PSJOBS_LEADER_ELECT")]
    pub leader_elect: bool,
    /// Namespace of the lease [default: the operator's own].
    #[arg(long, env = "PSJOBS_LEASE_NAMESPACE")]
    pub lease_namespace: Option<String>,
    /// Name of this operator in the lease and in events [default: the host name].
    #[arg(long, env = "PSJOBS_IDENTITY")]
    pub identity: Option<String>,
    /// Form of log lines.
    #[arg(long, env = "PSJOBS_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// What to log: a level, or filters such as info,psjobs_operator=debug.
    #[arg(long, env = "PSJOBS_LOG", default_value = "info,kube_runtime=warn")]
    pub log: String,
}

/// Form of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}
