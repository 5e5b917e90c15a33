//! Conditions of a status: one of each type, with a transition time that changes only when the condition's status does.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use psjobs_api::crd::{ConditionType, JobCondition, ParameterServerJobStatus};

/// The new content of a condition: its status, a reason of one word for programs, a sentence for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConditionUpdate {
    pub holds: bool,
    pub reason: String,
    pub message: String,
}

impl ConditionUpdate {
    pub fn yes(reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self { holds: true, reason: reason.into(), message: message.into() }
    }

    pub fn no(reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self { holds: false, reason: reason.into(), message: message.into() }
    }
}

/// Returns the condition of a type, if the status has it.
pub fn find(status: &ParameterServerJobStatus, type_: ConditionType) -> Option<&JobCondition> {
    status.conditions.iter().find(|condition| condition.type_ == type_)
}

/// Returns whether the status has the condition and it is True.
pub fn holds(status: &ParameterServerJobStatus, type_: ConditionType) -> bool {
    find(status, type_).is_some_and(|condition| condition.status == "True")
}

/// Returns since when the condition is True; `None` if it is not.
pub fn since(status: &ParameterServerJobStatus, type_: ConditionType) -> Option<Timestamp> {
    find(status, type_).filter(|condition| condition.status == "True").map(|condition| condition.last_transition_time.0)
}

/// Sets a condition. Its transition time stays if its status does.
pub fn set(status: &mut ParameterServerJobStatus, type_: ConditionType, update: ConditionUpdate, now: Timestamp) {
    let generation = status.observed_generation;
    let new = JobCondition {
        type_,
        status: if update.holds { "True" } else { "False" }.into(),
        reason: update.reason,
        message: update.message,
        last_transition_time: Time(now),
        observed_generation: generation,
    };
    match status.conditions.iter_mut().find(|condition| condition.type_ == type_) {
        Some(old) if old.status == new.status => {
            *old = JobCondition { last_transition_time: old.last_transition_time.clone(), ..new };
        }
        Some(old) => *old = new,
        None => {
            status.conditions.push(new);
            status.conditions.sort_by_key(|condition| condition.type_);
        }
    }
}

/// Sets a condition to False, if the status has it: such conditions are shown only once they have been True.
pub fn clear(status: &mut ParameterServerJobStatus, type_: ConditionType, reason: &str, now: Timestamp) {
    if find(status, type_).is_some() {
        set(status, type_, ConditionUpdate::no(reason, ""), now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_condition_moves_only_with_its_status() {
        let at = |second| Timestamp::from_second(second).expect("in range");
        let mut status = ParameterServerJobStatus::default();
        for (second, update, want) in [
            (1, ConditionUpdate::no("Waiting", "for one"), 1),
            (2, ConditionUpdate::no("Waiting", "for another"), 1),
            (3, ConditionUpdate::yes("Up", ""), 3),
            (4, ConditionUpdate::yes("Up", "still"), 3),
        ] {
            set(&mut status, ConditionType::Running, update, at(second));
            let condition = find(&status, ConditionType::Running).expect("set");
            assert_eq!(condition.last_transition_time.0, at(want), "after second {second}");
        }
        assert_eq!(status.conditions.len(), 1);
        assert_eq!(since(&status, ConditionType::Running), Some(at(3)));
    }
}
