//! The page of all jobs that the chart brings: a job live, and the same after its pods and it itself are gone.

use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use kube::api::{DeleteParams, ListParams};
use psjobs_api::crd::Phase;
use psjobs_e2e::cluster::SYSTEM;
use psjobs_e2e::manifest::paced;
use psjobs_e2e::namespace::TestNamespace;
use psjobs_e2e::wait::{SHORT, TRAINING, until_none, until_ok};
use serde_json::{Map, Value};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

use super::page::{Page, get, runs};

const CHART: &str = "charts/psjobs";
const DEPLOYMENT: &str = "deployment/psjobs-web";

pub async fn a_job_is_shown_after_its_deletion(namespace: &TestNamespace) -> Result<()> {
    with_page(namespace, shown(namespace)).await
}

/// Runs a test while the chart serves the page. Its records are gone afterwards, so that another test may do the same.
pub async fn with_page(namespace: &TestNamespace, test: impl Future<Output = Result<()>>) -> Result<()> {
    let cluster = &namespace.cluster;
    cluster.helm(&["upgrade", CHART, "--reset-then-reuse-values", "--set", "web.enabled=true"]).await?;
    let ended = test.await;
    cluster.helm(&["upgrade", CHART, "--reset-then-reuse-values", "--set", "web.enabled=false"]).await?;
    // Records outlive the release.
    let claim = ["--namespace", SYSTEM, "delete", "persistentvolumeclaim", "psjobs-web-records", "--timeout=90s"];
    cluster.kubectl(&claim).await?;
    ended
}

async fn shown(namespace: &TestNamespace) -> Result<()> {
    let token = token(namespace).await?;
    let key = format!("{}/mnist", namespace.name);
    let server = Forwarded::start(namespace).await?;
    let refused = get(&server.host, None, "/").await?;
    ensure!(refused.starts_with("HTTP/1.1 401 "), "without a token: {refused}");
    let foreign = get(&server.host, Some(&token), &format!("/events/{SYSTEM}/mnist")).await?;
    ensure!(foreign.starts_with("HTTP/1.1 403 "), "of another namespace: {foreign}");

    namespace.apply(&paced()?).await?;
    let mut page = Page::open(&server.host, &token, &key).await?;
    page.read_until("a step", |job| job.get("progress").is_some_and(|progress| progress["step"].as_u64() > Some(0)))
        .await?;
    namespace.phase("mnist", Phase::Succeeded, TRAINING).await?;
    page.read_until("the job's end", is_over).await?;
    is_recorded(namespace, &key).await?;
    let (before, _) = read(&server, &token, &key).await?;

    namespace.jobs().delete("mnist", &DeleteParams::foreground()).await?;
    until_none(&namespace.jobs(), &ListParams::default(), SHORT, "the deleted job to go").await?;
    until_none(&namespace.pods(), &ListParams::default(), SHORT, "the deleted job's pods to go").await?;
    let (after, log) = read(&server, &token, &key).await?;
    ensure!(before == after, "before the deletion:\n{before:?}\nafter it:\n{after:?}");
    for process in ["ps-0", "trainer-0", "trainer-1"] {
        ensure!(runs(&after, process) == 1, "{process} ran once: {after:?}");
    }
    let curves = after["curves"].to_string();
    ensure!(after["phase"] == "Succeeded" && curves.contains("loss"), "{after:?}");
    ensure!(log.contains("started job="), "the last lines of a trainer: {log}");
    drop(server);

    // Another process reads the record from the volume.
    for command in [&["restart", DEPLOYMENT][..], &["status", DEPLOYMENT, "--timeout=120s"]] {
        namespace.cluster.kubectl(&[&["--namespace", SYSTEM, "rollout"], command].concat()).await?;
    }
    let server = Forwarded::start(namespace).await?;
    let (again, _) = read(&server, &token, &key).await?;
    ensure!(again == after, "before the restart:\n{after:?}\nafter it:\n{again:?}");
    Ok(())
}

/// Waits for the record of a job.
pub async fn is_recorded(namespace: &TestNamespace, key: &str) -> Result<()> {
    let recorded = || async {
        let said = namespace.cluster.kubectl(&["--namespace", SYSTEM, "logs", DEPLOYMENT]).await?;
        ensure!(said.contains(&format!("{key} is over and recorded")), "no record of {key} in\n{said}");
        Ok(())
    };
    until_ok(SHORT, "the record of the job", recorded).await
}

/// Returns a job that is over as its page shows it, and the last lines of its first trainer.
async fn read(server: &Forwarded, token: &str, key: &str) -> Result<(Map<String, Value>, String)> {
    let mut page = Page::open(&server.host, token, key).await?;
    page.read_until("a job that is over", is_over).await?;
    let log = get(&server.host, Some(token), &format!("/logs/trainer-0/{key}")).await?;
    Ok((page.job, log))
}

fn is_over(job: &Map<String, Value>) -> bool {
    job.get("isOver") == Some(&Value::Bool(true))
}

/// Returns the token of an account that may list the jobs of the namespace and read logs there.
pub async fn token(namespace: &TestNamespace) -> Result<String> {
    for create in [
        &["serviceaccount", "reader"][..],
        &["role", "jobs", "--verb=list", "--resource=parameterserverjobs.psjobs.dev"],
        &["role", "logs", "--verb=get", "--resource=pods/log"],
    ] {
        namespace.kubectl(&[&["create"], create].concat()).await?;
    }
    let account = format!("--serviceaccount={}:reader", namespace.name);
    for role in ["jobs", "logs"] {
        namespace.kubectl(&["create", "rolebinding", role, &format!("--role={role}"), &account]).await?;
    }
    Ok(namespace.kubectl(&["create", "token", "reader"]).await?.trim().to_owned())
}

/// The page at a port of this machine.
pub struct Forwarded {
    /// For example `127.0.0.1:40001`.
    pub host: String,
    _kubectl: Child,
}

impl Forwarded {
    pub async fn start(namespace: &TestNamespace) -> Result<Self> {
        let mut kubectl = Command::new("kubectl")
            .args(["port-forward", "--namespace", SYSTEM, "--context", &namespace.cluster.context])
            .args(["service/psjobs-web", ":80"])
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let output = kubectl.stdout.take().context("standard output is piped")?;
        let mut lines = BufReader::new(output).lines();
        let said = lines.next_line().await?.context("kubectl port-forward says where the page is")?;
        // Later lines, one for each connection, have somewhere to go.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        let host = said.strip_prefix("Forwarding from ").and_then(|rest| rest.split_whitespace().next());
        let host = host.with_context(|| format!("kubectl port-forward said {said}"))?.to_owned();
        Ok(Self { host, _kubectl: kubectl })
    }
}
