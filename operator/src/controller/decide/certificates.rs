//! Renewal of a job's certificates. A certificate cannot be added to those that the pods have, because the key of their
//! authority is not kept; so all pods start again with new ones.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use psjobs_api::certificates::LIFE;

use super::DecisionBuilder;

/// How long before the end of its certificates a job that can resume from a checkpoint gets new ones.
const AHEAD: SignedDuration = SignedDuration::from_hours(30 * 24);
/// Reason of the restart.
const REASON: &str = "CertificatesExpire";

impl DecisionBuilder<'_> {
    /// Notes in the status which certificates the job's pods have, and until when.
    pub(super) fn note_certificates(&mut self) {
        let status = &mut self.out.status;
        status.certificates = self.job.certificates_under(Some(self.prev));
        let life = SignedDuration::try_from(LIFE).unwrap_or(SignedDuration::MAX);
        let ends = || Time(self.now.saturating_add(life).unwrap_or(Timestamp::MAX));
        status.certificates_expire =
            status.certificates.is_some().then(|| self.prev.certificates_expire.clone().unwrap_or_else(ends));
    }

    /// Starts all pods again before their certificates end, if the job can resume from a checkpoint. Otherwise connections
    /// that exist stay open after the end, and all pods start again only when one of them must, because it could not connect
    /// to the others. Returns whether the decision is complete.
    pub(super) fn renew_certificates(&mut self) -> bool {
        let Some(Time(end)) = self.out.status.certificates_expire else { return false };
        let resumes = self.job.object.spec.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.resume);
        let due = if resumes { self.after(end, -AHEAD) } else { end };
        if due > self.now {
            self.wake_at(due);
            return false;
        }
        if !resumes && !self.some_pod_is_missing() {
            return false;
        }
        self.recreate(REASON, &format!("the job's certificates end at {end}"), false);
        true
    }

    /// Tells whether a replica that had a pod has none now, and needs one.
    fn some_pod_is_missing(&self) -> bool {
        let needed = |replica: &_| {
            self.history.has_begun(*replica) && !self.history.succeeded(*replica) && !self.history.is_lost(*replica)
        };
        self.job.replicas().filter(needed).any(|replica| self.pod(replica).is_none())
    }
}
