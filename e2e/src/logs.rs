//! Log lines of pods, with the node's timestamps.

use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use futures::{AsyncBufReadExt, TryStreamExt};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, LogParams};

use crate::namespace::phase_of;
use crate::wait::{until, within};

/// A line of a log.
#[derive(Clone, Debug)]
pub struct Line {
    pub at: Timestamp,
    pub text: String,
}

/// Waits for the first log line of a pod's first container that contains all of `words`, and before that for the pod to start.
///
/// # Errors
/// If the pod ends or `limit` passes without such a line.
pub async fn line(pods: &Api<Pod>, pod: &str, words: &[&str], limit: Duration) -> Result<Line> {
    let found = async {
        // A pod that has not started has no log; a job runs with fewer trainers than it may have.
        let started = until(pods, pod, limit, &format!("{pod} to start"), has_started).await?;
        let first = started.and_then(|started| Some(started.spec?.containers.into_iter().next()?.name));
        let parameters = LogParams { container: first, follow: true, timestamps: true, ..LogParams::default() };
        let mut lines = pods.log_stream(pod, &parameters).await?.lines();
        while let Some(line) = lines.try_next().await? {
            if words.iter().all(|word| line.contains(word)) {
                return parse(&line);
            }
        }
        Err(anyhow!("{pod} ended without a log line that has {words:?}"))
    };
    within(limit, &format!("{pod} to log {words:?}"), found).await
}

fn has_started(pod: Option<&Pod>) -> bool {
    pod.and_then(phase_of).is_some_and(|phase| phase != "Pending")
}

fn parse(line: &str) -> Result<Line> {
    let (at, text) = line.split_once(' ').context("a log line begins with its time")?;
    Ok(Line { at: at.parse()?, text: text.to_owned() })
}
