//! What happens to a job when its processes end and time passes: a pure state machine with the rules
//! of the operator. It is told events and the time, and answers with what to do.

mod elastic;

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use psjobs_api::Role;
use psjobs_api::crd::RestartPolicy;

use super::plan::{Replica, Rules};

/// A server that ended well while trainers still run is taken for failed after this long. Normally
/// the trainers' own end, which it waited for, is a moment away.
const EARLY_SERVER_END: Duration = Duration::from_secs(30);

/// Failures that follow one another within this time are one trouble, and the first is its cause.
const ONE_TROUBLE: Duration = Duration::from_secs(60);

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Code(i32),
    Signal(i32),
    /// It could not be started.
    NotStarted,
}

impl Exit {
    fn is_good(self) -> bool {
        self == Self::Code(0)
    }

    /// As a container's exit code.
    pub fn code(self) -> i32 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
            Self::NotStarted => 127,
        }
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "ended with exit code {code}"),
            Self::Signal(9) => f.write_str("was killed by signal 9 (SIGKILL); did the machine run out of memory?"),
            Self::Signal(signal) => match signal_name(*signal) {
                Some(name) => write!(f, "was killed by signal {signal} ({name})"),
                None => write!(f, "was killed by signal {signal}"),
            },
            Self::NotStarted => f.write_str("could not be started"),
        }
    }
}

fn signal_name(signal: i32) -> Option<&'static str> {
    let names = [(1, "SIGHUP"), (2, "SIGINT"), (4, "SIGILL"), (6, "SIGABRT"), (7, "SIGBUS"), (8, "SIGFPE")];
    let more = [(11, "SIGSEGV"), (13, "SIGPIPE"), (15, "SIGTERM"), (24, "SIGXCPU")];
    names.into_iter().chain(more).find(|(number, _)| *number == signal).map(|(_, name)| name)
}

/// A process that ended badly.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    pub replica: Replica,
    pub exit: Exit,
    /// The last lines that it wrote.
    pub tail: Vec<String>,
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

/// What the caller is to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    Start {
        replica: Replica,
        incarnation: u32,
    },
    Tell(String),
    /// Stop what still runs; the job is over.
    End(Outcome),
}

/// Where a job and its members stand.
#[derive(Debug)]
pub struct Lifecycle {
    rules: Rules,
    members: BTreeMap<Replica, Member>,
    restarts: u32,
    /// The servers' time to end, once all trainers are done.
    drained_by: Option<Duration>,
    trouble: Option<Trouble>,
    over: bool,
}

#[derive(Debug, Default)]
struct Member {
    incarnation: u32,
    state: State,
}

#[derive(Debug, Default, PartialEq)]
enum State {
    #[default]
    Running,
    /// To be started again at this time.
    StartsAt(Duration),
    /// A server that ended before the trainers; failed at this time unless they end too.
    FailsAt(Duration),
    Done,
    /// A trainer that an elastic job goes on without.
    Lost,
}

#[derive(Debug)]
struct Trouble {
    first: Failure,
    last: Duration,
}

impl Lifecycle {
    pub fn new(rules: Rules, replicas: impl IntoIterator<Item = Replica>) -> Self {
        let members = replicas.into_iter().map(|replica| (replica, Member::default())).collect();
        Self { rules, members, restarts: 0, drained_by: None, trouble: None, over: false }
    }

    /// The first start of every member.
    pub fn start(&self) -> Vec<Action> {
        self.members.keys().map(|&replica| Action::Start { replica, incarnation: 0 }).collect()
    }

    /// Restarts so far, over all members.
    pub fn restarts(&self) -> u32 {
        self.restarts
    }

    /// All trainers are done.
    pub fn is_draining(&self) -> bool {
        self.drained_by.is_some()
    }

    /// How often a member was started before.
    pub fn incarnation(&self, replica: Replica) -> u32 {
        self.members.get(&replica).map_or(0, |member| member.incarnation)
    }

    /// A process ended.
    pub fn exited(&mut self, replica: Replica, exit: Exit, tail: Vec<String>, now: Duration) -> Vec<Action> {
        let server = replica.role == Role::Server;
        if self.over {
            return Vec::new();
        }
        if self.is_draining() {
            self.set(replica, State::Done);
            let trouble =
                (!exit.is_good()).then(|| Action::Tell(format!("{replica} {exit}, after all trainers were done")));
            return trouble.into_iter().chain(self.finish_if_drained()).collect();
        }
        match (exit.is_good(), server) {
            (false, _) => self.failed(Failure { replica, exit, tail }, now),
            (true, true) => {
                self.set(replica, State::FailsAt(now + EARLY_SERVER_END));
                Vec::new()
            }
            (true, false) => {
                self.set(replica, State::Done);
                self.drain_if_trained(now)
            }
        }
    }

    /// Time passed.
    pub fn tick(&mut self, now: Duration) -> Vec<Action> {
        if self.over {
            return Vec::new();
        }
        if self.rules.active_deadline.is_some_and(|deadline| deadline <= now) {
            let seconds = self.rules.active_deadline.unwrap_or_default().as_secs();
            return self.fail(format!(
                "it was active for {seconds} s, as long as spec.runPolicy.activeDeadlineSeconds allows"
            ));
        }
        if self.drained_by.is_some_and(|by| by <= now) {
            let seconds = self.rules.server_drain.as_secs();
            let note = format!(
                "the servers did not end within {seconds} s (spec.runPolicy.serverDrainSeconds) and are stopped"
            );
            return [Action::Tell(note)].into_iter().chain(self.succeed()).collect();
        }
        let closing = self.is_closing();
        let mut actions = Vec::new();
        for replica in self.due(now) {
            if self.over {
                break;
            }
            let Some(member) = self.members.get_mut(&replica) else { continue };
            match std::mem::take(&mut member.state) {
                State::StartsAt(_) => {
                    member.incarnation += 1;
                    actions.push(Action::Start { replica, incarnation: member.incarnation });
                }
                // It knew the members: whoever still comes back finds nothing to do.
                State::FailsAt(_) if closing => actions.extend(self.succeed()),
                State::FailsAt(_) => {
                    let line = "it ended while trainers still run; a server must run until they are done".into();
                    actions.extend(self.failed(Failure { replica, exit: Exit::Code(0), tail: vec![line] }, now));
                }
                state => member.state = state,
            }
        }
        actions
    }

    /// When [`Lifecycle::tick`] has something to do next.
    pub fn wake_at(&self) -> Option<Duration> {
        let members = self.members.values().filter_map(|member| member.state.due());
        members.chain(self.rules.active_deadline).chain(self.drained_by).min()
    }

    fn due(&self, now: Duration) -> Vec<Replica> {
        let due = |member: &Member| member.state.due().is_some_and(|due| due <= now);
        self.members.iter().filter(|(_, member)| due(member)).map(|(&replica, _)| replica).collect()
    }

    fn set(&mut self, replica: Replica, state: State) {
        self.members.entry(replica).or_default().state = state;
    }

    fn failed(&mut self, failure: Failure, now: Duration) -> Vec<Action> {
        let Failure { replica, exit, .. } = failure;
        match &mut self.trouble {
            Some(trouble) if now <= trouble.last + ONE_TROUBLE => trouble.last = now,
            trouble => *trouble = Some(Trouble { first: failure, last: now }),
        }
        if exit == Exit::NotStarted {
            return self.fail(format!("{replica} {exit}"));
        }
        if replica.role == Role::Trainer && self.is_fatal(exit) {
            let policy = self.rules.restart_policy;
            return self
                .fail(format!("{replica} {exit}, and with spec.trainer.restartPolicy {policy:?} that ends the job"));
        }
        if let Some(actions) = self.give_up(replica, exit, now) {
            return actions;
        }
        let most = self.rules.max_restarts;
        if self.restarts == most {
            return self.fail(match most {
                0 => format!("{replica} {exit}, and spec.failurePolicy.maxRestarts is 0"),
                _ => format!("{replica} {exit}, and all {most} restarts of spec.failurePolicy.maxRestarts are used up"),
            });
        }
        self.restarts += 1;
        let wait = back_off(self.incarnation(replica));
        self.set(replica, State::StartsAt(now + wait));
        let when = if wait.is_zero() { String::new() } else { format!(" in {} s", wait.as_secs()) };
        vec![Action::Tell(format!("{replica} {exit}; it is started again{when} (restart {} of {most})", self.restarts))]
    }

    fn is_fatal(&self, exit: Exit) -> bool {
        match self.rules.restart_policy {
            RestartPolicy::OnFailure => false,
            RestartPolicy::Never => true,
            RestartPolicy::ExitCode => (1..128).contains(&exit.code()),
        }
    }

    fn drain_if_trained(&mut self, now: Duration) -> Vec<Action> {
        self.send_late_ones_away();
        let mut trainers = self.members.iter().filter(|(replica, _)| replica.role == Role::Trainer);
        if !trainers.all(|(_, member)| member.state.is_over()) {
            return Vec::new();
        }
        self.drained_by = Some(now + self.rules.server_drain);
        // A server that waits to be started again has nothing left to do.
        for member in self.members.values_mut().filter(|member| member.state.due().is_some()) {
            member.state = State::Done;
        }
        self.finish_if_drained()
    }

    fn finish_if_drained(&mut self) -> Vec<Action> {
        if self.members.values().all(|member| member.state.is_over()) { self.succeed() } else { Vec::new() }
    }

    fn succeed(&mut self) -> Vec<Action> {
        self.over = true;
        vec![Action::End(Outcome::Succeeded)]
    }

    fn fail(&mut self, reason: String) -> Vec<Action> {
        self.over = true;
        let cause = self.trouble.take().map(|trouble| trouble.first);
        vec![Action::End(Outcome::Failed { reason, cause })]
    }
}

impl State {
    fn due(&self) -> Option<Duration> {
        match self {
            Self::StartsAt(at) | Self::FailsAt(at) => Some(*at),
            Self::Running | Self::Done | Self::Lost => None,
        }
    }

    fn is_over(&self) -> bool {
        matches!(self, Self::Done | Self::Lost)
    }
}

/// Before the start after incarnation `n`: 0, 1, 2, 4, ... 60 s.
fn back_off(incarnation: u32) -> Duration {
    let seconds = incarnation.checked_sub(1).map_or(0, |doublings| 1_u64 << doublings.min(6));
    Duration::from_secs(seconds.min(60))
}

#[cfg(test)]
mod tests;
