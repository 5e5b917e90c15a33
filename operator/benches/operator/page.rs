//! Measures the cluster's page: psjobs-web as a process of its own, beside jobs that run. There is no browser: the first
//! event that has all jobs, read and parsed, stands for the first paint.

mod server;
mod visitor;

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kube::Api;
use psjobs_api::crd::ParameterServerJob;
use serde_json::{Value, json};
use tokio_util::task::AbortOnDropHandle;

use crate::Site;
use crate::fleet::{Fleet, patch_status};
use crate::report::{print, quantile};
use server::Server;
pub use server::program;
use visitor::{Events, Visitor, load};

/// Cases of this scenario.
pub const CASES: [&str; 6] = [
    "page-first-paint-s",
    "page-list-lag-median-s",
    "page-list-lag-worst-s",
    "page-job-lag-median-s",
    "page-job-lag-worst-s",
    "page-peak-mib",
];

/// First visits, each with a token of its own, which psjobs-web has to ask the cluster about.
const VISITS: usize = 5;
const CHANGES: usize = 20;
/// Time from one change to the next. psjobs-web looks twice a second: each change falls at another time between two looks.
const PACE: Duration = Duration::from_millis(1130);

/// Measures psjobs-web, which is `program`, at jobs that run.
pub async fn measure(site: &Site, fleet: &Fleet, program: &Path) -> Result<()> {
    let (client, namespace) = (&site.client, &fleet.namespace);
    let visitor = Visitor::new(client, namespace).await?;
    let begin = Instant::now();
    let server = Server::start(program, client, &site.kubeconfig, &format!("page-of-{namespace}")).await?;
    eprintln!("page: ready after {:.2} s, with {:.1} MiB", begin.elapsed().as_secs_f64(), server.rss_mib()?);

    let mut visits = Vec::new();
    for _ in 0..VISITS {
        visits.push(first_paint(server.address, &visitor.token().await?, fleet.jobs).await?);
    }
    print("page-first-paint-s", "s", &visits, &[1.0]);
    eprintln!("page: the first of these took {:.3} s", visits[0]);

    let (list, job) = lags(site, fleet, server.address, &visitor.token().await?).await?;
    for (median, worst, values) in [
        ("page-list-lag-median-s", "page-list-lag-worst-s", &list),
        ("page-job-lag-median-s", "page-job-lag-worst-s", &job),
    ] {
        print(median, "s", values, &[1.0]);
        print(worst, "s", &[quantile(values, 1.0)], &[1.0]);
    }
    eprintln!("page: {:.1} MiB at the end", server.rss_mib()?);
    print("page-peak-mib", "MiB", &[server.peak_mib()?], &[100.0]);
    Ok(())
}

/// psjobs-web, and a browser that shows the list of a namespace's jobs, until it is dropped.
pub struct Shown {
    _reading: AbortOnDropHandle<()>,
    _server: Server,
}

/// Shows the list of a namespace's jobs.
pub async fn show(site: &Site, namespace: &str, program: &Path) -> Result<Shown> {
    let visitor = Visitor::new(&site.client, namespace).await?;
    let user = format!("page-of-{namespace}");
    let server = Server::start(program, &site.client, &site.kubeconfig, &user).await?;
    let mut events = Events::open(server.address, "/events", &visitor.token().await?).await?;
    events.next().await?;
    let reading = tokio::spawn(async move { while events.next().await.is_ok() {} });
    Ok(Shown { _reading: AbortOnDropHandle::new(reading), _server: server })
}

/// Seconds from the request for the page to the first event, which has all jobs.
async fn first_paint(address: SocketAddr, token: &str, jobs: usize) -> Result<f64> {
    let begin = Instant::now();
    load(address, token).await?;
    let listed = Events::open(address, "/events", token).await?.next().await?;
    let seconds = begin.elapsed().as_secs_f64();
    let listed = listed.as_object().context("the list of jobs is an object")?.len();
    ensure!(listed == jobs, "the first event has {listed} jobs; expected {jobs}");
    Ok(seconds)
}

/// Seconds from each change of a job's status, as it is sent, to the event with it: in the list, and at the job's page.
async fn lags(site: &Site, fleet: &Fleet, address: SocketAddr, token: &str) -> Result<(Vec<f64>, Vec<f64>)> {
    let jobs = Api::<ParameterServerJob>::namespaced(site.client.clone(), &fleet.namespace);
    let name = fleet.names().pop().context("there is a job")?;
    let key = format!("{}/{name}", fleet.namespace);
    let mut list = Events::open(address, "/events", token).await?;
    let mut page = Events::open(address, &format!("/events/{key}"), token).await?;
    let (mut of_list, mut of_job) = (Vec::new(), Vec::new());
    let mut ticks = tokio::time::interval(PACE);
    for step in 1..=CHANGES {
        ticks.tick().await;
        let progress = json!({"step": step, "totalSteps": CHANGES, "percent": step * 100 / CHANGES, "summary": "runs"});
        let begin = Instant::now();
        patch_status(&jobs, &name, &json!({ "progress": progress })).await?;
        let shows = |job: &Value| job["progress"]["step"] == step;
        let (listed, shown) = tokio::try_join!(list.until(|all| shows(&all[&key])), page.until(shows))?;
        of_list.push((listed - begin).as_secs_f64());
        of_job.push((shown - begin).as_secs_f64());
    }
    Ok((of_list, of_job))
}
