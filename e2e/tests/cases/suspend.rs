//! A job is suspended and resumed.

use anyhow::{Context, Result, ensure};
use kube::api::ListParams;
use psjobs_api::crd::{ParameterServerJob, Phase};
use psjobs_e2e::logs::line;
use psjobs_e2e::manifest::{PACED, PACED_ACCURACY, from_file, main_container, training};
use psjobs_e2e::namespace::TestNamespace;
use psjobs_e2e::wait::{SHORT, TRAINING, until, until_none};

pub async fn starts_again(namespace: &TestNamespace) -> Result<()> {
    namespace.apply(&training(&["train", "mnist", "--max-steps", "300"])?).await?;
    namespace.phase("mnist", Phase::Running, SHORT).await?;

    suspend(namespace, "mnist", true).await?;
    let status = namespace.phase("mnist", Phase::Suspended, SHORT).await?;
    ensure!(status.start_time.is_none(), "a suspended job is not active");
    until_none(&namespace.pods(), &ListParams::default(), SHORT, "the suspended job's pods to go").await?;

    suspend(namespace, "mnist", false).await?;
    namespace.phase("mnist", Phase::Running, SHORT).await?;
    let status = namespace.phase("mnist", Phase::Succeeded, TRAINING).await?;
    ensure!(status.restarts_counted == 0, "being suspended was counted as a failure");
    Ok(())
}

/// Suspends a job with checkpoints: it resumes from the last one.
pub async fn resumes_from_a_checkpoint(namespace: &TestNamespace) -> Result<()> {
    const JOB: &str = "mnist-checkpoint";
    let mut job = from_file("examples/mnist-checkpoint.yaml")?;
    main_container(&mut job)?.args = Some(PACED.map(str::to_owned).into());
    namespace.apply(&job).await?;
    let checkpoint = |job: &ParameterServerJob| job.status.as_ref()?.last_checkpoint.clone();
    let kept = |job: Option<&ParameterServerJob>| job.and_then(checkpoint).is_some();
    let job = until(&namespace.jobs(), JOB, TRAINING, "a checkpoint in the job's status", kept).await?;
    let before = job.as_ref().and_then(checkpoint).context("it was there")?;

    suspend(namespace, JOB, true).await?;
    namespace.phase(JOB, Phase::Suspended, SHORT).await?;
    until_none(&namespace.pods(), &ListParams::default(), SHORT, "the suspended job's pods to go").await?;
    suspend(namespace, JOB, false).await?;
    namespace.phase(JOB, Phase::Running, SHORT).await?;
    let restored = line(&namespace.pods(), "mnist-checkpoint-ps-0", &["restored from a checkpoint"], SHORT).await?;
    namespace.print(format_args!("{}", restored.text));

    let status = namespace.phase(JOB, Phase::Succeeded, TRAINING).await?;
    let (last, model) = (status.last_checkpoint.context("the last checkpoint")?, status.model.context("the model")?);
    ensure!(last.step > before.step, "the checkpoint of step {} is not after that of step {}", last.step, before.step);
    ensure!(model.path == "mnist-checkpoint/model.safetensors", "the model is at {}", model.path);
    let accuracy = model.metric.context("the model's metric")?;
    namespace.print(format_args!("{} {:.4}", accuracy.name, accuracy.value));
    ensure!(accuracy.name == "accuracy" && accuracy.value > PACED_ACCURACY, "the model's metric is {accuracy:?}");
    Ok(())
}

async fn suspend(namespace: &TestNamespace, job: &str, suspend: bool) -> Result<()> {
    let said = namespace.psjob(&[if suspend { "suspend" } else { "resume" }, job]).await?;
    namespace.print(said.trim_end());
    Ok(())
}
