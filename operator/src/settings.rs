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
    /// Take care of jobs with the label psjobs.dev/shard=SHARD only; without it of those without the label. One of
    /// several operators that share a cluster.
    #[arg(long, env = "PSJOBS_SHARD", value_parser = shard_name)]
    pub shard: Option<String>,
    /// Address of /metrics, /healthz and /readyz.
    #[arg(long, env = "PSJOBS_METRICS_ADDR", default_value = "0.0.0.0:9464")]
    pub metrics_addr: SocketAddr,
    /// Work only while holding the lease psjobs-operator (psjobs-operator-SHARD), so that several operators can stand
    /// by.
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
    /// Log level, or filters such as info,psjobs_operator=debug.
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

/// A name that fits a label and, with what stands before it, a lease.
fn shard_name(text: &str) -> Result<String, String> {
    let inside = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    let ends = |c: Option<&u8>| c.is_some_and(|&c| inside(c));
    let bytes = text.as_bytes();
    let fits = bytes.len() <= 40 && bytes.iter().all(|&c| inside(c) || c == b'-');
    if fits && ends(bytes.first()) && ends(bytes.last()) {
        Ok(text.to_owned())
    } else {
        Err("a shard's name has at most 40 of a-z, 0-9 and '-', which is neither the first nor the last; for example gpu-2".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shards_name_must_fit_a_label_and_a_lease() {
        let long = "a".repeat(41);
        for (name, good) in
            [("a", true), ("gpu-2", true), ("", false), ("-a", false), ("a-", false), ("A", false), (&long, false)]
        {
            let parsed = Settings::try_parse_from(["psjobs-operator", &format!("--shard={name}")]);
            assert_eq!(parsed.map(|settings| settings.shard).ok(), good.then(|| Some(name.to_owned())), "{name:?}");
        }
    }
}
