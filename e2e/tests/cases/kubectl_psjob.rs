//! A job from begin to end by `kubectl psjob` alone: submitted, listed, followed in its logs and its page while a trainer
//! is replaced, cloned, cancelled.

use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use kube::api::DeleteParams;
use psjobs_api::crd::Phase;
use psjobs_e2e::manifest::paced;
use psjobs_e2e::namespace::TestNamespace;
use psjobs_e2e::wait::{SHORT, TRAINING, until};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

use super::page::{Page, runs};

pub async fn a_job_from_begin_to_end(namespace: &TestNamespace) -> Result<()> {
    let manifest = serde_yaml::to_string(&paced()?)?;
    let said = namespace.psjob_with_input(&["submit", "-", "--set", "trainer.replicas=2"], &manifest).await?;
    ensure!(said.starts_with("mnist is created in namespace "), "{said}");
    namespace.phase("mnist", Phase::Running, SHORT).await?;
    let listed = namespace.psjob(&["list"]).await?;
    ensure!(listed.lines().any(|line| line.starts_with("mnist ") && line.contains("Running")), "{listed}");
    let missing = namespace.psjob(&["why", "minst"]).await.err().context("there is no such job")?;
    ensure!(format!("{missing:#}").contains("there is no job minst in namespace"), "{missing:#}");

    // The page and the lines are followed from here to the job's end, while one trainer's pod is replaced.
    let (mut page, _server) = open(namespace, "mnist").await?;
    page.read_until("a run of trainer-1", |job| runs(job, "trainer-1") > 0).await?;
    let replaced = async {
        let before = namespace.uids("mnist").await?;
        psjobs_e2e::logs::line(&namespace.pods(), "mnist-trainer-1", &["training", "step="], TRAINING).await?;
        namespace.pods().delete("mnist-trainer-1", &DeleteParams::default()).await?;
        let other = |now: Option<&k8s_openapi::api::core::v1::Pod>| {
            now.is_some_and(|now| Some(&now.metadata.uid) != before.get("mnist-trainer-1"))
        };
        until(&namespace.pods(), "mnist-trainer-1", SHORT, "the deleted trainer's successor", other).await?;
        namespace.psjob(&["watch", "mnist"]).await
    };
    let followed = namespace.psjob(&["logs", "mnist", "--follow", "--timestamps"]);
    let ended = page.read_until("the job's end", |job| job.get("isOver") == Some(&Value::Bool(true)));
    let (watched, followed, ()) = tokio::try_join!(replaced, followed, ended)?;
    namespace.print(format_args!("kubectl psjob watch mnist:\n{watched}"));
    ensure!(watched.contains("mnist: Running, step "), "{watched}");
    ensure!(watched.contains("mnist is Succeeded."), "{watched}");
    let page = page.job;
    ensure!(page["phase"] == "Succeeded" && runs(&page, "trainer-1") == 2, "trainer-1 ran twice: {page:?}");
    let says = page["explanation"]["sentences"].to_string();
    ensure!(says.contains("It took"), "the page says {says}");

    let starts = |replica: &str| {
        followed.lines().filter(|line| line.starts_with(replica) && line.contains("started job=")).count()
    };
    ensure!(
        (starts("ps-0 "), starts("trainer-0 "), starts("trainer-1 ")) == (1, 1, 2),
        "starts of processes in\n{followed}"
    );
    let times: Vec<&str> = followed.lines().filter_map(|line| line.split(' ').nth(1)).collect();
    let late = times.windows(2).filter(|pair| pair[0] > pair[1]).count();
    namespace.print(format_args!("{} lines followed, {late} behind a later one", times.len()));
    ensure!(late <= 3 + times.len() / 50, "{late} of {} lines come behind a later one in\n{followed}", times.len());

    // The log at the end has the same lines, in order.
    let whole = namespace.psjob(&["logs", "mnist", "--timestamps", "--role", "trainer", "--index", "0"]).await?;
    let of_trainer =
        |text: &str| text.lines().filter(|line| line.starts_with("trainer-0 ")).map(str::to_owned).collect::<Vec<_>>();
    ensure!(of_trainer(&followed) == of_trainer(&whole), "followed:\n{followed}\nat the end:\n{whole}");

    let said = namespace.psjob(&["clone", "mnist", "again", "--set", "runPolicy.activeDeadlineSeconds=600"]).await?;
    ensure!(said.starts_with("again is created"), "{said}");
    let why = namespace.psjob(&["why", "again"]).await?;
    ensure!(why.starts_with("again is "), "{why}");
    let refused = namespace.psjob(&["scale", "again", "--trainers", "3"]).await.err().context("it is not elastic")?;
    ensure!(format!("{refused:#}").contains("elasticPolicy"), "{refused:#}");
    let said = namespace.psjob(&["cancel", "again"]).await?;
    ensure!(said == "again is deleted\n", "{said}");
    until(&namespace.jobs(), "again", SHORT, "the cancelled job to go", |job| job.is_none()).await?;
    ensure!(namespace.psjob(&["submit", "no-such-file.yaml"]).await.is_err(), "a manifest that is not there");
    Ok(())
}

/// Opens the page of a job, as `kubectl psjob web` serves it until the returned process is dropped.
async fn open(namespace: &TestNamespace, job: &str) -> Result<(Page, Child)> {
    let mut server = Command::new("kubectl")
        .args(["psjob", "web", job, "--address", "127.0.0.1:0", "--namespace", &namespace.name])
        .args(["--context", &namespace.cluster.context])
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let said = BufReader::new(server.stderr.take().context("standard error is piped")?).lines().next_line().await?;
    let said = said.context("it says where the page is")?;
    let address = said.split_once("http://").and_then(|(_, rest)| rest.split_once(';')).map(|(address, _)| address);
    let (host, token) = address.and_then(|address| address.split_once("/?token=")).with_context(|| said.clone())?;
    Ok((Page::open(host, token, job).await?, server))
}
