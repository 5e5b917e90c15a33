//! Starts the processes of a plan, does what the [`Lifecycle`] decides, and leaves no process behind.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::time::{Duration, Instant};

use psjobs_api::Role;
use psjobs_ps::proto::StatusReply;
use rustix::process::{Pid, Signal};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep_until, timeout_at};

use super::exit::Exit;
use super::guard::Guard;
use super::lifecycle::{Action, Ending, Lifecycle};
use super::log::log_file;
use super::plan::{Plan, Replica};
use super::process::{self, Process};
use super::readiness;
use super::results;
use super::signals::Signals;
use super::status;
use super::view::View;

/// Time in which a second signal is that of the same Ctrl-C: the terminal sends it to psjobs, and a program that has started psjobs
/// sends it again.
const ONE_CTRL_C: Duration = Duration::from_secs(1);

/// Called with what server 0 says of the job, twice a second.
pub type Observer<'a> = &'a mut dyn FnMut(&StatusReply);

/// A job while it runs.
pub struct Supervisor<'a> {
    plan: &'a Plan,
    view: &'a mut View,
    observer: Observer<'a>,
    logs: &'a Path,
    lifecycle: Lifecycle,
    guard: Guard,
    running: BTreeMap<Replica, Pid>,
    /// When processes that were asked to end are killed.
    kill_at: BTreeMap<Replica, Instant>,
    /// Servers whose listening is waited for.
    starting: BTreeMap<Replica, AbortOnDrop>,
    ready: JoinSet<(Replica, u32)>,
    ended: JoinSet<(Replica, Exit, Vec<String>)>,
    began: Instant,
}

impl<'a> Supervisor<'a> {
    pub fn new(plan: &'a Plan, view: &'a mut View, observer: Observer<'a>, logs: &'a Path) -> std::io::Result<Self> {
        Ok(Self {
            plan,
            view,
            observer,
            logs,
            lifecycle: Lifecycle::new(plan.rules.clone(), plan.replicas()),
            guard: Guard::start()?,
            running: BTreeMap::new(),
            kill_at: BTreeMap::new(),
            starting: BTreeMap::new(),
            ready: JoinSet::new(),
            ended: JoinSet::new(),
            began: Instant::now(),
        })
    }

    /// Restarts so far.
    pub fn restarts(&self) -> u32 {
        self.lifecycle.restarts()
    }

    /// Runs the job to its end. No process of it is left when this returns.
    pub async fn run(&mut self, signals: &mut Signals) -> Ending {
        let (sender, mut statuses) = watch::channel(None);
        let poll = tokio::spawn(status::poll(self.plan.coordinator().to_owned(), sender));
        let _poll = AbortOnDrop(poll.abort_handle());
        let ending = self.until_over(&mut statuses, signals).await;
        self.stop(signals, matches!(ending, Ending::Interrupted(_))).await;
        ending
    }

    async fn until_over(
        &mut self,
        statuses: &mut watch::Receiver<Option<StatusReply>>,
        signals: &mut Signals,
    ) -> Ending {
        let mut actions = VecDeque::from(self.lifecycle.start(self.now()));
        loop {
            while let Some(action) = actions.pop_front() {
                match action {
                    Action::Warn(text) => self.view.warn(&text),
                    Action::Start { replica, incarnation } => actions.extend(self.start(replica, incarnation)),
                    Action::Stop(replica) => self.ask_to_end(replica),
                    Action::End(outcome) => return Ending::Over(outcome),
                }
            }
            let wake = self.lifecycle.wake_at().map(|wake| self.began + wake);
            let wake = wake.into_iter().chain(self.kill_at.values().copied()).min();
            tokio::select! {
                Some(Ok((replica, exit, tail))) = self.ended.join_next() => {
                    self.gone(replica, exit);
                    let was_draining = self.lifecycle.is_draining();
                    let is_server_done = exit.is_good() && replica.role == Role::Server;
                    let result = is_server_done.then(|| results::read(self.plan, replica)).flatten();
                    actions.extend(match result {
                        Some(result) => self.lifecycle.concluded(replica, &result, self.now()),
                        None => self.lifecycle.exited(replica, exit, tail, self.now()),
                    });
                    if self.lifecycle.is_draining() && !was_draining && actions.is_empty() {
                        self.view.draining();
                    }
                }
                () = sleep_until(wake.unwrap_or_else(far_away).into()) => {
                    self.kill_overdue();
                    actions.extend(self.lifecycle.tick(self.now()));
                }
                Some(Ok((replica, incarnation))) = self.ready.join_next() => {
                    actions.extend(self.lifecycle.server_is_ready(replica, incarnation, self.now()));
                }
                Ok(()) = statuses.changed() => {
                    if let Some(status) = statuses.borrow_and_update().as_ref() {
                        self.view.progress(status);
                        (self.observer)(status);
                        actions.extend(self.lifecycle.progress(status.step, status.total_steps, self.now()));
                    }
                }
                signal = signals.next() => {
                    self.view.warn("stopping every process");
                    return Ending::Interrupted(signal);
                }
            }
        }
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// Starts a process. What follows at once if that does not work comes back.
    fn start(&mut self, replica: Replica, incarnation: u32) -> Vec<Action> {
        let launch = self.plan.launch(replica, incarnation, self.lifecycle.trainer_ends());
        // If the guard is gone, the log says so when the process has started.
        self.guard.expect(&launch.entry()).ok();
        match Process::start(&launch, &log_file(self.logs, replica), self.view.watcher(replica)) {
            Ok(process) => {
                self.running.insert(replica, process.group);
                if self.guard.watch(process.group).is_err() {
                    self.view.warn("the guard process is gone; if psjobs is killed, the job's processes stay");
                }
                self.view.started(replica, incarnation);
                if replica.role == Role::Server && self.lifecycle.probes_servers() {
                    self.wait_until_ready(replica, incarnation);
                }
                self.ended.spawn(async move {
                    let (exit, tail) = process.wait().await;
                    (replica, exit, tail)
                });
                Vec::new()
            }
            Err(error) => {
                let tail = vec![format!("{}: {error}", launch.program.display())];
                self.lifecycle.exited(replica, Exit::NotStarted, tail, self.now())
            }
        }
    }

    fn wait_until_ready(&mut self, server: Replica, incarnation: u32) {
        let Some(address) = self.plan.address(server).map(str::to_owned) else { return };
        let wait = self.ready.spawn(async move {
            readiness::wait(&address).await;
            (server, incarnation)
        });
        self.starting.insert(server, AbortOnDrop(wait));
    }

    /// Asks a process to end; it is killed after its grace period.
    fn ask_to_end(&mut self, replica: Replica) {
        if let Some(&group) = self.running.get(&replica) {
            process::signal(group, Signal::TERM);
            self.kill_at.insert(replica, Instant::now() + self.plan.grace(replica));
        }
    }

    fn kill_overdue(&mut self) {
        let now = Instant::now();
        let overdue = self.kill_at.extract_if(.., |_, at| *at <= now);
        let groups = overdue.filter_map(|(replica, _)| self.running.get(&replica));
        groups.for_each(|&group| process::signal(group, Signal::KILL));
    }

    fn gone(&mut self, replica: Replica, exit: Exit) {
        self.kill_at.remove(&replica);
        self.starting.remove(&replica);
        if let Some(group) = self.running.remove(&replica) {
            // If the guard is gone, the log has said so when the process started.
            self.guard.forget(group).ok();
        }
        self.view.ended(replica, exit);
    }

    /// Asks what still runs to end, and makes each process end when its time is over, or all when a signal comes; one that may
    /// be the same Ctrl-C as the one that has `interrupted` the job is left out.
    async fn stop(&mut self, signals: &mut Signals, interrupted: bool) {
        self.signal_all(Signal::TERM);
        let (plan, asked) = (self.plan, Instant::now());
        for replica in self.running.keys() {
            self.kill_at.entry(*replica).or_insert_with(|| asked + plan.grace(*replica));
        }
        let again_from = tokio::time::Instant::now() + ONE_CTRL_C;
        let mut may_be_the_same = interrupted;
        // Processes that were killed are no longer in it.
        while let Some(next) = self.kill_at.values().copied().min() {
            let ended = tokio::select! {
                ended = timeout_at(next.into(), self.ended.join_next()) => ended,
                _ = signals.next() => if may_be_the_same { continue } else { break },
                () = sleep_until(again_from), if may_be_the_same => {
                    may_be_the_same = false;
                    self.view.warn("waiting for them to end; Ctrl-C again kills them at once");
                    continue;
                }
            };
            match ended {
                Ok(Some(Ok((replica, exit, _)))) => self.gone(replica, exit),
                Ok(Some(Err(_))) => {}
                Ok(None) => break,
                Err(_) => self.kill_overdue(),
            }
        }
        self.signal_all(Signal::KILL);
        while let Some(ended) = self.ended.join_next().await {
            if let Ok((replica, exit, _)) = ended {
                self.gone(replica, exit);
            }
        }
    }

    fn signal_all(&self, signal: Signal) {
        self.running.values().for_each(|&group| process::signal(group, signal));
    }
}

fn far_away() -> Instant {
    Instant::now() + Duration::from_secs(86_400)
}

#[derive(Debug)]
struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}
