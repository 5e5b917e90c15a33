//! A node with a job's pods is lost; the pods are replaced on other nodes, and no failure is counted.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Affinity, Pod, PodAffinityTerm, PodAntiAffinity, WeightedPodAffinityTerm};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::ResourceExt;
use psjobs_api::Role;
use psjobs_api::crd::{ParameterServerJob, Phase, names};
use psjobs_e2e::logs::line;
use psjobs_e2e::manifest::training;
use psjobs_e2e::namespace::TestNamespace;
use psjobs_e2e::nodes::{self, Loss, LostNode};
use psjobs_e2e::operator;
use psjobs_e2e::wait::{SHORT, TRAINING, until};

/// Kills the node of server 0 and all trainers.
pub async fn job_survives_a_killed_node(namespace: &TestNamespace) -> Result<()> {
    let ChosenNodes { operators, victim } = choose(namespace).await?;
    let started = async {
        // The scheduler can place pods only on the other worker.
        nodes::take_pods(&namespace.cluster, &operators, false).await?;
        start(namespace, &job()?).await
    };
    let started = started.await;
    nodes::take_pods(&namespace.cluster, &operators, true).await?;
    started?;
    survives(namespace, &victim, Loss::Power, &["mnist-ps-0", "mnist-trainer-0", "mnist-trainer-1"]).await
}

/// Disconnects the node of the trainers, without the server: they run on, and reach no other process.
pub async fn job_survives_a_disconnected_node(namespace: &TestNamespace) -> Result<()> {
    let ChosenNodes { operators, victim } = choose(namespace).await?;
    let mut job = job()?;
    let pod = job.spec.trainer.template.spec.as_mut().context("the example's template has a spec")?;
    pod.affinity = Some(prefer_other_nodes_than_servers());
    let started = async {
        nodes::take_pods(&namespace.cluster, &victim, false).await?;
        namespace.apply(&job).await?;
        on(namespace, "mnist-ps-0", &operators).await
    };
    let started = started.await;
    // By default the operator creates trainers when the server is ready.
    nodes::take_pods(&namespace.cluster, &victim, true).await?;
    started?;
    start(namespace, &job).await?;
    survives(namespace, &victim, Loss::Network, &["mnist-trainer-0", "mnist-trainer-1"]).await
}

struct ChosenNodes {
    /// Node of the operator.
    operators: String,
    /// Node that will be lost.
    victim: String,
}

async fn choose(namespace: &TestNamespace) -> Result<ChosenNodes> {
    let leader = operator::leader(&namespace.cluster, |_| true, SHORT).await?;
    let operators = operator::node_of(&namespace.cluster, &leader).await?;
    let workers = nodes::workers(&namespace.cluster).await?;
    let victim = workers.into_iter().find(|node| *node != operators).context("a node without the operator")?;
    Ok(ChosenNodes { operators, victim })
}

fn job() -> Result<ParameterServerJob> {
    let mut job = training(&["train", "mnist", "--max-steps", "400"])?;
    job.spec.run_policy.force_delete_after_seconds = 5;
    Ok(job)
}

fn prefer_other_nodes_than_servers() -> Affinity {
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
async fn start(namespace: &TestNamespace, job: &ParameterServerJob) -> Result<()> {
    namespace.apply(job).await?;
    namespace.phase("mnist", Phase::Running, SHORT).await?;
    line(&namespace.pods(), "mnist-trainer-1", &["training", "step="], TRAINING).await?;
    Ok(())
}

async fn on(namespace: &TestNamespace, pod: &str, node: &str) -> Result<()> {
    let of = |pod: &Pod| pod.spec.as_ref()?.node_name.clone();
    let placed = |pod: Option<&Pod>| pod.and_then(of).is_some();
    let found = until(&namespace.pods(), pod, SHORT, &format!("{pod} to find a node"), placed).await?;
    let found = found.as_ref().and_then(of);
    ensure!(found.as_deref() == Some(node), "{pod} is on {found:?} instead of {node}");
    Ok(())
}

/// Takes down the node with these pods of the job, waits until the job succeeds without it, and brings it back.
async fn survives(namespace: &TestNamespace, victim: &str, loss: Loss, lost: &[&str]) -> Result<()> {
    for pod in lost {
        on(namespace, pod, victim).await?;
    }
    let before = namespace.uids("mnist").await?;
    let node = LostNode::lose(victim, loss).await?;
    let survived = async {
        node.until_silent(&namespace.cluster).await?;
        for pod in lost {
            let another = |now: Option<&Pod>| now.is_some_and(|now| now.uid() != before[*pod]);
            until(&namespace.pods(), pod, SHORT, &format!("{pod} to be replaced"), another).await?;
        }
        namespace.phase("mnist", Phase::Succeeded, TRAINING).await
    };
    let survived = survived.await;
    node.bring_back(&namespace.cluster).await?;
    let status = survived?;
    namespace.print(format_args!("{victim} lost its {loss:?}; {} pods replaced", status.restarts));
    ensure!(
        status.restarts == i32::try_from(lost.len())?,
        "{} pods were replaced instead of {lost:?}",
        status.restarts
    );
    ensure!(status.restarts_counted == 0, "a lost node was counted as the job's failure");
    let kept = before.iter().filter(|(pod, _)| !lost.contains(&pod.as_str()));
    let now = namespace.uids("mnist").await?;
    for (pod, uid) in kept {
        ensure!(now.get(pod) == Some(uid), "{pod} was replaced though its node was there");
    }
    Ok(())
}
