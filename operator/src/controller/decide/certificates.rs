//! Renewal of a job's certificates. Nobody can add one to those that the pods have, because their authority's key is not
//! kept; so all pods start again, and get new ones.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use psjobs_api::certificates::LIFE;

use super::Draft;

/// A job that can go on from a checkpoint gets new certificates so long before the old ones end.
const AHEAD: SignedDuration = SignedDuration::from_hours(30 * 24);
/// Reason of the restart.
const REASON: &str = "CertificatesExpire";

impl Draft<'_> {
    /// Which certificates the job's pods have, and until when.
    pub(super) fn note_certificates(&mut self) {
        let status = &mut self.out.status;
        status.certificates = self.job.certificates_under(Some(self.prev));
        let life = SignedDuration::try_from(LIFE).unwrap_or(SignedDuration::MAX);
        let ends = || Time(self.now.saturating_add(life).unwrap_or(Timestamp::MAX));
        status.certificates_expire =
            status.certificates.is_some().then(|| self.prev.certificates_expire.clone().unwrap_or_else(ends));
    }

    /// Starts all pods again before their certificates end, where that costs no more than the steps since a checkpoint.
    /// Without one, what is connected stays connected; only when a pod must start again, which could reach nobody, all
    /// do. Whether there is nothing else to do now.
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

    /// A replica that has been there has no pod now, and needs one.
    fn some_pod_is_missing(&self) -> bool {
        let needed = |replica: &_| {
            self.ledger.has_begun(*replica) && !self.ledger.succeeded(*replica) && !self.ledger.is_lost(*replica)
        };
        self.job.replicas().filter(needed).any(|replica| self.pod(replica).is_none())
    }
}
