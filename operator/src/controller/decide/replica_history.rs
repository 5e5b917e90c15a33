//! The history of each replica, which the status keeps. A pod has the same numbers in its annotations, so reading a pod
//! twice, or reading an old status, changes nothing. Numbers only grow while a replica belongs to the job; when it is scaled
//! away or given up its failures are reset, its incarnation never is.

use std::collections::BTreeMap;

use psjobs_api::crd::{ParameterServerJobStatus, ReplicaGroup};
use psjobs_api::{Role, index_ranges};

use crate::controller::observe::{ObservedPod, PodPhase, Replica};

/// The highest number of a history: numbers of a status are 32 bits wide and signed. Everybody who may change a pod's
/// annotations can write any number there.
pub const HIGHEST: u32 = i32::MAX.cast_unsigned();

/// The highest incarnation that is read from a pod although the history does not lead to it. As many incarnations are left
/// above it for the next pods: servers refuse a process only if another one has a higher incarnation.
const HIGHEST_UNKNOWN: u32 = HIGHEST / 2;

/// Returns the incarnation after `incarnation`, at most [`HIGHEST`].
fn after(incarnation: u32) -> u32 {
    incarnation.saturating_add(1).min(HIGHEST)
}

/// The newest pod that a replica had, how many of its pods failed, and whether its work is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Record {
    pub incarnation: u32,
    pub failures: u32,
    /// Failures and disruptions in a row, since one of its pods last ran for spec.failurePolicy.backoff.resetAfterSeconds.
    pub failures_in_a_row: u32,
    /// Incarnation of its newest pod whose program failed, if one did.
    pub failed_incarnation: Option<u32>,
    pub succeeded: bool,
    /// Incarnation from which its pods count. Above `incarnation`: the replica is to begin anew.
    pub since: u32,
    /// The replica is given up, and gets no pod until [`ReplicaHistory::retry`].
    pub lost: bool,
}

/// The change that a pod's end makes to its replica's record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RestartCost {
    /// The end counts towards failurePolicy.maxRestarts.
    pub counts: bool,
    /// If it failed: the new number of failures and disruptions in a row, this one included.
    pub in_a_row: Option<u32>,
    /// The program itself failed: Kubernetes did not take the pod away.
    pub is_own: bool,
}

/// A record for every replica whose pod has existed since the job was last resumed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReplicaHistory {
    records: BTreeMap<Replica, Record>,
    /// Incarnation of first pods.
    first: u32,
}

impl Record {
    fn has_begun(&self) -> bool {
        self.incarnation >= self.since
    }
}

impl ReplicaHistory {
    pub fn read(status: &ParameterServerJobStatus) -> Self {
        let mut records = BTreeMap::new();
        for (role, of_role) in [(Role::Server, &status.ps), (Role::Trainer, &status.trainer)] {
            for group in of_role.iter().flat_map(|of_role| &of_role.replicas) {
                let record = Record {
                    incarnation: group.incarnation.unsigned_abs(),
                    failures: group.failures.unsigned_abs(),
                    failures_in_a_row: group.failures_in_a_row.unsigned_abs(),
                    failed_incarnation: group.failed_incarnation.map(i32::unsigned_abs),
                    succeeded: group.succeeded,
                    since: group.since.unsigned_abs(),
                    lost: group.lost,
                };
                records.extend(index_ranges::parse(&group.indexes).map(|index| (Replica { role, index }, record)));
            }
        }
        Self { records, first: status.first_incarnation.unsigned_abs() }
    }

    /// Adds the state of pods: each has its incarnation and the failures before it.
    pub fn observe<'a>(&mut self, pods: impl IntoIterator<Item = (Replica, &'a ObservedPod, RestartCost)>) {
        for (replica, pod, restart_cost) in pods {
            let incarnation = self.credible(replica, pod.incarnation);
            let record = self.records.entry(replica).or_default();
            if incarnation >= record.incarnation {
                let so_far = record.failures_in_a_row.max(pod.failures_in_a_row);
                record.failures_in_a_row = restart_cost.in_a_row.unwrap_or(so_far).min(HIGHEST);
            }
            record.incarnation = record.incarnation.max(incarnation);
            let failed = if restart_cost.is_own { Some(incarnation) } else { pod.failed_incarnation };
            record.failed_incarnation = record.failed_incarnation.max(failed.map(|failed| failed.min(incarnation)));
            record.failures = record.failures.max(pod.failures.saturating_add(restart_cost.counts.into()).min(HIGHEST));
            record.succeeded |= replica.role == Role::Trainer && matches!(pod.phase, PodPhase::Succeeded { .. });
        }
    }

    /// Notes that a trainer has ended well.
    pub fn conclude(&mut self, trainer: Replica) {
        self.records.entry(trainer).or_default().succeeded = true;
    }

    /// Removes a replica from the job, with all pods that it had, this incarnation's included.
    pub fn remove(&mut self, replica: Replica, newest: Option<u32>) {
        let newest = newest.map(|newest| self.credible(replica, newest));
        let Some(incarnation) = self.get(replica).map(|record| record.incarnation).max(newest) else { return };
        let succeeded = self.succeeded(replica);
        let record = Record { incarnation, since: after(incarnation), succeeded, ..Record::default() };
        self.records.insert(replica, record);
    }

    /// Removes a replica from the job until [`ReplicaHistory::retry`].
    pub fn give_up(&mut self, replica: Replica) {
        self.remove(replica, None);
        if let Some(record) = self.records.get_mut(&replica) {
            record.lost = true;
        }
    }

    /// Lets replicas that were given up begin again.
    pub fn retry(&mut self) {
        self.records.values_mut().for_each(|record| record.lost = false);
    }

    pub fn is_lost(&self, replica: Replica) -> bool {
        self.get(replica).is_some_and(|record| record.lost)
    }

    /// Returns the replicas that are given up.
    pub fn lost(&self) -> impl Iterator<Item = Replica> {
        self.records.iter().filter(|(_, record)| record.lost).map(|(&replica, _)| replica)
    }

    /// Returns the replicas that have a record.
    pub fn replicas(&self) -> impl Iterator<Item = Replica> {
        self.records.keys().copied()
    }

    /// Returns the lowest incarnation of a pod that counts.
    pub fn since(&self, replica: Replica) -> u32 {
        self.get(replica).map_or(self.first, |record| record.since.max(self.first))
    }

    /// Returns whether the replica has had a pod that counts.
    pub fn has_begun(&self, replica: Replica) -> bool {
        self.get(replica).is_some_and(|record| record.has_begun())
    }

    /// Returns the number of replicas of a role that had a pod that counts.
    pub fn started(&self, role: Role) -> u32 {
        u32::try_from(self.of(role).filter(|(_, record)| record.has_begun()).count()).unwrap_or(u32::MAX)
    }

    /// Returns the number of replicas of a role whose work is done.
    pub fn done(&self, role: Role) -> u32 {
        u32::try_from(self.of(role).filter(|(_, record)| record.succeeded).count()).unwrap_or(u32::MAX)
    }

    /// Returns the history without successes.
    pub fn without_successes(mut self) -> Self {
        self.records.values_mut().for_each(|record| record.succeeded = false);
        self
    }

    pub fn get(&self, replica: Replica) -> Option<Record> {
        self.records.get(&replica).copied()
    }

    /// Returns the number of replicas of a role that could have a pod: one more than the highest index.
    pub fn count(&self, role: Role) -> u32 {
        self.of(role).next_back().map_or(0, |(replica, _)| replica.index + 1)
    }

    pub fn succeeded(&self, replica: Replica) -> bool {
        self.get(replica).is_some_and(|record| record.succeeded)
    }

    /// Returns the trainers whose work is done, ascending.
    pub fn finished_trainers(&self) -> Vec<u32> {
        let finished = self.of(Role::Trainer).filter(|(_, record)| record.succeeded);
        finished.map(|(trainer, _)| trainer.index).collect()
    }

    /// Returns the incarnation of the next pod of a replica that has none: never one that existed before.
    pub fn next_incarnation(&self, replica: Replica) -> u32 {
        self.get(replica).map_or(self.first, |record| after(record.incarnation).max(self.first))
    }

    /// Returns the incarnation of a pod whose annotation says `annotated`. A number above the next incarnation, which the
    /// operator cannot have given, is limited to [`HIGHEST_UNKNOWN`] or, if that is higher, to the record's incarnation.
    pub fn credible(&self, replica: Replica, annotated: u32) -> u32 {
        if annotated <= HIGHEST_UNKNOWN || annotated <= self.next_incarnation(replica) {
            return annotated;
        }
        self.get(replica).map_or(0, |record| record.incarnation).max(HIGHEST_UNKNOWN)
    }

    /// Returns an incarnation that is higher than every one so far.
    pub fn after_all(&self) -> u32 {
        let newest = self.records.values().map(|record| after(record.incarnation)).max();
        newest.unwrap_or(0).max(self.first)
    }

    /// Returns the number of pods of a role that replaced another since `before`.
    pub fn replaced_since(&self, before: &Self, role: Role) -> u32 {
        let known = |replica| before.get(replica).map_or(0, |record| record.incarnation);
        // The first pod of a replica that begins anew replaces no other.
        let base = |replica| known(replica).max(before.since(replica));
        bounded(self.of(role).map(|(replica, record)| record.incarnation.saturating_sub(base(replica))))
    }

    /// Returns the number of pods of all roles that failed since `before`.
    pub fn failed_since(&self, before: &Self) -> u32 {
        let base = |replica| before.get(replica).map_or(0, |record| record.failures);
        bounded(self.records.iter().map(|(&replica, record)| record.failures.saturating_sub(base(replica))))
    }

    /// Converts the history to its form in the status: equal records together, with their indexes as ranges.
    pub fn groups(&self, role: Role) -> Vec<ReplicaGroup> {
        let mut groups = BTreeMap::<Record, Vec<u32>>::new();
        for (replica, &record) in self.of(role) {
            groups.entry(record).or_default().push(replica.index);
        }
        let group = |(record, members): (Record, Vec<u32>)| ReplicaGroup {
            indexes: index_ranges::format(&members),
            incarnation: record.incarnation.cast_signed(),
            failures: record.failures.cast_signed(),
            failures_in_a_row: record.failures_in_a_row.cast_signed(),
            failed_incarnation: record.failed_incarnation.map(u32::cast_signed),
            succeeded: record.succeeded,
            since: record.since.cast_signed(),
            lost: record.lost,
        };
        groups.into_iter().map(group).collect()
    }

    fn of(&self, role: Role) -> impl DoubleEndedIterator<Item = (Replica, &Record)> {
        self.records.iter().filter(move |(replica, _)| replica.role == role).map(|(&replica, record)| (replica, record))
    }
}

/// Adds numbers up, at most to [`HIGHEST`].
fn bounded(numbers: impl Iterator<Item = u32>) -> u32 {
    numbers.fold(0, u32::saturating_add).min(HIGHEST)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_that_somebody_wrote_into_a_pod_are_limited_and_higher_ones_follow() {
        let trainer = Replica::trainer(0);
        for written in [HIGHEST - 1, HIGHEST, HIGHEST + 1, u32::MAX] {
            let pod = |incarnation| crate::controller::fixtures::pod(trainer).born(incarnation, written, written);
            let cost = RestartCost { counts: true, in_a_row: None, is_own: true };
            let mut history = ReplicaHistory::default();
            let mut real = 0;
            for _ in 0..3 {
                // The pod as it was created, then twice with the other number.
                for annotated in [real, written, written] {
                    history.observe([(trainer, &pod(annotated), cost)]);
                }
                let next = history.next_incarnation(trainer);
                assert!(next > real && next <= HIGHEST_UNKNOWN + 3, "{written}: {next} follows {real}");
                assert_eq!(history.after_all(), next, "{written}");
                real = next;
            }
            assert_eq!(history.failed_since(&ReplicaHistory::default()), HIGHEST, "{written}");
            history.remove(trainer, Some(written));
            assert!(history.credible(trainer, written) < history.since(trainer), "{written}: it counts no more");
            assert_eq!(history.next_incarnation(trainer), real, "{written}: the pod with {real} was never created");
            let groups = history.groups(Role::Trainer);
            assert!(groups.iter().all(|group| group.incarnation > 0 && group.since > 0), "{written}: {groups:?}");
        }
    }

    #[test]
    fn above_the_limit_an_incarnation_is_read_only_if_it_is_the_next() {
        let (known, new) = (Replica::trainer(0), Replica::trainer(1));
        // The record of the first trainer, the incarnation of first pods, and what is read from a pod of each trainer.
        let rows = [
            (3, 0, 7, (7, 7)),
            (HIGHEST_UNKNOWN, 0, HIGHEST_UNKNOWN + 1, (HIGHEST_UNKNOWN + 1, HIGHEST_UNKNOWN)),
            (HIGHEST_UNKNOWN + 5, 0, HIGHEST_UNKNOWN + 7, (HIGHEST_UNKNOWN + 5, HIGHEST_UNKNOWN)),
            (0, HIGHEST_UNKNOWN + 9, HIGHEST_UNKNOWN + 9, (HIGHEST_UNKNOWN + 9, HIGHEST_UNKNOWN + 9)),
        ];
        for (incarnation, first, annotated, want) in rows {
            let record = Record { incarnation, ..Record::default() };
            let history = ReplicaHistory { records: [(known, record)].into(), first };
            let read = (history.credible(known, annotated), history.credible(new, annotated));
            assert_eq!(read, want, "{annotated} after {incarnation}, first {first}");
        }
    }

    fn record() -> impl Strategy<Value = Record> {
        let failed = prop::option::of(0_u32..3);
        (0_u32..4, 0_u32..3, 0_u32..3, failed, any::<bool>(), 0_u32..3, any::<bool>()).prop_map(
            |(incarnation, failures, failures_in_a_row, failed_incarnation, succeeded, since, lost)| Record {
                incarnation,
                failures,
                failures_in_a_row,
                failed_incarnation,
                succeeded,
                since,
                lost,
            },
        )
    }

    #[test]
    fn a_replica_that_left_begins_anew_with_a_higher_incarnation_and_no_failures() {
        let trainer = Replica::trainer(3);
        let record = Record { incarnation: 4, failures: 2, failures_in_a_row: 2, ..Record::default() };
        let mut history = ReplicaHistory { records: [(trainer, record)].into(), first: 0 };
        assert!(history.has_begun(trainer));
        history.give_up(trainer);
        assert!(history.is_lost(trainer) && !history.has_begun(trainer));
        assert_eq!(
            (history.next_incarnation(trainer), history.since(trainer), history.started(Role::Trainer)),
            (5, 5, 0)
        );
        assert_eq!(history.get(trainer).map(|record| (record.failures, record.failures_in_a_row)), Some((0, 0)));
        history.retry();
        assert!(!history.is_lost(trainer) && history.lost().next().is_none());

        // A pod that the status does not have yet is scaled away.
        history.remove(trainer, Some(5));
        assert_eq!(history.next_incarnation(trainer), 6);
        let mut after = history.clone();
        after.records.entry(trainer).and_modify(|record| record.incarnation = 6);
        assert_eq!(after.replaced_since(&history, Role::Trainer), 0, "its first pod replaces no other");
        after.records.entry(trainer).and_modify(|record| record.incarnation = 7);
        assert_eq!(after.replaced_since(&history, Role::Trainer), 1);
    }

    proptest! {
        #[test]
        fn a_ledger_survives_the_way_through_the_status(
            records in prop::collection::btree_map(0_u32..300, record(), 0..200),
            first in 0_u32..3,
        ) {
            let records = records.into_iter().map(|(index, record)| (Replica::trainer(index), record));
            let history = ReplicaHistory { records: records.collect(), first };
            let mut status = ParameterServerJobStatus { first_incarnation: first.cast_signed(), ..Default::default() };
            status.trainer.get_or_insert_default().replicas = history.groups(Role::Trainer);
            prop_assert_eq!(ReplicaHistory::read(&status), history);
        }
    }
}
