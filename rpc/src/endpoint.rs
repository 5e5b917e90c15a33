//! This process's end of all remote calls: its name and session, what it hosts, whom it knows and
//! what it holds elsewhere. Calls go out from here; `inbox` takes in what others ask.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::{Duration, Instant};

use psjobs_ps::network::Network;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::autograd::{Contexts, Module, ModuleRef, Parameters};
use super::link::{Link, Slot};
use super::lock::lock;
use super::object::Call;
use super::object_table::{Hosted, ObjectId, ObjectTable, Session};
use super::peers::Peers;
use super::pending::Sent;
use super::remote_refs::{ContextId, RemoteRefs};
use super::reply::Responder;
use super::runtime_driver::{Driver, Inner};
use super::target::Target;
use super::wire::{encode, proto};
use super::{Peer, RRef, Registry, RemoteError, Value, dispatch, peers};

/// Who this process is in its job, and how patient it is.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Name in the job, for example `trainer-0`; unique in it.
    pub name: String,
    /// Processes of another job are refused.
    pub job_uid: String,
    /// What a silent process held is freed after this long. Heartbeats go out four times as often.
    pub lease: Duration,
    /// How long a call may take unless it says otherwise.
    pub timeout: Duration,
    /// What other processes are reached through.
    pub network: Network,
}

impl Settings {
    #[must_use]
    pub fn new(name: impl Into<String>, job_uid: impl Into<String>) -> Self {
        let (lease, timeout) = (Duration::from_secs(30), Duration::from_secs(60));
        Self { name: name.into(), job_uid: job_uid.into(), lease, timeout, network: Network::default() }
    }
}

/// How long peers have to close their side of a connection.
const FAREWELL: Duration = Duration::from_secs(1);

/// A handle to this process's end; clones are the same end. Its methods block and are for ordinary
/// threads: hosted methods, training loops.
#[derive(Clone)]
pub struct Endpoint(Arc<Shared>);

pub(crate) struct Shared {
    pub settings: Settings,
    pub name: Arc<str>,
    pub session: Session,
    pub registry: Registry,
    pub runtime: Handle,
    /// Gone if the runtime has threads of its own. Not held: its tasks hold this.
    driver: Weak<Inner>,
    pub host: ObjectTable,
    pub contexts: Contexts,
    pub peers: Mutex<Peers>,
    pub peers_changed: Condvar,
    /// Locked before `peers` where both are.
    pub holdings: Mutex<RemoteRefs>,
    pub lease_checks: AtomicU64,
    /// No new calls or connections from now on.
    pub stopping: CancellationToken,
    /// Connections, which are given time to end in order.
    pub connections: TaskTracker,
    /// That time is over.
    cut_off: CancellationToken,
}

/// What lives in a process, for tests of leaks and for people.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Objects, modules and values hosted here.
    pub objects: usize,
    /// References to them, here and elsewhere.
    pub references: u64,
    /// Autograd contexts that are open here.
    pub contexts: usize,
    /// Calls from here that wait for a reply.
    pub calls: usize,
    /// Objects and contexts elsewhere that are kept for this process.
    pub held: usize,
    /// How often leases were renewed and looked at.
    pub lease_checks: u64,
}

impl Endpoint {
    /// Starts the end; it sends and receives on `runtime` until [`Endpoint::shutdown`].
    #[must_use]
    pub fn start(settings: Settings, registry: Registry, runtime: Handle) -> Self {
        Self::start_on(settings, registry, runtime, Weak::new())
    }

    /// Starts the end on a runtime that the threads which wait for answers drive themselves.
    #[must_use]
    pub fn start_driven(settings: Settings, registry: Registry, driver: &Driver) -> Self {
        Self::start_on(settings, registry, driver.handle(), Arc::downgrade(driver.inner()))
    }

    fn start_on(settings: Settings, mut registry: Registry, runtime: Handle, driver: Weak<Inner>) -> Self {
        super::autograd::register(&mut registry);
        let endpoint = Self(Arc::new(Shared {
            name: settings.name.as_str().into(),
            settings,
            session: rand::random(),
            registry,
            runtime,
            driver,
            host: ObjectTable::default(),
            contexts: Contexts::default(),
            peers: Mutex::default(),
            peers_changed: Condvar::new(),
            holdings: Mutex::default(),
            lease_checks: AtomicU64::default(),
            stopping: CancellationToken::new(),
            connections: TaskTracker::new(),
            cut_off: CancellationToken::new(),
        }));
        endpoint.spawn(peers::keep_leases(endpoint.clone()));
        endpoint
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the network that connections go over, with the credentials of this process.
    #[must_use]
    pub fn network(&self) -> &Network {
        &self.shared().settings.network
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.0
    }

    /// A process by name; also this one.
    #[must_use]
    pub fn peer(&self, name: &str) -> Peer {
        Peer::new(self.clone(), name.into(), self.0.settings.timeout)
    }

    /// Hosts a module in this process. Its pieces of a context's graph are not cut out of the local one.
    #[must_use]
    pub fn module(&self, module: impl Module, parameters: Parameters) -> ModuleRef {
        let hosted = Hosted::Module(Arc::new(super::autograd::HostedModule::new(module, parameters)));
        ModuleRef::new(self.adopt("local".into(), hosted))
    }

    /// A reference to something new in this process.
    pub(crate) fn adopt(&self, name: Arc<str>, hosted: Hosted) -> RRef {
        let id = self.0.host.insert(Arc::clone(&name), hosted, self.0.session);
        RRef::new(self.clone(), Arc::clone(&self.0.name), self.0.session, id, name)
    }

    /// Why the process `peer` will not come back: it said goodbye, or was silent for a whole lease.
    #[must_use]
    pub fn gone(&self, peer: &str) -> Option<String> {
        lock(&self.0.peers).gone(peer)
    }

    #[must_use]
    pub fn stats(&self) -> Stats {
        let (objects, references) = self.0.host.count();
        let links: Vec<_> = lock(&self.0.peers).links().collect();
        let calls = links.iter().map(|link| link.in_flight()).sum();
        let (contexts, held) = (self.0.contexts.count(), lock(&self.0.holdings).count());
        let lease_checks = self.0.lease_checks.load(Ordering::Relaxed);
        Stats { objects, references, contexts, calls, held, lease_checks }
    }

    /// Says goodbye to all peers and drops what is hosted here. Calls that wait get an error. Blocks
    /// until the peers have heard it, or for a second.
    pub fn shutdown(&self) {
        self.0.stopping.cancel();
        self.0.peers_changed.notify_all();
        let links: Vec<_> = lock(&self.0.peers).links().collect();
        for link in links {
            link.send(proto::frame::Kind::Goodbye(proto::Goodbye {}));
            link.close(&format!("{} ended", self.0.name));
        }
        self.0.contexts.clear(self);
        self.0.host.clear();
        self.0.connections.close();
        self.0.runtime.block_on(async {
            // A peer that does not close its side in time is cut off.
            drop(tokio::time::timeout(FAREWELL, self.0.connections.wait()).await);
            self.0.cut_off.cancel();
            self.0.connections.wait().await;
        });
    }

    /// Runs a task until [`Endpoint::shutdown`].
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let stopping = self.0.stopping.clone();
        self.0.runtime.spawn(async move { stopping.run_until_cancelled(task).await });
    }

    /// Runs a connection; [`Endpoint::shutdown`] gives it a while to end by itself.
    pub(crate) fn spawn_connection(&self, task: impl Future<Output = ()> + Send + 'static) {
        let cut_off = self.0.cut_off.clone();
        let task = async move {
            cut_off.run_until_cancelled(task).await;
        };
        self.0.connections.spawn_on(task, &self.0.runtime);
    }

    /// Starts a call; `describe` names it in errors.
    pub(crate) fn send_call(
        &self,
        to: &Destination,
        target: Target,
        context: Option<ContextId>,
        arguments: Vec<Value>,
    ) -> Result<Sent, RemoteError> {
        let deadline = Instant::now() + to.timeout;
        let describe = target.describe(&to.what);
        if to.peer == self.0.name {
            return Ok(self.call_here(to, target, context, arguments, deadline));
        }
        let link = peers::link_to(self, &to.peer, &describe, deadline)?;
        if to.session.is_some_and(|session| session != link.session) {
            let reason = "it was restarted; what it held is gone".to_owned();
            return Err(RemoteError::Unreachable { peer: to.peer.to_string(), call: describe, reason });
        }
        let message = proto::Call {
            id: 0,
            timeout_ms: u32::try_from(to.timeout.as_millis()).unwrap_or(u32::MAX),
            context: context.unwrap_or(0),
            target: Some(target.into()),
            arguments: encode(self, &link, &arguments)?,
        };
        let (id, slot) = link.call(message, &describe, to.timeout, deadline)?;
        // Only now: the owner must see the call before it sees references in it released.
        drop(arguments);
        let driver = self.0.driver.clone();
        Ok(Sent {
            slot,
            deadline,
            timeout: to.timeout,
            call: describe,
            driver,
            over: Some((link, id)),
            peer: to.peer.clone(),
        })
    }

    fn call_here(
        &self,
        to: &Destination,
        target: Target,
        context: Option<ContextId>,
        arguments: Vec<Value>,
        deadline: Instant,
    ) -> Sent {
        let slot = Arc::<Slot>::default();
        let describe = target.describe(&to.what);
        let responder = Responder::here(Arc::clone(&slot), to.peer.clone(), describe.clone());
        let context = context.map(|id| self.0.contexts.open(id, self.0.session));
        let call = Call { endpoint: self.clone(), caller: Arc::clone(&self.0.name), deadline, context };
        dispatch::begin(call, target, arguments, responder);
        let driver = self.0.driver.clone();
        Sent { slot, deadline, timeout: to.timeout, call: describe, driver, over: None, peer: to.peer.clone() }
    }

    /// A reference on its way to the other end of `link`.
    pub(crate) fn export(&self, link: &Link, reference: &RRef) -> proto::Reference {
        if reference.session() == self.0.session {
            // The sender's own reference keeps the object until this one is counted.
            drop(self.0.host.retain(reference.id(), link.session));
        } else if reference.session() != link.session {
            self.park(reference.clone());
        }
        proto::Reference {
            owner: reference.owner().to_owned(),
            session: reference.session(),
            object: reference.id(),
            name: reference.object_name().to_owned(),
        }
    }

    /// Keeps a third process's object alive until the receiver has counted its own reference.
    fn park(&self, reference: RRef) {
        let lease = self.0.settings.lease;
        self.spawn(async move {
            tokio::time::sleep(lease).await;
            drop(reference);
        });
    }

    /// A reference that came over `link`.
    pub(crate) fn import(&self, link: &Link, reference: &proto::Reference) -> Result<RRef, RemoteError> {
        let (owner, name): (Arc<str>, Arc<str>) = (reference.owner.as_str().into(), reference.name.as_str().into());
        if reference.session == self.0.session {
            self.0.host.retain(reference.object, self.0.session)?;
        } else {
            let mut holdings = lock(&self.0.holdings);
            holdings.add_reference(reference.session, reference.object);
            if reference.session != link.session
                && let Some(link) = lock(&self.0.peers).link_of(reference.session)
            {
                link.send(proto::frame::Kind::Retain(proto::Retain { object: reference.object }));
            }
        }
        Ok(RRef::new(self.clone(), owner, reference.session, reference.object, name))
    }

    /// The last clone of a reference was dropped.
    pub(crate) fn let_go(&self, owner: Session, object: ObjectId) {
        if owner == self.0.session {
            self.0.host.release(object, owner);
            return;
        }
        let mut holdings = lock(&self.0.holdings);
        holdings.remove_reference(owner, object);
        if let Some(link) = lock(&self.0.peers).link_of(owner) {
            link.send(proto::frame::Kind::Release(proto::Release { object }));
        }
    }
}

/// Whom a call goes to.
#[derive(Clone, Debug)]
pub(crate) struct Destination {
    pub peer: Arc<str>,
    /// The session that must answer; any for calls that name no object.
    pub session: Option<Session>,
    /// Name of the object, for messages.
    pub what: Arc<str>,
    pub timeout: Duration,
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint").field("name", &self.0.name).field("stats", &self.stats()).finish()
    }
}
