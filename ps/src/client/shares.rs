//! Asks server 0 how many examples of a step a trainer reads, in a job where that follows its speed.

use std::time::Duration;

use tonic::transport::Channel;

use super::config::SessionConfig;
use super::error::{ClientError, is_retryable};
use crate::batch::sharing::{Share, Work};
use crate::proto::coordination_client::CoordinationClient;
use crate::proto::{self, TrainerId};

/// How long server 0 may take to send a trainer its share of the examples.
const ANSWER: Duration = Duration::from_secs(2);

/// A trainer's way to its shares, by the connection that it has to server 0 now.
pub(super) struct Shares {
    server: Option<CoordinationClient<Channel>>,
    address: String,
    trainer: TrainerId,
}

impl Shares {
    /// Creates the way over `server`, server 0, if the trainer is connected to it.
    pub fn new(server: Option<CoordinationClient<Channel>>, config: &SessionConfig) -> Self {
        Self { server, address: config.servers[0].clone(), trainer: config.id() }
    }

    /// Returns the share of the examples of `step` and some that follow; see
    /// [`AsyncSession::share_batch`](super::AsyncSession::share_batch).
    pub async fn ask(&self, step: u64, base: u32, work: Work) -> Result<Option<Share>, ClientError> {
        let Some(mut client) = self.server.clone() else { return Ok(None) };
        let (trainer, busy_seconds) = (Some(self.trainer.clone()), work.busy.as_secs_f64());
        let request = proto::GetBatchShareRequest { trainer, step, base, examples: work.examples, busy_seconds };
        match tokio::time::timeout(ANSWER, client.get_batch_share(request)).await {
            Ok(Ok(reply)) => {
                let proto::GetBatchShareReply { until_step, offset, examples } = reply.into_inner();
                // A share that does not hold for the step would be asked for again and again.
                Ok((until_step > step).then_some(Share { until: until_step, offset, examples }))
            }
            Ok(Err(status)) if !is_retryable(&status) => Err(ClientError::refused(&self.address, &status)),
            Ok(Err(_)) | Err(_) => Ok(None),
        }
    }
}
