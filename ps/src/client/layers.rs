//! Layers that the trainers of a job with sparse tables train themselves, as copies of each other. Trainer 0 gives them
//! to the servers for their checkpoints, and trainers that start again get them from there.

use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures::future::try_join_all;
use tonic::Code;

use super::connecting::{Failure, is_not_kept, schedule, unreachable, wait_until_durable};
use super::error::{ClientError, is_retryable};
use super::tables::{AsyncTables, Shared};
use crate::layout::Layout;
use crate::proto::{self, GetLayersRequest, StoreLayersRequest};
use crate::retry::Retries;

/// How long a trainer that must stop tries to give its layers.
const AT_STOP: Duration = Duration::from_secs(5);

/// The layers of one moment. Their tensors are those of [`SessionConfig::tensors`](super::SessionConfig).
#[derive(Clone, Debug, PartialEq)]
pub struct Layers {
    /// Steps whose gradients they contain.
    pub steps: u64,
    /// Updates that the optimizer state has seen.
    pub updates: u64,
    /// The parameters in the order of the tensors, then each slot of the optimizer's state, as long as they are.
    pub state: Vec<f32>,
}

impl AsyncTables {
    /// Returns whether a checkpoint wants the layers of a trainer that has done `steps`.
    #[must_use]
    pub fn wants_layers(&self, steps: u64) -> bool {
        let wanted = self.shared.layers_wanted.load(Ordering::Relaxed);
        wanted > 0 && steps >= wanted
    }

    /// Gives the layers to the servers. Nothing happens where they keep no checkpoints.
    ///
    /// # Errors
    /// If a server stays away or refuses; [`ClientError::TablesLost`] if the servers have gone to a checkpoint since.
    ///
    /// # Panics
    /// If the state has another length than the tensors.
    pub async fn keep(&self, layers: &Layers) -> Result<(), ClientError> {
        if self.shared.epoch == 0 {
            return Ok(());
        }
        self.shared.layers_wanted.store(0, Ordering::Relaxed);
        self.shared.keep(layers).await
    }

    /// As [`AsyncTables::keep`], by a trainer that must stop, for a short time only: the servers write their
    /// last checkpoint soon.
    pub async fn keep_at_stop(&self, layers: &Layers) {
        if self.shared.epoch == 0 {
            return;
        }
        let shared = self.shared.uninterrupted();
        let kept = tokio::time::timeout(AT_STOP, shared.keep(layers)).await;
        if !matches!(kept, Ok(Ok(()))) {
            tracing::warn!(step = layers.steps, "the servers did not take the layers of the last step");
        }
    }

    /// The layers as they were kept last; `None` if they never were. If the servers have gone to a checkpoint since this
    /// trainer opened the tables, it opens them again first. [`AsyncTables::next_step`] is not before the layers
    /// afterwards, where trainers keep in step: a process before this one may have given the step of a round that was
    /// still open when this one joined.
    ///
    /// # Errors
    /// If a server stays away or refuses.
    pub async fn kept(&mut self) -> Result<Option<Layers>, ClientError> {
        if self.shared.epoch == 0 {
            return Ok(None);
        }
        loop {
            let epoch = self.shared.epoch;
            let kept = match self.shared.kept().await {
                Err(ClientError::TablesLost { .. }) => {
                    self.reopen().await?;
                    continue;
                }
                kept => kept?,
            };
            if kept.as_ref().is_none_or(|layers| layers.steps <= self.next_step()) {
                return Ok(kept);
            }
            self.reopen().await?;
            if self.shared.epoch == epoch {
                return Ok(kept);
            }
        }
    }

    /// Waits until losing servers can no longer cost a step of this trainer, which has given its last one. False if the
    /// servers have gone to a checkpoint instead, and it may have to give steps again.
    ///
    /// # Errors
    /// If server 0 stays away.
    pub async fn conclude(&self) -> Result<bool, ClientError> {
        match self.shared.conclude().await {
            Err(ClientError::TablesLost { .. }) => Ok(false),
            concluded => concluded.map(|()| true),
        }
    }
}

impl Shared {
    async fn keep(&self, layers: &Layers) -> Result<(), ClientError> {
        let layout = self.layout()?;
        let elements = layout.elements();
        assert!(
            layers.state.len().is_multiple_of(elements) && !layers.state.is_empty(),
            "a state of {elements} parameters"
        );
        let kept = (0..layout.blocks()).map(|block| {
            let mut columns = layers.state.chunks_exact(elements).map(|column| {
                let values: &[u8] = bytemuck::cast_slice(&column[layout.range(block)]);
                Bytes::copy_from_slice(values)
            });
            let contents = proto::BlockContents {
                previous: Bytes::new(),
                block,
                version: layers.steps,
                updates: layers.updates,
                // The same for all, who keep in step: the server knows how many.
                next_steps: Vec::new(),
                values: columns.next().unwrap_or_default(),
                slots: columns.collect(),
            };
            let request =
                StoreLayersRequest { trainer: Some(self.config.id()), epoch: self.epoch, contents: Some(contents) };
            let shard = layout.owner(block) as usize;
            let kept = self.insist(shard, move |mut client| {
                let request = request.clone();
                async move { client.store_layers(request).await }
            });
            async move { kept.await.map(|reply| self.answered(shard, reply.leader_term)) }
        });
        try_join_all(kept).await.map(drop)
    }

    async fn kept(&self) -> Result<Option<Layers>, ClientError> {
        let layout = self.layout()?;
        let blocks = (0..layout.blocks()).map(|block| {
            let request = GetLayersRequest { trainer: Some(self.config.id()), block, epoch: self.epoch };
            self.insist(layout.owner(block) as usize, move |mut client| {
                let request = request.clone();
                async move { client.get_layers(request).await }
            })
        });
        let blocks = try_join_all(blocks).await?;
        let (Some(first), Some(slots)) = (blocks.first(), blocks.iter().map(|block| block.slots.len()).min()) else {
            return Ok(None);
        };
        // One that is being kept right now is not all of one step.
        let (steps, updates) = (first.version, first.updates);
        if blocks.iter().any(|block| block.values.is_empty() || block.version != steps) {
            return Ok(None);
        }
        let mut state = vec![0.0; layout.elements() * (1 + slots)];
        for (place, column) in state.chunks_exact_mut(layout.elements()).enumerate() {
            for (block, contents) in (0..).zip(&blocks) {
                let bytes = if place == 0 { &contents.values } else { &contents.slots[place - 1] };
                let into: &mut [u8] = bytemuck::cast_slice_mut(&mut column[layout.range(block)]);
                if bytes.len() != into.len() {
                    return Err(self.refused(layout.owner(block) as usize, "it sent layers of another length"));
                }
                into.copy_from_slice(bytes);
            }
        }
        Ok(Some(Layers { steps, updates, state }))
    }

    async fn conclude(&self) -> Result<(), ClientError> {
        let address = &self.config.servers[0];
        // The answer itself has no deadline: it comes with the next checkpoint.
        let limit = self.config.waiting_time_at_end(self.epoch);
        let schedule = schedule(&self.config, 0).failing_for(limit);
        let mut retries = Retries::new(schedule);
        loop {
            let asked = tokio::select! {
                biased;
                asked = wait_until_durable(&self.config, self.epoch, self.given_steps()) => asked,
                error = self.no_answer(limit) => return Err(error),
            };
            let status = match asked {
                Ok(()) => break,
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Status(status)) => status,
            };
            if status.code() == Code::Aborted {
                return Err(ClientError::TablesLost { address: address.clone() });
            }
            if !is_retryable(&status) {
                return Err(ClientError::refused(address, &status));
            }
            tracing::debug!(reason = status.message(), "the last step is not kept yet");
            // Server 0 is there, and will keep the step when it can: who starts the trainer again cannot help.
            if self.config.supervised && is_not_kept(&status) {
                retries = Retries::new(schedule);
            }
            if !retries.pause().await {
                return Err(unreachable(&self.config, 0, limit, status.message()));
            }
        }
        self.config.concluded.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn layout(&self) -> Result<Layout, ClientError> {
        Ok(Layout::new(&self.config.tensors, self.config.servers.len())?)
    }
}
