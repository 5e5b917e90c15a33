//! A job with its data and its checkpoints in a bucket, and no volume, is watched in Chromium while its pods are killed,
//! and looked up there after it was deleted. Where Chromium is missing, all of that is done but the watching.

use std::fs;
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::DeleteParams;
use psjobs_api::crd::{ParameterServerJob, Phase};
use psjobs_e2e::command::run;
use psjobs_e2e::logs::line;
use psjobs_e2e::manifest::{PACED_ACCURACY, main_container};
use psjobs_e2e::namespace::TestNamespace;
use psjobs_e2e::wait::{SHORT, TRAINING, until, within};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, serialize};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::object_store::{self, JOB, delete, has_no_claim, is_kept};
use super::store::{KEYS, Store};
use super::web::{Forwarded, is_recorded, token, with_page};

/// Names of the training and the test set in MNIST and in the bucket, and how many of their examples are there.
const EXAMPLES: [(&str, &str, usize); 2] = [("train", "train", 20_000), ("t10k", "test", 2_000)];
/// Arguments of trainers that take 32 ms for a step, most of which they sleep, and 48 s in all, for pods to be killed
/// meanwhile. Two trainers read the training set nearly five times.
const TRAIN: [&str; 10] =
    ["train", "mlp", "--max-steps", "1500", "--epochs", "5", "--example-ms", "1", "--data", "s3://bucket/data"];
/// Rows and columns of an image.
const SIDE: usize = 28;

pub async fn job_is_watched(namespace: &TestNamespace) -> Result<()> {
    let chromium = run("scripts/browser.sh", &[]).await?;
    if chromium.trim().is_empty() {
        namespace.print("no browser watches the job: that needs node 20 or later, and Chromium or Chrome on the PATH");
    }
    let store = Store::start(namespace).await?;
    let ended = with_page(namespace, watched(namespace, &store, chromium.trim())).await;
    store.stop().await?;
    ended
}

async fn watched(namespace: &TestNamespace, store: &Store, chromium: &str) -> Result<()> {
    store.create_keys(namespace).await?;
    put_data(store).await?;
    let (token, server) = (token(namespace).await?, Forwarded::start(namespace).await?);
    let key = format!("{}/{JOB}", namespace.name);
    let mut browser = Browser::start(chromium, &server.host, &token, &key)?;
    browser.sees("the list").await?;

    namespace.apply(&job()?).await?;
    browser.sees("a loss").await?;
    is_kept(namespace).await?;
    has_no_claim(namespace).await?;

    kill(namespace, "trainer-1").await?;
    browser.sees("trainer-1 again").await?;
    // Two pods that are away at the same time are one event.
    namespace.phase(JOB, Phase::Running, SHORT).await?;
    kill(namespace, "ps-0").await?;
    let restored = line(&namespace.pods(), &format!("{JOB}-ps-0"), &["restored from a checkpoint"], SHORT).await?;
    namespace.print(format_args!("{}", restored.text));
    ensure!(restored.text.contains("s3://bucket/jobs/"), "{}", restored.text);
    browser.sees("ps-0 again").await?;

    let status = namespace.phase(JOB, Phase::Succeeded, TRAINING).await?;
    ensure!(status.restarts >= 2, "{} pods were replaced instead of 2", status.restarts);
    let model = status.model.context("the model")?;
    ensure!(model.path == "s3://bucket/jobs/mnist-checkpoint/model.safetensors", "the model is at {}", model.path);
    let accuracy = model.metric.context("the model's metric")?;
    namespace.print(format_args!("{} {:.4}", accuracy.name, accuracy.value));
    ensure!(accuracy.name == "accuracy" && accuracy.value > PACED_ACCURACY, "the model's metric is {accuracy:?}");
    browser.sees("the end").await?;

    is_recorded(namespace, &key).await?;
    let before = browser.look().await?;
    delete(namespace).await?;
    let after = browser.look().await?;
    ensure!(before == after, "before the deletion:\n{before}\nafter it:\n{after}");
    browser.end().await
}

/// Puts a part of MNIST into the store's bucket, below `data`.
async fn put_data(store: &Store) -> Result<()> {
    let said = run("scripts/mnist.sh", &[]).await?;
    let (_, mnist) = said.trim_end().rsplit_once(" are in ").context("scripts/mnist.sh says where MNIST is")?;
    let folder = tempfile::tempdir()?;
    for (name, part, examples) in EXAMPLES {
        fs::create_dir(folder.path().join(part))?;
        let tensors = tensors(Path::new(mnist), name, examples)?;
        fs::write(folder.path().join(part).join("part-0.safetensors"), tensors)?;
    }
    store.put(folder.path(), "data").await
}

/// Returns the first examples of a part of MNIST as safetensors.
fn tensors(mnist: &Path, name: &str, examples: usize) -> Result<Vec<u8>> {
    let read = |kind: &str, header: usize, bytes: usize| {
        let file = mnist.join(format!("{name}-{kind}-ubyte"));
        let all = fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let first = all.get(header..header + examples * bytes);
        first.map(<[u8]>::to_vec).with_context(|| format!("{} has less than {examples} examples", file.display()))
    };
    let (images, labels) = (read("images-idx3", 16, SIDE * SIDE)?, read("labels-idx1", 8, 1)?);
    let images = TensorView::new(Dtype::U8, vec![examples, SIDE, SIDE], &images)?;
    let labels = TensorView::new(Dtype::U8, vec![examples], &labels)?;
    Ok(serialize([("images", images), ("labels", labels)], None)?)
}

/// Returns a job that has everything in the store.
fn job() -> Result<ParameterServerJob> {
    let mut job = object_store::job("s3://bucket/jobs")?;
    let trainer = main_container(&mut job)?;
    trainer.args = Some(TRAIN.map(str::to_owned).into());
    trainer.env_from = Some(serde_json::from_value(json!([{"secretRef": {"name": KEYS}}]))?);
    Ok(job)
}

/// Deletes a pod without a grace period, so that its process cannot leave the job properly, and waits for another one.
async fn kill(namespace: &TestNamespace, process: &str) -> Result<()> {
    let (pods, name) = (namespace.pods(), format!("{JOB}-{process}"));
    let before = pods.get(&name).await?.uid();
    pods.delete(&name, &DeleteParams::default().grace_period(0)).await?;
    let another = |pod: Option<&Pod>| pod.is_some_and(|pod| pod.uid() != before);
    until(&pods, &name, SHORT, &format!("{name} to be replaced"), another).await.map(drop)
}

/// Chromium with the page of all jobs, which `web/browser/watch.mjs` drives. Without Chromium it sees nothing.
struct Browser(Option<Watch>);

struct Watch {
    node: Child,
    commands: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Browser {
    fn start(chromium: &str, host: &str, token: &str, job: &str) -> Result<Self> {
        if chromium.is_empty() {
            return Ok(Self(None));
        }
        let mut node = Command::new("node")
            .arg("web/browser/watch.mjs")
            .env("CHROMIUM", chromium)
            .env("ADDRESS", format!("http://{host}"))
            .env("TOKEN", token)
            .env("JOB", job)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("node does not start")?;
        let commands = node.stdin.take().context("standard input is piped")?;
        let output = node.stdout.take().context("standard output is piped")?;
        Ok(Self(Some(Watch { node, commands, lines: BufReader::new(output).lines() })))
    }

    /// Waits until the browser has seen `what`, and returns what it says of it.
    async fn sees(&mut self, what: &str) -> Result<Value> {
        let Some(watch) = &mut self.0 else { return Ok(Value::Null) };
        let line = async { anyhow::Ok(watch.lines.next_line().await?) };
        let line = within(TRAINING, &format!("the browser to see {what}"), line).await?;
        let line = line.with_context(|| format!("the browser has ended without {what}; it says why above"))?;
        let seen: Value = serde_json::from_str(&line)?;
        ensure!(seen["seen"] == what, "the browser has not seen {what} but {line}");
        Ok(seen)
    }

    /// Lets it load the page of the job and the list anew, and returns what they show.
    async fn look(&mut self) -> Result<Value> {
        if let Some(watch) = &mut self.0 {
            watch.commands.write_all(b"look\n").await.context("the browser has ended; it says why above")?;
        }
        self.sees("the record").await
    }

    /// Ends it, which fails if anything was wrong with a page.
    async fn end(self) -> Result<()> {
        let Some(Watch { mut node, commands, .. }) = self.0 else { return Ok(()) };
        drop(commands);
        let ended = within(SHORT, "the browser to end", async { anyhow::Ok(node.wait().await?) }).await?;
        ensure!(ended.success(), "the browser ended with {ended}; it says why above");
        Ok(())
    }
}
