//! A soak from its beginning to its verdict.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use k8s_openapi::api::core::v1::{Namespace, PersistentVolume};
use kube::ResourceExt;
use kube::api::{Api, ListParams};

use super::board::Board;
use super::kind::Kind;
use super::schedule::{REST, Schedule};
use super::stage::Stage;
use super::trace::keep_logs;
use super::verdict::Verdict;
use super::{fleet, node_faults, pod_faults};
use crate::cluster::Cluster;
use crate::namespace::TestNamespace;
use crate::operator;
use crate::wait::until_ok;

/// Deadline for namespaces and volumes to go.
const GONE: Duration = Duration::from_secs(180);

/// Runs jobs for `length` under the faults that `seed` draws, and keeps the logs of their pods in `logs`.
///
/// # Errors
/// If the cluster cannot be prepared, or an undisturbed job fails.
pub async fn run(cluster: Arc<Cluster>, seed: u64, length: Duration, logs: &Path) -> Result<Verdict> {
    tokio::select! {
        verdict = soak(cluster.clone(), seed, length) => verdict,
        kept = keep_logs(cluster.client.clone(), logs) => {
            kept?;
            bail!("the watch of pods ended, so their logs are not kept")
        }
    }
}

async fn soak(cluster: Arc<Cluster>, seed: u64, length: Duration) -> Result<Verdict> {
    let mut stage = Stage::set_up(cluster).await?;
    operator::scale(&stage.cluster, 2).await?;
    stage.board.say("undisturbed jobs, whose results those of disturbed ones must equal");
    let undisturbed = fleet::undisturbed(&stage).await?;
    // Times are those since the faults began.
    stage.board = Board::new();
    stage.board.say(format_args!("seed {seed}, {} minutes", length.as_secs() / 60));
    let schedule = Schedule::draw(seed, length);
    tokio::join!(
        fleet::under_faults(&stage, &undisturbed, length.saturating_sub(REST)),
        node_faults::carry_out(&stage, &schedule.nodes, length),
        pod_faults::carry_out(&stage, &schedule.pods, length),
    );
    if let Err(error) = clean_up(&stage).await {
        stage.board.problem(format!("{error:#}"));
    }
    Ok(Verdict::of(&stage.board, seed))
}

/// Removes the soak's namespaces and volumes, and checks that none is left.
async fn clean_up(stage: &Stage) -> Result<()> {
    operator::scale(&stage.cluster, 1).await?;
    // The last pod may have just ended, and its node not yet have let go of the volume.
    let disk = || stage.disk.remove(stage.namespace(Kind::FullDisk));
    until_ok(GONE, "the small disk to be removed", disk).await?;
    let ours: Vec<&TestNamespace> = Kind::ALL.into_iter().map(|kind| stage.namespace(kind)).collect();
    for namespace in &ours {
        namespace.remove().await?;
    }
    let is_ours = |name: &str| ours.iter().any(|namespace| namespace.name == name);
    let gone = || async {
        let client = || stage.cluster.client.clone();
        let all = ListParams::default();
        let namespaces = Api::<Namespace>::all(client()).list_metadata(&all).await?.items;
        let namespaces = namespaces.iter().map(ResourceExt::name_any).filter(|name| is_ours(name));
        let volumes = Api::<PersistentVolume>::all(client()).list(&all).await?.items;
        let claimed = |volume: &&PersistentVolume| {
            let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref()?.namespace.as_deref());
            claim.is_some_and(is_ours)
        };
        let volumes = volumes.iter().filter(claimed).map(ResourceExt::name_any);
        let left: Vec<String> = namespaces.chain(volumes).collect();
        ensure!(left.is_empty(), "there are still {left:?}");
        Ok(())
    };
    until_ok(GONE, "the soak to leave nothing", gone).await
}
