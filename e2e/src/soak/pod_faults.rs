//! The lane of faults that take away processes, pods and operators, and fill the small disk.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::DeleteParams;
use psjobs_api::Role;
use psjobs_api::crd::names;
use tokio::time::sleep;

use super::board::FaultRecord;
use super::guard::keeps_a_server;
use super::kind::Kind;
use super::schedule::{Entry, Fault, REST, Target};
use super::stage::{Stage, job_of, node_of};
use crate::namespace::phase_of;
use crate::nodes::kill_process;
use crate::operator;
use crate::wait::{SHORT, until_ok};

/// How long a fault waits for a pod that it may hit.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Carries out the faults. One that finds nothing to hit is skipped: its job is between two runs, or its node is away.
pub async fn carry_out(stage: &Stage, entries: &[Entry], length: Duration) {
    for entry in entries {
        sleep(entry.at.saturating_sub(stage.board.now())).await;
        if stage.board.now() + entry.lasts + REST > length {
            break;
        }
        let name = entry.fault.name();
        let done = match (entry.fault, entry.target) {
            (fault, Target::Replica(kind, role, index)) => {
                let hit = || hit_replica(stage, fault, kind, (role, index));
                until_ok(TIMEOUT, "a pod to hit", hit).await
            }
            (Fault::FillDisk, _) => match fill_disk(stage, entry.lasts).await {
                Err(error) => {
                    stage.board.problem(format!("{name}: {error:#}"));
                    continue;
                }
                done => done,
            },
            _ => until_ok(TIMEOUT, "an operator to kill", || kill_operator(stage)).await,
        };
        if let Err(error) = done {
            stage.board.say(format_args!("{name}: skipped, {error:#}"));
            stage.board.records().skipped += 1;
        }
    }
}

/// Kills or deletes a pod of the kind's job: the one of the schedule, or another of its role, or any other.
async fn hit_replica(stage: &Stage, fault: Fault, kind: Kind, replica: (Role, u32)) -> Result<()> {
    let job = stage.board.training(kind).with_context(|| format!("no {} job trains now", kind.name()))?;
    let away = stage.away.lock().await;
    let pods = stage.pods().await?;
    let holders = stage.holders(&pods);
    let is_away = |node: Option<&str>| node.is_some() && node == away.as_deref();
    let mut mine: Vec<&Pod> = pods.iter().filter(|pod| job_of(pod) == Some(&job)).collect();
    let is_running = |pod: &Pod| phase_of(pod) == Some("Running") && pod.metadata.deletion_timestamp.is_none();
    mine.retain(|pod| is_running(pod) && !is_away(node_of(pod)));
    mine.retain(|pod| {
        let name = pod.name_any();
        keeps_a_server(&holders, |holder| holder.pod == name || is_away(holder.node.as_deref()))
    });
    let (role, index) = replica;
    let drawn = names::pod(&job, role, index);
    let is_of_role = |pod: &Pod| pod.labels().get(names::LABEL_ROLE).is_some_and(|label| *label == role.to_string());
    mine.sort_by_key(|pod| (pod.name_any() != drawn, !is_of_role(pod)));
    let pod = mine.first().with_context(|| format!("{job} has no pod that may be hit"))?;
    let (name, namespace) = (pod.name_any(), stage.namespace(kind));
    let node = node_of(pod).context("a running pod has a node")?;
    if fault == Fault::KillProcess {
        kill_process(node, &namespace.name, &name).await?;
    } else {
        namespace.pods().delete(&name, &DeleteParams::default().grace_period(0)).await?;
    }
    let now = stage.board.now();
    drop(away);
    stage.board.say(format_args!("{}: {name}", fault.name()));
    stage.board.records().faults.push(FaultRecord { fault, from: now, until: now, jobs: vec![job] });
    Ok(())
}

/// Kills an operator on a node that answers, the leader as likely as the one that stands by.
async fn kill_operator(stage: &Stage) -> Result<()> {
    let away = stage.away.lock().await;
    for pod in operator::running(&stage.cluster).await? {
        if away.as_deref() == Some(&operator::node_of(&stage.cluster, &pod).await?) {
            continue;
        }
        let jobs = stage.pods().await?.iter().filter_map(job_of).map(str::to_owned).collect();
        operator::kill(&stage.cluster, &pod).await?;
        let now = stage.board.now();
        stage.board.say(format_args!("{}: {pod}", Fault::KillOperator.name()));
        let record = FaultRecord { fault: Fault::KillOperator, from: now, until: now, jobs };
        stage.board.records().faults.push(record);
        return Ok(());
    }
    ensure!(away.is_some(), "no operator runs");
    anyhow::bail!("every operator is on the node that is away")
}

async fn fill_disk(stage: &Stage, lasts: Duration) -> Result<()> {
    let jobs = stage.board.training(Kind::FullDisk).into_iter().collect::<Vec<_>>();
    stage.disk.fill().await?;
    let from = stage.board.now();
    stage.board.say(format_args!("{}: for {} s", Fault::FillDisk.name(), lasts.as_secs()));
    sleep(lasts).await;
    until_ok(SHORT, "the disk to be mended", || stage.disk.mend()).await?;
    let until = stage.board.now();
    stage.board.records().faults.push(FaultRecord { fault: Fault::FillDisk, from, until, jobs });
    Ok(())
}
