//! Renewal of a job's certificates. A certificate cannot be added to those that the pods have, because the key of their
//! authority is not kept; so all pods start again with new ones.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use psjobs_api::certificates::LIFE;

use super::draft::{Draft, Wake};
use super::facts::{Facts, after};

/// How long before the end of its certificates a job that can resume from a checkpoint gets new ones.
const AHEAD: SignedDuration = SignedDuration::from_hours(30 * 24);

impl Facts<'_> {
    /// Returns until when the certificates of the job's pods are valid, if they have any.
    fn certificates_expire(&self) -> Option<Timestamp> {
        self.job.certificates_under(Some(self.prev))?;
        let known = self.prev.certificates_expire.as_ref().map(|Time(end)| *end);
        Some(known.unwrap_or_else(|| after(self.now, LIFE)))
    }

    /// Returns the end of the certificates if all pods are to start again with new ones: before that end if the job can
    /// resume from a checkpoint. Otherwise connections that exist stay open after the end, and all pods start again only
    /// when one of them must, because it could not connect to the others.
    pub(super) fn renews_certificates(&self, wake: &mut Wake) -> Option<Timestamp> {
        let end = self.certificates_expire()?;
        let resumes = self.job.object.spec.checkpoint.is_some();
        let due = if resumes { after(end, -AHEAD) } else { end };
        (wake.is_over(due, self.now) && (resumes || self.some_pod_is_missing())).then_some(end)
    }

    /// Returns whether a replica that had a pod has none now, and needs one.
    fn some_pod_is_missing(&self) -> bool {
        let needed = |replica: &_| {
            self.history.has_begun(*replica) && !self.history.succeeded(*replica) && !self.history.is_lost(*replica)
        };
        self.job.replicas().filter(needed).any(|replica| self.pod(replica).is_none())
    }
}

impl Draft<'_, '_> {
    /// Notes in the status which certificates the job's pods have, and until when.
    pub(super) fn note_certificates(&mut self) {
        let next = self.facts.observed.next_certificates.clone();
        self.out.status.certificates = next.or_else(|| self.facts.job.certificates_under(Some(self.facts.prev)));
        self.out.status.certificates_expire = self.facts.certificates_expire().map(Time);
    }
}
