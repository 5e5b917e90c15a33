//! The `ParameterServer` service: gradients up, parameters down. `Exchange` and `Pull` write and
//! read their messages themselves ([`crate::wire`]); to clients they look like generated code.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use tokio::sync::mpsc;
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;

use super::peer::{Answer, Peer};
use super::shared::{Shared, trainer};
use super::store::Store;
use crate::clock::now;
use crate::proto::{self, exchange_request::Message};
use crate::wire::{Outgoing, Reader, frame};

/// Blocks that a Pull holds in memory while the reader is slow.
const PULL_QUEUE: usize = 4;

/// Where answers are handed in.
type Answers = mpsc::Sender<Result<Bytes, Status>>;

/// The service, for tonic's router.
#[derive(Clone)]
pub struct Service(Arc<Shared>);

impl NamedService for Service {
    const NAME: &'static str = "psjobs.v1.ParameterServer";
}

impl tower::Service<Request<Body>> for Service {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let (shared, path) = (self.0.clone(), request.uri().path().to_owned());
        let reader = Reader::new(request.into_body(), shared.recipe.buffers.clone());
        let method = path.rsplit('/').next().unwrap_or_default();
        let answers = match method {
            "Exchange" => exchange(shared, reader),
            "Pull" => pull(shared, reader),
            "Push" => push(shared, reader),
            _ => Err(Status::unimplemented(format!("{path} is not known here; methods are Exchange, Pull and Push"))),
        };
        Box::pin(async move {
            Ok(match answers {
                Ok(answers) => {
                    let mut response = Response::new(Body::new(Outgoing::response(answers)));
                    response
                        .headers_mut()
                        .insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("application/grpc"));
                    response
                }
                Err(status) => status.into_http(),
            })
        })
    }
}

impl Service {
    /// Serves the blocks of `shared`.
    #[must_use]
    pub fn new(shared: Arc<Shared>) -> Self {
        Self(shared)
    }
}

type Receiver = mpsc::Receiver<Result<Bytes, Status>>;

fn exchange(shared: Arc<Shared>, reader: Reader) -> Result<Receiver, Status> {
    // One answer for each block of the step in flight, and one error.
    let (answers, stream) = mpsc::channel(shared.store()?.layout().blocks() as usize + 1);
    shared.clone().tasks.spawn(async move {
        if let Err(status) = read_gradients(&shared, reader, answers.clone()).await {
            tracing::debug!(reason = status.message(), "a training stream ended");
            // The trainer may be gone already.
            drop(answers.try_send(Err(status)));
        }
    });
    Ok(stream)
}

fn pull(shared: Arc<Shared>, reader: Reader) -> Result<Receiver, Status> {
    let (answers, stream) = mpsc::channel(PULL_QUEUE);
    shared.clone().tasks.spawn(async move {
        if let Err(status) = send_blocks(&shared, reader, &answers).await {
            drop(answers.send(Err(status)).await);
        }
    });
    Ok(stream)
}

fn push(shared: Arc<Shared>, reader: Reader) -> Result<Receiver, Status> {
    let (answers, stream) = mpsc::channel(1);
    shared.clone().tasks.spawn(async move {
        let reply = take_values(&shared, reader).await;
        drop(answers.send(reply.map(|reply| frame::message(&reply))).await);
    });
    Ok(stream)
}

async fn send_blocks(shared: &Shared, mut reader: Reader, answers: &Answers) -> Result<(), Status> {
    let request: proto::PullRequest =
        reader.message().await?.ok_or_else(|| Status::invalid_argument("a Pull needs one PullRequest"))?;
    shared.members().hear(&trainer(request.trainer)?, now())?;
    let store = shared.store()?;
    let blocks: Vec<u32> =
        if request.blocks.is_empty() { store.shard(shared.shard(request.shard)?).collect() } else { request.blocks };
    for block in blocks {
        let (version, values) = store.read(block).await?.ok_or_else(|| empty(block))?;
        let start = store.layout().range(block).start;
        let answer = Answer { step: 0, block, version, start, values: &values };
        if answers.send(Ok(answer.encode(&shared.recipe))).await.is_err() {
            break; // Nobody reads on.
        }
    }
    Ok(())
}

async fn take_values(shared: &Shared, mut reader: Reader) -> Result<proto::PushReply, Status> {
    let store = shared.store()?;
    let (mut known, mut initialized) = (false, 0);
    while let Some(push) = reader.message::<proto::PushRequest>().await? {
        if !known {
            shared.members().hear(&trainer(push.trainer)?, now())?;
            known = true;
        }
        shared.shard(Some(store.layout().owner(push.block)))?;
        initialized += u32::from(store.initialize(push.block, push.codec, push.payload).await?);
    }
    Ok(proto::PushReply { initialized })
}

/// Not the last word: whoever joins again is told which blocks to fill. The servers may have gone back to nothing
/// since a trainer filled this one.
pub fn empty(block: u32) -> Status {
    Status::aborted(format!("block {block} has no values yet; push them first"))
}

/// Hands over a trainer's gradients until its stream ends, or is ended from here.
async fn read_gradients(shared: &Shared, mut reader: Reader, answers: Answers) -> Result<(), Status> {
    let store: &Store = shared.store()?;
    let Some(proto::ExchangeRequest { message: Some(Message::Open(open)) }) = reader.message().await? else {
        return Err(Status::invalid_argument("the first message of a training stream must be Open"));
    };
    let id = trainer(open.trainer)?;
    shared.members().hear(&id, now())?;
    if open.epoch != shared.recovery.epoch() {
        return Err(Status::aborted("the servers went to a checkpoint since this trainer joined; join again"));
    }
    let shard = shared.shard(open.shard)?;
    let memory = shared.memory(open.shared_memory_token, store.layout().elements())?;
    let end = shared.open_stream(id.index, shard);
    let peer = Peer::new(id.index, open.epoch, answers, memory, end.clone());
    loop {
        let message = tokio::select! {
            biased;
            () = end.cancelled() => return Err(Status::aborted("the server has ended this stream")),
            message = reader.message::<proto::ExchangeRequest>() => message?,
        };
        let Some(message) = message else { return Ok(()) };
        let Some(Message::Gradient(gradient)) = message.message else {
            return Err(Status::invalid_argument("expected a gradient block; Open comes once, at the start"));
        };
        shared.members().hear(&id, now())?;
        shared.metrics.gradient(gradient.payload.len());
        let step = gradient.step;
        store.gradient(&peer, gradient).await?;
        shared.members().gave(id.index, step, now());
    }
}
