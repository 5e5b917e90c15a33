//! `spec.elasticPolicy`: the job gives up a trainer rather than itself, and is done when its work is, whichever trainers
//! are there by then.

use std::time::Duration;

use psjobs_api::Replica;
use psjobs_policy::elastic::{self, TrainerState};

use super::{Action, Exit, Lifecycle, State};

impl Lifecycle {
    /// Goes on without a trainer that has no restart left, or whose work others have done, if the job is elastic and
    /// enough trainers are left.
    pub(super) fn give_up(&mut self, replica: Replica, exit: Exit, counts: bool, now: Duration) -> Option<Vec<Action>> {
        let bounds = self.rules.policy.elastic?;
        let (closing, most) = (self.is_closing(), self.rules.policy.max_restarts);
        let left = if counts { most.saturating_sub(self.counted) } else { 1 };
        if elastic::without_restart(&[(replica, now)], left, closing).is_empty() {
            return None;
        }
        let all = self.trainers().count() as u32;
        let lost = self.trainers().filter(|(_, member)| member.state == State::Lost).count() as u32;
        let left = all - lost - 1;
        if !bounds.may_shrink_to(left, closing) {
            return None;
        }
        let because = elastic::because(closing, most);
        let note = match closing {
            true => format!("{replica} {exit}; {because}, so it is not started again"),
            false => format!("{replica} {exit}, and {because}; it is given up, and {left} of {all} trainers go on"),
        };
        self.set(replica, State::Lost);
        Some([Action::Warn(note)].into_iter().chain(self.complete_if_successful(now)).collect())
    }

    /// Returns true if some trainer of an elastic job has ended well: what there was to do is assigned.
    pub(super) fn is_closing(&self) -> bool {
        self.rules.policy.elastic.is_some() && self.trainers().any(|(_, member)| member.state == State::Done)
    }

    /// Returns true if the trainers of an elastic job are through, see [`elastic::work_is_over`].
    pub(super) fn work_is_over(&self) -> bool {
        let state = |state| match state {
            State::Done => TrainerState::Done,
            State::Running | State::Stopping => TrainerState::Present,
            State::Waiting | State::StartsAt(_) | State::FailsAt(_) | State::Stopped | State::Lost => {
                TrainerState::Absent
            }
        };
        elastic::work_is_over(self.is_closing(), false, self.trainers().map(|(r, member)| (r, state(member.state))))
    }
}
