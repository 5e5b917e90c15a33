//! A job with spec.elasticPolicy: it gives up a trainer rather than itself, and is done when its work is,
//! whoever is there by then.

use std::time::Duration;

use psjobs_api::Role;

use super::{Action, Exit, Lifecycle, Member, Replica, State};

impl Lifecycle {
    /// Goes on without a trainer that has no restart left, or whose work others have done, if the job is elastic
    /// and enough trainers are left. The first is needed: it evaluates and reports.
    pub(super) fn give_up(&mut self, replica: Replica, exit: Exit, now: Duration) -> Option<Vec<Action>> {
        let min = self.rules.min_trainers.filter(|_| is_spare(replica))?;
        let trainers = self.members.iter().filter(|(replica, _)| replica.role == Role::Trainer);
        let (all, lost) =
            (trainers.clone().count(), trainers.filter(|(_, member)| member.state == State::Lost).count());
        let left = all - lost - 1;
        let note = if self.is_closing() {
            format!("{replica} {exit}; nothing is left for it to do, so it is not started again")
        } else if self.restarts == self.rules.max_restarts && left >= min as usize {
            let most = self.rules.max_restarts;
            format!(
                "{replica} {exit}, and spec.failurePolicy.maxRestarts is {most}; it is given up, and {left} of {all} trainers go on"
            )
        } else {
            return None;
        };
        self.set(replica, State::Lost);
        Some([Action::Tell(note)].into_iter().chain(self.drain_if_trained(now)).collect())
    }

    /// Some trainer of an elastic job has ended well: what there was to do is dealt out.
    pub(super) fn is_closing(&self) -> bool {
        let is_done =
            |(replica, member): (&Replica, &Member)| replica.role == Role::Trainer && member.state == State::Done;
        self.rules.min_trainers.is_some() && self.members.iter().any(is_done)
    }

    /// Of a job whose work is dealt out, trainers that wait for their next start.
    pub(super) fn send_late_ones_away(&mut self) {
        if self.is_closing() {
            let waits = |replica: &Replica, member: &Member| is_spare(*replica) && member.state.due().is_some();
            let late = self.members.iter_mut().filter(|(replica, member)| waits(replica, member));
            late.for_each(|(_, member)| member.state = State::Lost);
        }
    }
}

/// A member that an elastic job can do without.
fn is_spare(replica: Replica) -> bool {
    replica.role == Role::Trainer && replica.index > 0
}
