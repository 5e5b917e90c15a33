//! Leader election: of several operators one works, the others stand by. The lease is short, so that an operator that
//! dies is replaced within seconds, and it is given back on a clean exit. What to do with it is decided in
//! [`crate::lease`].

use std::sync::Arc;
use std::time::Instant;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, timeout};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::error_chain::chain;
use crate::lease::{ANSWER, DURATION, INTERVAL, Sighting, Step, Tenure, step};

/// Name of the lease of operators without a shard. For a shard, `-` and its name are appended.
const LEASE: &str = "psjobs-operator";

/// A candidate of the election, which knows at any time whether it leads.
pub struct Candidate {
    leads: watch::Receiver<bool>,
    tenure: Arc<Tenure>,
    ended: CancellationToken,
    campaign: JoinHandle<()>,
}

impl Candidate {
    /// Enters the election of this shard in `namespace` as `identity`.
    ///
    /// # Errors
    /// If the lease may not be read or written.
    pub async fn enter(
        client: Client,
        namespace: &str,
        shard: Option<&str>,
        identity: &str,
    ) -> Result<Self, kube::Error> {
        let name = shard.map_or_else(|| LEASE.to_owned(), |shard| format!("{LEASE}-{shard}"));
        let tenure = Arc::new(Tenure::elected());
        let mut campaign = Campaign {
            leases: Api::namespaced(client, namespace),
            name,
            identity: identity.to_owned(),
            seen: None,
            tenure: tenure.clone(),
        };
        if let Err(error) = campaign.turn().await {
            if matches!(&error, kube::Error::Api(status) if !status.is_conflict() && status.code < 429) {
                return Err(error);
            }
            warn!("the lease cannot be had yet: {}", chain(&error));
        }
        let (leading, leads) = watch::channel(tenure.holds(Instant::now()));
        let ended = CancellationToken::new();
        let campaign = tokio::spawn(campaign.run(leading, ended.clone()));
        Ok(Self { leads, tenure, ended, campaign })
    }

    /// Returns this candidate's right to write, which ends while requests fail.
    #[must_use]
    pub fn tenure(&self) -> Arc<Tenure> {
        self.tenure.clone()
    }

    /// Waits until this operator leads, or until it does not, if `leads` is false.
    pub async fn until(&mut self, leads: bool) {
        if self.leads.wait_for(|now| *now == leads).await.is_err() && leads {
            // The campaign has ended, so this operator never leads again.
            std::future::pending().await
        }
    }

    /// Leaves the election, and gives the lease back if it is held.
    pub async fn leave(self) {
        self.ended.cancel();
        if let Err(error) = self.campaign.await {
            warn!("the election ended badly: {error}");
        }
    }
}

/// The requests of a candidate.
struct Campaign {
    leases: Api<Lease>,
    name: String,
    identity: String,
    seen: Option<Sighting>,
    tenure: Arc<Tenure>,
}

impl Campaign {
    /// Tries to lead at each tick until `ended`, and reports whether this operator leads.
    async fn run(mut self, leading: watch::Sender<bool>, ended: CancellationToken) {
        let mut ticks = tokio::time::interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = ended.cancelled() => break,
            }
            match timeout(ANSWER, self.turn()).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => warn!("the lease cannot be read or renewed: {}", chain(&error)),
                Err(_) => warn!("the API server does not answer about the lease within {} s", ANSWER.as_secs()),
            }
            let holds = self.tenure.holds(Instant::now());
            leading.send_if_modified(|leads| std::mem::replace(leads, holds) != holds);
        }
        if self.tenure.holds(Instant::now()) {
            self.tenure.end();
            match timeout(ANSWER, self.hold("")).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => warn!("the lease could not be given back, it runs out by itself: {}", chain(&error)),
                Err(_) => warn!("the lease could not be given back in time, it runs out by itself"),
            }
        }
    }

    /// Looks at the lease, unless it was this operator's, and does what follows. Another candidate may be faster; then it
    /// looks again, because that may have been this one, whose answer was lost.
    async fn turn(&mut self) -> Result<(), kube::Error> {
        for _ in 0..2 {
            if self.try_turn().await? {
                return Ok(());
            }
            self.seen = None;
        }
        self.tenure.end();
        Ok(())
    }

    /// Returns false if the lease has changed since it was seen last.
    async fn try_turn(&mut self) -> Result<bool, kube::Error> {
        let is_ours = self.seen.as_ref().is_some_and(|seen| seen.holder == self.identity);
        if !is_ours {
            let found = self.leases.get_opt(&self.name).await?;
            self.see(found);
        }
        let asked = Instant::now();
        let held = match step(self.seen.as_ref(), &self.identity, asked) {
            Step::Create => self.create().await,
            Step::Hold => self.hold(&self.identity.clone()).await,
            Step::Wait => {
                self.tenure.end();
                return Ok(true);
            }
        };
        match held {
            Ok(()) => {
                self.tenure.renewed(asked);
                Ok(true)
            }
            // It has another version or holder, is there already, or was deleted.
            Err(kube::Error::Api(status))
                if status.is_conflict() || status.is_already_exists() || status.is_not_found() =>
            {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    fn see(&mut self, found: Option<Lease>) {
        let sighting = |lease: Lease| {
            let (version, spec) = (lease.resource_version().unwrap_or_default(), lease.spec.unwrap_or_default());
            let seconds = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
            Sighting {
                holder: spec.holder_identity.unwrap_or_default(),
                version,
                transitions: spec.lease_transitions.unwrap_or(0),
                duration: seconds.map_or(DURATION, std::time::Duration::from_secs),
                since: Instant::now(),
            }
        };
        self.seen = found.map(|lease| sighting(lease).after(self.seen.as_ref()));
    }

    async fn create(&mut self) -> Result<(), kube::Error> {
        let metadata = ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
        let now = MicroTime(Timestamp::now());
        let spec = LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(DURATION.as_secs() as i32),
            acquire_time: Some(now.clone()),
            renew_time: Some(now),
            lease_transitions: Some(0),
            ..LeaseSpec::default()
        };
        let lease = Lease { metadata, spec: Some(spec) };
        let created = self.leases.create(&PostParams::default(), &lease).await?;
        self.see(Some(created));
        Ok(())
    }

    /// Writes `holder` into the lease, if it is as it was seen last.
    async fn hold(&mut self, holder: &str) -> Result<(), kube::Error> {
        let Some(seen) = &self.seen else { return Ok(()) };
        let now = MicroTime(Timestamp::now());
        let mut spec = json!({
            "holderIdentity": holder,
            "leaseDurationSeconds": DURATION.as_secs(),
            "renewTime": now,
        });
        if seen.holder != holder && !holder.is_empty() {
            spec["acquireTime"] = json!(now);
            spec["leaseTransitions"] = json!(seen.transitions.saturating_add(1));
        }
        // The API server refuses the patch if the lease has another version by now.
        let patch = Patch::Merge(json!({"metadata": {"resourceVersion": seen.version}, "spec": spec}));
        let held = self.leases.patch(&self.name, &PatchParams::default(), &patch).await?;
        self.see(Some(held));
        Ok(())
    }
}
