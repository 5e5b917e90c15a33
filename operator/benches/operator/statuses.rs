//! Measures the cost of a job's status for the API server: written as the operator does it, against a patch by the
//! same client.

use anyhow::{Context as _, Result};
use kube::{Api, Client};
use psjobs_api::crd::{ParameterServerJob, ParameterServerJobStatus};
use psjobs_operator::controller::write::update_status::update_status;

use crate::fleet::patch_status;
use crate::metrics;

/// Writes of each kind, and of how many the CPU time is taken; in turn.
const RUNS: usize = 5;
const WRITES: usize = 200;

/// Milliseconds of the API server's CPU for each write of these statuses, one after the other, to a job that no
/// operator takes care of: as the operator writes them, and patched.
pub async fn costs(
    client: &Client,
    jobs: &Api<ParameterServerJob>,
    name: &str,
    statuses: &[ParameterServerJobStatus; 2],
) -> Result<(Vec<f64>, Vec<f64>)> {
    let (mut written, mut patched) = (Vec::new(), Vec::new());
    let per_write = |begin: f64, end: f64| (end - begin) * 1000.0 / WRITES as f64;
    for _ in 0..RUNS {
        let mut job = jobs.get(name).await?;
        let begin = cpu_seconds(client).await?;
        for status in statuses.iter().cycle().take(WRITES) {
            job = update_status(client, &job, status).await?.context("nothing was written")?;
        }
        let between = cpu_seconds(client).await?;
        for status in statuses.iter().cycle().take(WRITES) {
            patch_status(jobs, name, status).await?;
        }
        written.push(per_write(begin, between));
        patched.push(per_write(between, cpu_seconds(client).await?));
    }
    Ok((written, patched))
}

/// CPU time that the API server has used so far, as it says itself.
async fn cpu_seconds(client: &Client) -> Result<f64> {
    let text = metrics(client).await?;
    let line = text.lines().find_map(|line| line.strip_prefix("process_cpu_seconds_total "));
    line.context("the API server does not report its CPU time")?.parse().context("CPU time is a number")
}
