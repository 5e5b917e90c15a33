//! Both ends of setting up a connection: dialling (and dialling again when it breaks), and the gRPC
//! service that others dial.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::net::TcpListener;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::{TcpListenerStream, UnboundedReceiverStream};
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status, Streaming};

use super::endpoint::Shared;
use super::link::{Link, Slot};
use super::lock::lock;
use super::remote_refs::Snapshot;
use super::wire::proto;
use super::wire::proto::frame::Kind;
use super::wire::proto::remote_objects_client::RemoteObjectsClient;
use super::wire::proto::remote_objects_server::{RemoteObjects, RemoteObjectsServer};
use super::{Endpoint, Peer, RemoteError, dispatch, peers};

/// Largest frame: bounds what a broken peer can make this process allocate.
const MAX_FRAME_BYTES: usize = 1 << 30;
const WINDOW_BYTES: u32 = 16 << 20;
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_LAST: Duration = Duration::from_secs(2);

type Frames = UnboundedReceiverStream<proto::Frame>;

impl Endpoint {
    /// Connects to the process `name` at `address` (`host:port`), waiting up to `patience` for it to
    /// come up, and stays connected: a broken connection is made again.
    ///
    /// # Errors
    /// If it does not come up, is another process, or belongs to another job.
    pub fn connect(&self, name: &str, address: &str, patience: Duration) -> Result<Peer, RemoteError> {
        let slot = Arc::<Slot>::default();
        let dial = Dial {
            endpoint: self.clone(),
            name: name.into(),
            address: address.to_owned(),
            first: Mutex::new(Some(Arc::clone(&slot))),
            last_error: Mutex::new("it does not answer".to_owned()),
        };
        let dial = Arc::new(dial);
        self.spawn_connection(keep_connected(Arc::clone(&dial)));
        match slot.wait(Instant::now() + patience) {
            Some(first) => first.map(|_| self.peer(name)),
            None => Err(dial.unreachable(&format!("{} (tried for {patience:?})", lock(&dial.last_error)))),
        }
    }

    /// The gRPC service, for a server that offers others too.
    #[must_use]
    pub fn service(&self) -> RemoteObjectsServer<Service> {
        RemoteObjectsServer::new(Service(self.clone())).max_decoding_message_size(MAX_FRAME_BYTES)
    }

    /// Offers the service alone, on a listener of its own, until [`Endpoint::shutdown`].
    pub fn serve(&self, listener: TcpListener) {
        let incoming = TcpListenerStream::new(listener).map(|stream| {
            // The listener sets no options on what it accepts, and small calls must not wait.
            stream.and_then(|stream| stream.set_nodelay(true).map(|()| stream))
        });
        let router = Server::builder()
            .initial_connection_window_size(WINDOW_BYTES)
            .initial_stream_window_size(WINDOW_BYTES)
            .add_service(self.service());
        let endpoint = self.clone();
        self.spawn_connection(async move {
            let Shared { settings, stopping, .. } = endpoint.shared();
            if let Err(error) = settings.network.serve(router, incoming, stopping.cancelled()).await {
                tracing::error!(error = &error as &dyn std::error::Error, "the service of remote objects ended");
            }
        });
    }
}

struct Dial {
    endpoint: Endpoint,
    name: Arc<str>,
    address: String,
    /// Filled by the first connection, or the first error that will not pass.
    first: Mutex<Option<Arc<Slot>>>,
    last_error: Mutex<String>,
}

enum DialError {
    /// Trying again cannot help.
    Refused(String),
    Failed(String),
}

impl From<Status> for DialError {
    fn from(status: Status) -> Self {
        match status.code() {
            Code::InvalidArgument | Code::Unimplemented => Self::Refused(status.message().to_owned()),
            _ => Self::Failed(status.message().to_owned()),
        }
    }
}

impl Dial {
    fn unreachable(&self, reason: &str) -> RemoteError {
        let (peer, call) = (self.name.to_string(), format!("connection to {}", self.address));
        RemoteError::Unreachable { peer, call, reason: reason.to_owned() }
    }

    fn tell_first(&self, result: Result<(), RemoteError>) {
        if let Some(slot) = lock(&self.first).take() {
            slot.fill(result.map(|()| super::link::Answer::default()));
        }
    }
}

async fn keep_connected(dial: Arc<Dial>) {
    let stopping = &dial.endpoint.shared().stopping;
    let mut pause = RETRY_FIRST;
    while let Some(dialled) = stopping.run_until_cancelled(dial_once(&dial)).await {
        match dialled {
            Ok((link, frames)) => {
                dial.tell_first(Ok(()));
                pause = RETRY_FIRST;
                if dispatch::read(&dial.endpoint, &link, frames).await {
                    return;
                }
            }
            Err(DialError::Refused(reason)) => {
                dial.tell_first(Err(dial.unreachable(&reason)));
                return;
            }
            Err(DialError::Failed(reason)) => {
                *lock(&dial.last_error) = reason;
                let pause_now = pause.mul_f64(rand::random_range(0.5..1.0));
                let _ = stopping.run_until_cancelled(tokio::time::sleep(pause_now)).await;
                pause = (pause * 2).min(RETRY_LAST);
            }
        }
    }
}

async fn dial_once(dial: &Dial) -> Result<(Arc<Link>, Streaming<proto::Frame>), DialError> {
    let endpoint = &dial.endpoint;
    let network = &endpoint.shared().settings.network;
    let target = (network.endpoint(&dial.address))
        .map_err(|_| DialError::Refused(format!("`{}` is not host:port", dial.address)))?
        .initial_connection_window_size(WINDOW_BYTES)
        .initial_stream_window_size(WINDOW_BYTES)
        .connect_timeout(RETRY_LAST);
    let channel = network.connect(&target).await.map_err(|error| DialError::Failed(innermost(&error)))?;
    let known = lock(&endpoint.shared().peers).session_of(&dial.name);
    let told = known.map(|session| lock(&endpoint.shared().holdings).snapshot(session)).unwrap_or_default();
    let (out, frames) = Link::channel();
    let hello = Kind::Hello(peers::hello(endpoint, known.unwrap_or(0), &told));
    drop(out.send(proto::Frame { kind: Some(hello) }));
    let mut client = RemoteObjectsClient::new(channel).max_decoding_message_size(MAX_FRAME_BYTES);
    let mut frames = client.attach(Frames::new(frames)).await?.into_inner();
    let hello = expect_hello(&mut frames).await?;
    if *hello.name != *dial.name {
        return Err(DialError::Refused(format!(
            "the process there is {}; check the order of the addresses",
            hello.name
        )));
    }
    dispatch::reconcile(endpoint, &hello);
    let link = Arc::new(Link::new(Arc::clone(&dial.name), hello.session, out));
    let told = if known == Some(hello.session) { told } else { Snapshot::default() };
    peers::attach(endpoint, &link, Some(&told));
    Ok((link, frames))
}

/// The gRPC side of an [`Endpoint`].
#[derive(Clone, Debug)]
pub struct Service(Endpoint);

#[tonic::async_trait]
impl RemoteObjects for Service {
    type AttachStream = tokio_stream::adapters::Map<Frames, fn(proto::Frame) -> Result<proto::Frame, Status>>;

    async fn attach(&self, request: Request<Streaming<proto::Frame>>) -> Result<Response<Self::AttachStream>, Status> {
        let endpoint = &self.0;
        let mut frames = request.into_inner();
        let hello = expect_hello(&mut frames).await?;
        let ours = &endpoint.shared().settings.job_uid;
        if hello.job_uid != *ours {
            let theirs = &hello.job_uid;
            let message = format!("{} is of job {theirs:?}, {} of job {ours:?}", hello.name, endpoint.name());
            return Err(Status::invalid_argument(message));
        }
        if endpoint.shared().stopping.is_cancelled() {
            return Err(Status::unavailable(format!("{} is ending", endpoint.name())));
        }
        dispatch::reconcile(endpoint, &hello);
        let (out, frames_out) = Link::channel();
        let link = Arc::new(Link::new(hello.name.as_str().into(), hello.session, out));
        peers::attach(endpoint, &link, None);
        let reader = endpoint.clone();
        endpoint.spawn_connection(async move {
            dispatch::read(&reader, &link, frames).await;
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

/// The cause at the bottom: the layers above it say only "transport error".
fn innermost(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}
