//! The deadlines of `spec.runPolicy`: for being active, for the start, and from one step to the next.

use std::time::Duration;

use psjobs_api::Role;
use psjobs_policy::deadlines::{FRESH_REPORT, STALLED, no_step};
use psjobs_policy::{self as policy, Missed, Response};

use super::state::Report;
use super::{Action, Lifecycle, State};

impl Lifecycle {
    /// Notes how far server 0 says that training is.
    pub fn progress(&mut self, step: u64, total: u64, now: Duration) -> Vec<Action> {
        let highest = self.highest_step.map_or(step, |(highest, _)| highest.max(step));
        self.highest_step = Some((highest, now));
        if !self.over && self.is_draining() && self.drained_by.is_none() && self.awaits_the_model() {
            return self.wait_for_the_model(now);
        }
        if self.over || self.is_draining() || self.rules.policy.deadlines.progress.is_none() {
            return Vec::new();
        }
        let same = self.report.filter(|known| known.step == step);
        let stepped = same.map_or(now, |known| known.stepped);
        self.report = Some(Report { step, total, stepped, heard: now, is_stale: false });
        let actions = self.handle_stall(now);
        self.note_running(now);
        actions
    }

    pub(super) fn missed_deadline(&mut self, now: Duration) -> Option<Vec<Action>> {
        let missed = self.rules.policy.deadlines.check(now, self.has_run).err()?;
        let what = missed.what();
        Some(match missed {
            Missed::Active(_) => self.fail(format!("it {what}")),
            Missed::Startup(_) => self.fail(format!("it {what}: {}", self.why_not_running())),
        })
    }

    pub(super) fn next_deadline(&self) -> Option<Duration> {
        self.rules.policy.deadlines.check(Duration::ZERO, self.has_run).ok().flatten()
    }

    fn why_not_running(&self) -> String {
        let unready = |(replica, member): (&psjobs_api::Replica, &super::Member)| {
            (replica.role == Role::Server && !member.is_ready).then(|| format!("{replica} is not ready"))
        };
        let waiting = |(replica, member): (&psjobs_api::Replica, &super::Member)| {
            (member.state != State::Running).then(|| format!("{replica} does not run"))
        };
        let found = self.members.iter().find_map(unready).or_else(|| self.members.iter().find_map(waiting));
        found.unwrap_or_default()
    }

    /// When a job that makes no further step is stalled.
    fn stalled_at(&self) -> Option<(Duration, Report)> {
        let deadline = self.rules.policy.deadlines.progress?;
        let report = self.report.filter(|report| !report.is_stale)?;
        Some((self.running_since?.max(report.stepped) + deadline, report))
    }

    pub(super) fn next_stall(&self) -> Option<Duration> {
        self.stalled_at().map(|(at, _)| at)
    }

    /// Does about a job that makes no step what its policy says.
    pub(super) fn handle_stall(&mut self, now: Duration) -> Vec<Action> {
        let Some((_, report)) = self.stalled_at().filter(|(at, _)| *at <= now) else { return Vec::new() };
        if now >= report.heard + FRESH_REPORT {
            // Server 0 does not answer; that says nothing about its steps.
            self.report = Some(Report { is_stale: true, ..report });
            return Vec::new();
        }
        let deadline = self.rules.policy.deadlines.progress.unwrap_or_default();
        let what = no_step(deadline, report.step, report.total);
        let failure = policy::Failure {
            role: None,
            disruption: false,
            exit_code: None,
            reason: STALLED,
            conditions: &[],
            log_tail: None,
        };
        let Response { action, counts, .. } = self.rules.policy.respond_to(&failure);
        match action {
            policy::Action::FailJob { because, .. } => self.fail(format!("it {what}, and {because}")),
            _ if counts && self.restarts_are_used_up() => {
                let most = self.rules.policy.max_restarts;
                self.fail(format!("it {what}; spec.failurePolicy.maxRestarts is {most}"))
            }
            _ => self.restart_all_now(&what, counts, now),
        }
    }

    /// Notes since when all replicas run, of an elastic job all servers and as many trainers as it needs.
    pub(super) fn note_running(&mut self, now: Duration) {
        let is_up = |state: State| matches!(state, State::Running | State::FailsAt(_) | State::Done);
        let servers = self.members.iter().filter(|(replica, _)| replica.role == Role::Server);
        let servers_are_up = servers.clone().all(|(_, member)| is_up(member.state));
        let trainers_up = self.trainers().filter(|(_, member)| is_up(member.state)).count();
        let enough = self.rules.policy.elastic.map_or(self.trainers().count(), |elastic| elastic.min as usize);
        // Once the job runs, a server that ends a moment before the trainers does not take that back.
        let is_ready = self.running_since.is_some() || self.servers_are_ready();
        let runs = servers_are_up && is_ready && trainers_up >= enough;
        self.running_since = if runs { self.running_since.or(Some(now)) } else { None };
        self.has_run |= runs;
    }
}
