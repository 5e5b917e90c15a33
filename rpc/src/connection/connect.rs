//! Sets up connections: dials peers (again when a connection breaks), and serves the gRPC service that they dial.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use psjobs_api::Role;
use psjobs_ps::network;
use psjobs_ps::peer_role::PeerRole;
use psjobs_ps::retry::{Failure, Schedule, Stopped, retry};
use psjobs_ps::unknown_peers::{Peer, StreamPlaces, set_known};
use tokio::net::TcpListener;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::{TcpListenerStream, UnboundedReceiverStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status, Streaming};

use super::attach::{attach, detach, hello, reconcile};
use super::first_frame::FirstFrameLimit;
use super::link::Link;
use super::peers::Superseded;
use super::remote_refs::Snapshot;
use super::slot::Slot;
use super::state::Process;
use crate::error::RemoteError;
use crate::proto;
use crate::proto::frame::Kind;
use crate::proto::remote_objects_client::RemoteObjectsClient;
use crate::proto::remote_objects_server::{RemoteObjects, RemoteObjectsServer};

/// Size limit of a frame of a known peer, for large tensors: bounds what a broken one can make this process allocate.
const MAX_FRAME_BYTES: usize = 1 << 30;
/// How long a peer may take to say who it is.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Peers that may have yet to say who they are, at once; half of them from one address.
const MAX_UNKNOWN_PEERS: usize = 64;
const WINDOW_BYTES: u32 = 16 << 20;
/// Bytes of an HTTP/2 frame: a large tensor goes in few.
const HTTP2_FRAME_BYTES: u32 = 1 << 20;
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_LAST: Duration = Duration::from_secs(2);

type Frames = UnboundedReceiverStream<proto::Frame>;

/// Connects to the process `name` at `address` (`host:port`), waiting up to `timeout` for it to start, and stays
/// connected: a broken connection is made again, until the peer has another one.
pub(crate) fn connect(
    process: Arc<dyn Process>,
    name: &str,
    address: &str,
    timeout: Duration,
) -> Result<(), RemoteError> {
    let slot = Arc::<Slot<()>>::default();
    let dial = Arc::new(Dial {
        process,
        name: name.into(),
        address: address.to_owned(),
        first: Mutex::new(Some(Arc::clone(&slot))),
        last_error: Mutex::new("it does not answer".to_owned()),
        given_up: CancellationToken::new(),
    });
    dial.process.connections().spawn_connection(keep_connected(Arc::clone(&dial)));
    match slot.wait(Instant::now() + timeout) {
        Some(first) => first,
        None => {
            dial.given_up.cancel();
            Err(dial.unreachable(&format!("{} (tried for {timeout:?})", dial.last_error.lock())))
        }
    }
}

/// Returns the gRPC service, for a server that serves others too.
pub(crate) fn service(process: Arc<dyn Process>) -> FirstFrameLimit<RemoteObjectsServer<Service>> {
    let service = Service { process, unknown: StreamPlaces::new(MAX_UNKNOWN_PEERS) };
    FirstFrameLimit(RemoteObjectsServer::new(service).max_decoding_message_size(MAX_FRAME_BYTES))
}

/// Serves the gRPC service alone, on a listener of its own, until shutdown.
pub(crate) fn serve(process: Arc<dyn Process>, listener: TcpListener) {
    let incoming = TcpListenerStream::new(listener).map(|stream| stream.inspect(network::prepare));
    let router = network::limited(Server::builder())
        .initial_connection_window_size(WINDOW_BYTES)
        .initial_stream_window_size(WINDOW_BYTES)
        .max_frame_size(HTTP2_FRAME_BYTES)
        .add_service(service(Arc::clone(&process)));
    let serving = Arc::clone(&process);
    process.connections().spawn_connection(async move {
        let shared = serving.connections();
        if let Err(error) = shared.settings.network.serve(router, incoming, 0, shared.stopping.cancelled()).await {
            tracing::error!(error = &error as &dyn std::error::Error, "the service of remote objects ended");
        }
    });
}

struct Dial {
    process: Arc<dyn Process>,
    name: Arc<str>,
    address: String,
    /// Filled by the first connection, or the first error that will not pass.
    first: Mutex<Option<Arc<Slot<()>>>>,
    last_error: Mutex<String>,
    /// Cancelled when the first connection did not come in time.
    given_up: CancellationToken,
}

enum DialError {
    /// Trying again cannot help.
    Refused(String),
    Failed(String),
}

impl From<Status> for DialError {
    fn from(status: Status) -> Self {
        match status.code() {
            Code::InvalidArgument | Code::FailedPrecondition | Code::PermissionDenied | Code::Unimplemented => {
                Self::Refused(status.message().to_owned())
            }
            _ => Self::Failed(status.message().to_owned()),
        }
    }
}

impl From<DialError> for Failure<String, String> {
    fn from(error: DialError) -> Self {
        match error {
            DialError::Refused(reason) => Self::Permanent(reason),
            DialError::Failed(reason) => Self::Transient(reason),
        }
    }
}

impl Dial {
    /// Returns the key by which the pauses of two processes that lost the same peer differ.
    fn key(&self) -> u32 {
        let mut hasher = DefaultHasher::new();
        (&*self.process.connections().name, &*self.name).hash(&mut hasher);
        hasher.finish() as u32
    }

    fn unreachable(&self, reason: &str) -> RemoteError {
        let (peer, call) = (self.name.to_string(), format!("connection to {}", self.address));
        RemoteError::Unreachable { peer, call, reason: reason.to_owned() }
    }

    /// Returns whether the peer has a connection.
    fn is_connected(&self) -> bool {
        matches!(self.process.connections().peers.lock().state(&self.name), Some(Ok(_)))
    }

    /// Reports the first connection, or that there will be none.
    fn report_first(&self, result: Result<(), RemoteError>) {
        if let Err(RemoteError::Unreachable { reason, .. }) = &result {
            self.process.connections().end_peer(&self.name, reason, false, |_| {});
        }
        if let Some(slot) = self.first.lock().take() {
            slot.fill(result);
        }
    }
}

async fn keep_connected(dial: Arc<Dial>) {
    let stopping = &dial.process.connections().stopping;
    let schedule = Schedule::growing(RETRY_FIRST, RETRY_LAST).spread_by(dial.key());
    loop {
        let attempt = || {
            let dialled = dial_once(&dial);
            async move { dialled.await.map_err(Failure::from) }
        };
        let failed = |reason: &String, _| dial.last_error.lock().clone_from(reason);
        let ended = async {
            tokio::select! { () = stopping.cancelled() => {}, () = dial.given_up.cancelled() => {} }
        };
        match retry(schedule, ended, attempt, failed).await {
            Ok((link, frames)) => {
                dial.report_first(Ok(()));
                // A peer that has connected here, or at another address, needs no connection of this one.
                if read(&dial.process, &link, frames).await || dial.is_connected() {
                    return;
                }
            }
            Err(Stopped::Permanent(reason)) => return dial.report_first(Err(dial.unreachable(&reason))),
            Err(Stopped::TimedOut(_) | Stopped::Cancelled) => return,
        }
    }
}

async fn dial_once(dial: &Dial) -> Result<(Arc<Link>, Streaming<proto::Frame>), DialError> {
    let shared = dial.process.connections();
    let network = &shared.settings.network;
    let target = (network.endpoint(&dial.address, Role::of_replica(&dial.name)))
        .map_err(|_| DialError::Refused(format!("`{}` is not host:port", dial.address)))?
        .initial_connection_window_size(WINDOW_BYTES)
        .initial_stream_window_size(WINDOW_BYTES)
        .max_frame_size(HTTP2_FRAME_BYTES)
        .connect_timeout(RETRY_LAST);
    let channel = network.connect(&target).await.map_err(|error| DialError::Failed(innermost(&error)))?;
    let known = shared.peers.lock().session_of(&dial.name);
    let sent = known.map(|session| shared.remote_refs.lock().snapshot(session)).unwrap_or_default();
    let (out, frames) = Link::channel();
    let first = Kind::Hello(hello(shared, known.unwrap_or(0), &sent));
    drop(out.send(proto::Frame { kind: Some(first) }));
    let mut client = RemoteObjectsClient::new(channel).max_decoding_message_size(MAX_FRAME_BYTES);
    let mut frames = client.attach(Frames::new(frames)).await?.into_inner();
    let hello = expect_hello(&mut frames).await?;
    if *hello.name != *dial.name {
        return Err(DialError::Refused(format!(
            "the process there is {}; check the order of the addresses",
            hello.name
        )));
    }
    shared.peers.lock().check(&dial.name, hello.incarnation).map_err(|error| DialError::Failed(error.to_string()))?;
    // The peer is to be started again: its successor listens at the same address.
    reconcile(&*dial.process, &hello).map_err(|error| DialError::Failed(error.to_string()))?;
    let link = Arc::new(Link::new(Arc::clone(&dial.name), (hello.session, hello.incarnation), out));
    let sent = if known == Some(hello.session) { sent } else { Snapshot::default() };
    attach(&*dial.process, &link, Some(&sent)).map_err(|error| DialError::Failed(error.to_string()))?;
    Arc::clone(&dial.process).attached(&link.peer);
    Ok((link, frames))
}

/// Reads a connection until it ends; true if the peer said goodbye.
async fn read(process: &Arc<dyn Process>, link: &Arc<Link>, mut frames: Streaming<proto::Frame>) -> bool {
    let (reason, ended) = loop {
        match frames.message().await {
            Ok(Some(proto::Frame { kind: Some(Kind::Goodbye(_)) })) => {
                break (format!("{} has ended", link.peer), true);
            }
            Ok(Some(frame)) => {
                process.connections().peers.lock().heard(link, Instant::now());
                if let Some(kind) = frame.kind {
                    Arc::clone(process).receive(link, kind);
                }
            }
            Ok(None) => break ("it was closed".to_owned(), false),
            Err(status) => break (status.message().to_owned(), false),
        }
    };
    tracing::debug!(peer = %link.peer, reason, "connection ended");
    detach(&**process, link, &reason, ended);
    ended
}

/// The gRPC service of an [`Endpoint`](crate::Endpoint).
#[derive(Clone)]
pub struct Service {
    process: Arc<dyn Process>,
    /// Places of peers that have yet to say who they are.
    unknown: StreamPlaces,
}

impl Service {
    /// Reads the first frame of `peer`.
    async fn first_frame(
        &self,
        peer: Option<&Peer>,
        frames: &mut Streaming<proto::Frame>,
    ) -> Result<proto::Hello, Status> {
        let _place = self.unknown.enter(peer)?;
        tokio::time::timeout(HELLO_TIMEOUT, expect_hello(frames)).await.unwrap_or_else(|_| {
            let seconds = HELLO_TIMEOUT.as_secs();
            Err(Status::deadline_exceeded(format!("no frame came in {seconds} s after the stream was opened")))
        })
    }
}

#[tonic::async_trait]
impl RemoteObjects for Service {
    type AttachStream = tokio_stream::adapters::Map<Frames, fn(proto::Frame) -> Result<proto::Frame, Status>>;

    async fn attach(&self, request: Request<Streaming<proto::Frame>>) -> Result<Response<Self::AttachStream>, Status> {
        let process = &self.process;
        let shared = process.connections();
        let (_, extensions, mut frames) = request.into_parts();
        let peer = extensions.get::<PeerRole>().copied();
        let hello = self.first_frame(extensions.get(), &mut frames).await?;
        if let Some(peer) = peer.filter(|_| Role::of_replica(&hello.name) == Some(Role::Server)) {
            PeerRole::check_is_server(Some(peer), &format!("the name {}", hello.name))?;
        }
        let ours = &shared.settings.job_uid;
        if hello.job_uid != *ours {
            let theirs = &hello.job_uid;
            let message = format!("{} is of job {theirs:?}, {} of job {ours:?}", hello.name, shared.name);
            return Err(Status::invalid_argument(message));
        }
        set_known(&extensions);
        if shared.stopping.is_cancelled() {
            return Err(Status::unavailable(format!("{} is ending", shared.name)));
        }
        let superseded = |error: Superseded| Status::failed_precondition(error.to_string());
        // Checked again when the connection is entered: here, so that what the process says it holds is not counted.
        shared.peers.lock().check(&hello.name, hello.incarnation).map_err(superseded)?;
        reconcile(&**process, &hello).map_err(|error| Status::failed_precondition(error.to_string()))?;
        let (out, frames_out) = Link::channel();
        let link = Arc::new(Link::new(hello.name.as_str().into(), (hello.session, hello.incarnation), out));
        attach(&**process, &link, None).map_err(superseded)?;
        Arc::clone(process).attached(&link.peer);
        let reader = Arc::clone(process);
        shared.spawn_connection(async move {
            read(&reader, &link, frames).await;
        });
        Ok(Response::new(Frames::new(frames_out).map(Ok)))
    }
}

async fn expect_hello(frames: &mut Streaming<proto::Frame>) -> Result<proto::Hello, Status> {
    match frames.message().await? {
        Some(proto::Frame { kind: Some(Kind::Hello(hello)) }) => Ok(hello),
        _ => Err(Status::invalid_argument("the first frame must be Hello")),
    }
}

/// Returns the innermost cause: the layers above it say only "transport error".
fn innermost(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}
