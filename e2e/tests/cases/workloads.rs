//! The other examples, for a few steps: the image has what they need, and they run without privileges.

use anyhow::{Context, Result, ensure};
use psjobs_api::crd::{ParameterServerJob, Phase};
use psjobs_e2e::logs::line;
use psjobs_e2e::namespace::TestNamespace;
use psjobs_e2e::wait::{SHORT, TRAINING};

pub async fn mnist_remote(namespace: &TestNamespace) -> Result<()> {
    runs(namespace, "mnist-remote", "train mnist-remote --max-steps 100").await
}

pub async fn cartpole(namespace: &TestNamespace) -> Result<()> {
    runs(namespace, "cartpole", "train cartpole --max-rounds 5").await
}

/// Runs `lm` while the server evaluates the model with its own copy of the text.
pub async fn lm(namespace: &TestNamespace) -> Result<()> {
    const MODEL: &str = "lm --words 2000 --held-out 2000";
    let serve = format!("serve evaluate {MODEL} --every 1");
    start(namespace, "lm", Some(&serve), &format!("train {MODEL} --max-steps 40")).await?;
    namespace.phase("lm", Phase::Running, SHORT).await?;
    line(&namespace.pods(), "lm-ps-0", &["evaluated", "perplexity="], TRAINING).await?;
    succeeds(namespace, "lm").await
}

/// Runs `recsys`: its trainers find each other through server 0 and all-reduce over a ring.
pub async fn recsys(namespace: &TestNamespace) -> Result<()> {
    runs(namespace, "recsys", "train recsys --keys 1000000 --examples 40000").await
}

async fn runs(namespace: &TestNamespace, example: &str, train: &str) -> Result<()> {
    start(namespace, example, None, train).await?;
    succeeds(namespace, example).await
}

/// Applies the example with other arguments.
async fn start(namespace: &TestNamespace, example: &str, serve: Option<&str>, train: &str) -> Result<()> {
    let text = std::fs::read_to_string(format!("examples/{example}.yaml"))?;
    let mut job: ParameterServerJob = serde_yaml::from_str(&text)?;
    let words = |line: &str| Some(line.split_whitespace().map(str::to_owned).collect());
    let pod = job.spec.trainer.template.spec.as_mut().context("the example's template has a spec")?;
    pod.containers[0].args = words(train);
    if let Some(serve) = serve {
        let template = job.spec.ps.template.as_mut().context("the example has a template of servers")?;
        template.spec.as_mut().context("it has a spec")?.containers[0].args = words(serve);
    }
    namespace.apply(&job).await?;
    Ok(())
}

async fn succeeds(namespace: &TestNamespace, example: &str) -> Result<()> {
    let status = namespace.phase(example, Phase::Succeeded, TRAINING).await?;
    ensure!(status.restarts == 0, "{} pods were replaced though nothing happened to them", status.restarts);
    let progress = status.progress.context("a job that succeeded reports its progress")?;
    ensure!(progress.step > 0, "no step was reported");
    Ok(())
}
