//! A job is suspended and resumed.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use kube::api::ListParams;
use psjobs_api::crd::{ParameterServerJob, Phase};
use psjobs_e2e::logs::line;
use psjobs_e2e::manifest::{PACED, PACED_ACCURACY, from_file, main_container, training};
use psjobs_e2e::namespace::TestNamespace;
use psjobs_e2e::wait::{SHORT, TRAINING, until, until_none};
use safetensors::SafeTensors;
use serde_json::Value;

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
    let fetched = tempfile::tempdir()?;
    fetch_checkpoint(namespace, JOB, before.step, fetched.path()).await?;
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

    let file = fetched.path().join("model.safetensors");
    let path = file.to_str().context("a path of text")?;
    let said = namespace.psjob(&["model", JOB, "--output", path]).await?;
    namespace.print(said.trim_end());
    let bytes = fs::read(&file)?;
    ensure!(said.contains(&format!(" {} bytes", bytes.len())), "{said}, but the file has {} bytes", bytes.len());
    ensure!(!SafeTensors::deserialize(&bytes)?.is_empty(), "the model of {} bytes has no tensors", bytes.len());
    let again = namespace.psjob(&["model", JOB, "--output", path]).await.err().context("the file is there")?;
    ensure!(format!("{again:#}").contains("--force replaces it"), "{again:#}");
    Ok(())
}

/// Lists the checkpoints of a job that does not train, and fetches the newest, which is at least of step `step`.
pub async fn fetch_checkpoint(namespace: &TestNamespace, job: &str, step: i64, folder: &Path) -> Result<()> {
    let listed = namespace.psjob(&["checkpoint", "list", job, "--output", "json"]).await?;
    let listed: Vec<Value> = serde_json::from_str(&listed)?;
    let newest = listed.first().context("a checkpoint in the list")?;
    ensure!(newest["step"].as_i64() >= Some(step) && newest["job"] == job, "{newest}");
    let said = namespace.psjob(&["checkpoint", "get", job, "--output", folder.to_str().context("text")?]).await?;
    namespace.print(said.trim_end());
    let place = folder.join(job).join(newest["folder"].as_str().context("its folder")?);
    let manifest: Value = serde_json::from_slice(&fs::read(place.join("manifest.json"))?)?;
    let parts = manifest["parts"].as_array().context("its parts")?;
    let sizes = parts.iter().map(|part| {
        let file = part["file"].as_str().context("the name of a part")?;
        Ok(Some(fs::metadata(place.join(file))?.len()) == part["bytes"].as_u64())
    });
    ensure!(sizes.collect::<Result<Vec<_>>>()?.iter().all(|same| *same), "parts have other sizes than {manifest}");
    ensure!(place.with_file_name("run.json").exists(), "no record of the run in {}", folder.display());
    let missing = namespace.psjob(&["checkpoint", "get", job, "--step", "1"]).await.err().context("there is none")?;
    ensure!(format!("{missing:#}").contains("has no checkpoint of step 1; "), "{missing:#}");
    Ok(())
}

async fn suspend(namespace: &TestNamespace, job: &str, suspend: bool) -> Result<()> {
    let said = namespace.psjob(&[if suspend { "suspend" } else { "resume" }, job]).await?;
    namespace.print(said.trim_end());
    Ok(())
}
