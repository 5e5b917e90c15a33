//! A job is scaled up and down while it trains; no other pod is restarted.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use psjobs_api::Role;
use psjobs_api::crd::{ParameterServerJob, Phase};
use psjobs_e2e::logs::line;
use psjobs_e2e::manifest::{PACED_ACCURACY, from_file, main_container};
use psjobs_e2e::namespace::TestNamespace;
use psjobs_e2e::wait::{SHORT, TRAINING, until};

const JOB: &str = "elastic";
/// One epoch of all trainers together, each of which takes 64 ms for a step and sleeps for most of it.
const ARGUMENTS: [&str; 6] = ["train", "mlp", "--epochs", "1", "--example-ms", "2"];

pub async fn grows_and_shrinks(namespace: &TestNamespace) -> Result<()> {
    let mut job = from_file("examples/elastic.yaml")?;
    main_container(&mut job)?.args = Some(ARGUMENTS.map(str::to_owned).into());
    namespace.apply(&job).await?;
    namespace.phase(JOB, Phase::Running, SHORT).await?;
    trains(namespace, 0).await?;
    let from_the_start = namespace.uids(JOB).await?;

    scale(namespace, 3).await?;
    trainers(namespace, "3/3").await?;
    // The new trainer must train, not only run.
    let joined = trains(namespace, 2).await?;
    namespace.print(format_args!("trainer 2: {joined}"));
    let now = namespace.uids(JOB).await?;
    ensure!(from_the_start.iter().all(|(name, uid)| now.get(name) == Some(uid)), "{from_the_start:?} became {now:?}");

    scale(namespace, 1).await?;
    for index in [1, 2] {
        let gone = |pod: Option<&Pod>| pod.is_none();
        until(&namespace.pods(), &pod(index), SHORT, &format!("trainer {index} to leave"), gone).await?;
    }
    trainers(namespace, "1/1").await?;
    let now = namespace.uids(JOB).await?;
    ensure!(now.iter().all(|(name, uid)| from_the_start.get(name) == Some(uid)), "{from_the_start:?} became {now:?}");
    ensure!(now.len() == 2, "there are {now:?} instead of a server and a trainer");

    let status = namespace.phase(JOB, Phase::Succeeded, TRAINING).await?;
    ensure!(status.restarts == 0 && status.last_failure.is_none(), "being scaled was taken for a failure: {status:?}");
    let metrics = status.progress.context("a job that succeeded reports its progress")?.metrics;
    let accuracy = metrics.iter().find(|metric| metric.name == "accuracy").context("the job shows its accuracy")?.value;
    namespace.print(format_args!("2, 3, then 1 trainers; accuracy {accuracy:.4} (at least {PACED_ACCURACY})"));
    ensure!(accuracy >= PACED_ACCURACY, "the accuracy is {accuracy}");
    namespace.event("ScaledUp", "Scaled from 2 to 3 trainers").await?;
    namespace.event("ScaledDown", "Scaled from 3 to 1 trainers").await
}

async fn scale(namespace: &TestNamespace, trainers: u32) -> Result<()> {
    namespace.kubectl(&["scale", &format!("psjob/{JOB}"), &format!("--replicas={trainers}")]).await?;
    Ok(())
}

/// Waits until the column Trainers shows `summary`, and checks that the job still runs.
async fn trainers(namespace: &TestNamespace, summary: &str) -> Result<()> {
    let shows = |job: Option<&ParameterServerJob>| {
        let trainer = job.and_then(|job| job.status.as_ref()?.trainer.as_ref());
        trainer.is_some_and(|trainer| trainer.summary == summary)
    };
    let what = format!("{JOB} to have {summary} trainers");
    let job = until(&namespace.jobs(), JOB, SHORT, &what, shows).await?.context("it was there")?;
    let phase = job.status.and_then(|status| status.phase);
    ensure!(phase == Some(Phase::Running), "with {summary} trainers the job is {phase:?}");
    Ok(())
}

/// Waits for a trainer's log line about its steps.
async fn trains(namespace: &TestNamespace, trainer: u32) -> Result<String> {
    Ok(line(&namespace.pods(), &pod(trainer), &["training", "step="], TRAINING).await?.text)
}

fn pod(trainer: u32) -> String {
    psjobs_api::crd::names::pod(JOB, Role::Trainer, trainer)
}
