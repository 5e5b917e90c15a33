//! The operator is killed, scaled, upgraded, rolled back, and the API server restarts; no pod of a job is replaced.

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
use psjobs_e2e::namespace::TestNamespace;
use psjobs_e2e::wait::{SHORT, TRAINING, until, within};
use psjobs_e2e::{nodes, operator};

const JOBS: usize = 10;
const KILLS: usize = 20;
/// Longest time between two kills: half of the new operators are killed before they could lead.
const PAUSE: Duration = Duration::from_secs(12);
/// Deadline of a handover; a dead leader's lease expires after eight seconds.
const HANDOVER: Duration = Duration::from_secs(15);

pub async fn killed_twenty_times(namespace: &TestNamespace) -> Result<()> {
    let mut seen = BTreeMap::<String, BTreeSet<String>>::new();
    let watching = async {
        let pods = watcher(namespace.pods(), watcher::Config::default()).default_backoff().applied_objects();
        let mut pods = pin!(pods);
        while let Some(pod) = pods.next().await {
            if let Ok(pod) = pod {
                seen.entry(pod.name_any()).or_default().extend(pod.uid());
            }
        }
    };
    let result = tokio::select! {
        result = jobs_and_kills(namespace) => result,
        () = watching => bail!("the watch of pods ended"),
    };
    result?;
    ensure!(seen.len() == 2 * JOBS, "{} pods were seen instead of {}: {seen:?}", seen.len(), 2 * JOBS);
    let twice: Vec<_> = seen.iter().filter(|(_, uids)| uids.len() > 1).collect();
    ensure!(twice.is_empty(), "pods were made twice: {twice:?}");
    Ok(())
}

async fn jobs_and_kills(namespace: &TestNamespace) -> Result<()> {
    let mut led = 0;
    for kill in 0..KILLS {
        if kill % (KILLS / JOBS) == 0 {
            namespace.apply(&small_job(kill * JOBS / KILLS)?).await?;
        }
        // A random time, so that kills hit every phase of a job.
        tokio::time::sleep(PAUSE.mul_f64(rand::random())).await;
        let mut pods = operator::running(&namespace.cluster).await?;
        if let Some(pod) = pods.pop() {
            led += usize::from(operator::leader(&namespace.cluster, |_| true, SHORT).await? == pod);
            operator::kill(&namespace.cluster, &pod).await?;
        }
    }
    namespace.print(format_args!("{led} of the killed led"));
    for job in 0..JOBS {
        let status = namespace.phase(&format!("job-{job}"), Phase::Succeeded, TRAINING).await?;
        ensure!(status.restarts == 0, "{} pods of job-{job} were replaced", status.restarts);
    }
    Ok(())
}

/// Returns a job of one server and one trainer that trains for some seconds.
fn small_job(index: usize) -> Result<ParameterServerJob> {
    let mut job = training(&["train", "mlp", "--max-steps", "1500"])?;
    job.metadata.name = Some(format!("job-{index}"));
    job.spec.trainer.replicas = 1;
    Ok(job)
}

pub async fn one_takes_over(namespace: &TestNamespace) -> Result<()> {
    operator::scale(&namespace.cluster, 2).await?;
    let result = taken_over(namespace).await;
    operator::scale(&namespace.cluster, 1).await?;
    result
}

async fn taken_over(namespace: &TestNamespace) -> Result<()> {
    let before = running(namespace, "500").await?;
    let leader = operator::leader(&namespace.cluster, |_| true, SHORT).await?;
    operator::kill(&namespace.cluster, &leader).await?;
    let killed = Instant::now();
    // Only the next leader can see this deletion.
    namespace.pods().delete("mnist-trainer-1", &DeleteParams::default().grace_period(0)).await?;
    let next = operator::leader(&namespace.cluster, |name| name != leader, HANDOVER).await?;
    namespace.print(format_args!("{next} leads {:.1} s after {leader} was killed", killed.elapsed().as_secs_f64()));
    let uid = before["mnist-trainer-1"].clone();
    let another = |pod: Option<&k8s_openapi::api::core::v1::Pod>| pod.is_some_and(|pod| pod.uid() != uid);
    until(&namespace.pods(), "mnist-trainer-1", SHORT, "the lost trainer to be replaced", another).await?;
    let status = namespace.phase("mnist", Phase::Succeeded, TRAINING).await?;
    ensure!((status.restarts, status.restarts_counted) == (1, 0), "{status:?}");
    untouched(namespace, &before, &["mnist-ps-0", "mnist-trainer-0"]).await
}

pub async fn upgraded_and_rolled_back(namespace: &TestNamespace) -> Result<()> {
    let before = running(namespace, "800").await?;
    let all: Vec<&str> = before.keys().map(String::as_str).collect();
    for arguments in [
        &["upgrade", "charts/psjobs", "--reuse-values", "--set-string", "podAnnotations.upgrade=yes"][..],
        &["rollback"],
    ] {
        let old = operator::running(&namespace.cluster).await?;
        namespace.cluster.helm(arguments).await?;
        let new = operator::leader(&namespace.cluster, |name| !old.iter().any(|old| old == name), SHORT).await?;
        namespace.print(format_args!("{}: {new} leads", arguments[0]));
        untouched(namespace, &before, &all).await?;
    }
    let status = namespace.phase("mnist", Phase::Succeeded, TRAINING).await?;
    ensure!(status.restarts == 0, "{} pods were replaced though nothing happened to them", status.restarts);
    untouched(namespace, &before, &all).await
}

pub async fn the_api_server_restarts(namespace: &TestNamespace) -> Result<()> {
    let before = running(namespace, "600").await?;
    let node = nodes::control_plane(&namespace.cluster).await?;
    run("docker", &["exec", &node, "pkill", "-KILL", "-x", "kube-apiserver"]).await?;
    let killed = Instant::now();
    let answers = async {
        let mut looks = tokio::time::interval(Duration::from_millis(500));
        while namespace.cluster.client.apiserver_version().await.is_err() {
            looks.tick().await;
        }
        Ok(())
    };
    within(SHORT, "the API server to come back", answers).await?;
    namespace.print(format_args!("the API server answers {:.1} s after it was killed", killed.elapsed().as_secs_f64()));
    let status = namespace.phase("mnist", Phase::Succeeded, TRAINING).await?;
    ensure!(status.restarts == 0, "{} pods were replaced though nothing happened to them", status.restarts);
    untouched(namespace, &before, &before.keys().map(String::as_str).collect::<Vec<_>>()).await
}

/// Starts a job of `steps` steps, waits until it trains, and returns its pods' uids.
async fn running(namespace: &TestNamespace, steps: &str) -> Result<BTreeMap<String, Option<String>>> {
    namespace.apply(&training(&["train", "mnist", "--max-steps", steps])?).await?;
    namespace.phase("mnist", Phase::Running, SHORT).await?;
    line(&namespace.pods(), "mnist-trainer-1", &["training", "step="], TRAINING).await?;
    namespace.uids("mnist").await
}

async fn untouched(namespace: &TestNamespace, before: &BTreeMap<String, Option<String>>, pods: &[&str]) -> Result<()> {
    let now = namespace.uids("mnist").await?;
    for &pod in pods {
        let uid = before.get(pod).with_context(|| format!("{pod} was there"))?;
        ensure!(now.get(pod) == Some(uid), "{pod} was replaced: {before:?} became {now:?}");
    }
    Ok(())
}
