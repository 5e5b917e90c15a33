//! The flags of `psjobs-web`. Every one can come from the environment, as a Deployment likes it.

use std::net::SocketAddr;
use std::time::Duration;

use clap::{Parser, ValueEnum};

/// Serves the page of a cluster's jobs, and keeps the records of those that are over.
#[derive(Parser, Clone, Debug)]
#[command(name = "psjobs-web", version, about)]
pub struct Settings {
    /// Show jobs of this namespace only; without it of the whole cluster.
    #[arg(long, env = "PSJOBS_NAMESPACE")]
    pub namespace: Option<String>,
    /// Address to serve at.
    #[arg(long, env = "PSJOBS_WEB_ADDR", value_name = "ADDRESS:PORT", default_value = "0.0.0.0:8080")]
    pub addr: SocketAddr,
    /// Keep the records of jobs that are over in this folder or bucket: a path, s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or
    /// az://CONTAINER/FOLDER; without it there are none.
    #[arg(long, env = "PSJOBS_WEB_RECORDS", value_name = "FOLDER")]
    pub records: Option<String>,
    /// Time for which a record is kept, as 30d or 12h.
    #[arg(long, env = "PSJOBS_WEB_KEEP_RECORDS", value_name = "TIME", default_value = "30d", value_parser = time)]
    pub keep_records: Duration,
    /// Form of log lines.
    #[arg(long, env = "PSJOBS_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// Log level, or filters such as info,psjobs_web_server=debug.
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

/// Reads a whole number with a unit.
fn time(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no time such as 30d, 12h or 90m");
    let unit = text.chars().last().ok_or_else(wrong)?;
    let seconds = match unit {
        'd' => 86_400,
        'h' => 3_600,
        'm' => 60,
        's' => 1,
        _ => return Err(wrong()),
    };
    let number: u32 = text[..text.len() - 1].parse().map_err(|_| wrong())?;
    if number == 0 { Err(wrong()) } else { Ok(Duration::from_secs(u64::from(number) * seconds)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_unit() {
        for (text, wanted) in [("30d", 2_592_000), ("12h", 43_200), ("90m", 5_400), ("5s", 5)] {
            assert_eq!(time(text), Ok(Duration::from_secs(wanted)), "{text}");
        }
        for text in ["", "d", "30", "-1d", "0d", "1.5h", "3é"] {
            assert!(time(text).is_err(), "{text}");
        }
    }
}
