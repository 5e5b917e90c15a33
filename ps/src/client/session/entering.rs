//! How a trainer comes to its servers, and comes back to one that was lost.

use tonic::Status;

use super::{AsyncSession, Settled};
use crate::client::connecting::schedule;
use crate::client::error::{ClientError, is_retryable};
use crate::client::exchange::{Opened, Purpose};
use crate::client::first_step::FirstStep;
use crate::client::link::{Link, Opening};
use crate::client::momentum::Momentum;
use crate::retry::Retries;

impl AsyncSession {
    /// Joins all servers, which must agree on what they hold, and pulls it.
    pub(super) async fn enter(&mut self) -> Result<(), ClientError> {
        let (mut epoch, mut has_asked_again) = (0, false);
        let all_steps = self.last.unwrap_or(self.config.total_steps);
        // It computed with the parameters of before.
        self.exchange.take();
        loop {
            self.links.clear();
            for server in 0..self.config.servers.len() as u32 {
                let link = self.open(server, epoch, None).await?;
                if link.next_step != u64::MAX && link.next_step >= all_steps && !self.config.elastic {
                    self.config.connect_timeout = self.config.waiting_time_at_end(link.epoch);
                }
                self.links.push(link);
            }
            let newest = self.links.iter().map(|link| link.epoch).max().unwrap_or(0);
            // The others are about to go to the same checkpoint.
            epoch = newest;
            let momentum = self.links.first().and_then(|link| link.trainer_momentum);
            self.momentum = momentum.map(|settings| Momentum::new(settings, &self.config.tensors, &self.layout));
            if self.links.iter().any(|link| link.epoch < newest) {
                continue;
            }
            if self.config.elastic {
                match self.take_place().await? {
                    Settled::Done => {
                        self.entries += 1;
                        return Ok(());
                    }
                    Settled::Rewound => continue,
                }
            }
            // Every server has at least one block of most models; one that has none says u64::MAX.
            let steps = self.links.iter().map(|link| link.next_step).filter(|step| *step != u64::MAX);
            let first = FirstStep::of(&steps.collect::<Vec<_>>(), epoch);
            // A process before this one may have given steps while this one joined. All servers refuse it now.
            if first.is_forgotten && !std::mem::replace(&mut has_asked_again, true) {
                continue;
            }
            self.next_step = first.step;
            if first.step < all_steps {
                self.config.connect_timeout = self.connect_timeout;
            }
            if let Settled::Rewound = self.pull().await? {
                continue;
            }
            if self.entries == 0 {
                self.say_what_is_shared();
            }
            // A process before this one gave the last step, and may have died before it was kept.
            if self.next_step < self.config.total_steps || matches!(self.conclude().await?, Settled::Done) {
                self.entries += 1;
                return Ok(());
            }
        }
    }

    /// Logs which servers are on this trainer's host or in its pod: what goes to them takes no network.
    fn say_what_is_shared(&self) {
        let shared = (0_u32..).zip(&self.links).filter(|(_, link)| link.shares_memory()).map(|(server, _)| server);
        let shared = shared.collect::<Vec<_>>();
        if !shared.is_empty() {
            tracing::info!(servers = ?shared, "shares memory with its servers");
        }
    }

    /// Opens the streams to a server, or only one of so many.
    async fn open(&mut self, server: u32, epoch: u64, only: Option<(u32, u32)>) -> Result<Link, ClientError> {
        self.generation += 1;
        let opening = Opening {
            config: &self.config,
            layout: &self.layout,
            server,
            generation: self.generation,
            only,
            epoch,
            memory: &self.memory,
            initial: &self.initial,
            buffers: &self.buffers,
            landed: &self.landed,
            events: &self.sender,
        };
        let link = Link::open(&opening).await?;
        // Where a server passes gradients on to another one, they travel in any case.
        let travels = !link.shares_memory() || self.config.replication_factor > 1;
        let window = if travels { link.window } else { usize::MAX };
        let opened = Opened { width: link.width, lanes: link.lanes().collect(), generation: self.generation, window };
        self.exchange.opened(server, &opened);
        if only.is_none_or(|(lane, _)| lane == 0) {
            self.attendance.attend(&self.config, link.host, link.channel());
        }
        // Another holder of the blocks leads nothing now, and may again: it has to know of this trainer, too.
        for holder in self.config.holders(server).into_iter().filter(|holder| *holder != link.host) {
            self.attendance.attend_lazily(&self.config, holder);
        }
        Ok(link)
    }

    /// Opens a stream again that broke with `status`; all of the server if its blocks are led elsewhere now. Those that
    /// were opened have the newest generation.
    pub(super) async fn reopen(&mut self, server: u32, lane: u32, status: &Status) -> Result<Settled, ClientError> {
        let address = self.config.servers[server as usize].clone();
        if !is_retryable(status) {
            return Err(ClientError::refused(&address, status));
        }
        tracing::warn!(%address, lane, reason = status.message(), "lost server {server}; connecting again");
        let link = &self.links[server as usize];
        let &Link { epoch, host, width, .. } = link;
        // Its late answers do not count, and the block that it was within is sent again.
        link.lane(lane).withdraw();
        let only = (width > 1).then_some((lane, width));
        let mut link = self.open(server, epoch, only).await?;
        let elsewhere = link.host != host;
        if only.is_some() && elsewhere {
            self.links[server as usize].withdraw();
            link = self.open(server, epoch, None).await?;
        }
        tracing::info!(%address, lane, "server {server} is back");
        if link.epoch > epoch {
            return Ok(Settled::Rewound);
        }
        let (purpose, step) = self.exchange.subject();
        let is_training = purpose == Purpose::Step && !self.config.elastic && !self.exchange.is_settled();
        if is_training && link.epoch == 0 && link.next_step < self.exchange.may_lack(server) {
            tracing::info!(%address, step, "server {server} was started anew; it gets the whole step again");
            self.exchange.forgotten(server);
        }
        if only.is_some() && !elsewhere {
            self.links[server as usize].mend(link);
        } else {
            self.links[server as usize] = link;
        }
        Ok(Settled::Done)
    }

    async fn pull(&mut self) -> Result<Settled, ClientError> {
        let step = self.next_step;
        for server in 0..self.links.len() as u32 {
            let mut retries = Retries::new(schedule(&self.config, server));
            while let Err(status) = self.pull_from(server, step).await? {
                if let Settled::Rewound = self.reopen(server, 0, &status).await? {
                    return Ok(Settled::Rewound);
                }
                retries.pause().await;
            }
        }
        Ok(Settled::Done)
    }

    /// Pulls the blocks of a server, each into its place when it comes, so that few are in memory twice. If the stream breaks, some
    /// are in place: all are pulled again.
    async fn pull_from(&mut self, server: u32, step: u64) -> Result<Result<(), Status>, ClientError> {
        let pulling = self.links[server as usize].pull(&self.config, server, step, &self.buffers).await;
        let mut blocks = match pulling {
            Ok(blocks) => blocks,
            Err(status) => return Ok(Err(status)),
        };
        loop {
            match blocks.message().await {
                Ok(Some(block)) => self.take(&block)?,
                Ok(None) => return Ok(Ok(())),
                Err(status) => return Ok(Err(status)),
            }
        }
    }
}
