//! A trainer's connection to one server: it joins, fills blocks that have no values, and opens the training streams,
//! one or several, each over a connection of its own.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use psjobs_api::env::MOST_CONNECTIONS;
use psjobs_arithmetic::codec::Codec;
use tokio::sync::mpsc;
use tonic::Status;
use tonic::transport::Channel;

use super::ballots::Leader;
use super::config::SessionConfig;
use super::connecting::{Failure, connect, enter, persist_any};
use super::error::ClientError;
use super::lane::{self, Event, Lane, Name};
use crate::layout::Layout;
use crate::proto;
use crate::proto::coordination_client::CoordinationClient;
use crate::shm::{self, Mapping};
use crate::wire::{self, Buffers, Outgoing, Reader, call, codec_number, frame};

/// The open training streams to one server.
pub struct Link {
    pub next_step: u64,
    /// Counts the times that the servers went back to a checkpoint; 0 where they keep none.
    pub epoch: u64,
    /// The leader whose updates the blocks had when this trainer joined, as in [`Leader`].
    leader_term: u64,
    /// The token of memory that this server has mapped, in which payloads stay; 0 for none.
    shared_memory_token: u64,
    /// Blocks that may be on their way, where payloads travel.
    pub window: usize,
    /// The server at the other end: the one that is named, or the one that holds its blocks too.
    pub host: u32,
    /// Streams over which the blocks are dealt.
    pub width: u32,
    /// The part of the optimizer that this trainer carries out, if any.
    pub trainer_momentum: Option<proto::TrainerMomentum>,
    /// By number; all of them, but of a link that is to mend another one.
    lanes: BTreeMap<u32, Lane>,
}

/// The settings that a link is opened with.
pub struct Opening<'a> {
    pub config: &'a SessionConfig,
    pub layout: &'a Layout,
    pub server: u32,
    pub generation: u64,
    /// Only this stream, of so many: the others are well. Else as many as the trainer is to have.
    pub only: Option<(u32, u32)>,
    /// A server that is behind this epoch is about to follow: it is waited for.
    pub epoch: u64,
    /// Its parameters become the values of blocks that have none, of a server that was started anew.
    pub memory: &'a Mapping,
    /// Their values where all servers have gone back to the beginning.
    pub initial: &'a [f32],
    pub buffers: &'a Buffers,
    /// The mapping through which streams write parameters.
    pub landed: &'a Arc<Mapping>,
    pub events: &'a mpsc::UnboundedSender<Event>,
}

/// Methods whose messages are written by hand.
pub(super) const PULL: &str = "/psjobs.v1.ParameterServer/Pull";
const INITIALIZE_BLOCKS: &str = "/psjobs.v1.ParameterServer/InitializeBlocks";

impl Link {
    /// Joins a server and opens streams, trying until `config.connect_timeout`.
    pub async fn open(opening: &Opening<'_>) -> Result<Self, ClientError> {
        let silent = |host| opening.config.last_heard.is_silent(host);
        persist_any(opening.config, opening.server, silent, |host| Self::attempt(opening, host)).await
    }

    async fn attempt(opening: &Opening<'_>, host: u32) -> Result<Self, Failure> {
        let &Opening { config, layout, server, only, epoch, memory, .. } = opening;
        let (channel, reply) = enter(config, host, Some(server)).await?;
        if reply.epoch < epoch {
            return Err(Status::unavailable("it has yet to go back to the checkpoint that the others hold").into());
        }
        if !reply.empty_blocks.is_empty() {
            fill(channel.clone(), opening, reply.epoch, &reply.empty_blocks).await?;
        }
        // One of several streams carries payloads, as the others do.
        let token = if only.is_none() { share(config, memory, &reply.shared_memory_socket) } else { 0 };
        let blocks = layout.owned_by(server).count();
        let (wanted, width) = match only {
            Some((lane, width)) => (lane..lane + 1, width),
            None => {
                // Shared memory needs no second connection, and no connection without blocks is opened.
                let most = if token != 0 { 1 } else { config.connections };
                let width = most.clamp(1, blocks.clamp(1, MOST_CONNECTIONS as usize) as u32);
                (0..width, width)
            }
        };
        let mut lanes = BTreeMap::new();
        for lane in wanted.clone() {
            let channel = if lane == wanted.start {
                channel.clone()
            } else {
                connect(&config.network, &config.servers[host as usize]).await?
            };
            let open = proto::Open {
                trainer: Some(config.id()),
                shared_memory_token: token,
                epoch: reply.epoch,
                shard: Some(server),
                lane,
                lanes: width,
                leader_term: reply.leader_term,
            };
            let name = Name { server, lane, generation: opening.generation };
            // The whole step fits, so that the training thread never waits to hand over a block.
            let memory = lane::Memory { queue: blocks + 1, buffers: opening.buffers, parameters: opening.landed };
            lanes.insert(lane, Lane::open(name, channel, open, memory, opening.events).await?);
        }
        let window = (reply.window as usize).clamp(1, wire::WINDOW);
        let proto::JoinReply { next_step, epoch, trainer_momentum, leader_term, .. } = reply;
        config.voting.follow(server, Leader { term: leader_term, epoch });
        Ok(Self {
            next_step,
            epoch,
            leader_term,
            shared_memory_token: token,
            window,
            host,
            width,
            trainer_momentum,
            lanes,
        })
    }

    /// Returns whether payloads stay in memory that this server has mapped.
    pub fn shares_memory(&self) -> bool {
        self.shared_memory_token != 0
    }

    /// Takes the place of the streams that `mended` has anew.
    pub fn mend(&mut self, mended: Self) {
        let Self { next_step, leader_term, window, lanes, .. } = mended;
        (self.next_step, self.leader_term, self.window) = (next_step, leader_term, window);
        self.lanes.extend(lanes);
    }

    /// Returns the numbers of the open streams.
    pub fn lanes(&self) -> impl Iterator<Item = u32> {
        self.lanes.keys().copied()
    }

    /// Returns a stream.
    pub fn lane(&self, lane: u32) -> &Lane {
        &self.lanes[&lane]
    }

    /// Lets no answer of its streams land any more.
    pub fn withdraw(&self) {
        self.lanes.values().for_each(Lane::withdraw);
    }

    /// The connection of the first stream.
    pub fn channel(&self) -> Channel {
        self.lanes.values().next().expect("a link has a stream").channel.clone()
    }

    /// Waits until losing servers can no longer cost a step of this trainer, which has given its last one.
    pub async fn conclude(&self, config: &SessionConfig) -> Result<(), Status> {
        let (trainer, steps) = (Some(config.id()), config.given_steps());
        let request = proto::WaitUntilDurableRequest { trainer, epoch: self.epoch, steps };
        CoordinationClient::new(self.channel()).wait_until_durable(request).await.map(drop)
    }

    /// Begins to read the values of the server's blocks, to compute `step` from.
    pub async fn pull(
        &self,
        config: &SessionConfig,
        server: u32,
        step: u64,
        buffers: &Buffers,
    ) -> Result<Reader, Status> {
        let request = proto::PullRequest {
            trainer: Some(config.id()),
            shard: Some(server),
            step: Some(step),
            epoch: Some(self.epoch),
            leader_term: self.leader_term,
            shared_memory_token: self.shared_memory_token,
            ..Default::default()
        };
        call(self.channel(), PULL, once(frame::message(&request)), buffers).await
    }
}

/// A request of one message.
pub(super) fn once(message: Bytes) -> Outgoing {
    let (sender, receiver) = mpsc::channel(1);
    drop(sender.try_send(Ok(message)));
    Outgoing::request(receiver)
}

/// Hands the memory to a server that offers to share it and is within reach; the token, 0 for none.
fn share(config: &SessionConfig, memory: &Mapping, socket: &str) -> u64 {
    if !config.shared_memory || socket.is_empty() {
        return 0;
    }
    shm::accept(socket, memory).unwrap_or_else(|error| {
        tracing::debug!(%error, "no shared memory with this server; using TCP");
        0
    })
}

/// Gives values to blocks that have none, in `epoch`. Several trainers may do so at once: the first one's stay.
async fn fill(channel: Channel, opening: &Opening<'_>, epoch: u64, blocks: &[u32]) -> Result<(), Status> {
    let &Opening { config, layout, memory, initial, buffers, .. } = opening;
    let values = if epoch > 0 && !initial.is_empty() { initial } else { memory.parameters() };
    let (sender, receiver) = mpsc::channel(1);
    let send = async {
        let first = proto::InitializeBlocksRequest { trainer: Some(config.id()), ..Default::default() };
        drop(sender.send(Ok(frame::message(&first))).await);
        for block in blocks {
            let payload = bytemuck::cast_slice(&values[layout.range(*block)]);
            let push = proto::InitializeBlocksRequest {
                trainer: None,
                block: *block,
                codec: codec_number::number(Codec::F32),
                payload: Bytes::copy_from_slice(payload),
            };
            if sender.send(Ok(frame::message(&push))).await.is_err() {
                break; // The call has ended; its status says why.
            }
        }
        drop(sender);
        Ok::<_, Status>(())
    };
    let take = async { call(channel, INITIALIZE_BLOCKS, Outgoing::request(receiver), buffers).await?.message().await };
    let ((), reply) = tokio::try_join!(send, take)?;
    let taken = reply.map_or(0, |reply: proto::InitializeBlocksReply| reply.initialized);
    tracing::debug!(blocks = blocks.len(), taken, "gave values to empty blocks");
    Ok(())
}
