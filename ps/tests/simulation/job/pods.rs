//! The pods of a colocated job: a server and the trainer of its number, which the operator replaces together.

use std::time::Duration;

use super::{Action, Supervisor};
use crate::fault::MachineFault;

impl Supervisor {
    /// Asks a server to stop, and starts it again `away` later or when it has ended. Returns whether it ran.
    pub(super) fn stop_server(&mut self, server: u32, away: Duration) -> bool {
        let Some(process) = self.running.get(&self.newest_server(server)) else { return false };
        process.stop.cancel();
        self.stopping[server as usize] = true;
        self.later(away, Action::StartServer(server));
        true
    }

    /// Ends the trainer in the pod of a server that has ended, and starts a successor with that of the server.
    pub(super) fn take_trainer_along(&mut self, pod: u32, away: Duration, silent: bool) {
        if self.job.plan.colocated && self.kill(self.newest(pod), silent) {
            self.succeed(pod, away);
        }
    }

    /// Ends the server in the pod of a trainer that has ended: it is asked to stop, unless the machine is gone.
    pub(super) fn take_server_along(&mut self, pod: u32, away: Duration, silent: bool) {
        if !self.job.plan.colocated {
            return;
        }
        if !silent {
            self.stop_server(pod, away);
        } else if self.kill(self.newest_server(pod), true) {
            self.later(away, Action::StartServer(pod));
        }
    }

    /// A pod is replaced, because its node is out of reach. Its processes live on, and are cut off from all others for a while, or
    /// not at all.
    pub(super) fn leave_pod_behind(&mut self, pod: u32, away: Duration, cut_off: Option<Duration>) {
        if let Some(lasts) = cut_off {
            self.strike_machine(pod, MachineFault::CutOff, lasts);
        }
        self.strike_machine(pod, MachineFault::Replaced, away);
    }
}
