//! `spec.failurePolicy`: what follows when a process fails, and which failure a trouble began with.

use std::time::Duration;

use psjobs_api::{Replica, Role};
use psjobs_policy::deadlines::ENDED_EARLY;
use psjobs_policy::{self as policy, Response};

use super::state::{Member, Trouble};
use super::{Action, Exit, Failure, Lifecycle, State};

/// Failures that follow one another within this time are one trouble, and the first is its cause.
const ONE_TROUBLE: Duration = Duration::from_secs(60);

/// Reason of the failure of a process that ended by itself, as Kubernetes has it.
pub const ERROR: &str = "Error";

impl Lifecycle {
    pub(super) fn server_ended_early(&mut self, replica: Replica, now: Duration) -> Vec<Action> {
        let line = "it ended while trainers still run; a server must run until they are done".into();
        self.failed_because(Failure { replica, exit: Exit::Code(0), tail: vec![line] }, ENDED_EARLY, now)
    }

    pub(super) fn failed(&mut self, failure: Failure, now: Duration) -> Vec<Action> {
        self.failed_because(failure, ERROR, now)
    }

    fn failed_because(&mut self, failure: Failure, reason: &str, now: Duration) -> Vec<Action> {
        let Failure { replica, exit, .. } = failure;
        let response = self.rules.policy.respond_to(&policy::Failure {
            role: Some(replica.role),
            disruption: false,
            exit_code: Some(exit.code()),
            reason,
            conditions: &[],
            log_tail: Some(&failure.tail.join("\n")),
        });
        match &mut self.trouble {
            _ if response.has_other_cause => {}
            Some(trouble) if now <= trouble.last + ONE_TROUBLE => trouble.last = now,
            trouble => *trouble = Some(Trouble { first: failure, last: now }),
        }
        if exit == Exit::NotStarted {
            return self.fail(format!("{replica} {exit}"));
        }
        if let policy::Action::FailJob { because, .. } = response.action {
            return self.fail(format!("{replica} {exit}, and {because}"));
        }
        if self.recreation.is_pending() {
            self.set(replica, State::Stopped);
            return Vec::new();
        }
        let ran = now.saturating_sub(self.members.get(&replica).map_or(now, |member| member.started));
        if response.action == policy::Action::RestartJob {
            return self.restart_all_after(replica, exit, response.counts, ran, now);
        }
        self.restart(replica, exit, &response, ran, now)
    }

    fn restart(
        &mut self,
        replica: Replica,
        exit: Exit,
        response: &Response,
        ran: Duration,
        now: Duration,
    ) -> Vec<Action> {
        if let Some(actions) = self.give_up(replica, exit, response.counts, now) {
            return actions;
        }
        if response.counts && self.restarts_are_used_up() {
            return self.fail(self.used_up(replica, exit));
        }
        self.restarts += 1;
        self.counted += u32::from(response.counts);
        let before = self.members.get(&replica).map_or(0, |member| member.failures_in_a_row);
        let in_a_row = self.rules.policy.failures_in_a_row(before, ran);
        let wait = self.rules.policy.wait(in_a_row);
        let member = self.members.entry(replica).or_default();
        (member.failures_in_a_row, member.state) = (in_a_row, State::StartsAt(now + wait));
        if replica.role == Role::Trainer {
            self.start_concluded_servers(now);
        }
        let which = self.which_restart(response.counts);
        vec![Action::Warn(format!("{replica} {exit}; it is started again{}{which}", when(wait)))]
    }

    /// Starts the servers again that had ended because all trainers had left: one of those starts again.
    fn start_concluded_servers(&mut self, now: Duration) {
        let is_done =
            |(replica, member): &(&Replica, &mut Member)| replica.role == Role::Server && member.state == State::Done;
        self.members.iter_mut().filter(is_done).for_each(|(_, member)| member.state = State::StartsAt(now));
    }

    pub(super) fn restarts_are_used_up(&self) -> bool {
        self.counted >= self.rules.policy.max_restarts
    }

    pub(super) fn used_up(&self, replica: Replica, exit: Exit) -> String {
        match self.rules.policy.max_restarts {
            0 => format!("{replica} {exit}, and spec.failurePolicy.maxRestarts is 0"),
            most => format!("{replica} {exit}, and all {most} restarts of spec.failurePolicy.maxRestarts are used up"),
        }
    }

    /// Returns ` (restart 1 of 3)`, nothing for one that does not count.
    pub(super) fn which_restart(&self, counts: bool) -> String {
        let most = self.rules.policy.max_restarts;
        if counts { format!(" (restart {} of {most})", self.counted) } else { String::new() }
    }
}

/// Returns ` in 4 s`, nothing for a restart at once.
pub fn when(wait: Duration) -> String {
    if wait.is_zero() { String::new() } else { format!(" in {} s", wait.as_secs()) }
}
