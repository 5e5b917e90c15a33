//! Leader election: of several operators one works, the others stand by. The lease is short, so that an operator that
//! dies is replaced within seconds, and it is released on a clean exit.

use kube::Client;
use kube_lease_manager::{LeaseManager, LeaseManagerBuilder, LeaseManagerError};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tracing::warn;

/// Name of the lease of operators without a shard. For a shard, `-` and its name are appended.
const LEASE: &str = "psjobs-operator";
/// The longest time until a dead leader is replaced.
const DURATION_SECONDS: u64 = 8;
/// The leader renews this long before the lease runs out; operators' clocks may differ by as much.
const GRACE_SECONDS: u64 = 4;

/// A candidate of the election, which knows at any time whether it leads.
pub struct Candidate {
    leads: watch::Receiver<bool>,
    campaign: JoinHandle<Result<LeaseManager, LeaseManagerError>>,
}

impl Candidate {
    /// Enters the election of this shard in `namespace` as `identity`.
    pub async fn enter(
        client: Client,
        namespace: &str,
        shard: Option<&str>,
        identity: &str,
    ) -> Result<Self, LeaseManagerError> {
        let lease = shard.map_or_else(|| LEASE.to_owned(), |shard| format!("{LEASE}-{shard}"));
        let builder = LeaseManagerBuilder::new(client, lease).with_namespace(namespace).with_identity(identity);
        let manager = builder.with_duration(DURATION_SECONDS).with_grace(GRACE_SECONDS).build().await?;
        let (leads, campaign) = manager.watch().await;
        Ok(Self { leads, campaign })
    }

    /// Waits until this operator leads, or until it does not, if `leads` is false.
    pub async fn until(&mut self, leads: bool) {
        if self.leads.wait_for(|now| *now == leads).await.is_err() && leads {
            // The campaign has ended, so this operator never leads again.
            std::future::pending().await
        }
    }

    /// Leaves the election, and releases the lease if it is held.
    pub async fn leave(self) {
        drop(self.leads);
        match self.campaign.await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => warn!("the lease could not be given back, it runs out by itself: {error}"),
            Err(error) => warn!("the election ended badly: {error}"),
        }
    }
}
