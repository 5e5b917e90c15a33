//! Compares two statuses, to determine how urgently the new one must be written.

use psjobs_api::crd::{ConditionType, JobCondition, ParameterServerJobStatus, RoleStatus};

use super::decide::ReplicaHistory;

/// The kind of difference between two statuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Difference {
    None,
    /// Numbers and words that change with every pod, and may change again a moment later.
    Details,
    /// Fields on which decisions or people rely.
    Facts,
}

/// Compares two statuses.
pub fn difference(old: &ParameterServerJobStatus, new: &ParameterServerJobStatus) -> Difference {
    if old == new {
        Difference::None
    } else if facts(old) == facts(new) {
        Difference::Details
    } else {
        Difference::Facts
    }
}

/// Returns a status without its details.
fn facts(status: &ParameterServerJobStatus) -> (ParameterServerJobStatus, ReplicaHistory) {
    let of_role = |of_role: &Option<RoleStatus>| {
        let of_role = of_role.as_ref()?;
        Some(RoleStatus { desired: of_role.desired, restarts: of_role.restarts, ..RoleStatus::default() })
    };
    let conditions = status.conditions.iter().filter(|condition| condition.type_ != ConditionType::ServersReady);
    let condition = |condition: &JobCondition| JobCondition {
        type_: condition.type_,
        status: condition.status.clone(),
        reason: String::new(),
        message: String::new(),
        last_transition_time: condition.last_transition_time.clone(),
        observed_generation: None,
    };
    let facts = ParameterServerJobStatus {
        reason: None,
        conditions: conditions.map(condition).collect(),
        ps: of_role(&status.ps),
        trainer: of_role(&status.trainer),
        progress: None,
        last_checkpoint: None,
        ..status.clone()
    };
    (facts, ReplicaHistory::read(status).without_successes())
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use psjobs_api::crd::{Phase, Progress, ReplicaGroup};

    use super::*;

    #[test]
    fn numbers_and_words_are_details_all_else_are_facts() {
        let condition = |type_, status: &str, reason: &str| JobCondition {
            type_,
            status: status.into(),
            reason: reason.into(),
            message: String::new(),
            last_transition_time: Time(Timestamp::UNIX_EPOCH),
            observed_generation: None,
        };
        let group = |incarnation, succeeded| ReplicaGroup {
            indexes: "0-1".into(),
            incarnation,
            succeeded,
            ..ReplicaGroup::default()
        };
        let old = ParameterServerJobStatus {
            phase: Some(Phase::Pending),
            conditions: vec![
                condition(ConditionType::ServersReady, "False", "A"),
                condition(ConditionType::Running, "False", "A"),
            ],
            trainer: Some(RoleStatus { replicas: vec![group(0, false)], ..RoleStatus::default() }),
            ..ParameterServerJobStatus::default()
        };
        type Change = fn(&mut ParameterServerJobStatus, &dyn Fn(i32, bool) -> ReplicaGroup);
        let rows: [(&str, Change, Difference); 9] = [
            ("nothing", |_, _| {}, Difference::None),
            ("a count", |s, _| s.trainer.get_or_insert_default().ready = 1, Difference::Details),
            ("progress", |s, _| s.progress = Some(Progress::default()), Difference::Details),
            ("a reason", |s, _| s.conditions[1].reason = "B".into(), Difference::Details),
            ("servers are ready", |s, _| s.conditions[0].status = "True".into(), Difference::Details),
            (
                "a trainer is done",
                |s, g| s.trainer.get_or_insert_default().replicas = vec![g(0, true)],
                Difference::Details,
            ),
            ("the job runs", |s, _| s.conditions[1].status = "True".into(), Difference::Facts),
            (
                "a new incarnation",
                |s, g| s.trainer.get_or_insert_default().replicas = vec![g(1, false)],
                Difference::Facts,
            ),
            ("a phase", |s, _| s.phase = Some(Phase::Running), Difference::Facts),
        ];
        for (label, change, want) in rows {
            let mut new = old.clone();
            change(&mut new, &group);
            assert_eq!(difference(&old, &new), want, "{label}");
        }
    }
}
