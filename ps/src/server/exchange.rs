//! The `ParameterServer` service: gradients up, parameters down.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::peer::Peer;
use super::shared::{Shared, trainer};
use super::store::Store;
use crate::proto::{self, exchange_request::Message};

pub struct Exchange(pub Arc<Shared>);

type Answers = ReceiverStream<Result<proto::ParameterBlock, Status>>;

/// Blocks that a Pull holds in memory while the reader is slow.
const PULL_QUEUE: usize = 4;

#[tonic::async_trait]
impl proto::parameter_server_server::ParameterServer for Exchange {
    type ExchangeStream = Answers;
    type PullStream = Answers;

    async fn exchange(&self, request: Request<Streaming<proto::ExchangeRequest>>) -> Result<Response<Answers>, Status> {
        let store = self.0.store()?;
        // One answer for each block of the step in flight, and one error.
        let (answers, stream) = mpsc::channel(store.len() + 1);
        let shared = self.0.clone();
        self.0.tasks.spawn(async move {
            if let Err(status) = read_gradients(&shared, request.into_inner(), answers.clone()).await {
                tracing::debug!(reason = status.message(), "a training stream ended");
                // The trainer may be gone already.
                drop(answers.try_send(Err(status)));
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn pull(&self, request: Request<proto::PullRequest>) -> Result<Response<Answers>, Status> {
        let request = request.into_inner();
        self.0.members().hear(&trainer(request.trainer)?, Instant::now())?;
        let store = self.0.store()?;
        let blocks: Vec<u32> = if request.blocks.is_empty() { store.numbers().collect() } else { request.blocks };
        let (answers, stream) = mpsc::channel(PULL_QUEUE);
        let shared = self.0.clone();
        self.0.tasks.spawn(async move {
            for block in blocks {
                let answer = read_block(&shared, block).await;
                let failed = answer.is_err();
                if answers.send(answer).await.is_err() || failed {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn push(
        &self,
        request: Request<Streaming<proto::PushRequest>>,
    ) -> Result<Response<proto::PushReply>, Status> {
        let store = self.0.store()?;
        let mut stream = request.into_inner();
        let (mut known, mut initialized) = (false, 0);
        while let Some(push) = stream.message().await? {
            if !known {
                self.0.members().hear(&trainer(push.trainer)?, Instant::now())?;
                known = true;
            }
            initialized += u32::from(store.initialize(push.block, push.codec, push.payload).await?);
        }
        Ok(Response::new(proto::PushReply { initialized }))
    }
}

async fn read_block(shared: &Shared, block: u32) -> Result<proto::ParameterBlock, Status> {
    let (version, payload) = shared
        .store()?
        .read(block)
        .await?
        .ok_or_else(|| Status::failed_precondition(format!("block {block} has no values yet; push them first")))?;
    Ok(proto::ParameterBlock { step: 0, block, codec: proto::Codec::F32.into(), version, payload })
}

/// Hands over a trainer's gradients until its stream ends, or is ended from here.
async fn read_gradients(
    shared: &Shared,
    mut stream: Streaming<proto::ExchangeRequest>,
    answers: mpsc::Sender<Result<proto::ParameterBlock, Status>>,
) -> Result<(), Status> {
    let store: &Store = shared.store()?;
    let Some(proto::ExchangeRequest { message: Some(Message::Open(open)) }) = stream.message().await? else {
        return Err(Status::invalid_argument("the first message of a training stream must be Open"));
    };
    let id = trainer(open.trainer)?;
    shared.members().hear(&id, Instant::now())?;
    let memory = shared.memory(open.shared_memory_token, store.layout().elements())?;
    let end = shared.open_stream(id.index);
    let peer = Peer::new(id.index, answers, memory, end.clone());
    loop {
        let message = tokio::select! {
            message = stream.message() => message?,
            () = end.cancelled() => return Err(Status::aborted("the server has ended this stream")),
        };
        let Some(message) = message else { return Ok(()) };
        let Some(Message::Gradient(gradient)) = message.message else {
            return Err(Status::invalid_argument("expected a gradient block; Open comes once, at the start"));
        };
        {
            let now = Instant::now();
            let mut members = shared.members();
            members.hear(&id, now)?;
            members.gave(id.index, gradient.step, now);
        }
        shared.metrics.gradient(gradient.payload.len());
        store.gradient(&peer, gradient).await?;
    }
}
