//! `spec.successPolicy`, and the end of a job that succeeds: what still runs is stopped, the trainers first, and the
//! servers get their time to end.

use std::time::Duration;

use psjobs_api::{Replica, Role};
use psjobs_policy::Success;
use psjobs_policy::deadlines::{FRESH_REPORT, NO_MODEL};

use super::{Action, Failure, Lifecycle, Outcome, State};

impl Lifecycle {
    /// Begins to end the job if enough trainers are done.
    pub(super) fn complete_if_successful(&mut self, now: Duration) -> Vec<Action> {
        let success = self.rules.policy.success;
        let is_done = |index| self.members.get(&Replica::trainer(index)).is_some_and(|m| m.state == State::Done);
        let trainers = self.trainers().count() as u32;
        let reached = success.is_reached(trainers, is_done) || success != Success::RankZero && self.work_is_over();
        let is_missing = |state| !matches!(state, State::Running | State::Done | State::FailsAt(_));
        if !reached || (self.awaits_the_model() && is_missing(self.writer())) {
            return Vec::new();
        }
        self.is_draining = true;
        self.drained_by = Some(now + self.rules.server_drain);
        let mut actions = Vec::new();
        for (&replica, member) in &mut self.members {
            member.state = match (replica.role, member.state) {
                (Role::Trainer, State::Running) => {
                    actions.push(Action::Stop(replica));
                    State::Stopping
                }
                (Role::Trainer, State::Done) | (Role::Server, State::Running) => continue,
                (Role::Trainer, _) => State::Lost,
                // One that waits to be started again has nothing left to do.
                (Role::Server, _) => State::Done,
            };
        }
        actions.extend(self.go_on_draining());
        actions
    }

    /// Returns whether server 0 has the model of a job to write, all of whose trainers, or those of an elastic one, are done.
    pub(super) fn awaits_the_model(&self) -> bool {
        let all = || self.trainers().all(|(_, member)| member.state == State::Done);
        let has_ended = matches!(self.writer(), State::Done | State::FailsAt(_));
        self.rules.writes_model && !has_ended && (self.rules.policy.elastic.is_some() || all())
    }

    fn writer(&self) -> State {
        self.members.get(&Replica::server(0)).map(|member| member.state).unwrap_or_default()
    }

    pub(super) fn ended_while_draining(&mut self, end: Failure, was_asked_to: bool, now: Duration) -> Vec<Action> {
        let Failure { replica, exit, .. } = end;
        let is_writer = replica == Replica::server(0) && self.awaits_the_model();
        if is_writer && !exit.is_good() && !was_asked_to {
            // Another process of it finds all steps in the last checkpoint.
            self.is_draining = false;
            return self.failed(end, now);
        }
        if is_writer {
            self.drained_by = Some(now + self.rules.server_drain);
        }
        let state = if replica.role == Role::Trainer && !exit.is_good() { State::Lost } else { State::Done };
        self.set(replica, state);
        let mut actions = Vec::new();
        if !exit.is_good() && !was_asked_to {
            actions.push(Action::Warn(format!("{replica} {exit}, after all trainers were done")));
        }
        actions.extend(self.go_on_draining());
        actions
    }

    /// Ends the job if its servers have ended, and stops them if they would wait for trainers that were stopped. Those of
    /// an elastic job only wait for who is there.
    fn go_on_draining(&mut self) -> Vec<Action> {
        if self.members.values().all(|member| member.state.is_over()) {
            return self.succeed();
        }
        let all_are_over = self.trainers().all(|(_, member)| member.state.is_over());
        let some_were_stopped = self.trainers().any(|(_, member)| member.state != State::Done);
        if !all_are_over || !some_were_stopped || self.rules.policy.elastic.is_some() {
            return Vec::new();
        }
        let servers = self.members.iter_mut().filter(|(_, member)| member.state == State::Running);
        let stop = servers.map(|(&replica, member)| {
            member.state = State::Stopping;
            Action::Stop(replica)
        });
        stop.collect()
    }

    /// Ends the job whose servers have had their time. Server 0 has more of it for the model, if there can be one.
    pub(super) fn end_drain(&mut self, now: Duration) -> Vec<Action> {
        if self.awaits_the_model() {
            return self.wait_for_the_model(now);
        }
        let seconds = self.rules.server_drain.as_secs();
        let note =
            format!("the servers did not end within {seconds} s (spec.runPolicy.serverDrainSeconds) and are stopped");
        [Action::Warn(note)].into_iter().chain(self.succeed()).collect()
    }

    /// Waits for the model, unless server 0 says, now or in its next report, that the trainers made no step.
    pub(super) fn wait_for_the_model(&mut self, now: Duration) -> Vec<Action> {
        self.drained_by = None;
        match self.highest_step {
            Some((0, heard)) if now < heard + FRESH_REPORT => self.fail(format!("it {NO_MODEL}")),
            _ => Vec::new(),
        }
    }

    pub(super) fn succeed(&mut self) -> Vec<Action> {
        self.over = true;
        vec![Action::End(Outcome::Succeeded)]
    }
}
