//! The state that all connections of a process share, and what they expect from the process above them.

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use psjobs_ps::network::Network;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::link::Link;
use super::peers::Peers;
use super::remote_refs::RemoteRefs;
use super::runtime_driver::Inner;
use crate::ids::{ContextId, ObjectId, Session};
use crate::proto::frame::Kind;

/// This process's name in its job, and its timeouts.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Name in the job, for example `trainer-0`; unique in it.
    pub name: String,
    /// Processes of another job are refused.
    pub job_uid: String,
    /// How often this replica was replaced; peers refuse a process of this name with a lower number than before.
    pub incarnation: u32,
    /// How long a process may be silent before what it held is freed. Heartbeats go out four times as often.
    pub lease: Duration,
    /// How long a call may take unless it says otherwise.
    pub timeout: Duration,
    /// Makes the connections to other processes.
    pub network: Network,
}

impl Settings {
    #[must_use]
    pub fn new(name: impl Into<String>, job_uid: impl Into<String>) -> Self {
        let (lease, timeout) = (Duration::from_secs(30), Duration::from_secs(60));
        let (name, job_uid) = (name.into(), job_uid.into());
        Self { name, job_uid, incarnation: 0, lease, timeout, network: Network::default() }
    }
}

/// Handles what arrives over connections.
pub(crate) trait Process: Send + Sync + 'static {
    fn connections(&self) -> &Connections;

    /// Sets what `holder` holds here: so many references to each object, and these contexts.
    fn reconcile(&self, holder: Session, held: &HashMap<ObjectId, u64>, contexts: &[ContextId]);

    /// Returns whether a peer may lack some of what it says that it holds here, after this process has let go of all that the
    /// peer held: contexts, and objects but for those that are kept for as long as this process lives.
    fn may_lack(&self, held: &HashMap<ObjectId, u64>, contexts: &[ContextId]) -> bool;

    /// Takes note of a new connection to `peer`, which may be another process than before. Does not wait.
    fn attached(self: Arc<Self>, peer: &Arc<str>);

    /// Handles a frame, in the order of arrival and without waiting.
    fn receive(self: Arc<Self>, link: &Arc<Link>, frame: Kind);
}

/// The connections of a process, and what they share.
pub(crate) struct Connections {
    pub settings: Settings,
    pub name: Arc<str>,
    pub session: Session,
    pub runtime: Handle,
    /// Gone if the runtime has threads of its own. Not held: its tasks hold this.
    pub driver: Weak<Inner>,
    pub peers: Mutex<Peers>,
    pub peers_changed: Condvar,
    /// Locked before `peers` where both are.
    pub remote_refs: Mutex<RemoteRefs>,
    pub lease_checks: AtomicU64,
    /// Cancelled by a shutdown: no new calls or connections from then on.
    pub stopping: CancellationToken,
    /// The tasks of connections, which a shutdown gives time to end in order.
    pub tasks: TaskTracker,
    /// Cancelled when that time has passed.
    pub cut_off: CancellationToken,
}

impl Connections {
    pub fn new(settings: Settings, runtime: Handle, driver: Weak<Inner>) -> Self {
        Self {
            name: settings.name.as_str().into(),
            settings,
            session: rand::random(),
            runtime,
            driver,
            peers: Mutex::default(),
            peers_changed: Condvar::new(),
            remote_refs: Mutex::default(),
            lease_checks: AtomicU64::default(),
            stopping: CancellationToken::new(),
            tasks: TaskTracker::new(),
            cut_off: CancellationToken::new(),
        }
    }

    /// Runs a task until shutdown.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let stopping = self.stopping.clone();
        self.runtime.spawn(async move { stopping.run_until_cancelled(task).await });
    }

    /// Runs the task of a connection; a shutdown gives it a while to end by itself.
    pub fn spawn_connection(&self, task: impl Future<Output = ()> + Send + 'static) {
        let cut_off = self.cut_off.clone();
        let task = async move {
            cut_off.run_until_cancelled(task).await;
        };
        self.tasks.spawn_on(task, &self.runtime);
    }

    /// Returns all open connections.
    pub fn links(&self) -> Vec<Arc<Link>> {
        self.peers.lock().links().collect()
    }

    /// Marks a peer as gone for good, because its lease is over or for another reason, runs `free` with the session that it had,
    /// and closes its connection: a peer that connects again then holds nothing that is still to be freed.
    pub fn end_peer(&self, name: &str, reason: &str, lease_over: bool, free: impl FnOnce(Session)) {
        let ended = self.peers.lock().end(name, reason, lease_over, Instant::now());
        let Some(ended) = ended else { return };
        if let Some(link) = &ended.link {
            link.outdate();
        }
        free(ended.session);
        if let Some(link) = ended.link {
            link.close(reason);
        }
        self.peers_changed.notify_all();
    }

    /// Sends a frame to the process of `session`, if it is connected.
    pub fn send_to(&self, session: Session, kind: Kind) {
        if let Some(link) = self.peers.lock().link_of(session) {
            link.send(kind);
        }
    }
}
