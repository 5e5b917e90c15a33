//! `kubectl psjob watch`: the progress of a job until it ends.

use std::pin::pin;

use anyhow::bail;
use clap::Args;
use futures::StreamExt as _;
use jiff::Timestamp;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{Config, Event, watcher};
use psjobs_api::crd::{ParameterServerJob, Phase};

use crate::connection::{Cluster, ConnectionArgs, Flags};
use crate::text;
use crate::why::explain;

/// Show a job's progress until it ends
///
/// Exit code: 0 it succeeded, 1 it failed, 130 after Ctrl-C, which leaves the job alone.
#[derive(Debug, Args)]
pub struct WatchArgs {
    /// Name of the job
    name: String,
}

impl WatchArgs {
    pub async fn run(self, connection: &ConnectionArgs) -> anyhow::Result<u8> {
        let cluster = connection.open().await?;
        cluster.job(&self.name).await?;
        until_its_end(&cluster, &self.name, &connection.as_flags()).await
    }
}

/// Prints a line each time that the job has changed, and at its end why it ended; returns the exit code. It ends early
/// where nobody reads the lines any more.
pub async fn until_its_end(cluster: &Cluster, name: &str, flags: &Flags) -> anyhow::Result<u8> {
    let only = Config::default().fields(&format!("metadata.name={name}"));
    let mut events = pin!(watcher(cluster.jobs(), only).default_backoff());
    let mut interrupted = pin!(tokio::signal::ctrl_c());
    let (mut shown, mut found, mut away) = (String::new(), false, false);
    loop {
        let event = tokio::select! {
            event = events.next() => event,
            _ = &mut interrupted => {
                eprintln!("{name} goes on; `kubectl psjob cancel {name}{flags}` ends it");
                return Ok(130);
            }
        };
        match event {
            Some(Ok(Event::Apply(job) | Event::InitApply(job))) => {
                (found, away) = (true, false);
                let line = line(&job);
                if line != shown {
                    if !text::print(&line) {
                        return Ok(0);
                    }
                    shown = line;
                }
                let phase = text::phase(&job);
                if phase.is_some_and(Phase::is_final) {
                    text::print(explain(&job, Timestamp::now()).as_text(flags));
                    return Ok(u8::from(phase == Some(Phase::Failed)));
                }
            }
            Some(Ok(Event::Delete(_))) => bail!("{name} was deleted"),
            Some(Ok(Event::InitDone)) if !found => bail!("{name} was deleted"),
            Some(Ok(Event::Init)) => found = false,
            Some(Ok(Event::InitDone)) => {}
            Some(Err(error)) => {
                if !away {
                    eprintln!("the cluster does not answer ({error}); trying again");
                    away = true;
                }
            }
            None => bail!("the cluster ended the watch of {name}"),
        }
    }
}

/// `mnist: Running, step 788 of 1500 (52%), loss 0.144, 641.5 examples/s, 100s left`.
fn line(job: &ParameterServerJob) -> String {
    let name = job.metadata.name.as_deref().unwrap_or_default();
    let Some((status, phase)) = job.status.as_ref().and_then(|status| Some((status, status.phase?))) else {
        return format!("{name}: waits for an operator");
    };
    let mut parts = vec![format!("{name}: {phase:?}")];
    parts.extend(text::reason(status).map(str::to_owned));
    if let Some(progress) = status.progress.as_ref().filter(|progress| progress.step > 0) {
        parts.push(text::steps(progress));
        parts.extend(progress.metrics.iter().map(|metric| format!("{} {}", metric.name, text::number(metric.value))));
        if !phase.is_final() {
            parts.extend(progress.examples_per_second.map(|rate| format!("{} examples/s", text::number(rate))));
            parts.extend(progress.estimated_remaining_seconds.map(|rest| format!("{} left", text::span(rest))));
        }
    } else if !phase.is_final() {
        let roles = [("servers", &status.ps), ("trainers", &status.trainer)];
        parts.extend(roles.iter().filter_map(|(role, status)| Some(format!("{role} {}", status.as_ref()?.summary))));
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_line_says_how_far_the_job_is() {
        let job = |status: serde_json::Value| -> ParameterServerJob {
            let spec = json!({"trainer": {"template": {"spec": {"containers": [{"name": "trainer"}]}}}});
            let mut job = json!({"apiVersion": "psjobs.dev/v1alpha1", "kind": "ParameterServerJob", "spec": spec, "metadata": {"name": "mnist"}});
            if !status.is_null() {
                job["status"] = status;
                job["status"]["restarts"] = 0.into();
                job["status"]["restartsCountTowardsMax"] = 0.into();
            }
            serde_json::from_value(job).expect("a job")
        };
        let role = |summary: &str| json!({"desired": 2, "ready": 0, "active": 2, "succeeded": 0, "failed": 0, "restarts": 0, "summary": summary, "selector": ""});
        let progress = json!({"step": 788, "totalSteps": 1500, "percent": 52, "summary": "52%", "examplesPerSecond": 641.53,
            "estimatedRemainingSeconds": 100, "metrics": [{"name": "loss", "value": 0.143_965}]});
        for (status, wanted) in [
            (json!(null), "mnist: waits for an operator"),
            (
                json!({"phase": "Pending", "reason": "ErrImagePull", "ps": role("1/1"), "trainer": role("0/2")}),
                "mnist: Pending, ErrImagePull, servers 1/1, trainers 0/2",
            ),
            (
                json!({"phase": "Running", "reason": "Running", "progress": progress}),
                "mnist: Running, step 788 of 1500 (52%), loss 0.144, 641.5 examples/s, 100s left",
            ),
            (
                json!({"phase": "Succeeded", "reason": "Succeeded", "progress": progress}),
                "mnist: Succeeded, step 788 of 1500 (52%), loss 0.144",
            ),
        ] {
            assert_eq!(line(&job(status)), wanted);
        }
    }
}
