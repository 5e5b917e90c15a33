//! The status of a failed job has the cause.

use anyhow::{Context, Result, ensure};
use psjobs_api::crd::{ConditionType, Phase};
use psjobs_e2e::manifest::with_trainer;
use psjobs_e2e::namespace::TestNamespace;
use psjobs_e2e::wait::SHORT;

const LAST_LINE: &str = "the disk with the data is not there";

pub async fn cause_is_reported(namespace: &TestNamespace) -> Result<()> {
    let script = format!("echo {LAST_LINE} >&2; exit 1");
    let mut job = with_trainer(|trainer| {
        trainer.command = Some(["sh", "-c", &script].map(str::to_owned).into());
        trainer.args = None;
    })?;
    job.spec.failure_policy.max_restarts = 1;
    namespace.apply(&job).await?;
    let status = namespace.phase("mnist", Phase::Failed, SHORT).await?;

    let cause = status.last_failure.context("a failed job has a lastFailure")?;
    namespace.print(format_args!("{}", cause.message));
    ensure!(cause.exit_code == Some(1), "the exit code is {:?}", cause.exit_code);
    ensure!(cause.role == "trainer" && [1, 2].contains(&cause.rank), "it names {} of rank {}", cause.role, cause.rank);
    ensure!(cause.log_tail.contains(LAST_LINE), "the log's tail is {:?}", cause.log_tail);
    let failed = status.conditions.iter().find(|condition| condition.type_ == ConditionType::Failed);
    let failed = failed.context("a failed job has the condition Failed")?;
    ensure!(failed.reason == "MaxRestartsExceeded", "the reason is {}: {}", failed.reason, failed.message);
    ensure!(status.restarts_counted <= 1, "{} restarts, of 1", status.restarts_counted);
    ensure!(status.completion_time.is_some(), "a failed job has a completionTime");

    // The servers end after the condition is written, so that the cause is visible at once.
    namespace.ended("mnist-ps-0").await?;
    namespace.event("Failed", "exit code 1").await
}
