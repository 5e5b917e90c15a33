//! The pages of a hundred jobs at a real API server are the same before and after the jobs are deleted, also when the operator is
//! killed while the jobs start, end and are deleted. The test plays the kubelet.

#[expect(dead_code, reason = "the other test programs use the rest")]
mod support;

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

use futures::stream::{self, StreamExt as _};
use kube::api::ListParams;
use psjobs_api::crd::{ParameterServerJob, Phase};
use serde_json::{Value, json};
use support::operator::{Team, api_server, eventually};
use support::{Page, create, delete, progress, rights_of_chart, token, write_status};

const JOBS: usize = 100;
const HALF: usize = JOBS / 2;
/// Jobs that the test works on at once.
const AT_ONCE: usize = 16;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_pages_of_a_hundred_jobs_are_the_same_after_deletion_though_the_operator_is_killed() {
    let Some(server) = api_server().await else { return };
    let team = Team::on(server, "hundred").await;
    let config = rights_of_chart(server, format!("the-page-of-{}", team.namespace)).await;
    let list = json!({"apiGroups": ["psjobs.dev"], "resources": ["parameterserverjobs"], "verbs": ["list"]});
    let reader = token(&team, "reader", &[list]).await;
    let folder = tempfile::tempdir().expect("a folder");
    let page = Page::start(&config, folder.path()).await;

    let operator = team.operator();
    each(0..JOBS, async |job| create(&team, &name(job)).await).await;
    each(0..HALF, async |job| run(&team, job).await).await;
    drop(operator);
    let operator = team.operator();
    each(HALF..JOBS, async |job| run(&team, job).await).await;
    each(0..JOBS, async |job| wait_for(&team, job, Phase::Running).await).await;
    for step in [10, 20] {
        each(0..JOBS, async |job| {
            let progress = progress(step, 1.0 / f64::from(step) + job as f64);
            write_status(&team, &name(job), json!({ "progress": progress })).await;
            page.until(&path(&team, job), &reader, |shown| shown["progress"]["step"] == step).await;
        })
        .await;
    }

    let end_all = async {
        each(0..HALF, async |job| end(&team, job).await).await;
        drop(operator);
        let operator = team.operator();
        each(HALF..JOBS, async |job| end(&team, job).await).await;
        each(0..JOBS, async |job| wait_for(&team, job, Phase::Succeeded).await).await;
        operator
    };
    let records = folder.path().join(&team.namespace);
    let (operator, live) = tokio::join!(end_all, read_until_recorded(&page, &team, &reader, &records));
    let before = read_pages(&page, &team, &reader).await;
    let curves: BTreeSet<String> = before.iter().map(|shown| shown["curves"].to_string()).collect();
    assert_eq!(curves.len(), JOBS, "each job has other curves");
    assert!(before.iter().all(|shown| shown["isOver"] == true && shown["phase"] == "Succeeded"));
    let live: Vec<Value> = live.iter().zip(&before).map(|(live, recorded)| with_later_events(live, recorded)).collect();
    assert_same("recorded, compared with the last page without a record", &before, &live);

    each(0..HALF, async |job| delete(&team, &name(job)).await).await;
    drop(operator);
    let _operator = team.operator();
    each(HALF..JOBS, async |job| delete(&team, &name(job)).await).await;
    eventually("a cluster without jobs", async || {
        let jobs = team.api::<ParameterServerJob>().list(&ListParams::default()).await.expect("jobs can be listed");
        jobs.items.is_empty().then_some(())
    })
    .await;
    // The watch tells of a later job after the deletions.
    create(&team, "later").await;
    let later = format!("{}/later", team.namespace);
    let listed = page.until("/events", &reader, |jobs| !jobs[&later].is_null()).await;
    assert_eq!(succeeded(&listed, &team), JOBS, "{listed}");
    assert_same("deleted", &read_pages(&page, &team, &reader).await, &before);
    page.end().await;

    let again = Page::start(&config, folder.path()).await;
    // The records are read while the jobs of the cluster are shown.
    again.until("/events", &reader, |jobs| !jobs[&later].is_null() && succeeded(jobs, &team) == JOBS).await;
    assert_same("deleted, of a new process", &read_pages(&again, &team, &reader).await, &before);
    again.end().await;
}

fn name(job: usize) -> String {
    format!("job-{job}")
}

fn path(team: &Team, job: usize) -> String {
    format!("/events/{}/{}", team.namespace, name(job))
}

/// Does something for each of these jobs, for some of them at once.
async fn each(jobs: Range<usize>, act: impl AsyncFn(usize)) {
    // On the heap: reading a job takes much of a test thread's stack where nothing is optimised.
    stream::iter(jobs).for_each_concurrent(AT_ONCE, |job| Box::pin(act(job))).await;
}

/// Runs the pods of a job as the kubelet does.
async fn run(team: &Team, job: usize) {
    for pod in ["ps-0", "trainer-0"] {
        team.run(&format!("{}-{pod}", name(job))).await;
    }
}

/// Ends the pods of a job as the kubelet does.
async fn end(team: &Team, job: usize) {
    let metrics = json!({"accuracy": job as f64 / JOBS as f64});
    let result = json!({"steps": 20 + job, "examples": 640, "seconds": 4.0, "metrics": metrics}).to_string();
    team.end(&format!("{}-trainer-0", name(job)), 0, &result).await;
    team.end(&format!("{}-ps-0", name(job)), 0, "").await;
}

async fn wait_for(team: &Team, job: usize, phase: Phase) {
    let is = |job: Option<&ParameterServerJob>| {
        job.and_then(|job| job.status.as_ref()).is_some_and(|status| status.phase == Some(phase))
    };
    team.until(&name(job), is).await;
}

/// Returns the pages of all jobs.
async fn read_pages(page: &Page, team: &Team, reader: &str) -> Vec<Value> {
    let pages = stream::iter(0..JOBS).map(async |job| page.first(&path(team, job), reader).await);
    pages.buffered(AT_ONCE).collect().await
}

/// Reads pages until all jobs have records, and returns each page as it was the last time without a record.
async fn read_until_recorded(page: &Page, team: &Team, reader: &str, records: &Path) -> Vec<Value> {
    let mut last = vec![Value::Null; JOBS];
    eventually("the records of all jobs", async || {
        let mut is_complete = true;
        for (job, last) in last.iter_mut().enumerate().filter(|(job, _)| !has_record(records, *job)) {
            let shown = page.first(&path(team, job), reader).await;
            // The file is there before the page is shown from it.
            if !has_record(records, job) {
                (*last, is_complete) = (shown, false);
            }
        }
        is_complete.then_some(())
    })
    .await;
    last
}

/// Returns a page that was read without a record, with the events that came between that and the record.
fn with_later_events(live: &Value, recorded: &Value) -> Value {
    let events = |page: &Value| page["events"].as_array().cloned().unwrap_or_default();
    let mut page = live.clone();
    if events(recorded).starts_with(&events(live)) {
        page["events"] = recorded["events"].clone();
    }
    page
}

fn has_record(records: &Path, job: usize) -> bool {
    let Ok(files) = std::fs::read_dir(records) else { return false };
    let begin = format!("{}_", name(job));
    let is_record = |file: &str| file.starts_with(&begin) && file.ends_with(".json");
    files.filter_map(Result::ok).any(|file| file.file_name().to_str().is_some_and(is_record))
}

/// Returns how many of the jobs the list shows as succeeded.
fn succeeded(listed: &Value, team: &Team) -> usize {
    let is = |job: &usize| listed[format!("{}/{}", team.namespace, name(*job))]["phase"] == "Succeeded";
    (0..JOBS).filter(is).count()
}

fn assert_same(when: &str, pages: &[Value], wanted: &[Value]) {
    let differing: Vec<usize> = (0..JOBS).filter(|&job| pages[job] != wanted[job]).collect();
    println!("{when}: {} of {JOBS} pages are the same", JOBS - differing.len());
    if let Some(&job) = differing.first() {
        panic!("{when}: the pages of {differing:?} differ, {job} shows\n{}\nand not\n{}", pages[job], wanted[job]);
    }
}
