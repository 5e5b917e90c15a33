//! Decides what happens to a job when its processes end and time passes: a pure state machine that asks the job's
//! policy, as the operator does for pods. It is given events and the time, and answers with what to do.

mod completion;
mod deadlines;
mod elastic;
mod failure;
mod recreate;
mod state;

use std::collections::BTreeMap;
use std::time::Duration;

use psjobs_api::exit_code::PEER_AWAY;
use psjobs_api::{Replica, ReplicaResult, Role};
use psjobs_policy::JobPolicy;
use psjobs_policy::deadlines::EARLY_SERVER_END;
use psjobs_policy::elastic::is_spare;

pub use super::exit::Exit;
pub use failure::ERROR;
pub use state::Failure;
use state::{Member, Recreation, Report, State, Trouble};

/// The parts of a job's spec that matter after its processes have started.
#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    pub policy: JobPolicy,
    /// The servers' time to end after the trainers.
    pub server_drain: Duration,
    /// Servers are ready when they listen on their address, else as soon as they run.
    pub servers_are_probed: bool,
    /// Server 0 writes the model when all trainers are done: the job keeps checkpoints.
    pub writes_model: bool,
}

/// How the job ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    Succeeded,
    Failed {
        reason: String,
        /// The failure that the trouble began with, if processes failed.
        cause: Option<Failure>,
    },
}

/// How a run ended.
#[derive(Debug)]
pub enum Ending {
    Over(Outcome),
    /// A signal ended it.
    Interrupted(i32),
}

/// A command to the caller.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    Start {
        replica: Replica,
        incarnation: u32,
    },
    /// Ask a process to end, and report its end.
    Stop(Replica),
    Warn(String),
    /// Stop what still runs; the job is over.
    End(Outcome),
}

/// The state of a job and its replicas.
#[derive(Debug)]
pub struct Lifecycle {
    rules: Rules,
    members: BTreeMap<Replica, Member>,
    /// Processes that were started in place of another.
    restarts: u32,
    /// Failures that were given another start and count towards spec.failurePolicy.maxRestarts.
    counted: u32,
    recreation: Recreation,
    /// The trainers are done, and the servers are about to end.
    is_draining: bool,
    /// By trainer that has left well, as a server says that has ended with a result: its incarnation then.
    left_as: BTreeMap<u32, u32>,
    /// When the servers' time to end is over; none once it is and server 0 still has the model to write.
    drained_by: Option<Duration>,
    /// Since when all replicas run.
    running_since: Option<Duration>,
    has_run: bool,
    report: Option<Report>,
    /// The highest step that server 0 has reported, and when it last reported one.
    highest_step: Option<(u64, Duration)>,
    trouble: Option<Trouble>,
    over: bool,
}

/// The trainers that have ended.
#[derive(Clone, Debug, Default)]
pub struct TrainerEnds {
    /// All that have ended well; none in an elastic job, where that says nothing about what is left to do.
    pub finished: Vec<u32>,
    /// All batches of an elastic job are assigned, and no trainer comes any more: a server waits for one alone.
    pub closing: bool,
}

impl Lifecycle {
    pub fn new(rules: Rules, replicas: impl IntoIterator<Item = Replica>) -> Self {
        Self {
            rules,
            members: replicas.into_iter().map(|replica| (replica, Member::default())).collect(),
            restarts: 0,
            counted: 0,
            recreation: Recreation::default(),
            is_draining: false,
            left_as: BTreeMap::new(),
            drained_by: None,
            running_since: None,
            has_run: false,
            report: None,
            highest_step: None,
            trouble: None,
            over: false,
        }
    }

    /// Starts the job.
    pub fn start(&mut self, now: Duration) -> Vec<Action> {
        let actions = self.start_waiting(now);
        self.note_running(now);
        actions
    }

    /// Returns the number of processes that were started in place of another.
    pub fn restarts(&self) -> u32 {
        self.restarts
    }

    /// Returns which trainers have ended, as far as a process that starts now has to know.
    pub fn trainer_ends(&self) -> TrainerEnds {
        let finished = self.trainers().filter(|(_, member)| member.state == State::Done);
        let finished = finished.filter(|_| self.rules.policy.elastic.is_none()).map(|(trainer, _)| trainer.index);
        TrainerEnds { finished: finished.collect(), closing: self.is_closing() }
    }

    /// Returns true once the trainers are done.
    pub fn is_draining(&self) -> bool {
        self.is_draining
    }

    /// Returns true if servers are ready only when they listen, see [`Lifecycle::server_is_ready`].
    pub fn probes_servers(&self) -> bool {
        self.rules.servers_are_probed
    }

    /// Notes that a server's process listens.
    pub fn server_is_ready(&mut self, replica: Replica, incarnation: u32, now: Duration) -> Vec<Action> {
        if let Some(member) = self.members.get_mut(&replica)
            && member.incarnation == incarnation
            && member.state == State::Running
        {
            member.is_ready = true;
        }
        let actions = if self.over || self.is_draining() { Vec::new() } else { self.start_waiting(now) };
        self.note_running(now);
        actions
    }

    /// Notes that a process ended.
    pub fn exited(&mut self, replica: Replica, exit: Exit, tail: Vec<String>, now: Duration) -> Vec<Action> {
        if self.over {
            return Vec::new();
        }
        if let Some(member) = self.members.get_mut(&replica) {
            member.found_no_server = exit == Exit::Code(PEER_AWAY);
        }
        let stopping = self.members.get(&replica).is_some_and(|member| member.state == State::Stopping);
        let actions = match (self.is_draining(), stopping, exit.is_good(), replica.role) {
            (true, ..) => self.ended_while_draining(Failure { replica, exit, tail }, stopping, now),
            (false, true, ..) => {
                self.set(replica, State::Stopped);
                self.start_all_if_stopped(now)
            }
            (_, _, false, Role::Trainer) if self.found_no_server_after_it_left(replica) => {
                self.set(replica, State::Done);
                self.complete_if_successful(now)
            }
            (_, _, false, _) => self.failed(Failure { replica, exit, tail }, now),
            (_, _, true, Role::Server) => {
                self.set(replica, State::FailsAt(now + EARLY_SERVER_END));
                Vec::new()
            }
            (_, _, true, Role::Trainer) => {
                self.set(replica, State::Done);
                self.complete_if_successful(now)
            }
        };
        self.note_running(now);
        actions
    }

    /// Notes that a server ended well and left a result: it has seen all trainers leave, and those that still run go on
    /// without it, unless one of them had failed since and begins again. The members of an elastic job are not all of its
    /// trainers, so there its end says less.
    pub fn concluded(&mut self, server: Replica, result: &ReplicaResult, now: Duration) -> Vec<Action> {
        let mut actions = self.exited(server, Exit::Code(0), Vec::new(), now);
        let trainers = self.trainers().map(|(trainer, _)| trainer.index).collect::<Vec<_>>();
        let left = trainers.into_iter().filter_map(|trainer| Some((trainer, result.left_as(trainer)?)));
        self.left_as.extend(left);
        let is_due = |(_, member): &(Replica, &Member)| matches!(member.state, State::StartsAt(_));
        let due = self.trainers().filter(is_due).map(|(trainer, _)| trainer);
        let done: Vec<_> = due.filter(|trainer| self.found_no_server_after_it_left(*trainer)).collect();
        let waits = self.members.get(&server).is_some_and(|member| matches!(member.state, State::FailsAt(_)));
        if waits && self.rules.policy.elastic.is_none() {
            let begins_again = |(trainer, member): (Replica, &Member)| match member.state {
                State::StartsAt(_) => !done.contains(&trainer),
                State::Running => result.left_as(trainer.index).is_some_and(|left_as| left_as < member.incarnation),
                _ => false,
            };
            let is_needed = self.trainers().any(begins_again);
            done.into_iter().for_each(|trainer| self.set(trainer, State::Done));
            self.set(server, if is_needed { State::StartsAt(now) } else { State::Done });
            if !self.over && !self.is_draining() {
                // No other end may follow.
                actions.extend(self.complete_if_successful(now));
            }
        }
        actions
    }

    /// Returns whether a trainer's last process ended because it found no server any more, after these had counted it as
    /// finished.
    fn found_no_server_after_it_left(&self, trainer: Replica) -> bool {
        let left_as = self.left_as.get(&trainer.index);
        let is_last = |member: &Member| member.found_no_server && left_as == Some(&member.incarnation);
        self.rules.policy.elastic.is_none() && self.members.get(&trainer).is_some_and(is_last)
    }

    /// Notes that time passed.
    pub fn tick(&mut self, now: Duration) -> Vec<Action> {
        if self.over {
            return Vec::new();
        }
        if self.is_draining {
            return if self.drained_by.is_some_and(|by| by <= now) { self.end_drain(now) } else { Vec::new() };
        }
        if let Some(actions) = self.missed_deadline(now) {
            return actions;
        }
        let mut actions = self.recreate_if_due(now);
        for replica in self.due(now) {
            if self.over || self.is_draining() {
                break;
            }
            actions.extend(self.act_on_due(replica, now));
        }
        if !self.over && !self.is_draining() {
            // Server 0 may have been started again to write the model.
            actions.extend(self.complete_if_successful(now));
        }
        if !self.over && !self.is_draining() {
            actions.extend(self.handle_stall(now));
        }
        self.note_running(now);
        actions
    }

    /// Returns when [`Lifecycle::tick`] has something to do next.
    pub fn wake_at(&self) -> Option<Duration> {
        if self.is_draining() {
            return self.drained_by;
        }
        let members = self.members.values().filter_map(|member| member.state.due());
        members.chain(self.recreation.at).chain(self.next_deadline()).chain(self.next_stall()).min()
    }

    fn due(&self, now: Duration) -> Vec<Replica> {
        let due = |member: &Member| member.state.due().is_some_and(|due| due <= now);
        self.members.iter().filter(|(_, member)| due(member)).map(|(&replica, _)| replica).collect()
    }

    fn act_on_due(&mut self, replica: Replica, now: Duration) -> Vec<Action> {
        let closing = self.is_closing();
        match self.members.get(&replica).map(|member| member.state) {
            Some(State::StartsAt(_) | State::FailsAt(_)) if self.recreation.is_pending() => {
                self.set(replica, State::Stopped);
                Vec::new()
            }
            // What there was to do is assigned to others.
            Some(State::StartsAt(_)) if closing && is_spare(replica) => {
                self.set(replica, State::Lost);
                self.complete_if_successful(now)
            }
            Some(State::StartsAt(_)) => {
                if let Some(member) = self.members.get_mut(&replica) {
                    member.incarnation += 1;
                }
                self.launch(replica, now).into_iter().collect()
            }
            // It knew the members: a trainer that still comes back finds nothing to do.
            Some(State::FailsAt(_)) if closing => self.succeed(),
            Some(State::FailsAt(_)) => self.server_ended_early(replica, now),
            _ => Vec::new(),
        }
    }

    /// Starts the replicas that have not been started, but for trainers that wait for the servers.
    fn start_waiting(&mut self, now: Duration) -> Vec<Action> {
        let closing = self.is_closing();
        let mut actions = Vec::new();
        if self.recreation.is_pending() {
            return actions;
        }
        for role in [Role::Server, Role::Trainer] {
            let ready = self.servers_are_ready();
            let may_start = |replica: Replica, member: &Member| {
                member.state == State::Waiting
                    && !self.rules.policy.waits_for_servers(replica, member.was_started, ready)
                    && !(closing && is_spare(replica))
            };
            let of_role = self.members.iter().filter(|(replica, _)| replica.role == role);
            let waiting: Vec<_> = of_role.filter(|(r, m)| may_start(**r, m)).map(|(&replica, _)| replica).collect();
            actions.extend(waiting.into_iter().filter_map(|replica| self.launch(replica, now)));
        }
        actions
    }

    fn launch(&mut self, replica: Replica, now: Duration) -> Option<Action> {
        let is_ready = replica.role == Role::Server && !self.rules.servers_are_probed;
        let member = self.members.get_mut(&replica)?;
        *member = Member { state: State::Running, started: now, was_started: true, is_ready, ..*member };
        Some(Action::Start { replica, incarnation: member.incarnation })
    }

    fn servers_are_ready(&self) -> bool {
        let ready = |member: &Member| member.state == State::Running && member.is_ready;
        self.members.iter().filter(|(replica, _)| replica.role == Role::Server).all(|(_, member)| ready(member))
    }

    fn trainers(&self) -> impl Iterator<Item = (Replica, &Member)> {
        self.members.iter().filter(|(replica, _)| replica.role == Role::Trainer).map(|(&replica, m)| (replica, m))
    }

    fn set(&mut self, replica: Replica, state: State) {
        self.members.entry(replica).or_default().state = state;
    }

    fn fail(&mut self, reason: String) -> Vec<Action> {
        self.over = true;
        let cause = self.trouble.take().map(|trouble| trouble.first);
        vec![Action::End(Outcome::Failed { reason, cause })]
    }
}

#[cfg(test)]
mod tests;
