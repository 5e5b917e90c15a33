//! The scenarios that are measured. Each gives the figures of one or more cases.

use std::time::{Duration, Instant};

use anyhow::Result;
use kube::Api;
use psjobs_api::Role;
use psjobs_api::crd::{ParameterServerJob, Phase};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::fleet::{Fleet, clear, namespace};
use crate::report::{print, quantile};
use crate::watching::{Change, Journal};
use crate::{Site, bare, metrics, page, rules, statuses};

/// Runs of jobs that begin or end at once; the others run once. Quantiles are over the jobs of a run.
const RUNS: usize = 3;
/// Runs with the page and without it.
const PAIRS: usize = 5;
/// How long servers may take to end in the scenario where they do not.
const DRAIN: Duration = Duration::from_secs(3);

/// Runs all scenarios, or the one that has the case `only`.
pub async fn all(site: &Site, only: Option<&str>) -> Result<()> {
    let wanted = |cases: &[&str]| only.is_none_or(|only| cases.contains(&only));
    if wanted(&["dry-run-create-ms"]) {
        let (with_rules, without) = rules::costs(&site.client).await?;
        print("dry-run-create-ms", "ms", &with_rules, &without);
    }
    if wanted(&["status-cpu-ms"]) {
        statuses_of_one(site).await?;
    }
    if wanted(&["paced-created-to-pods-p99-s"]) {
        paced(site).await?;
    }
    if wanted(&["burst-200-all-pods-s"]) {
        burst(site, "burst-200-all-pods-s", 200, 4, RUNS).await?;
    }
    if wanted(&["burst-200-beside-page-s"]) {
        burst_beside_page(site).await?;
    }
    if wanted(&["done-to-succeeded-p99-s", "bare-done-to-succeeded-p99-s", "writes-per-job", "cpu-s-per-job"]) {
        whole_life(site).await?;
    }
    if wanted(&["servers-gone-p99-s"]) {
        let mut p99s = Vec::new();
        for _ in 0..RUNS {
            p99s.push(stubborn_servers(site).await?);
        }
        print("servers-gone-p99-s", "s", &p99s, &[2.0]);
    }
    if wanted(&["burst-1000-all-pods-s", "rss-mib"]) {
        burst(site, "burst-1000-all-pods-s", 1000, 8, RUNS).await?;
    }
    if wanted(&page::CASES) {
        let program = page::program()?;
        let (fleet, _, journal) = running(site, 1000, 8, json!({})).await?;
        drop(journal);
        page::measure(site, &fleet, &program).await?;
        fleet.clear().await?;
    }
    Ok(())
}

/// Measures the API server's time for a status: statuses that the operator wrote of a job, written again to one of
/// another's.
async fn statuses_of_one(site: &Site) -> Result<()> {
    let (fleet, names, mut journal) = running(site, 1, 4, json!({})).await?;
    let jobs = Api::<ParameterServerJob>::namespaced(site.client.clone(), &fleet.namespace);
    let running = jobs.get_status(&names[0]).await?.status.unwrap_or_default();
    fleet.end(&names, Role::Trainer, 0..fleet.trainers).await?;
    fleet.end(&names, Role::Server, 0..1).await?;
    journal.all(&phases(&names, Phase::Succeeded)).await?;
    let succeeded = jobs.get_status(&names[0]).await?.status.unwrap_or_default();
    drop(journal);
    fleet.clear().await?;

    let fleet = Fleet::new(&site.client, 1, 4).await?;
    fleet.apply(&names, json!({"managedBy": "psjobs.dev/bench"})).await?;
    let jobs = Api::namespaced(site.client.clone(), &fleet.namespace);
    let (written, patched) = statuses::costs(&site.client, &jobs, &names[0], &[running, succeeded]).await?;
    print("status-cpu-ms", "ms", &written, &patched);
    fleet.clear().await
}

/// Jobs applied at once: until all their pods exist, over a bare client that creates the same objects.
async fn burst(site: &Site, case: &'static str, jobs: usize, trainers: u32, runs: usize) -> Result<()> {
    let (mut values, mut limits) = (Vec::new(), Vec::new());
    let mut memory = 0.0;
    for run in 1..=runs {
        let fleet = Fleet::new(&site.client, jobs, trainers).await?;
        values.push(until_all_pods(site, &format!("{case}: run {run} of {runs}"), &fleet).await?);
        memory = site.operator.rss_mib()?;

        let copy = namespace(&site.client).await?;
        limits.push(bare::copy(&site.client, &fleet.namespace, &copy).await?);
        clear(&site.client, &copy).await?;
        fleet.clear().await?;
    }
    print(case, "s", &values, &limits);
    if jobs == 1000 {
        print("rss-mib", "MiB", &[memory], &[150.0]);
    }
    Ok(())
}

/// Applies all jobs of a fleet at once. Returns the seconds until all their pods exist, when every status is written: the
/// operator then has seen all that it keeps.
async fn until_all_pods(site: &Site, label: &str, fleet: &Fleet) -> Result<f64> {
    let mut journal = Journal::of(&site.client, &fleet.namespace);
    let names = fleet.names();
    let (before, sent_before) = (writes(site).await?, sent_again(site).await?);
    let begin = Instant::now();
    let stored = fleet.apply(&names, json!({})).await?;
    let times = journal.all(&fleet.creations(&names)).await?;
    let (early, again) = (writes(site).await? - before, sent_again(site).await? - sent_before);
    let since = |times: Vec<Instant>| times.into_iter().max().unwrap_or(begin).duration_since(begin).as_secs_f64();
    let (stored, last) = (since(stored), since(times));
    eprintln!(
        "{label}: jobs stored after {stored:.2} s, last pod after {last:.2} s; {early} statuses and events until then, \
         {again} pods sent again"
    );
    journal.all(&phases(&names, Phase::Pending)).await?;
    Ok(last)
}

/// Jobs applied at once while psjobs-web watches them and a browser shows their list, over the same without; in turn.
async fn burst_beside_page(site: &Site) -> Result<()> {
    let case = "burst-200-beside-page-s";
    let program = page::program()?;
    let (mut beside, mut alone) = (Vec::new(), Vec::new());
    for run in 1..=PAIRS {
        for (values, is_shown) in [(&mut alone, false), (&mut beside, true)] {
            let fleet = Fleet::new(&site.client, 200, 4).await?;
            let shown = if is_shown { Some(page::show(site, &fleet.namespace, &program).await?) } else { None };
            let label = format!("{case}: run {run} of {PAIRS}, {}", if is_shown { "shown" } else { "alone" });
            values.push(until_all_pods(site, &label, &fleet).await?);
            drop(shown);
            fleet.clear().await?;
        }
    }
    print(case, "s", &beside, &alone);
    Ok(())
}

/// One job every two seconds: from stored to its last pod. The first finds cold connections, and is the worst.
async fn paced(site: &Site) -> Result<()> {
    const JOBS: usize = 100;
    let fleet = Fleet::new(&site.client, JOBS, 4).await?;
    let mut journal = Journal::of(&site.client, &fleet.namespace);
    let mut ticks = tokio::time::interval(Duration::from_secs(2));
    let mut values = Vec::new();
    for name in fleet.names() {
        ticks.tick().await;
        let job = [name];
        let stored = fleet.apply(&job, json!({})).await?[0];
        let last = journal.all(&fleet.creations(&job)).await?.into_iter().max().unwrap_or(stored);
        values.push(last.saturating_duration_since(stored).as_secs_f64());
    }
    let case = "paced-created-to-pods-p99-s";
    print(case, "s", &[p99(case, &values)], &[0.1]);
    fleet.clear().await
}

/// 200 jobs from apply to Succeeded; their last trainers are done at once, and their servers then end.
async fn whole_life(site: &Site) -> Result<()> {
    let (mut p99s, mut per_job_writes, mut per_job_cpu) = (Vec::new(), Vec::new(), Vec::new());
    let mut bare_p99s = Vec::new();
    for _ in 0..RUNS {
        let fleet = Fleet::new(&site.client, 200, 4).await?;
        let mut creations = Journal::of(&site.client, &fleet.namespace);
        let names = fleet.names();
        let (writes, cpu) = (writes(site).await?, site.operator.cpu_seconds()?);
        fleet.apply(&names, json!({})).await?;
        creations.all(&fleet.creations(&names)).await?;
        drop(creations);
        let mut journal = Journal::of_jobs(&site.client, &fleet.namespace);
        fleet.run(&names).await?;
        journal.all(&phases(&names, Phase::Running)).await?;
        fleet.end(&names, Role::Trainer, 0..3).await?;
        // The operator has heard of all these before the last are done.
        journal.all(&names.iter().map(|name| Change::Done(name.clone(), 3)).collect::<Vec<_>>()).await?;
        let before = self::writes(site).await?;
        p99s.push(p99("done-to-succeeded-p99-s", &until_succeeded(&fleet, &names, &mut journal).await?));
        // More than one of each job were not worth waiting for.
        eprintln!("done-to-succeeded-p99-s: {} statuses and events until then", self::writes(site).await? - before);
        // The event of its end is the last that is written of a job.
        fleet.wait_for_events(names.len(), "Succeeded").await?;
        let per_job = |total: f64| total / names.len() as f64;
        per_job_writes.push(per_job(self::writes(site).await? - writes));
        per_job_cpu.push(per_job(site.operator.cpu_seconds()? - cpu));
        drop(journal);
        bare_p99s.push(bare_ends(site, &fleet, &names).await?);
        fleet.clear().await?;
    }
    print("done-to-succeeded-p99-s", "s", &p99s, &[1.0]);
    print("bare-done-to-succeeded-p99-s", "s", &bare_p99s, &[]);
    print("writes-per-job", "writes", &per_job_writes, &[8.0]);
    print("cpu-s-per-job", "s", &per_job_cpu, &[]);
    Ok(())
}

/// Ends the last trainers of all jobs at once, and their servers: how long each job then takes to succeed.
async fn until_succeeded(fleet: &Fleet, names: &[String], journal: &mut Journal) -> Result<Vec<f64>> {
    let done = fleet.end(names, Role::Trainer, fleet.trainers - 1..fleet.trainers).await?;
    let ended = fleet.end(names, Role::Server, 0..1).await?;
    let succeeded = journal.all(&phases(names, Phase::Succeeded)).await?;
    // A job is done when its server has ended too; that is the bench's own doing.
    let done = done.into_iter().zip(ended).map(|(trainer, server)| trainer.max(server));
    Ok(waits(done, succeeded))
}

/// Repeats the ends of the same pods, with statuses written by a client that does nothing else. The operator leaves
/// these jobs alone.
async fn bare_ends(site: &Site, of: &Fleet, names: &[String]) -> Result<f64> {
    let ends = bare::Ends::of(&site.client, &of.namespace).await?;
    let fleet = Fleet::new(&site.client, of.jobs, of.trainers).await?;
    fleet.apply(names, json!({"managedBy": "psjobs.dev/bench"})).await?;
    bare::copy(&site.client, &of.namespace, &fleet.namespace).await?;
    let mut journal = Journal::of_jobs(&site.client, &fleet.namespace);
    fleet.run(names).await?;
    ends.begin(&site.client, &fleet.namespace).await?;
    journal.all(&phases(names, Phase::Running)).await?;
    let (heard, mut hears) = watch::channel(0);
    let ending = async {
        fleet.end(names, Role::Trainer, 0..3).await?;
        hears.wait_for(|&pods| pods == 3 * names.len()).await?;
        until_succeeded(&fleet, names, &mut journal).await
    };
    let writing = ends.write(&site.client, &fleet.namespace, of.trainers as usize + 1, heard);
    let (waits, ()) = tokio::try_join!(ending, writing)?;
    fleet.clear().await?;
    Ok(p99("bare-done-to-succeeded-p99-s", &waits))
}

/// 200 jobs whose servers do not end by themselves: from the end of the drain until they are gone.
async fn stubborn_servers(site: &Site) -> Result<f64> {
    let drain = json!({"runPolicy": {"serverDrainSeconds": DRAIN.as_secs()}});
    let (fleet, names, mut journal) = running(site, 200, 1, drain).await?;
    let done = fleet.end(&names, Role::Trainer, 0..1).await?;
    let servers = names.iter().map(|name| Change::PodDeleted(format!("{name}-ps-0"))).collect::<Vec<_>>();
    let gone = journal.all(&servers).await?;
    fleet.clear().await?;
    Ok(p99("servers-gone-p99-s", &waits(done.into_iter().map(|time| time + DRAIN), gone)))
}

/// Jobs that run, their names, and a journal of them and their pods.
async fn running(site: &Site, jobs: usize, trainers: u32, more: Value) -> Result<(Fleet, Vec<String>, Journal)> {
    let fleet = Fleet::new(&site.client, jobs, trainers).await?;
    let mut journal = Journal::of(&site.client, &fleet.namespace);
    let names = fleet.names();
    fleet.apply(&names, more).await?;
    journal.all(&fleet.creations(&names)).await?;
    fleet.run(&names).await?;
    journal.all(&phases(&names, Phase::Running)).await?;
    Ok((fleet, names, journal))
}

fn phases(names: &[String], phase: Phase) -> Vec<Change> {
    names.iter().map(|name| Change::Phase(name.clone(), phase)).collect()
}

fn waits(from: impl Iterator<Item = Instant>, to: Vec<Instant>) -> Vec<f64> {
    from.zip(to).map(|(from, to)| to.saturating_duration_since(from).as_secs_f64()).collect()
}

fn p99(case: &str, values: &[f64]) -> f64 {
    let [median, p99, worst] = [0.5, 0.99, 1.0].map(|q| quantile(values, q));
    eprintln!("{case}: median {median:.3}, p99 {p99:.3}, worst {worst:.3}, of {}", values.len());
    p99
}

/// Statuses and events written so far, as the API server counts them; only the operator writes these.
async fn writes(site: &Site) -> Result<f64> {
    requests(site, |line| {
        let of_status = line.contains("resource=\"parameterserverjobs\"") && line.contains("subresource=\"status\"");
        let of_event = line.contains("resource=\"events\"");
        let write = ["POST", "PUT", "PATCH", "APPLY"].iter().any(|verb| line.contains(&format!("verb=\"{verb}\"")));
        (of_status || of_event) && write
    })
    .await
}

/// Pods that were to be created and existed, so far.
async fn sent_again(site: &Site) -> Result<f64> {
    let refused = ["verb=\"POST\"", "resource=\"pods\"", "code=\"409\""];
    requests(site, |line| refused.iter().all(|label| line.contains(label))).await
}

/// Requests so far, of those whose line in the API server's metrics `counts`.
async fn requests(site: &Site, counts: impl Fn(&str) -> bool) -> Result<f64> {
    let text = metrics(&site.client).await?;
    let counts = |line: &&str| line.starts_with("apiserver_request_total{") && counts(line);
    let values = text.lines().filter(counts).filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    Ok(values.sum())
}
