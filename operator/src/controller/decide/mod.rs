//! What to do about a job: a pure function of the job, its status so far, the world and the time.
//! It holds no client and no clock, so every behaviour is a row in a table of tests.
//!
//! Three promises, kept by a property test over random histories: there are never two pods of one
//! rank, nothing is created once the job has succeeded or failed, and counters only grow, incarnations also
//! when a replica is scaled away and back. A decision repeated on its own result asks for nothing, unless it
//! asked to be repeated at once.

mod active;
mod certificates;
pub mod conditions;
mod deadline;
mod elastic;
mod failure;
mod finish;
mod ledger;
mod phase;
mod recreate;
mod report;
mod suspend;

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use psjobs_api::crd::{ConditionType, ParameterServerJobStatus, Phase};
use psjobs_api::{CheckpointResult, Role};
use psjobs_policy::Success;

use self::conditions::Verdict;
pub use self::ledger::Ledger;
use self::ledger::Toll;
use super::memory::ENDING;
use super::observe::{Life, ObservedPod, Replica};
use super::turns;
use super::validate::{SpecError, ValidJob};

/// Everything outside the job's own object that a decision looks at.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct World {
    /// The job's pods; Kubernetes itself allows one of a name, hence one of a rank.
    pub pods: BTreeMap<Replica, ObservedPod>,
    /// The headless service exists.
    pub service: bool,
    /// Children that the API server just refused to create, in its words.
    pub refused: Vec<Refusal>,
    /// What server 0 told last.
    pub progress: Option<ProgressReport>,
}

/// A child that could not be created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub child: String,
    pub message: String,
}

/// How far training is, from server 0.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProgressReport {
    pub step: u64,
    pub total_steps: u64,
    pub examples_per_second: f64,
    pub metrics: BTreeMap<String, f64>,
    pub checkpoint: Option<CheckpointResult>,
    /// Indexes of trainers that are clearly slower than the others.
    pub stragglers: Vec<u32>,
    /// When it was told.
    pub at: Option<Timestamp>,
}

/// What to do now. The order matters: create, then write the status, then delete and tell; so that
/// a failure is on record before its evidence goes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decision {
    pub create: Vec<Child>,
    pub status: ParameterServerJobStatus,
    pub delete: Vec<Deletion>,
    /// The job's time after its end is over.
    pub delete_job: bool,
    pub notices: Vec<Notice>,
    /// The job mostly leaves this state within this time: unless something is to be deleted, nobody misses it.
    pub passing: Option<Duration>,
    /// Look again then, even if nothing changes.
    pub requeue: Option<SignedDuration>,
}

/// A child to create.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Child {
    Service,
    Pod(NewPod),
}

/// A pod to create, and the history of its replica that it carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NewPod {
    pub replica: Replica,
    pub incarnation: u32,
    pub failures: u32,
    pub failures_in_a_row: u32,
}

/// A pod to delete: this one, not one that has its name by then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deletion {
    pub name: String,
    pub uid: String,
    /// Do not wait for its node, which does not answer.
    pub force: bool,
}

/// An event: a sentence about the job, and the pod it is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    pub warning: bool,
    pub reason: String,
    pub note: String,
    pub pod: Option<(String, String)>,
}

/// Decides about a job that [`validate`](super::validate::validate) let through.
pub fn decide(job: &ValidJob, prev: &ParameterServerJobStatus, world: &World, now: Timestamp) -> Decision {
    let mut draft = Draft::new(job, prev, world, now);
    if prev.phase.is_some_and(Phase::is_final) {
        draft.clean_up();
    } else if draft.trainers_are_done() {
        draft.complete();
    } else if job.suspended {
        draft.suspend();
    } else {
        draft.run();
    }
    draft.into_decision()
}

/// Decides about a job that cannot be run: say why, leave its pods alone, wait for a change.
pub fn refuse(error: &SpecError, prev: &ParameterServerJobStatus, generation: Option<i64>, now: Timestamp) -> Decision {
    let mut status = prev.clone();
    let mut notices = Vec::new();
    if !prev.phase.is_some_and(Phase::is_final) {
        const REASON: &str = "InvalidSpec";
        status.observed_generation = generation;
        status.phase = status.phase.or(Some(Phase::Pending));
        status.reason = Some(REASON.into());
        conditions::set(&mut status, ConditionType::Created, Verdict::no(REASON, error.to_string()), now);
        if status != *prev {
            notices.push(Notice { warning: true, reason: REASON.into(), note: error.to_string(), pod: None });
        }
    }
    Decision { status, notices, ..Decision::default() }
}

/// A decision in the making.
struct Draft<'a> {
    job: &'a ValidJob,
    prev: &'a ParameterServerJobStatus,
    world: &'a World,
    now: Timestamp,
    /// The ledger as the status has it, and with what the pods tell.
    before: Ledger,
    ledger: Ledger,
    /// An elastic job's work is dealt out.
    closing: bool,
    out: Decision,
    wake: Option<Timestamp>,
}

impl<'a> Draft<'a> {
    fn new(job: &'a ValidJob, prev: &'a ParameterServerJobStatus, world: &'a World, now: Timestamp) -> Self {
        let before = Ledger::read(prev);
        let mut ledger = before.clone();
        let surplus = |replica: &Replica| replica.index >= job.count(replica.role);
        before.replicas().filter(surplus).for_each(|replica| ledger.retire(replica, None));
        // Also those that no status tells of: one may have been made just before the job was scaled.
        let pods = world.pods.iter().map(|(&replica, pod)| (replica, pod.incarnation));
        let pods = pods.filter(|&(replica, incarnation)| surplus(&replica) && incarnation >= before.since(replica));
        pods.for_each(|(replica, incarnation)| ledger.retire(replica, Some(incarnation)));
        if prev.observed_generation != job.generation {
            ledger.recall();
        }
        let out = Decision { status: prev.clone(), ..Decision::default() };
        let mut draft = Self { job, prev, world, now, ledger, before, closing: false, out, wake: None };
        draft.closing = draft.closes();
        draft
    }

    fn into_decision(mut self) -> Decision {
        self.out.requeue = self.wake.map(|at| at.duration_since(self.now).max(SignedDuration::ZERO));
        self.out
    }

    /// Success so far: the main containers of as many trainers as the job asks for have ended well, now or
    /// earlier, or the work of an elastic job is done. A job that completes goes on completing.
    fn trainers_are_done(&self) -> bool {
        let ended_well = |pod| matches!(pod, &ObservedPod { life: Life::Succeeded { .. }, .. });
        let is_done = |trainer| self.before.succeeded(trainer) || self.pod(trainer).is_some_and(ended_well);
        let policy = &self.job.policy;
        self.prev.phase == Some(Phase::Completing)
            || policy.success.is_reached(self.job.trainers, |index| is_done(Replica::trainer(index)))
            || policy.success != Success::RankZero && self.work_is_over(is_done)
    }

    /// A pod that counts: of a rank that the job has, and made since it was last resumed and the replica
    /// last left.
    fn is_current(&self, replica: Replica, pod: &ObservedPod) -> bool {
        replica.index < self.job.count(replica.role) && pod.incarnation >= self.ledger.since(replica)
    }

    /// The pod of a replica, if it has one that counts.
    fn pod(&self, replica: Replica) -> Option<&'a ObservedPod> {
        self.world.pods.get(&replica).filter(|pod| self.is_current(replica, pod))
    }

    /// All pods that count.
    fn pods(&self) -> Vec<(Replica, &'a ObservedPod)> {
        let all = self.world.pods.iter().map(|(&replica, pod)| (replica, pod));
        all.filter(|(replica, pod)| self.is_current(*replica, pod)).collect()
    }

    /// All pods that count, where their failures do not.
    fn pods_without_toll(&self) -> Vec<(Replica, &'a ObservedPod, Toll)> {
        self.pods().into_iter().map(|(replica, pod)| (replica, pod, Toll::default())).collect()
    }

    fn pods_of(&self, role: Role) -> impl Iterator<Item = (Replica, &'a ObservedPod)> + use<'a> {
        self.pods().into_iter().filter(move |(replica, _)| replica.role == role)
    }

    fn delete(&mut self, pod: &ObservedPod) {
        if pod.gone_by.is_none() {
            let force = self.is_lost(pod);
            self.out.delete.push(Deletion { name: pod.name.clone(), uid: pod.uid.clone(), force });
        }
    }

    /// When a pod on a node that does not answer is given up.
    fn lost_at(&self, pod: &ObservedPod) -> Option<Timestamp> {
        pod.node_lost.map(|since| self.after(since, self.job.force_delete_after))
    }

    /// Its node has been silent for so long that nobody waits for it any more.
    fn is_lost(&self, pod: &ObservedPod) -> bool {
        self.lost_at(pod).is_some_and(|at| at <= self.now)
    }

    /// A pod that should be gone and is not: its node is lost, so nobody will confirm the end.
    fn delete_by_force_if_overdue(&mut self, pod: &ObservedPod) {
        let Some(gone_by) = pod.gone_by else { return };
        let overdue = self.after(gone_by, self.job.force_delete_after);
        let overdue = self.lost_at(pod).map_or(overdue, |lost| lost.min(overdue));
        if overdue <= self.now {
            self.out.delete.push(Deletion { name: pod.name.clone(), uid: pod.uid.clone(), force: true });
        } else {
            self.wake_at(overdue);
        }
    }

    /// Looks again at `at`, or earlier if something else wants that.
    fn wake_at(&mut self, at: Timestamp) {
        self.wake = Some(self.wake.map_or(at, |wake| wake.min(at)));
    }

    fn after(&self, since: Timestamp, duration: impl TryInto<SignedDuration>) -> Timestamp {
        let duration = duration.try_into().unwrap_or(SignedDuration::MAX);
        since.saturating_add(duration).unwrap_or(Timestamp::MAX)
    }

    fn set(&mut self, type_: ConditionType, verdict: Verdict) {
        conditions::set(&mut self.out.status, type_, verdict, self.now);
    }

    fn notice(&mut self, reason: &str, note: impl Into<String>) {
        self.out.notices.push(Notice { warning: false, reason: reason.into(), note: note.into(), pod: None });
    }

    fn warning(&mut self, reason: &str, note: impl Into<String>, pod: Option<&ObservedPod>) {
        let pod = pod.map(|pod| (pod.name.clone(), pod.uid.clone()));
        self.out.notices.push(Notice { warning: true, reason: reason.into(), note: note.into(), pod });
    }

    /// `1 server and 2 trainers`.
    fn members(&self) -> String {
        format!("{} and {}", counted(self.job.servers, "server"), counted(self.job.trainers, "trainer"))
    }

    /// When the job began: when it was created, which a first status tells some seconds later, or resumed.
    fn start_time(&self) -> Option<Time> {
        let created = self.job.object.metadata.creation_timestamp.as_ref().filter(|_| self.prev.phase.is_none());
        let begun = || Time(created.map_or(self.now, |created| self.lately(created.0)));
        Some(self.prev.start_time.clone().unwrap_or_else(begun))
    }

    /// A time that others tell: as clocks of machines differ, it is not to come, and not longer ago than a state may
    /// wait to be written.
    fn lately(&self, at: Timestamp) -> Timestamp {
        let earliest = self.now.saturating_sub(ENDING + turns::PATIENCE).unwrap_or(self.now);
        at.clamp(earliest, self.now)
    }

    fn time(&self) -> Option<Time> {
        Some(Time(self.now))
    }
}

fn counted(number: u32, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests;
