//! The facts that a decision about a job rests on: its spec, its last status, the observed state and the time, and what
//! follows from them without a choice. They do not change while the decision is made.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use psjobs_api::crd::ParameterServerJobStatus;
use psjobs_api::exit_code::PEER_AWAY;
use psjobs_api::{ReplicaResult, Role};
use psjobs_policy::Response;

use super::replica_history::{HIGHEST, ReplicaHistory, RestartCost};
use super::timing::MAX_STATUS_DELAY;
use crate::controller::model::ObservedState;
use crate::controller::observe::{Failure, ObservedPod, PodPhase, Replica};
use crate::controller::validate::ValidJob;

/// A failed pod, what made it fail, and what that leads to.
#[derive(Clone)]
pub(super) struct Failed<'a> {
    pub replica: Replica,
    pub pod: &'a ObservedPod,
    pub failure: Failure,
    pub response: Response,
}

/// A trainer that is given up: the reason in one word, the sentence about it, and its pod's name and uid.
pub(super) struct Loss {
    pub reason: String,
    pub message: String,
    pub pod: Option<(String, String)>,
}

pub(super) struct Facts<'a> {
    pub job: &'a ValidJob,
    pub prev: &'a ParameterServerJobStatus,
    pub observed: &'a ObservedState,
    pub now: Timestamp,
    /// The history of replicas as the status has it, and with what the pods show.
    pub before: ReplicaHistory,
    pub history: ReplicaHistory,
    /// All batches of an elastic job are assigned.
    pub closing: bool,
    /// Pods that failed, in an active job, and those of them that are not of trainers which are given up.
    pub all_failed: Vec<Failed<'a>>,
    pub failed: Vec<Failed<'a>>,
    /// The trainers that this decision gives up.
    pub losses: Vec<Loss>,
}

impl<'a> Facts<'a> {
    pub fn new(
        job: &'a ValidJob,
        prev: &'a ParameterServerJobStatus,
        observed: &'a ObservedState,
        now: Timestamp,
    ) -> Self {
        let before = ReplicaHistory::read(prev);
        let mut history = before.clone();
        let surplus = |replica: &Replica| replica.index >= job.count(replica.role);
        before.replicas().filter(surplus).for_each(|replica| history.remove(replica, None));
        // Also pods that the status does not know: one may have been created just before the job was scaled.
        let pods = observed.pods.iter().map(|(&replica, pod)| (replica, pod.incarnation));
        let pods = pods.filter(|&(replica, incarnation)| surplus(&replica) && incarnation >= before.since(replica));
        pods.for_each(|(replica, incarnation)| history.remove(replica, Some(incarnation)));
        if prev.observed_generation != job.generation {
            history.retry();
        }
        let (all_failed, failed, losses) = (Vec::new(), Vec::new(), Vec::new());
        let mut facts = Self { job, prev, observed, now, before, history, closing: false, all_failed, failed, losses };
        facts.closing = facts.closes();
        facts
    }

    /// Adds the ends of pods to the history, as those of a job that is not active: no failure counts.
    pub fn with_ends(mut self) -> Self {
        let ends = self.pods().into_iter().map(|(replica, pod)| (replica, pod, RestartCost::default()));
        self.history.observe(ends.collect::<Vec<_>>());
        self
    }

    /// Returns whether some trainer of an elastic job has ended well: all batches are assigned then.
    fn closes(&self) -> bool {
        let ended_well = |pod: &ObservedPod| matches!(pod.phase, PodPhase::Succeeded { .. });
        self.job.policy.elastic.is_some()
            && (self.before.done(Role::Trainer) > 0 || self.pods_of(Role::Trainer).any(|(_, pod)| ended_well(pod)))
    }

    /// Returns whether a server has ended with a result, which each does when all trainers have left well, and what they
    /// did is kept. The members of an elastic job are not all of its trainers.
    fn training_is_over(&self) -> bool {
        self.server_results().next().is_some()
    }

    fn server_results(&self) -> impl Iterator<Item = &'a ReplicaResult> {
        let servers = if self.job.policy.elastic.is_none() { self.job.servers } else { 0 };
        (0..servers).filter_map(|index| self.live(Replica::server(index))?.result())
    }

    /// Returns whether a trainer has left well, although its pod's end was not seen and will not be: the pod is gone,
    /// or is taken away, or its node does not answer, or it had been replaced before the servers' end was seen. So has one that
    /// ended because it found no server any more. One that was seen to fail after it had left has its work to do again.
    pub fn has_left(&self, trainer: Replica) -> bool {
        let failed = self.before.get(trainer).and_then(|record| record.failed_incarnation);
        self.training_is_over()
            && failed.is_none_or(|failed| self.left_as(trainer).is_some_and(|left_as| failed < left_as))
            && self.pod(trainer).is_none_or(|pod| {
                let follows_unseen_end = self.follows_unseen_end(trainer, pod);
                match &pod.phase {
                    PodPhase::Succeeded { .. } => true,
                    PodPhase::Failed(failure) => {
                        let found_no_server = failure.exit_code == Some(PEER_AWAY);
                        let had_left = self.left_as(trainer) == Some(pod.incarnation);
                        failure.disruption || found_no_server && had_left || follows_unseen_end
                    }
                    PodPhase::Running => {
                        pod.deletion_deadline.is_some() || pod.node_lost.is_some() || follows_unseen_end
                    }
                    PodPhase::Pending => follows_unseen_end,
                }
            })
    }

    /// Returns the incarnation that a trainer had when it left the servers well, if it did and they have ended.
    fn left_as(&self, trainer: Replica) -> Option<u32> {
        self.server_results().filter_map(|result| result.left_as(trainer.index)).max()
    }

    /// Returns whether a trainer's pod never joined the servers, because an earlier pod of it had left well and they ended.
    pub fn comes_after_the_end(&self, trainer: Replica, pod: &ObservedPod) -> bool {
        self.left_as(trainer).is_some_and(|left_as| left_as < pod.incarnation)
    }

    /// Returns whether a trainer's pod follows one that had left well and was not seen to fail afterwards.
    fn follows_unseen_end(&self, trainer: Replica, pod: &ObservedPod) -> bool {
        let is_unseen = |left_as| pod.failed_incarnation.is_none_or(|failed| failed < left_as);
        self.left_as(trainer).is_some_and(|left_as| left_as < pod.incarnation && is_unseen(left_as))
    }

    /// Returns whether the job needs no other pod of a replica if it loses this one: training is over. Server 0 may have
    /// to write the model, and servers that have ended themselves may be needed by a trainer that failed afterwards.
    pub fn is_not_missed(&self, replica: Replica) -> bool {
        let has_ended = || self.live(replica).is_some_and(ObservedPod::has_result);
        match replica.role {
            Role::Server if replica.index == 0 && self.job.object.spec.checkpoint.is_some() => false,
            Role::Server => self.training_is_over() && !has_ended(),
            Role::Trainer => self.has_left(replica),
        }
    }

    /// Returns the trainers that a new pod of `role` has to know as finished. In an elastic job their end says nothing
    /// about what is left to do.
    pub fn finished_for(&self, role: Role) -> Vec<u32> {
        let is_needed = role == Role::Server && self.job.policy.elastic.is_none();
        if is_needed { self.history.finished_trainers() } else { Vec::new() }
    }

    /// Returns whether a pod counts: it has a rank of the job, and was created after the job was last resumed and after
    /// the replica last left.
    pub fn is_current(&self, replica: Replica, pod: &ObservedPod) -> bool {
        let incarnation = self.history.credible(replica, pod.incarnation);
        replica.index < self.job.count(replica.role) && incarnation >= self.history.since(replica)
    }

    /// Returns the pod of a replica, if it has one that counts.
    pub fn pod(&self, replica: Replica) -> Option<&'a ObservedPod> {
        self.observed.pods.get(&replica).filter(|pod| self.is_current(replica, pod))
    }

    /// Returns all pods that count.
    pub fn pods(&self) -> Vec<(Replica, &'a ObservedPod)> {
        let all = self.observed.pods.iter().map(|(&replica, pod)| (replica, pod));
        all.filter(|(replica, pod)| self.is_current(*replica, pod)).collect()
    }

    pub fn pods_of(&self, role: Role) -> impl Iterator<Item = (Replica, &'a ObservedPod)> + use<'a> {
        self.pods().into_iter().filter(move |(replica, _)| replica.role == role)
    }

    /// Returns the pod of a replica, unless it is being deleted.
    pub fn live(&self, replica: Replica) -> Option<&'a ObservedPod> {
        self.pod(replica).filter(|pod| pod.deletion_deadline.is_none())
    }

    pub fn servers_are_ready(&self) -> bool {
        let ready = |pod: &ObservedPod| pod.ready && pod.phase == PodPhase::Running;
        (0..self.job.servers).map(Replica::server).all(|server| self.live(server).is_some_and(ready))
    }

    /// Returns true for a trainer that is not to be created yet.
    pub fn waits_for_servers(&self, replica: Replica) -> bool {
        self.job.policy.waits_for_servers(replica, self.history.has_begun(replica), self.servers_are_ready())
    }

    /// Returns when a pod is given up whose node does not answer.
    pub fn lost_at(&self, pod: &ObservedPod) -> Option<Timestamp> {
        pod.node_lost.map(|since| after(since, self.job.force_delete_after))
    }

    /// Returns whether the pod's node has been silent for so long that the pod is given up.
    pub fn is_lost(&self, pod: &ObservedPod) -> bool {
        self.lost_at(pod).is_some_and(|at| at <= self.now)
    }

    /// Returns the restarts that count towards spec.failurePolicy.maxRestarts, with the failures seen now.
    pub fn restarts_counted(&self) -> u32 {
        self.prev.restarts_counted.unsigned_abs().saturating_add(self.history.failed_since(&self.before)).min(HIGHEST)
    }

    /// Returns when the job began: when it was created, some seconds before its first status, or resumed.
    pub fn start_time(&self) -> Timestamp {
        let created = self.job.object.metadata.creation_timestamp.as_ref().filter(|_| self.prev.phase.is_none());
        let begun = || created.map_or(self.now, |created| self.lately(created.0));
        self.prev.start_time.as_ref().map_or_else(begun, |Time(start)| *start)
    }

    /// Clamps a timestamp from another machine to [now - longest status delay, now], to tolerate clock skew.
    pub fn lately(&self, at: Timestamp) -> Timestamp {
        let earliest = self.now.saturating_sub(MAX_STATUS_DELAY).unwrap_or(self.now);
        at.clamp(earliest, self.now)
    }
}

/// Returns the time `duration` after `since`.
pub(super) fn after(since: Timestamp, duration: impl TryInto<SignedDuration>) -> Timestamp {
    let duration = duration.try_into().unwrap_or(SignedDuration::MAX);
    since.saturating_add(duration).unwrap_or(Timestamp::MAX)
}
