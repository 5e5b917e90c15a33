//! Carries out the faults of the plan.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::time::Instant;

use super::{Action, LIVES_ON, Supervisor};
use crate::fault::{Fault, MachineFault};
use crate::network::Host;

/// After so long without an acknowledgement a kernel gives a connection up, as `ps/src/network.rs` asks it to.
const KERNEL_LIMIT: Duration = Duration::from_secs(9);
/// So long after a disk was mended something may still not be written: attempts have pauses, and slow ones go on.
const AFTERWARDS: Duration = Duration::from_secs(60);

impl Supervisor {
    pub(super) fn act(&mut self, action: Action) {
        match action {
            Action::Fault(fault) => self.strike(fault),
            Action::Mend(directions) => {
                let mut wires = self.job.network.wires();
                wires.trace.log(format_args!("mended: {directions:?}"));
                directions.into_iter().for_each(|(from, to)| wires.mend(from, to));
            }
            Action::Admit(one, other) => {
                let mut wires = self.job.network.wires();
                wires.trace.log(format_args!("{one:?} and {other:?} are let through"));
                wires.admit(one, other);
            }
            Action::MendDisk(server, fault) => {
                self.job.network.wires().trace.log(format_args!("mended: {fault:?} of {server:?}"));
                self.disk.volume().mend(server, fault);
            }
            Action::TimeOut(pairs) => {
                let mut wires = self.job.network.wires();
                pairs.into_iter().for_each(|(one, other)| wires.time_out(one, other));
            }
            Action::StartServer(index) => {
                self.job.restarted.set(true);
                if !self.running.contains_key(&self.newest_server(index)) {
                    self.start_server(index);
                }
            }
            Action::ReplaceServer(index) => {
                self.job.restarted.set(true);
                self.start_server(index);
            }
            Action::StartTrainer { index, incarnation } => self.start_trainer(index, incarnation),
            Action::StopTrainers => {
                // One that has not been replaced leaves the other servers yet, or misses them.
                let trainers = 0..self.job.plan.trainers;
                let idle =
                    trainers.filter(|trainer| self.job.plan.least.is_some() || self.comes_after_the_end(*trainer));
                for trainer in idle.collect::<Vec<_>>() {
                    self.kill(self.newest(trainer), false);
                    self.trainers_over[trainer as usize] = true;
                }
            }
            // Server 0 has the time that it needs to write the model.
            Action::StopServers => {
                let first = u32::from(self.job.plan.checkpoint.is_some());
                for server in first..self.job.plan.servers {
                    self.kill(self.newest_server(server), false);
                    self.servers_over[server as usize] = true;
                }
            }
            Action::EndReplaced(trainer) => {
                if self.job.plan.supervised {
                    self.kill(trainer, false);
                }
            }
            Action::ClearUp => self.job.network.wires().clear_up(),
        }
    }

    fn strike(&mut self, fault: Fault) {
        if !matches!(fault, Fault::Jump { .. }) {
            self.job.network.wires().trace.log(format_args!("fault: {fault:?}"));
        }
        self.struck.insert(fault.name());
        match fault {
            Fault::Break { trainer, server, half } => {
                self.job.network.wires().break_between(self.newest(trainer), self.newest_server(server), half);
            }
            Fault::Sever { trainer, server, nth } => {
                self.job.network.wires().sever(self.newest(trainer), self.newest_server(server), nth);
            }
            Fault::Partition { trainer, server, up, down, lasts } => {
                let (trainer, server) = (self.newest(trainer), self.newest_server(server));
                let directions = [(up, (trainer, server)), (down, (server, trainer))];
                self.cut(directions.into_iter().filter(|(cut, _)| *cut).map(|(_, ends)| ends).collect(), lasts);
            }
            Fault::Split { one, other, there, back, lasts } => {
                let (one, other) = (self.newest_server(one), self.newest_server(other));
                let directions = [(there, (one, other)), (back, (other, one))];
                self.cut(directions.into_iter().filter(|(cut, _)| *cut).map(|(_, ends)| ends).collect(), lasts);
            }
            Fault::Refuse { server, lasts } => {
                let (one, other) = (self.newest_server(0), self.newest_server(server));
                if one != other {
                    self.job.network.wires().refuse(one, other);
                    self.later(lasts, Action::Admit(one, other));
                }
            }
            Fault::Kill { server, away, silent } => {
                if self.kill(self.newest_server(server), silent) {
                    self.later(away, Action::StartServer(server));
                    self.take_trainer_along(server, away, silent);
                }
            }
            Fault::Stop { server, away } => {
                if self.stop_server(server, away) {
                    self.take_trainer_along(server, away, false);
                }
            }
            Fault::Replace { trainer, away, silent } => {
                if self.kill(self.newest(trainer), silent) {
                    self.succeed(trainer, away);
                    self.take_server_along(trainer, away, silent);
                }
            }
            Fault::Zombie { trainer: pod, away, lasts } if self.job.plan.colocated => {
                self.leave_pod_behind(pod, away, Some(lasts));
            }
            Fault::ZombieServer { server: pod, away, lasts } if self.job.plan.colocated => {
                self.leave_pod_behind(pod, away, lasts);
            }
            Fault::Zombie { trainer, away, lasts } => {
                let host = self.newest(trainer);
                if self.running.contains_key(&host) {
                    self.cut_off(host, lasts);
                    self.succeed(trainer, away);
                    self.later(lasts.max(away) + LIVES_ON, Action::EndReplaced(host));
                }
            }
            Fault::ZombieServer { server, away, lasts } => {
                let host = self.newest_server(server);
                if self.running.contains_key(&host) {
                    if let Some(lasts) = lasts {
                        self.cut_off(host, lasts);
                    }
                    self.later(away, Action::ReplaceServer(server));
                }
            }
            Fault::Leave { trainer, back } => {
                if let Some(process) = self.running.get(&self.newest(trainer)) {
                    process.leave.store(true, Relaxed);
                    if let Some(away) = back {
                        self.succeed(trainer, away);
                    }
                }
            }
            Fault::Lost { trainer, silent } => {
                if self.kill(self.newest(trainer), silent)
                    && !self.is_replaced(trainer, self.incarnations[trainer as usize])
                {
                    self.trainers_over[trainer as usize] = true;
                }
            }
            Fault::Late { .. } => {} // It was so from the beginning.
            Fault::Lose { server } => {
                self.kill(self.newest_server(server), false);
                self.servers_over[server as usize] = true;
            }
            Fault::Machine { number, what, lasts } => self.strike_machine(number, what, lasts),
            Fault::Disk { server, fault, lasts } => {
                self.disk.volume().break_disk(server, fault);
                self.later(lasts, Action::MendDisk(server, fault));
                self.disk_ails_until = self.disk_ails_until.max(Instant::now() + lasts + AFTERWARDS);
            }
            Fault::Crash { server, after, away } => {
                self.disk.volume().die_after(self.newest_server(server), after, away);
            }
            // No event: the run must be the same without it.
            Fault::Jump { hours } => self.disk.volume().jump(i64::from(hours) * 3600),
        }
    }

    /// The machine of a server has died in a file operation. No process hears of it.
    pub(super) fn machine_died(&mut self, host: Host, away: Duration) {
        let Host::Server(index, _) = host else { return };
        if self.kill(host, true) {
            self.struck.insert("machine died in a file operation");
            self.later(away, Action::StartServer(index));
            self.take_trainer_along(index, away, true);
        }
    }

    /// The machine of server `number` and trainer `number` is lost, paused, or cut off.
    pub(super) fn strike_machine(&mut self, number: u32, what: MachineFault, lasts: Duration) {
        let (server, trainer) = (self.newest_server(number), self.newest(number));
        if let MachineFault::Lost = what {
            if self.kill(server, true) {
                self.later(lasts, Action::StartServer(number));
            }
            if self.kill(trainer, true) {
                self.succeed(number, lasts);
            }
            return;
        }
        if let MachineFault::Replaced = what {
            if self.running.contains_key(&server) {
                self.later(lasts, Action::ReplaceServer(number));
            }
            if self.running.contains_key(&trainer) {
                self.succeed(number, lasts);
                self.later(lasts + LIVES_ON, Action::EndReplaced(trainer));
            }
            return;
        }
        let outside = self.running.keys().filter(|other| **other != server && **other != trainer);
        let mut apart: Vec<(Host, Host)> = outside.flat_map(|other| [(server, *other), (trainer, *other)]).collect();
        let is_paused = matches!(what, MachineFault::Paused);
        if is_paused {
            apart.push((server, trainer));
        }
        let directions = apart.into_iter().flat_map(|(one, other)| [(one, other), (other, one)]).collect();
        if is_paused {
            // Kernels go on to acknowledge what comes, so that no connection is given up.
            self.hold_up(directions, lasts);
        } else {
            self.cut(directions, lasts);
        }
    }

    /// Cuts `host` off from all processes that run now.
    fn cut_off(&mut self, host: Host, lasts: Duration) {
        let others = self.running.keys().filter(|other| **other != host);
        self.cut(others.flat_map(|other| [(host, *other), (*other, host)]).collect(), lasts);
    }

    fn cut(&mut self, directions: Vec<(Host, Host)>, lasts: Duration) {
        self.time_out_later(directions.clone());
        self.hold_up(directions, lasts);
    }

    /// Lets nothing pass in these directions for a while. No kernel gives a connection up for it.
    fn hold_up(&mut self, directions: Vec<(Host, Host)>, lasts: Duration) {
        let mut wires = self.job.network.wires();
        directions.iter().for_each(|(from, to)| wires.cut(*from, *to));
        drop(wires);
        self.later(lasts, Action::Mend(directions));
    }

    /// Starts a successor of `trainer` later, unless one is on its way: no two processes have one incarnation.
    pub(super) fn succeed(&mut self, trainer: u32, away: Duration) {
        let incarnation = self.incarnations[trainer as usize] + 1;
        if !self.is_replaced(trainer, incarnation - 1) {
            self.later(away, Action::StartTrainer { index: trainer, incarnation });
        }
    }

    /// Lets the kernels of hosts that do not hear each other give their connections up, if the plan's do.
    pub(super) fn time_out_later(&mut self, pairs: Vec<(Host, Host)>) {
        if self.job.plan.kernels {
            self.later(KERNEL_LIMIT, Action::TimeOut(pairs));
        }
    }
}
