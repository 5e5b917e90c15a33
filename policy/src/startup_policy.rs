//! `spec.startupPolicy`: when a replica is started for the first time.

use psjobs_api::crd::StartupPolicy;
use psjobs_api::{Replica, Role};

use crate::job_policy::JobPolicy;

impl JobPolicy {
    /// Returns true if a replica is not to be started yet because the servers are not ready. One that has been started
    /// before is replaced whatever the servers do at that moment.
    #[must_use]
    pub fn waits_for_servers(&self, replica: Replica, was_started: bool, servers_are_ready: bool) -> bool {
        let in_order = self.startup_policy == StartupPolicy::ServersReady && !self.scheduled_together;
        in_order && replica.role == Role::Trainer && !was_started && !servers_are_ready
    }
}
