//! `spec.successPolicy`, and the end of a job that succeeds: what still runs is stopped, the trainers first, and the
//! servers get their time to end.

use std::time::Duration;

use psjobs_api::{Replica, Role};
use psjobs_policy::Success;

use super::{Action, Exit, Lifecycle, Outcome, State};

impl Lifecycle {
    /// Begins to end the job if enough trainers are done.
    pub(super) fn complete_if_successful(&mut self, now: Duration) -> Vec<Action> {
        let success = self.rules.policy.success;
        let is_done = |index| self.members.get(&Replica::trainer(index)).is_some_and(|m| m.state == State::Done);
        let trainers = self.trainers().count() as u32;
        let reached = success.is_reached(trainers, is_done) || success != Success::RankZero && self.work_is_over();
        if !reached {
            return Vec::new();
        }
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

    pub(super) fn ended_while_draining(&mut self, replica: Replica, exit: Exit, was_asked_to: bool) -> Vec<Action> {
        let state = if replica.role == Role::Trainer && !exit.is_good() { State::Lost } else { State::Done };
        self.set(replica, state);
        let mut actions = Vec::new();
        if !exit.is_good() && !was_asked_to {
            actions.push(Action::Tell(format!("{replica} {exit}, after all trainers were done")));
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

    pub(super) fn end_drain(&mut self) -> Vec<Action> {
        let seconds = self.rules.server_drain.as_secs();
        let note =
            format!("the servers did not end within {seconds} s (spec.runPolicy.serverDrainSeconds) and are stopped");
        [Action::Tell(note)].into_iter().chain(self.succeed()).collect()
    }

    pub(super) fn succeed(&mut self) -> Vec<Action> {
        self.over = true;
        vec![Action::End(Outcome::Succeeded)]
    }
}
