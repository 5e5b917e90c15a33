//! When servers were heard last, for the parts of a trainer that wait for one of them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// How long a server may leave heartbeats unanswered before its blocks are asked for at the other server that holds them.
const SILENCE: Duration = Duration::from_secs(5);

/// When each server has answered a heartbeat last, or got the first over a new connection. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct LastHeard(Arc<Mutex<BTreeMap<u32, Instant>>>);

impl LastHeard {
    /// Records that `server` answers, or gets its first heartbeat.
    pub(super) fn hear(&self, server: u32) {
        self.0.lock().insert(server, Instant::now());
    }

    /// Returns whether `server` has answered no heartbeat for so long that the other holder of its blocks may lead them.
    pub(super) fn is_silent(&self, server: u32) -> bool {
        self.0.lock().get(&server).is_some_and(|heard| heard.elapsed() >= SILENCE)
    }

    /// Returns a server that has left heartbeats unanswered for `limit`.
    pub(super) fn silent(&self, limit: Duration) -> Option<u32> {
        self.0.lock().iter().find(|(_, heard)| heard.elapsed() >= limit).map(|(server, _)| *server)
    }
}
