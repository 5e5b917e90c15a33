//! Reads a job's parameters without taking part in it, for a process that measures the model while it trains.

use std::time::Duration;

use psjobs_api::Environment;
use tonic::Status;

use super::config::holders;
use super::connecting::{Failure, connect};
use super::link::{PULL, once};
use crate::layout::Layout;
use crate::network::Network;
use crate::proto;
use crate::wire::{Buffers, call, codec_number, frame};

/// One server's blocks take no longer.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Where a job's parameters are read.
#[derive(Debug)]
pub struct Reading {
    job_uid: String,
    servers: Vec<String>,
    copies: u32,
}

impl Reading {
    /// Creates the reader of the job in `environment`.
    pub fn new(environment: &Environment) -> Self {
        Self {
            job_uid: environment.uid.clone(),
            servers: environment.servers.clone(),
            copies: environment.replication_factor,
        }
    }

    /// Fills `values` with all parameters, each block as it is when its turn comes: training goes on meanwhile, so
    /// blocks may be some updates apart, as those are that a trainer pulls. How many updates the blocks have had in
    /// all.
    ///
    /// # Errors
    /// If a server cannot be reached, or a block has no values yet; then some of `values` are new and some old.
    pub async fn read(&self, network: &Network, layout: &Layout, values: &mut [f32]) -> Result<u64, Status> {
        let mut updates = 0;
        for shard in 0..self.servers.len() as u32 {
            let expected = layout.owned_by(shard).count();
            let mut outcome = Ok((0, 0));
            for holder in holders(shard, self.servers.len() as u32, self.copies) {
                let reading = self.read_shard(network, holder, shard, layout, values);
                let late = |_| Err(Status::deadline_exceeded(format!("server {holder} did not answer in time")));
                outcome = tokio::time::timeout(TIMEOUT, reading).await.unwrap_or_else(late);
                if outcome.is_ok() {
                    break;
                }
            }
            let (found, versions) = outcome?;
            if found != expected {
                return Err(Status::data_loss(format!("server {shard} gave {found} of its {expected} blocks")));
            }
            updates += versions;
        }
        Ok(updates)
    }

    /// The blocks of `shard`, from `holder`; how many came, and their versions together.
    async fn read_shard(
        &self,
        network: &Network,
        holder: u32,
        shard: u32,
        layout: &Layout,
        values: &mut [f32],
    ) -> Result<(usize, u64), Status> {
        if layout.owned_by(shard).next().is_none() {
            return Ok((0, 0));
        }
        let channel = connect(network, &self.servers[holder as usize]).await.map_err(|failure| match failure {
            Failure::Status(status) => status,
            Failure::Final(error) => Status::invalid_argument(error.to_string()),
        })?;
        let request =
            proto::PullRequest { shard: Some(shard), job_uid: self.job_uid.clone(), ..proto::PullRequest::default() };
        let mut stream = call(channel, PULL, once(frame::message(&request)), &Buffers::default()).await?;
        let (mut found, mut versions) = (0, 0);
        while let Some(block) = stream.message::<proto::ParameterBlock>().await? {
            let range = layout.range(block.block);
            let codec = codec_number::from_number(block.codec).filter(|_| layout.owner(block.block) == shard);
            codec
                .and_then(|codec| codec.decode(&block.payload, &mut values[range]).ok())
                .ok_or_else(|| Status::data_loss(format!("server {holder} sent no block {}", block.block)))?;
            found += 1;
            versions += block.version;
        }
        Ok((found, versions))
    }
}
