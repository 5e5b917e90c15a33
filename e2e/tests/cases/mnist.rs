//! The first example: applied, watched, its accuracy read, deleted.

use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams};
use psjobs_api::crd::{Phase, names};
use psjobs_api::{Role, env};
use psjobs_e2e::leftovers;
use psjobs_e2e::manifest::EXAMPLE;
use psjobs_e2e::namespace::TestNamespace;
use psjobs_e2e::wait::{SHORT, TRAINING, until_none, within};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

/// Limit for the pods' end: half of the default grace period, so that a pod that ignores SIGTERM fails the test.
const GRACE: Duration = Duration::from_secs(15);
const JOB: &str = "mnist";
/// Lowest accuracy after one epoch in all; one process alone reaches .978 to .983.
const ACCURACY: f64 = 0.975;

pub async fn trains(namespace: &TestNamespace) -> Result<()> {
    namespace.kubectl(&["apply", "--filename", EXAMPLE]).await?;
    let (table, status) = tokio::try_join!(watched(namespace), async {
        namespace.phase(JOB, Phase::Running, SHORT).await?;
        pods_have_their_environment(namespace).await?;
        namespace.phase(JOB, Phase::Succeeded, TRAINING).await
    })?;
    println!("{}", table.join("\n"));

    let columns: Vec<&str> = table[0].split_whitespace().collect();
    ensure!(columns == ["NAME", "STATE", "SERVERS", "TRAINERS", "PROGRESS", "RESTARTS", "AGE"], "{columns:?}");
    let states: Vec<&str> = table[1..].iter().filter_map(|row| row.split_whitespace().nth(1)).collect();
    // The operator does not write Pending for a job that runs within a second.
    for state in ["Running", "Succeeded"] {
        ensure!(states.contains(&state), "the states were {states:?}, without {state}");
    }

    let metrics = status.progress.context("a job that succeeded reports its progress")?.metrics;
    let accuracy = metrics.iter().find(|metric| metric.name == "accuracy").context("the job shows its accuracy")?.value;
    namespace.print(format_args!("accuracy: {accuracy:.4} (at least {ACCURACY})"));
    ensure!(accuracy >= ACCURACY, "the accuracy is {accuracy}");
    ensure!(status.restarts == 0, "{} pods were replaced though nothing happened to them", status.restarts);

    for server in namespace.pods_of(JOB, Role::Server).await? {
        namespace.ended(&server.name_any()).await?;
    }
    nothing_is_left_after_delete(namespace).await
}

/// Deletes a running job in the foreground: the job exists until its last pod has ended, within [`GRACE`].
pub async fn is_deleted_in_the_foreground(namespace: &TestNamespace) -> Result<()> {
    namespace.kubectl(&["apply", "--filename", EXAMPLE]).await?;
    namespace.phase(JOB, Phase::Running, SHORT).await?;
    let deleted = Instant::now();
    within(GRACE, "a deleted job to end", nothing_is_left_after_delete(namespace)).await?;
    namespace.print(format_args!("all gone {:.1} s after the delete", deleted.elapsed().as_secs_f64()));
    Ok(())
}

/// Returns what `kubectl get psjobs --watch` prints until the job has ended: the header, then a row for each change.
async fn watched(namespace: &TestNamespace) -> Result<Vec<String>> {
    let mut child = Command::new("kubectl")
        .args(["--context", &namespace.cluster.context, "--namespace", &namespace.name, "get", "psjobs", "--watch"])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut lines = BufReader::new(child.stdout.take().context("standard output is piped")?).lines();
    let read = async {
        let mut table = Vec::new();
        while let Some(line) = lines.next_line().await? {
            let ended = ["Succeeded", "Failed"].iter().any(|state| line.contains(state));
            table.push(line);
            if ended {
                break;
            }
        }
        Ok(table)
    };
    within(SHORT + TRAINING, "kubectl get psjobs --watch to show the end", read).await
}

async fn pods_have_their_environment(namespace: &TestNamespace) -> Result<()> {
    let mut pods = namespace.pods_of(JOB, Role::Server).await?;
    pods.extend(namespace.pods_of(JOB, Role::Trainer).await?);
    let names: Vec<String> = pods.iter().map(ResourceExt::name_any).collect();
    ensure!(names == ["mnist-ps-0", "mnist-trainer-0", "mnist-trainer-1"], "the pods are {names:?}");
    let server = names::host(JOB, &namespace.name, Role::Server, 0);
    for (rank, pod) in pods.iter().enumerate() {
        let name = pod.name_any();
        for (variable, want) in [
            (env::RANK, rank.to_string()),
            (env::WORLD_SIZE, "3".into()),
            (env::MASTER_ADDR, server.clone()),
            (env::MASTER_PORT, psjobs_api::DEFAULT_PORT.to_string()),
        ] {
            let value = variable_of(pod, variable);
            ensure!(value == Some(&want), "{variable} of {name} is {value:?} instead of {want}");
        }
    }
    Ok(())
}

fn variable_of<'a>(pod: &'a Pod, name: &str) -> Option<&'a String> {
    let main = pod.spec.as_ref()?.containers.first()?;
    main.env.as_ref()?.iter().find(|variable| variable.name == name)?.value.as_ref()
}

async fn nothing_is_left_after_delete(namespace: &TestNamespace) -> Result<()> {
    namespace.jobs().delete(JOB, &DeleteParams::foreground()).await?;
    until_none(&namespace.jobs(), &ListParams::default(), SHORT, "the deleted job to go").await?;
    let left = leftovers::of(namespace).await?;
    ensure!(left.is_empty(), "after the job was deleted there are still {left:?}");
    Ok(())
}
