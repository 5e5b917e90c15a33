//! Starts and ends a process's end of all remote calls, and makes its outgoing calls.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use psjobs_ps::network::Network;
use tokio::net::TcpListener;
use tokio::runtime::Handle;

use crate::connection::{self, Absence, Connections, Driver, FirstFrameLimit, Inner, Sent, Service, Settings, Slot};
use crate::error::RemoteError;
use crate::ids::{ContextId, ObjectId, Session};
use crate::objects::{
    Answer, Call, Caller, Contexts, Destination, Endpoint, ObjectTable, Peer, Registry, Responder, Shared, Target,
    Value, decode, encode,
};
use crate::proto::frame::Kind;
use crate::proto::remote_objects_server::RemoteObjectsServer;
use crate::{autograd, dispatch, proto};

/// How long peers have to close their side of a connection at a shutdown.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Counts of what a process holds and hosts, for tests of leaks and for people.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Number of objects, modules and values hosted here.
    pub objects: usize,
    /// References to them, here and elsewhere.
    pub references: u64,
    /// Autograd contexts that are open here.
    pub contexts: usize,
    /// Calls from here that wait for a reply.
    pub calls: usize,
    /// Objects and contexts elsewhere that are kept for this process.
    pub held: usize,
    /// Number of times that leases were renewed and checked.
    pub lease_checks: u64,
}

impl Endpoint {
    /// Starts the end; it sends and receives on `runtime` until [`Endpoint::shutdown`]. Threads that wait for answers sleep.
    #[must_use]
    pub fn start(settings: Settings, registry: Registry, runtime: Handle) -> Self {
        Self::start_on(settings, registry, runtime, Weak::new())
    }

    /// Starts the end on a runtime that is polled by the threads which wait for answers.
    #[must_use]
    pub fn start_driven(settings: Settings, registry: Registry, driver: &Driver) -> Self {
        Self::start_on(settings, registry, driver.handle(), Arc::downgrade(driver.inner()))
    }

    fn start_on(settings: Settings, mut registry: Registry, runtime: Handle, driver: Weak<Inner>) -> Self {
        autograd::register(&mut registry);
        let endpoint = Self::of(Arc::new(Shared {
            connections: Connections::new(settings, runtime, driver),
            registry,
            objects: ObjectTable::default(),
            contexts: Contexts::default(),
            published: Mutex::default(),
        }));
        endpoint.connections().spawn(connection::keep_leases(endpoint.process()));
        endpoint
    }

    /// Returns the network that connections go over, with the credentials of this process.
    #[must_use]
    pub fn network(&self) -> &Network {
        &self.connections().settings.network
    }

    /// Connects to the process `name` at `address` (`host:port`), waiting up to `timeout` for it to start, and stays
    /// connected: a broken connection is made again.
    ///
    /// # Errors
    /// If it does not start, is another process, or belongs to another job.
    pub fn connect(&self, name: &str, address: &str, timeout: Duration) -> Result<Peer, RemoteError> {
        connection::connect(self.process(), name, address, timeout).map(|()| self.peer(name))
    }

    /// Returns the gRPC service, for a server that serves others too.
    #[must_use]
    pub fn service(&self) -> FirstFrameLimit<RemoteObjectsServer<Service>> {
        connection::service(self.process())
    }

    /// Serves the gRPC service alone, on a listener of its own, until [`Endpoint::shutdown`].
    pub fn serve(&self, listener: TcpListener) {
        connection::serve(self.process(), listener);
    }

    /// Returns why the process `peer` will not come back: it said goodbye, or was silent for a whole lease.
    #[must_use]
    pub fn gone(&self, peer: &str) -> Option<String> {
        self.connections().peers.lock().gone(peer)
    }

    /// Returns since when and why the process `peer` is not connected; `None` if it is. A process that has never connected
    /// is away from now on.
    #[must_use]
    pub fn absence(&self, peer: &str) -> Option<Absence> {
        let never = || Absence {
            since: Instant::now(),
            reason: "it has not connected".to_owned(),
            ended: false,
            lease_over: false,
        };
        self.connections().peers.lock().state(peer).map_or_else(|| Some(never()), Result::err)
    }

    /// Returns the number of the process that was connected last under the name `peer`. A process that takes its place has
    /// another one.
    #[must_use]
    pub fn session(&self, peer: &str) -> Option<u64> {
        self.connections().peers.lock().session_of(peer)
    }

    #[must_use]
    pub fn stats(&self) -> Stats {
        let (shared, connections) = (self.shared(), self.connections());
        let (objects, references) = shared.objects.count();
        let calls = connections.links().iter().map(|link| link.in_flight()).sum();
        let (contexts, held) = (shared.contexts.count(), connections.remote_refs.lock().count());
        let lease_checks = connections.lease_checks.load(Ordering::Relaxed);
        Stats { objects, references, contexts, calls, held, lease_checks }
    }

    /// Says goodbye to all peers and drops what is hosted here. Calls that wait get an error. Blocks
    /// until the peers have closed their side, or for a second.
    pub fn shutdown(&self) {
        let (shared, connections) = (self.shared(), self.connections());
        connections.stopping.cancel();
        connections.peers_changed.notify_all();
        for link in connections.links() {
            link.send(Kind::Goodbye(proto::Goodbye {}));
            link.close(&format!("{} ended", connections.name));
        }
        shared.contexts.clear(connections);
        shared.objects.clear();
        connections.tasks.close();
        connections.runtime.block_on(async {
            // A peer that does not close its side in time is cut off.
            drop(tokio::time::timeout(CLOSE_TIMEOUT, connections.tasks.wait()).await);
            connections.cut_off.cancel();
            connections.tasks.wait().await;
        });
    }
}

impl Caller for Shared {
    fn session(&self) -> Session {
        self.connections.session
    }

    fn send_call(
        self: Arc<Self>,
        to: &Destination,
        target: Target,
        context: Option<ContextId>,
        arguments: Vec<Value>,
    ) -> Result<Sent<Answer>, RemoteError> {
        let deadline = Instant::now() + to.timeout;
        if to.peer == self.connections.name {
            return Ok(call_here(&Endpoint::of(self), to, target, context, arguments, deadline));
        }
        call_peer(&Endpoint::of(self), to, target, context, arguments, deadline)
    }

    fn release(&self, owner: Session, object: ObjectId) {
        if owner == self.connections.session {
            self.objects.release(object, owner);
            return;
        }
        let mut remote_refs = self.connections.remote_refs.lock();
        remote_refs.remove_reference(owner, object);
        self.connections.send_to(owner, Kind::Release(proto::Release { object }));
    }
}

fn call_peer(
    endpoint: &Endpoint,
    to: &Destination,
    target: Target,
    context: Option<ContextId>,
    arguments: Vec<Value>,
    deadline: Instant,
) -> Result<Sent<Answer>, RemoteError> {
    let connections = endpoint.connections();
    let describe: Arc<str> = target.describe(&to.what).into();
    let link = connection::link_to(connections, &to.peer, &describe, deadline, to.awaits_replacement)?;
    if to.session.is_some_and(|session| session != link.session) {
        let reason = "it was restarted; what it held is gone".to_owned();
        return Err(RemoteError::Unreachable { peer: to.peer.to_string(), call: describe.to_string(), reason });
    }
    let message = proto::Call {
        id: 0,
        timeout_ms: u32::try_from(to.timeout.as_millis()).unwrap_or(u32::MAX),
        context: context.unwrap_or(0),
        target: Some(target.into()),
        arguments: encode(endpoint, link.session, &arguments)?,
    };
    let slot = Arc::<Slot<Answer>>::default();
    let on_reply = {
        let (slot, endpoint, session) = (Arc::clone(&slot), endpoint.clone(), link.session);
        let (peer, call) = (Arc::clone(&to.peer), Arc::clone(&describe));
        Box::new(move |reply: Result<proto::Reply, RemoteError>| {
            slot.fill(reply.and_then(|reply| match decode(&endpoint, session, reply.values) {
                Ok(values) => Ok(Answer { values, piece: reply.piece }),
                Err(error) => {
                    let (peer, call) = (peer.to_string(), call.to_string());
                    Err(RemoteError::Failed { peer, call, message: error.to_string() })
                }
            }));
        })
    };
    let id = link.call(message, &describe, to.timeout, deadline, on_reply)?;
    // After the call: the owner must see it before it sees references in it released.
    drop(arguments);
    let driver = connections.driver.clone();
    let (timeout, peer) = (to.timeout, to.peer.clone());
    Ok(Sent { slot, deadline, timeout, call: describe, driver, over: Some((link, id)), peer })
}

fn call_here(
    endpoint: &Endpoint,
    to: &Destination,
    target: Target,
    context: Option<ContextId>,
    arguments: Vec<Value>,
    deadline: Instant,
) -> Sent<Answer> {
    let connections = endpoint.connections();
    let slot = Arc::<Slot<Answer>>::default();
    let describe: Arc<str> = target.describe(&to.what).into();
    let responder = {
        let (slot, peer, call) = (Arc::clone(&slot), Arc::clone(&to.peer), Arc::clone(&describe));
        Responder::new(move |answer| {
            slot.fill(answer.map_err(|error| {
                let message = error.to_string();
                RemoteError::Failed { peer: peer.to_string(), call: call.to_string(), message }
            }));
        })
    };
    let context = context.map(|id| endpoint.shared().contexts.open(id, connections.session));
    let call = Call { endpoint: endpoint.clone(), caller: Arc::clone(&connections.name), deadline, context };
    dispatch::begin(call, target, arguments, responder);
    let driver = connections.driver.clone();
    Sent { slot, deadline, timeout: to.timeout, call: describe, driver, over: None, peer: to.peer.clone() }
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint").field("name", &self.connections().name).field("stats", &self.stats()).finish()
    }
}
