//! A job has its state in a bucket of S3, which versitygw plays on a node.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use kube::ResourceExt as _;
use kube::api::{DeleteParams, ListParams};
use psjobs_api::crd::{CheckpointSpec, ConditionType, ParameterServerJob, Phase};
use psjobs_e2e::logs::line;
use psjobs_e2e::manifest::{PACED, PACED_ACCURACY, from_file, main_container};
use psjobs_e2e::namespace::TestNamespace;
use psjobs_e2e::wait::{SHORT, TRAINING, until, until_none};
use safetensors::SafeTensors;
use serde_json::json;

use super::store::{FOLDER, KEYS, Store};
use super::suspend::fetch_checkpoint;

/// Name of the job in the example.
pub const JOB: &str = "mnist-checkpoint";

/// Deletes a job with all that belongs to it: another job goes on from what it has left in the bucket. Before, a job whose
/// bucket is not there says so.
pub async fn job_outlives_its_deletion(namespace: &TestNamespace) -> Result<()> {
    let store = Store::start(namespace).await?;
    let test = async {
        store.create_keys(namespace).await?;
        find_a_bucket(namespace, &store).await?;
        go_on(namespace, &store).await
    };
    let ended = test.await;
    store.stop().await?;
    ended
}

/// Returns a job that is kept below a URL.
pub fn job(url: &str) -> Result<ParameterServerJob> {
    let mut job = from_file("examples/mnist-checkpoint.yaml")?;
    main_container(&mut job)?.args = Some(PACED.map(str::to_owned).into());
    let checkpoint = json!({"objectStore": {"url": url, "secret": KEYS}, "intervalSeconds": 2});
    job.spec.checkpoint = Some(serde_json::from_value::<CheckpointSpec>(checkpoint)?);
    Ok(job)
}

/// A job without its bucket says what to do, until the bucket is there.
async fn find_a_bucket(namespace: &TestNamespace, store: &Store) -> Result<()> {
    namespace.apply(&job("s3://other/jobs")?).await?;
    let jobs = namespace.jobs();
    until(&jobs, JOB, SHORT, "the job to say that its bucket is missing", |job| fails(job, "True")).await?;
    let why = namespace.psjob(&["why", JOB]).await?;
    namespace.print(format_args!("kubectl psjob why {JOB}:\n{why}"));
    ensure!(why.contains("create the bucket"), "{why}");
    store.shell(&format!("mkdir {FOLDER}/other")).await?;
    until(&jobs, JOB, SHORT, "the job to find its bucket", |job| fails(job, "False")).await?;
    delete(namespace).await
}

/// Returns whether a job has the condition CheckpointFailing, with this status.
fn fails(job: Option<&ParameterServerJob>, status: &str) -> bool {
    let conditions = job.and_then(|job| job.status.as_ref()).map(|status| &status.conditions);
    let mut failing = conditions.into_iter().flatten().filter(|found| found.type_ == ConditionType::CheckpointFailing);
    failing.any(|found| found.status == status)
}

/// Waits for a checkpoint of the job after its first step.
pub async fn is_kept(namespace: &TestNamespace) -> Result<()> {
    let kept = |job: Option<&ParameterServerJob>| {
        job.and_then(|job| job.status.as_ref()?.last_checkpoint.as_ref()).is_some_and(|kept| kept.step > 0)
    };
    until(&namespace.jobs(), JOB, TRAINING, "a checkpoint in the job's status", kept).await.map(drop)
}

/// Checks that no pod uses a volume that outlives it, and that the namespace has none.
pub async fn has_no_claim(namespace: &TestNamespace) -> Result<()> {
    let claims = namespace.kubectl(&["get", "persistentvolumeclaims", "--output", "name"]).await?;
    ensure!(claims.trim().is_empty(), "a job without a volume has {claims}");
    let pods = namespace.pods().list(&ListParams::default()).await?.items;
    ensure!(!pods.is_empty(), "the job has no pod");
    for pod in pods {
        let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
        let claims = volumes.filter(|volume| volume.persistent_volume_claim.is_some()).count();
        ensure!(claims == 0, "{} has a volume that outlives it", pod.name_any());
    }
    Ok(())
}

/// Deletes the job with all that belongs to it.
pub async fn delete(namespace: &TestNamespace) -> Result<()> {
    namespace.jobs().delete(JOB, &DeleteParams::foreground()).await?;
    until_none(&namespace.pods(), &ListParams::default(), SHORT, "the deleted job's pods to go").await?;
    until_none(&namespace.jobs(), &ListParams::default(), SHORT, "the deleted job to go").await
}

async fn go_on(namespace: &TestNamespace, store: &Store) -> Result<()> {
    let job = job("s3://bucket/jobs")?;
    namespace.apply(&job).await?;
    is_kept(namespace).await?;
    has_no_claim(namespace).await?;
    delete(namespace).await?;

    namespace.apply(&job).await?;
    let restored = line(&namespace.pods(), &format!("{JOB}-ps-0"), &["restored from a checkpoint"], SHORT).await?;
    namespace.print(format_args!("{}", restored.text));
    ensure!(restored.text.contains("s3://bucket/jobs/mnist-checkpoint/run-00001/"), "{}", restored.text);
    let status = namespace.phase(JOB, Phase::Succeeded, TRAINING).await?;
    let model = status.model.context("the model")?;
    ensure!(model.path == "s3://bucket/jobs/mnist-checkpoint/model.safetensors", "the model is at {}", model.path);
    let accuracy = model.metric.context("the model's metric")?;
    ensure!(accuracy.name == "accuracy" && accuracy.value > PACED_ACCURACY, "the model's metric is {accuracy:?}");
    let size = store.shell(&format!("stat -c %s {FOLDER}/bucket/jobs/{JOB}/model.safetensors")).await?;
    let size = size.trim().parse::<u64>()?;
    ensure!(size > 800_000, "the model of 200,000 parameters has {size} bytes");
    let fetched = tempfile::tempdir()?;
    fetch_model(namespace, store, fetched.path(), size).await?;
    fetch_checkpoint(namespace, JOB, 1, fetched.path()).await?;
    let left = namespace.pods().list(&ListParams::default()).await?.items;
    // A pod that was deleted may still end.
    let left: Vec<_> = left.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).collect();
    ensure!(left.iter().all(|pod| !pod.name_any().contains("-read-")), "pods that read are left: {left:?}");

    namespace.jobs().delete(JOB, &DeleteParams::foreground()).await?;
    until_none(&namespace.jobs(), &ListParams::default(), SHORT, "the deleted job to go").await?;
    let gone = namespace.psjob(&["checkpoint", "list", JOB]).await.err().context("the job is deleted")?;
    ensure!(format!("{gone:#}").contains("there is no job"), "{gone:#}");
    let deleted = ["checkpoint", "list", JOB, "--url", "s3://bucket/jobs", "--secret", KEYS];
    let listed = namespace.psjob(&deleted).await?;
    namespace.print(listed.trim_end());
    ensure!(listed.contains(JOB), "{listed}");
    Ok(())
}

/// Fetches the model, which has `size` bytes in the bucket; then once more with a Secret that the store does not take.
async fn fetch_model(namespace: &TestNamespace, store: &Store, folder: &Path, size: u64) -> Result<()> {
    let file = folder.join("model.safetensors");
    let path = file.to_str().context("a path of text")?;
    let said = namespace.psjob(&["model", JOB, "--output", path]).await?;
    namespace.print(said.trim_end());
    let bytes = std::fs::read(&file)?;
    ensure!(bytes.len() as u64 == size, "{} bytes came of {size}", bytes.len());
    ensure!(!SafeTensors::deserialize(&bytes)?.is_empty(), "the model of {} bytes has no tensors", bytes.len());

    store.create_secret(namespace, "other-keys", "nothing").await?;
    let denied = ["model", JOB, "--url", "s3://bucket/jobs", "--secret", "other-keys", "--output", path, "--force"];
    let denied = namespace.psjob(&denied).await.err().context("the keys are wrong")?;
    ensure!(format!("{denied:#}").contains("check the credentials"), "{denied:#}");
    ensure!(std::fs::read(&file)? == bytes, "a model that cannot be fetched replaces none");
    Ok(())
}
