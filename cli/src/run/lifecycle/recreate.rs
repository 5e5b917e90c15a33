//! The restart of the whole job: every process is stopped, and the next ones have an incarnation that none of these had.

use std::time::Duration;

use psjobs_api::Replica;

use super::failure::when;
use super::state::Recreation;
use super::{Action, Exit, Lifecycle, Member, State};

impl Lifecycle {
    /// Restarts all after the failure of a process that ran for so long, after the back-off.
    pub(super) fn restart_all_after(
        &mut self,
        replica: Replica,
        exit: Exit,
        counts: bool,
        ran: Duration,
        now: Duration,
    ) -> Vec<Action> {
        if counts && self.restarts_are_used_up() {
            return self.fail(self.used_up(replica, exit));
        }
        self.set(replica, State::Stopped);
        let in_a_row = self.rules.policy.failures_in_a_row(self.recreation.in_a_row, ran);
        let wait = self.rules.policy.wait(in_a_row);
        self.recreation = Recreation { at: Some(now + wait), in_a_row, counts, stopping: false };
        let which = if counts {
            format!(" (restart {} of {})", self.counted + 1, self.rules.policy.max_restarts)
        } else {
            String::new()
        };
        let note = format!("{replica} {exit}; all processes are started again{}{which}", when(wait));
        [Action::Warn(note)].into_iter().chain(self.recreate_if_due(now)).collect()
    }

    /// Restarts all at once because the job did this.
    pub(super) fn restart_all_now(&mut self, what: &str, counts: bool, now: Duration) -> Vec<Action> {
        self.recreation = Recreation { at: Some(now), counts, stopping: false, ..self.recreation };
        let actions = self.recreate_if_due(now);
        let note = format!("the job {what}; all processes are started again{}", self.which_restart(counts));
        [Action::Warn(note)].into_iter().chain(actions).collect()
    }

    pub(super) fn recreate_if_due(&mut self, now: Duration) -> Vec<Action> {
        if self.recreation.at.is_none_or(|at| now < at) {
            return Vec::new();
        }
        self.recreation.at = None;
        self.recreation.stopping = true;
        self.counted += u32::from(self.recreation.counts);
        self.report = None;
        let mut actions = Vec::new();
        for (&replica, member) in &mut self.members {
            self.restarts += u32::from(member.was_started);
            member.state = if member.state == State::Running {
                actions.push(Action::Stop(replica));
                State::Stopping
            } else {
                State::Stopped
            };
        }
        actions.extend(self.start_all_if_stopped(now));
        actions
    }

    pub(super) fn start_all_if_stopped(&mut self, now: Duration) -> Vec<Action> {
        if !self.recreation.stopping || self.members.values().any(|member| member.state != State::Stopped) {
            return Vec::new();
        }
        self.recreation.stopping = false;
        let newest = self.members.values().map(|member| member.incarnation).max().unwrap_or(0);
        for member in self.members.values_mut() {
            *member = Member { incarnation: newest + 1, ..Member::default() };
        }
        self.start_waiting(now)
    }
}
