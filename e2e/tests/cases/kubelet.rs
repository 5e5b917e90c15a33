//! The kubelet of a server's node stops: the node's containers and their network go on, so that the operator replaces
//! processes that live on.

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use psjobs_api::Role;
use psjobs_api::crd::{ParameterServerJob, Phase};
use psjobs_e2e::logs::line;
use psjobs_e2e::manifest::{from_file, main_container};
use psjobs_e2e::namespace::TestNamespace;
use psjobs_e2e::nodes::{Loss, LostNode};
use psjobs_e2e::wait::{SHORT, TRAINING, until};

/// Name of the job in the example.
const JOB: &str = "mnist-replicated";
const SERVER: &str = "mnist-replicated-ps-0";

/// Stops the kubelet of server 0's node. The job must succeed before it is started again.
pub async fn job_survives_a_node_without_kubelet(namespace: &TestNamespace) -> Result<()> {
    namespace.apply(&job()?).await?;
    namespace.phase(JOB, Phase::Running, SHORT).await?;
    line(&namespace.pods(), "mnist-replicated-trainer-1", &["training", "step="], TRAINING).await?;
    let mut pods = namespace.pods_of(JOB, Role::Server).await?;
    let nodes: Vec<_> = pods.iter().filter_map(node_of).collect();
    ensure!(nodes.len() == 2 && nodes[0] != nodes[1], "the servers are on {nodes:?} instead of two nodes");
    let victim = nodes[0].to_owned();
    pods.extend(namespace.pods_of(JOB, Role::Trainer).await?);
    let lost = pods.iter().filter(|pod| node_of(pod) == Some(victim.as_str())).count();
    let before = namespace.uids(JOB).await?;

    let node = LostNode::lose(&victim, Loss::Kubelet).await?;
    let survived = async {
        node.until_silent(&namespace.cluster).await?;
        let another = |now: Option<&Pod>| now.is_some_and(|now| now.uid() != before[SERVER]);
        until(&namespace.pods(), SERVER, SHORT, &format!("{SERVER} to be replaced"), another).await?;
        namespace.phase(JOB, Phase::Succeeded, TRAINING).await
    };
    let survived = survived.await;
    node.bring_back(&namespace.cluster).await?;
    let status = survived?;
    namespace.print(format_args!("{victim} lost its kubelet with {lost} pods; {} replaced", status.restarts));
    ensure!(status.restarts_counted == 0, "a lost node was counted as the job's failure");
    Ok(())
}

/// The example, for as long as it takes until the node counts as lost and for a minute more, on machines of any speed.
fn job() -> Result<ParameterServerJob> {
    let mut job = from_file("examples/mnist-replicated.yaml")?;
    // 32 examples a step, of 1.5 ms each: 144 s.
    let args = ["train", "mnist", "--epochs", "1000", "--max-steps", "3000", "--example-ms", "1.5"];
    main_container(&mut job)?.args = Some(args.map(str::to_owned).into());
    job.spec.run_policy.force_delete_after_seconds = 5;
    ensure!(job.metadata.name.as_deref() == Some(JOB), "the example has another name than {JOB}");
    Ok(job)
}

fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}
