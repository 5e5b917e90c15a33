//! A job has its state in a bucket of S3, which versitygw plays on a node.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use kube::ResourceExt as _;
use kube::api::{DeleteParams, ListParams};
use psjobs_api::crd::{CheckpointSpec, ConditionType, ParameterServerJob, Phase};
use psjobs_e2e::command::run;
use psjobs_e2e::logs::line;
use psjobs_e2e::manifest::{PACED, PACED_ACCURACY, from_file, main_container};
use psjobs_e2e::namespace::TestNamespace;
use psjobs_e2e::nodes::address;
use psjobs_e2e::wait::{SHORT, TRAINING, until, until_none, until_ok};
use safetensors::SafeTensors;
use serde_json::json;

use super::suspend::fetch_checkpoint;

const JOB: &str = "mnist-checkpoint";
const KEY: &str = "key";
const SECRET: &str = "secretsecret";
/// Where the store listens, on all addresses of its node.
const PORT: u16 = 17_070;
const PROGRAM: &str = "/usr/local/bin/versitygw";
const FOLDER: &str = "/var/lib/psjobs-e2e-store";

/// Deletes a job with all that belongs to it: another job goes on from what it has left in the bucket. Before, a job whose
/// bucket is not there says so.
pub async fn job_outlives_its_deletion(namespace: &TestNamespace) -> Result<()> {
    let store = Store::start(namespace).await?;
    let test = async {
        create_keys(namespace, &store).await?;
        find_a_bucket(namespace, &store).await?;
        go_on(namespace, &store).await
    };
    let ended = test.await;
    store.stop().await?;
    ended
}

async fn create_keys(namespace: &TestNamespace, store: &Store) -> Result<()> {
    let keys = [
        format!("--from-literal=AWS_ACCESS_KEY_ID={KEY}"),
        format!("--from-literal=AWS_SECRET_ACCESS_KEY={SECRET}"),
        format!("--from-literal=AWS_ENDPOINT={}", store.endpoint),
        "--from-literal=AWS_REGION=us-east-1".to_owned(),
    ];
    let create: Vec<&str> =
        ["create", "secret", "generic", "store-keys"].into_iter().chain(keys.iter().map(String::as_str)).collect();
    namespace.kubectl(&create).await.map(drop)
}

/// Returns a job that is kept below a URL.
fn job(url: &str) -> Result<ParameterServerJob> {
    let mut job = from_file("examples/mnist-checkpoint.yaml")?;
    main_container(&mut job)?.args = Some(PACED.map(str::to_owned).into());
    let checkpoint = json!({"objectStore": {"url": url, "secret": "store-keys"}, "intervalSeconds": 2});
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

/// Deletes the job with all that belongs to it.
async fn delete(namespace: &TestNamespace) -> Result<()> {
    namespace.jobs().delete(JOB, &DeleteParams::foreground()).await?;
    until_none(&namespace.pods(), &ListParams::default(), SHORT, "the deleted job's pods to go").await?;
    until_none(&namespace.jobs(), &ListParams::default(), SHORT, "the deleted job to go").await
}

async fn go_on(namespace: &TestNamespace, store: &Store) -> Result<()> {
    let job = job("s3://bucket/jobs")?;
    namespace.apply(&job).await?;
    let kept = |job: Option<&ParameterServerJob>| {
        job.and_then(|job| job.status.as_ref()?.last_checkpoint.as_ref()).is_some_and(|kept| kept.step > 0)
    };
    until(&namespace.jobs(), JOB, TRAINING, "a checkpoint in the job's status", kept).await?;
    let claims = namespace.kubectl(&["get", "persistentvolumeclaims", "--output", "name"]).await?;
    ensure!(claims.trim().is_empty(), "a job without a volume has {claims}");
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
    fetch_model(namespace, &store.endpoint, fetched.path(), size).await?;
    fetch_checkpoint(namespace, JOB, 1, fetched.path()).await?;
    let left = namespace.pods().list(&ListParams::default()).await?.items;
    // A pod that was deleted may still end.
    let left: Vec<_> = left.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).collect();
    ensure!(left.iter().all(|pod| !pod.name_any().contains("-read-")), "pods that read are left: {left:?}");

    namespace.jobs().delete(JOB, &DeleteParams::foreground()).await?;
    until_none(&namespace.jobs(), &ListParams::default(), SHORT, "the deleted job to go").await?;
    let gone = namespace.psjob(&["checkpoint", "list", JOB]).await.err().context("the job is deleted")?;
    ensure!(format!("{gone:#}").contains("there is no job"), "{gone:#}");
    let deleted = ["checkpoint", "list", JOB, "--url", "s3://bucket/jobs", "--secret", "store-keys"];
    let listed = namespace.psjob(&deleted).await?;
    namespace.print(listed.trim_end());
    ensure!(listed.contains(JOB), "{listed}");
    Ok(())
}

/// Fetches the model, which has `size` bytes in the bucket; then once more with a Secret that the store does not take.
async fn fetch_model(namespace: &TestNamespace, endpoint: &str, folder: &Path, size: u64) -> Result<()> {
    let file = folder.join("model.safetensors");
    let path = file.to_str().context("a path of text")?;
    let said = namespace.psjob(&["model", JOB, "--output", path]).await?;
    namespace.print(said.trim_end());
    let bytes = std::fs::read(&file)?;
    ensure!(bytes.len() as u64 == size, "{} bytes came of {size}", bytes.len());
    ensure!(!SafeTensors::deserialize(&bytes)?.is_empty(), "the model of {} bytes has no tensors", bytes.len());

    let keys = [
        &format!("--from-literal=AWS_ACCESS_KEY_ID={KEY}"),
        "--from-literal=AWS_SECRET_ACCESS_KEY=nothing",
        "--from-literal=AWS_REGION=us-east-1",
        &format!("--from-literal=AWS_ENDPOINT={endpoint}"),
    ];
    let create = ["create", "secret", "generic", "other-keys"];
    namespace.kubectl(&[&create[..], &keys[..]].concat()).await?;
    let denied = ["model", JOB, "--url", "s3://bucket/jobs", "--secret", "other-keys", "--output", path, "--force"];
    let denied = namespace.psjob(&denied).await.err().context("the keys are wrong")?;
    ensure!(format!("{denied:#}").contains("check the credentials"), "{denied:#}");
    ensure!(std::fs::read(&file)? == bytes, "a model that cannot be fetched replaces none");
    Ok(())
}

/// A store on a node, which is a container of this machine: pods reach it there wherever the tests run.
struct Store {
    node: String,
    endpoint: String,
}

impl Store {
    /// Starts it with an empty bucket.
    async fn start(namespace: &TestNamespace) -> Result<Self> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/object-stores.sh");
        let programs = run(script.to_str().context("a path of text")?, &[]).await?;
        let nodes = namespace.kubectl(&["get", "nodes", "--output", "jsonpath={.items[0].metadata.name}"]).await?;
        let node = nodes.trim().to_owned();
        let address = address(&node).await?;
        let store = Self { node, endpoint: format!("http://{address}:{PORT}") };
        run("docker", &["cp", &format!("{}/versitygw", programs.trim()), &format!("{}:{PROGRAM}", store.node)]).await?;
        store.stop().await?;
        store.shell(&format!("mkdir -p {FOLDER}/bucket")).await?;
        let listen = format!("--port 0.0.0.0:{PORT} --access {KEY} --secret {SECRET} --quiet posix {FOLDER}");
        run("docker", &["exec", "--detach", &store.node, "sh", "-c", &format!("exec {PROGRAM} {listen}")]).await?;
        let answers = format!("bash -c 'echo > /dev/tcp/127.0.0.1/{PORT}'");
        until_ok(SHORT, "the store to listen", || store.shell(&answers)).await?;
        Ok(store)
    }

    /// Runs a command on the node, and returns its output.
    async fn shell(&self, command: &str) -> Result<String> {
        run("docker", &["exec", &self.node, "sh", "-c", command]).await
    }

    /// Ends it, if it runs, and removes its objects.
    async fn stop(&self) -> Result<()> {
        self.shell("pkill versitygw || true").await?;
        until_ok(SHORT, "the store to end", || self.shell("! pgrep versitygw")).await?;
        self.shell(&format!("rm -rf {FOLDER}")).await.map(drop)
    }
}
