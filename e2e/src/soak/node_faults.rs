//! The lane of faults that take away nodes and the API server. Each is mended before the next one begins.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Result;
use k8s_openapi::api::core::v1::Pod;
use tokio::time::sleep;

use super::board::FaultRecord;
use super::guard::keeps_a_server;
use super::schedule::{Entry, Fault, REST, Target};
use super::stage::{Stage, job_of, node_of};
use crate::command::run;
use crate::nodes::{self, Loss, LostNode};
use crate::wait::{SHORT, until_ok};

/// Least time between the end of a fault and the next one, where mending took longer than the schedule gives it.
const PAUSE: Duration = Duration::from_secs(15);
/// How long a fault waits for a node that may be taken away.
const TIMEOUT: Duration = Duration::from_secs(45);
/// Pause between two looks for such a node.
const LOOK: Duration = Duration::from_secs(2);

/// Carries out the faults; none begins that would last into the rest at the end.
pub async fn carry_out(stage: &Stage, entries: &[Entry], length: Duration) {
    let mut earliest = Duration::ZERO;
    for entry in entries {
        sleep(entry.at.max(earliest).saturating_sub(stage.board.now())).await;
        if stage.board.now() + entry.lasts + REST > length {
            break;
        }
        let done = match entry.target {
            Target::Worker(place) => take_node(stage, entry, place).await,
            _ => restart_api_server(stage).await,
        };
        if let Err(error) = done {
            stage.board.problem(format!("{}: {error:#}", entry.fault.name()));
        }
        earliest = stage.board.now() + PAUSE;
    }
}

/// Takes a node away for a while: the one of the schedule, or another one if a job would lose both of its servers.
async fn take_node(stage: &Stage, entry: &Entry, place: usize) -> Result<()> {
    let give_up = stage.board.now() + TIMEOUT;
    let (node, jobs) = loop {
        let mut away = stage.away.lock().await;
        let pods = until_ok(SHORT, "the list of pods", || stage.pods()).await?;
        if let Some(name) = choose(stage, &pods, place) {
            let node = LostNode::lose(name, loss(entry.fault)).await?;
            *away = Some(name.to_owned());
            break (node, jobs_on(&pods, name));
        }
        drop(away);
        if stage.board.now() > give_up {
            stage.board.say(format_args!("{}: skipped, every node has both servers of a job", entry.fault.name()));
            stage.board.records().skipped += 1;
            return Ok(());
        }
        sleep(LOOK).await;
    };
    let (name, from) = (node.name.clone(), stage.board.now());
    let seconds = entry.lasts.as_secs();
    stage.board.say(format_args!("{}: {name} for {seconds} s, with pods of {}", entry.fault.name(), jobs.join(", ")));
    sleep(entry.lasts).await;
    let back = node.bring_back(&stage.cluster).await;
    *stage.away.lock().await = None;
    let until = stage.board.now();
    stage.board.say(format_args!("{}: {name} is back", entry.fault.name()));
    stage.board.records().faults.push(FaultRecord { fault: entry.fault, from, until, jobs });
    back
}

/// Returns the node to take away: from `place` on the first without which each job that lives on two servers has one.
fn choose<'a>(stage: &'a Stage, pods: &[Pod], place: usize) -> Option<&'a str> {
    let holders = stage.holders(pods);
    let mut workers = stage.workers.iter().cycle().skip(place).take(stage.workers.len());
    let may_go = |node: &&String| keeps_a_server(&holders, |holder| holder.node.as_ref() == Some(*node));
    workers.find(may_go).map(String::as_str)
}

fn loss(fault: Fault) -> Loss {
    match fault {
        Fault::PauseNode => Loss::Paused,
        Fault::CutNode => Loss::Network,
        Fault::StopKubelet => Loss::Kubelet,
        _ => Loss::Power,
    }
}

fn jobs_on(pods: &[Pod], node: &str) -> Vec<String> {
    let here = pods.iter().filter(|pod| node_of(pod) == Some(node)).filter_map(job_of);
    here.map(str::to_owned).collect::<BTreeSet<_>>().into_iter().collect()
}

/// Kills the API server, and waits until it answers again.
async fn restart_api_server(stage: &Stage) -> Result<()> {
    let fault = Fault::RestartApiServer;
    let pods = until_ok(SHORT, "the list of pods", || stage.pods()).await?;
    let jobs: BTreeSet<String> = pods.iter().filter_map(job_of).map(str::to_owned).collect();
    let node = nodes::control_plane(&stage.cluster).await?;
    run("docker", &["exec", &node, "pkill", "-KILL", "-x", "kube-apiserver"]).await?;
    let from = stage.board.now();
    stage.board.say(fault.name());
    until_ok(SHORT, "the API server to come back", || async { Ok(stage.cluster.client.apiserver_version().await?) })
        .await?;
    let until = stage.board.now();
    stage.board.say(format_args!("{}: it answers after {:.1} s", fault.name(), (until - from).as_secs_f64()));
    let jobs = jobs.into_iter().collect();
    stage.board.records().faults.push(FaultRecord { fault, from, until, jobs });
    Ok(())
}
