//! `spec.elasticPolicy`: a job gives up a trainer rather than itself, and is done when its work is, whichever
//! trainers are there by then.

use psjobs_api::crd::ElasticPolicy;
use psjobs_api::{Replica, Role};

/// The bounds of an elastic job's number of trainers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elastic {
    /// Trainers that the job needs to train.
    pub min: u32,
    /// Places for trainers: their indexes are below it.
    pub max: u32,
}

/// The part of a trainer of an elastic job in the job's remaining work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrainerState {
    /// It has ended well.
    Done,
    /// It does not run: it was given up, has not started, or waits to be started again.
    Absent,
    /// It runs, or its failure ends more than itself.
    Present,
}

impl Elastic {
    /// Reads the bounds of a spec.
    #[must_use]
    pub fn new(policy: &ElasticPolicy) -> Self {
        Self { min: policy.min_replicas.unsigned_abs(), max: policy.max_replicas.unsigned_abs() }
    }

    /// Returns true if a job may give up trainers so that `left` are left. `closing`: some trainer has ended well, so
    /// that all work is assigned and no further trainer is needed.
    #[must_use]
    pub const fn may_shrink_to(self, left: u32, closing: bool) -> bool {
        closing || left >= self.min
    }

    /// Returns how many trainers a server that starts waits for. The others of a job that is `closing` have ended, and none
    /// comes in their place.
    #[must_use]
    pub const fn awaited(self, closing: bool) -> u32 {
        if closing { 1 } else { self.min }
    }
}

/// Returns true for a replica that an elastic job can do without: all but the servers and trainer 0, which evaluates
/// and reports.
#[must_use]
pub const fn is_spare(replica: Replica) -> bool {
    matches!(replica.role, Role::Trainer) && replica.index > 0
}

/// Returns true if the trainers of an elastic job are through: one has ended well (`closing`), and none is present that
/// has not ended. A server that has ended for long (`server_has_closed`) has nothing left for one that comes back.
#[must_use]
pub fn work_is_over(
    closing: bool,
    server_has_closed: bool,
    trainers: impl IntoIterator<Item = (Replica, TrainerState)>,
) -> bool {
    let is_over = |(replica, state)| match state {
        TrainerState::Done => true,
        TrainerState::Absent => is_spare(replica),
        TrainerState::Present => false,
    };
    closing && (server_has_closed || trainers.into_iter().all(is_over))
}

/// Returns the trainers to give up, of replicas that failed at these times and would each be started again, with so
/// many restarts left. Servers and trainer 0 get a restart before others; if even they get none, none is given up and
/// the job fails. In a job that is `closing` no spare trainer is started again.
#[must_use]
pub fn without_restart<At: Ord + Copy>(failures: &[(Replica, At)], restarts_left: u32, closing: bool) -> Vec<Replica> {
    let mut failures = failures.to_vec();
    failures.sort_by_key(|&(replica, at)| (is_spare(replica), at, replica));
    let beyond = if closing { failures } else { failures.split_off(failures.len().min(restarts_left as usize)) };
    if !closing && beyond.iter().any(|&(replica, _)| !is_spare(replica)) {
        return Vec::new();
    }
    beyond.into_iter().map(|(replica, _)| replica).filter(|&replica| is_spare(replica)).collect()
}

/// Returns why a trainer is given up; it continues a sentence about its failure.
#[must_use]
pub fn because(closing: bool, max_restarts: u32) -> String {
    match closing {
        true => "nothing is left for it to do".into(),
        false => format!("spec.failurePolicy.maxRestarts is {max_restarts}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PS: Replica = Replica::server(0);
    const T: [Replica; 4] = [Replica::trainer(0), Replica::trainer(1), Replica::trainer(2), Replica::trainer(3)];

    #[test]
    fn spare_trainers_go_without_a_restart_before_others() {
        // Failures in their order, restarts that are left, whether the job is closing, and which are given up.
        type Row<'a> = (&'a [Replica], u32, bool, &'a [Replica]);
        let rows: [Row<'_>; 7] = [
            (&[T[1]], 1, false, &[]),
            (&[T[1]], 0, false, &[T[1]]),
            (&[T[1], T[0], T[2]], 2, false, &[T[2]]),
            (&[T[1], PS], 1, false, &[T[1]]),
            (&[T[1], PS], 0, false, &[]),
            (&[T[1], T[0]], 5, true, &[T[1]]),
            (&[T[3], T[2]], 1, false, &[T[2]]),
        ];
        for (failing, left, closing, want) in rows {
            let failures: Vec<_> = failing.iter().enumerate().map(|(at, &replica)| (replica, at)).collect();
            assert_eq!(without_restart(&failures, left, closing), want, "{failing:?}, {left} left, closing: {closing}");
        }
    }

    #[test]
    fn the_work_is_over_when_no_trainer_is_present() {
        use TrainerState::{Absent, Done, Present};
        let rows = [
            ([Done, Done], true, false, true),
            ([Done, Absent], true, false, true),
            ([Done, Present], true, false, false),
            ([Absent, Done], true, false, false),
            ([Absent, Done], true, true, true),
            ([Absent, Absent], false, false, false),
        ];
        for (states, closing, closed, want) in rows {
            let trainers = [(T[0], states[0]), (T[1], states[1])];
            assert_eq!(work_is_over(closing, closed, trainers), want, "{states:?} {closing} {closed}");
        }
        let bounds = Elastic { min: 2, max: 4 };
        assert!(bounds.may_shrink_to(2, false) && !bounds.may_shrink_to(1, false) && bounds.may_shrink_to(0, true));
    }
}
