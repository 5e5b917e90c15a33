//! A node with a job's pods is lost; the job goes on elsewhere, and nobody counts it as the job's failure.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Affinity, Pod, PodAffinityTerm, PodAntiAffinity, WeightedPodAffinityTerm};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::ResourceExt;
use psjobs_api::Role;
use psjobs_api::crd::{ParameterServerJob, Phase, names};
use psjobs_e2e::logs::line;
use psjobs_e2e::manifest::training;
use psjobs_e2e::nodes::{self, Loss, LostNode};
use psjobs_e2e::operator;
use psjobs_e2e::site::Site;
use psjobs_e2e::wait::{SHORT, TRAINING, until};

/// The node of server 0 and all trainers loses its power.
pub async fn is_stopped(site: &Site) -> Result<()> {
    let Nodes { operators, victim } = nodes(site).await?;
    let started = async {
        // All pods go to the one node that is left.
        nodes::take_pods(&site.cluster, &operators, false).await?;
        start(site, &job()?).await
    };
    let started = started.await;
    nodes::take_pods(&site.cluster, &operators, true).await?;
    started?;
    survives(site, &victim, Loss::Power, &["mnist-ps-0", "mnist-trainer-0", "mnist-trainer-1"]).await
}

/// The node of the trainers, not of the server, is cut off: they go on there and reach nobody.
pub async fn is_cut_off(site: &Site) -> Result<()> {
    let Nodes { operators, victim } = nodes(site).await?;
    let mut job = job()?;
    let pod = job.spec.trainer.template.spec.as_mut().context("the example's template has a spec")?;
    pod.affinity = Some(rather_not_beside_servers());
    let started = async {
        nodes::take_pods(&site.cluster, &victim, false).await?;
        site.apply(&job).await?;
        on(site, "mnist-ps-0", &operators).await
    };
    let started = started.await;
    // By default trainers are made when the server is ready.
    nodes::take_pods(&site.cluster, &victim, true).await?;
    started?;
    start(site, &job).await?;
    survives(site, &victim, Loss::Network, &["mnist-trainer-0", "mnist-trainer-1"]).await
}

struct Nodes {
    /// The operator is here.
    operators: String,
    /// This one will be lost.
    victim: String,
}

async fn nodes(site: &Site) -> Result<Nodes> {
    let leader = operator::leader(&site.cluster, |_| true, SHORT).await?;
    let operators = operator::node_of(&site.cluster, &leader).await?;
    let workers = nodes::workers(&site.cluster).await?;
    let victim = workers.into_iter().find(|node| *node != operators).context("a node without the operator")?;
    Ok(Nodes { operators, victim })
}

fn job() -> Result<ParameterServerJob> {
    let mut job = training(&["train", "mnist", "--max-steps", "400"])?;
    job.spec.run_policy.force_delete_after_seconds = 5;
    Ok(job)
}

fn rather_not_beside_servers() -> Affinity {
    let servers = [(names::LABEL_ROLE.to_owned(), Role::Server.to_string())];
    let servers = LabelSelector { match_labels: Some(servers.into()), ..LabelSelector::default() };
    let node = PodAffinityTerm {
        label_selector: Some(servers),
        topology_key: "kubernetes.io/hostname".into(),
        ..PodAffinityTerm::default()
    };
    let rather = vec![WeightedPodAffinityTerm { weight: 100, pod_affinity_term: node }];
    let preferred_during_scheduling_ignored_during_execution = Some(rather);
    let apart = PodAntiAffinity { preferred_during_scheduling_ignored_during_execution, ..PodAntiAffinity::default() };
    Affinity { pod_anti_affinity: Some(apart), ..Affinity::default() }
}

/// Applies the job, and waits until it trains.
async fn start(site: &Site, job: &ParameterServerJob) -> Result<()> {
    site.apply(job).await?;
    site.phase("mnist", Phase::Running, SHORT).await?;
    line(&site.pods(), "mnist-trainer-1", &["training", "step="], TRAINING).await?;
    Ok(())
}

async fn on(site: &Site, pod: &str, node: &str) -> Result<()> {
    let of = |pod: &Pod| pod.spec.as_ref()?.node_name.clone();
    let placed = |pod: Option<&Pod>| pod.and_then(of).is_some();
    let found = until(&site.pods(), pod, SHORT, &format!("{pod} to find a node"), placed).await?;
    let found = found.as_ref().and_then(of);
    ensure!(found.as_deref() == Some(node), "{pod} is on {found:?} instead of {node}");
    Ok(())
}

/// Loses the node with these pods of the job, waits for the job to end well without it, and brings it back.
async fn survives(site: &Site, victim: &str, loss: Loss, lost: &[&str]) -> Result<()> {
    for pod in lost {
        on(site, pod, victim).await?;
    }
    let before = site.uids("mnist").await?;
    let node = LostNode::lose(victim, loss).await?;
    let survived = async {
        node.until_silent(&site.cluster).await?;
        for pod in lost {
            let another = |now: Option<&Pod>| now.is_some_and(|now| now.uid() != before[*pod]);
            until(&site.pods(), pod, SHORT, &format!("{pod} to be replaced"), another).await?;
        }
        site.phase("mnist", Phase::Succeeded, TRAINING).await
    };
    let survived = survived.await;
    node.bring_back(&site.cluster).await?;
    let status = survived?;
    println!("    {victim} lost its {loss:?}; {} pods replaced", status.restarts);
    ensure!(
        status.restarts == i32::try_from(lost.len())?,
        "{} pods were replaced instead of {lost:?}",
        status.restarts
    );
    ensure!(status.restarts_counted == 0, "a lost node was counted as the job's failure");
    let kept = before.iter().filter(|(pod, _)| !lost.contains(&pod.as_str()));
    let now = site.uids("mnist").await?;
    for (pod, uid) in kept {
        ensure!(now.get(pod) == Some(uid), "{pod} was replaced though its node was there");
    }
    Ok(())
}
