//! The operator is killed, doubled, upgraded, rolled back, and the API server restarts; the pods of jobs never notice.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use futures::StreamExt;
use kube::ResourceExt;
use kube::api::DeleteParams;
use kube::runtime::{WatchStreamExt, watcher};
use psjobs_api::crd::{ParameterServerJob, Phase};
use psjobs_e2e::command::run;
use psjobs_e2e::logs::line;
use psjobs_e2e::manifest::training;
use psjobs_e2e::site::Site;
use psjobs_e2e::wait::{SHORT, TRAINING, until, within};
use psjobs_e2e::{nodes, operator};

const JOBS: usize = 10;
const KILLS: usize = 20;
/// Longest time between two kills: half of the new ones are killed before they could lead.
const PAUSE: Duration = Duration::from_secs(12);
/// A dead leader's lease holds for eight seconds.
const HANDOVER: Duration = Duration::from_secs(15);

pub async fn killed_twenty_times(site: &Site) -> Result<()> {
    let mut seen = BTreeMap::<String, BTreeSet<String>>::new();
    let watching = async {
        let pods = watcher(site.pods(), watcher::Config::default()).default_backoff().applied_objects();
        let mut pods = pin!(pods);
        while let Some(pod) = pods.next().await {
            if let Ok(pod) = pod {
                seen.entry(pod.name_any()).or_default().extend(pod.uid());
            }
        }
    };
    let told = tokio::select! {
        told = jobs_and_kills(site) => told,
        () = watching => bail!("the watch of pods ended"),
    };
    told?;
    ensure!(seen.len() == 2 * JOBS, "{} pods were seen instead of {}: {seen:?}", seen.len(), 2 * JOBS);
    let twice: Vec<_> = seen.iter().filter(|(_, uids)| uids.len() > 1).collect();
    ensure!(twice.is_empty(), "pods were made twice: {twice:?}");
    Ok(())
}

async fn jobs_and_kills(site: &Site) -> Result<()> {
    let mut led = 0;
    for kill in 0..KILLS {
        if kill % (KILLS / JOBS) == 0 {
            site.apply(&small_job(kill * JOBS / KILLS)?).await?;
        }
        // At a random moment of whatever goes on.
        tokio::time::sleep(PAUSE.mul_f64(rand::random())).await;
        let mut pods = operator::running(&site.cluster).await?;
        if let Some(pod) = pods.pop() {
            led += usize::from(operator::leader(&site.cluster, |_| true, SHORT).await? == pod);
            operator::kill(&site.cluster, &pod).await?;
        }
    }
    println!("    {led} of the killed led");
    for job in 0..JOBS {
        let status = site.phase(&format!("job-{job}"), Phase::Succeeded, TRAINING).await?;
        ensure!(status.restarts == 0, "{} pods of job-{job} were replaced", status.restarts);
    }
    Ok(())
}

/// One server and one trainer, for some seconds.
fn small_job(index: usize) -> Result<ParameterServerJob> {
    let mut job = training(&["train", "mlp", "--max-steps", "1500"])?;
    job.metadata.name = Some(format!("job-{index}"));
    job.spec.trainer.replicas = 1;
    Ok(job)
}

pub async fn one_takes_over(site: &Site) -> Result<()> {
    operator::scale(&site.cluster, 2).await?;
    let told = taken_over(site).await;
    operator::scale(&site.cluster, 1).await?;
    told
}

async fn taken_over(site: &Site) -> Result<()> {
    let before = running(site, "500").await?;
    let leader = operator::leader(&site.cluster, |_| true, SHORT).await?;
    operator::kill(&site.cluster, &leader).await?;
    let killed = Instant::now();
    // Nobody but its successor can find out about this one.
    site.pods().delete("mnist-trainer-1", &DeleteParams::default().grace_period(0)).await?;
    let next = operator::leader(&site.cluster, |name| name != leader, HANDOVER).await?;
    println!("    {next} leads {:.1} s after {leader} was killed", killed.elapsed().as_secs_f64());
    let uid = before["mnist-trainer-1"].clone();
    let another = |pod: Option<&k8s_openapi::api::core::v1::Pod>| pod.is_some_and(|pod| pod.uid() != uid);
    until(&site.pods(), "mnist-trainer-1", SHORT, "the lost trainer to be replaced", another).await?;
    let status = site.phase("mnist", Phase::Succeeded, TRAINING).await?;
    ensure!((status.restarts, status.restarts_counted) == (1, 0), "{status:?}");
    untouched(site, &before, &["mnist-ps-0", "mnist-trainer-0"]).await
}

pub async fn upgraded_and_rolled_back(site: &Site) -> Result<()> {
    let before = running(site, "800").await?;
    let all: Vec<&str> = before.keys().map(String::as_str).collect();
    for arguments in [
        &["upgrade", "charts/psjobs", "--reuse-values", "--set-string", "podAnnotations.upgrade=yes"][..],
        &["rollback"],
    ] {
        let old = operator::running(&site.cluster).await?;
        site.cluster.helm(arguments).await?;
        let new = operator::leader(&site.cluster, |name| !old.iter().any(|old| old == name), SHORT).await?;
        println!("    {}: {new} leads", arguments[0]);
        untouched(site, &before, &all).await?;
    }
    let status = site.phase("mnist", Phase::Succeeded, TRAINING).await?;
    ensure!(status.restarts == 0, "{} pods were replaced though nothing happened to them", status.restarts);
    untouched(site, &before, &all).await
}

pub async fn the_api_server_restarts(site: &Site) -> Result<()> {
    let before = running(site, "600").await?;
    let node = nodes::control_plane(&site.cluster).await?;
    run("docker", &["exec", &node, "pkill", "-KILL", "-x", "kube-apiserver"]).await?;
    let killed = Instant::now();
    let answers = async {
        let mut looks = tokio::time::interval(Duration::from_millis(500));
        while site.cluster.client.apiserver_version().await.is_err() {
            looks.tick().await;
        }
        Ok(())
    };
    within(SHORT, "the API server to come back", answers).await?;
    println!("    the API server answers {:.1} s after it was killed", killed.elapsed().as_secs_f64());
    let status = site.phase("mnist", Phase::Succeeded, TRAINING).await?;
    ensure!(status.restarts == 0, "{} pods were replaced though nothing happened to them", status.restarts);
    untouched(site, &before, &before.keys().map(String::as_str).collect::<Vec<_>>()).await
}

/// Starts a job of so many steps, and waits until it trains. Its pods' uids.
async fn running(site: &Site, steps: &str) -> Result<BTreeMap<String, Option<String>>> {
    site.apply(&training(&["train", "mnist", "--max-steps", steps])?).await?;
    site.phase("mnist", Phase::Running, SHORT).await?;
    line(&site.pods(), "mnist-trainer-1", &["training", "step="], TRAINING).await?;
    site.uids("mnist").await
}

async fn untouched(site: &Site, before: &BTreeMap<String, Option<String>>, pods: &[&str]) -> Result<()> {
    let now = site.uids("mnist").await?;
    for &pod in pods {
        let uid = before.get(pod).with_context(|| format!("{pod} was there"))?;
        ensure!(now.get(pod) == Some(uid), "{pod} was replaced: {before:?} became {now:?}");
    }
    Ok(())
}
