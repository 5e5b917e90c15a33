//! State of jobs that is kept in memory between reconciles. Losing it costs a little time and never changes a decision:
//! everything that decisions depend on is in the job's status.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kube::ResourceExt as _;
use parking_lot::{Mutex, MutexGuard};
use psjobs_api::crd::ParameterServerJob;

use super::metadata::remove_unread_metadata;
use crate::controller::model::{CheckpointReport, ProgressReport};

/// Delay before the first retry of a reconcile that failed, and the longest.
const RETRY: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(30));

/// State by uid of the job.
#[derive(Default)]
pub struct JobStates(Mutex<HashMap<String, Entry>>);

#[derive(Default)]
struct Entry {
    /// The job as our last write left it; the watch may bring it later than the next reconcile.
    written: Option<Arc<ParameterServerJob>>,
    /// Reconciles in a row that failed.
    failed: u32,
    progress: Option<ProgressReport>,
    checkpoints: Option<CheckpointReport>,
    /// When the status first differed from the stored one.
    differs_since: Option<Instant>,
    /// A pod was found that another shard's operator created.
    disputed: bool,
    /// The Secret with certificates that this operator created for the job last.
    certificates: Option<String>,
}

impl JobStates {
    /// Returns the newer of the cached job and the job as this operator last wrote it.
    pub fn newest(&self, cached: Arc<ParameterServerJob>) -> Arc<ParameterServerJob> {
        let mut entries = self.lock();
        let Some(entry) = entries.get_mut(&cached.uid().unwrap_or_default()) else { return cached };
        match entry.written.take() {
            Some(written) if version(&written) > version(&cached) => {
                entry.written = Some(written.clone());
                written
            }
            _ => cached,
        }
    }

    /// Keeps a job as it was stored with its new status.
    pub fn status_written(&self, mut job: ParameterServerJob) {
        remove_unread_metadata(&mut job);
        let uid = job.uid().unwrap_or_default();
        self.lock().entry(uid).or_default().written = Some(job.into());
    }

    /// Returns how long a status that may wait for `timeout` still waits; `None` if it is due.
    pub fn debounce_status(&self, uid: &str, timeout: Duration, now: Instant) -> Option<Duration> {
        let mut entries = self.lock();
        let since = &mut entries.entry(uid.to_owned()).or_default().differs_since;
        let waited = now.duration_since(*since.get_or_insert(now));
        timeout.checked_sub(waited).filter(|wait| !wait.is_zero())
    }

    /// Ends the wait of a status: the next one that differs waits anew.
    pub fn flush_status(&self, uid: &str) {
        if let Some(entry) = self.lock().get_mut(uid) {
            entry.differs_since = None;
        }
    }

    /// Notes whether a pod of the job may have another shard's label.
    pub fn set_disputed(&self, uid: &str, disputed: bool) {
        self.lock().entry(uid.to_owned()).or_default().disputed = disputed;
    }

    pub fn is_disputed(&self, uid: &str) -> bool {
        self.lock().get(uid).is_some_and(|entry| entry.disputed)
    }

    /// Notes that this operator has created the Secret `name` for the job.
    pub fn certificates_created(&self, uid: &str, name: &str) {
        self.lock().entry(uid.to_owned()).or_default().certificates = Some(name.to_owned());
    }

    /// Returns true if this operator has created the Secret `name` for the job, as far as it remembers.
    pub fn has_created_certificates(&self, uid: &str, name: &str) -> bool {
        self.lock().get(uid).is_some_and(|entry| entry.certificates.as_deref() == Some(name))
    }

    /// Resets the delay of retries.
    pub fn reconcile_succeeded(&self, uid: &str) {
        if let Some(entry) = self.lock().get_mut(uid) {
            entry.failed = 0;
        }
    }

    /// Returns the delay before the next try, which doubles with every failure in a row.
    pub fn reconcile_failed(&self, uid: &str) -> Duration {
        let mut entries = self.lock();
        let entry = entries.entry(uid.to_owned()).or_default();
        let delay = RETRY.0 * 2_u32.pow(entry.failed.min(10));
        entry.failed += 1;
        delay.min(RETRY.1)
    }

    pub fn progress(&self, uid: &str) -> Option<ProgressReport> {
        self.lock().get(uid)?.progress.clone()
    }

    /// Keeps a report. Returns whether it differs from the last one in more than its time.
    pub fn record_progress(&self, uid: &str, report: ProgressReport) -> bool {
        let mut entries = self.lock();
        let progress = &mut entries.entry(uid.to_owned()).or_default().progress;
        let new = progress.as_ref().is_none_or(|known| ProgressReport { at: report.at, ..known.clone() } != report);
        *progress = Some(report);
        new
    }

    pub fn checkpoints(&self, uid: &str) -> Option<CheckpointReport> {
        self.lock().get(uid)?.checkpoints.clone()
    }

    /// Keeps a report about checkpoints. Returns whether it differs from the last one in more than its time.
    pub fn record_checkpoints(&self, uid: &str, report: CheckpointReport) -> bool {
        let mut entries = self.lock();
        let checkpoints = &mut entries.entry(uid.to_owned()).or_default().checkpoints;
        let new = checkpoints.as_ref().is_none_or(|known| known.failure != report.failure);
        *checkpoints = Some(report);
        new
    }

    /// Removes the state of every job that is not in `jobs`.
    pub fn retain(&self, jobs: &[Arc<ParameterServerJob>]) {
        let uids = jobs.iter().filter_map(|job| job.metadata.uid.as_deref()).collect::<std::collections::HashSet<_>>();
        self.lock().retain(|uid, _| uids.contains(uid.as_str()));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Entry>> {
        // Every change above is complete before anything can panic.
        self.0.lock()
    }
}

/// Parses the resource version. Versions of one resource are numbers that grow; one that is not a number counts as the
/// oldest, so that the cache wins.
fn version(job: &ParameterServerJob) -> u64 {
    job.resource_version().and_then(|version| version.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::fixtures::job;

    fn version(version: &str) -> ParameterServerJob {
        let mut job = job("");
        job.metadata.resource_version = Some(version.into());
        job
    }

    #[test]
    fn a_cache_behind_our_own_write_does_not_take_it_back() {
        let states = JobStates::default();
        states.status_written(version("100"));
        for (cached, want) in [("99", "100"), ("100", "100"), ("99", "99"), ("101", "101")] {
            let newest = states.newest(version(cached).into());
            assert_eq!(newest.resource_version().as_deref(), Some(want), "the cache has {cached}");
        }
    }

    #[test]
    fn a_report_about_checkpoints_is_new_if_the_fault_is_another() {
        let (states, failure) = (JobStates::default(), psjobs_api::FailedCheckpoint::default());
        for (label, failure, second, want) in [
            ("the first report", None, 0, true),
            ("the same later", None, 10, false),
            ("a fault", Some(failure.clone()), 20, true),
            ("it lasts", Some(failure), 30, false),
            ("it is over", None, 40, true),
        ] {
            let at = jiff::Timestamp::from_second(second).expect("in range");
            assert_eq!(states.record_checkpoints("a", CheckpointReport { failure, at }), want, "{label}");
            assert_eq!(states.checkpoints("a").map(|report| report.at), Some(at), "{label}");
        }
    }

    #[test]
    fn details_wait_for_others_but_not_for_long() {
        let states = JobStates::default();
        let begin = Instant::now();
        let timeout = Duration::from_secs(2);
        let at = |ms| states.debounce_status("u", timeout, begin + Duration::from_millis(ms));
        assert_eq!((at(0), at(500)), (Some(timeout), Some(timeout - Duration::from_millis(500))));
        assert_eq!((at(2000), at(2001)), (None, None));
        states.flush_status("u");
        assert_eq!(at(3000), Some(timeout), "what differs after it was written waits anew");
    }

    #[test]
    fn retries_wait_longer_until_one_works() {
        let states = JobStates::default();
        let waits = (0..12).map(|_| states.reconcile_failed("a").as_millis()).collect::<Vec<_>>();
        assert_eq!((waits[0], waits[1], waits[2], waits[11]), (200, 400, 800, 30_000));
        states.reconcile_succeeded("a");
        assert_eq!(states.reconcile_failed("a").as_millis(), 200);
    }
}
