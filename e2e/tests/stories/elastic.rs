//! A job gets more trainers while it trains, and then fewer; nobody else notices.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use psjobs_api::Role;
use psjobs_api::crd::{ParameterServerJob, Phase};
use psjobs_e2e::logs::line;
use psjobs_e2e::manifest::{from_file, main_container};
use psjobs_e2e::site::Site;
use psjobs_e2e::wait::{SHORT, TRAINING, until};

const JOB: &str = "elastic";
/// Of one pass over the data, whoever reads it.
const ACCURACY: f64 = 0.96;

pub async fn grows_and_shrinks(site: &Site) -> Result<()> {
    let mut job = from_file("examples/elastic.yaml")?;
    main_container(&mut job)?.args = Some(["train", "mnist", "--epochs", "1"].map(str::to_owned).into());
    site.apply(&job).await?;
    site.phase(JOB, Phase::Running, SHORT).await?;
    trains(site, 0).await?;
    let from_the_start = site.uids(JOB).await?;

    scale(site, 3).await?;
    trainers(site, "3/3").await?;
    // It takes part, rather than only being there.
    let joined = trains(site, 2).await?;
    println!("    trainer 2: {joined}");
    let now = site.uids(JOB).await?;
    ensure!(from_the_start.iter().all(|(name, uid)| now.get(name) == Some(uid)), "{from_the_start:?} became {now:?}");

    scale(site, 1).await?;
    for index in [1, 2] {
        let gone = |pod: Option<&Pod>| pod.is_none();
        until(&site.pods(), &pod(index), SHORT, &format!("trainer {index} to leave"), gone).await?;
    }
    trainers(site, "1/1").await?;
    let now = site.uids(JOB).await?;
    ensure!(now.iter().all(|(name, uid)| from_the_start.get(name) == Some(uid)), "{from_the_start:?} became {now:?}");
    ensure!(now.len() == 2, "there are {now:?} instead of a server and a trainer");

    let status = site.phase(JOB, Phase::Succeeded, TRAINING).await?;
    ensure!(status.restarts == 0 && status.last_failure.is_none(), "being scaled was taken for a failure: {status:?}");
    let metrics = status.progress.context("a job that succeeded tells its progress")?.metrics;
    let accuracy = metrics.iter().find(|metric| metric.name == "accuracy").context("the job tells its accuracy")?.value;
    println!("    2, 3, then 1 trainers; accuracy {accuracy:.4} (at least {ACCURACY})");
    ensure!(accuracy >= ACCURACY, "the accuracy is {accuracy}");
    site.event("ScaledUp", "Scaled from 2 to 3 trainers").await?;
    site.event("ScaledDown", "Scaled from 3 to 1 trainers").await
}

async fn scale(site: &Site, trainers: u32) -> Result<()> {
    site.kubectl(&["scale", &format!("psjob/{JOB}"), &format!("--replicas={trainers}")]).await?;
    Ok(())
}

/// Waits until the column Trainers shows `summary`, and the job runs all the while.
async fn trainers(site: &Site, summary: &str) -> Result<()> {
    let shows = |job: Option<&ParameterServerJob>| {
        let trainer = job.and_then(|job| job.status.as_ref()?.trainer.as_ref());
        trainer.is_some_and(|trainer| trainer.summary == summary)
    };
    let what = format!("{JOB} to have {summary} trainers");
    let job = until(&site.jobs(), JOB, SHORT, &what, shows).await?.context("it was there")?;
    let phase = job.status.and_then(|status| status.phase);
    ensure!(phase == Some(Phase::Running), "with {summary} trainers the job is {phase:?}");
    Ok(())
}

/// What a trainer says when it has made steps.
async fn trains(site: &Site, trainer: u32) -> Result<String> {
    Ok(line(&site.pods(), &pod(trainer), &["training", "step="], TRAINING).await?.text)
}

fn pod(trainer: u32) -> String {
    psjobs_api::crd::names::pod(JOB, Role::Trainer, trainer)
}
