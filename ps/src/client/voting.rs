//! Votes of a trainer on who leads the blocks that two servers hold. Its heartbeats hear of candidates, and those who ask
//! servers for blocks; [`super::ballots`] decides.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tonic::transport::Channel;

use super::ballots::{Answer, Ballots, Leader, is_wanted};
use super::config::SessionConfig;
use crate::proto::coordination_client::CoordinationClient;
use crate::proto::{self, ShardHolder};

/// How old an answer may be by which a server still leads.
const FRESH: Duration = Duration::from_secs(3);
/// How long a candidate may take to answer a vote, which it holds back for a second.
const ANSWER: Duration = Duration::from_secs(3);

/// The votes of a trainer. Clones share them.
#[derive(Clone, Default)]
pub struct Voting {
    elections: Arc<Mutex<Elections>>,
}

/// The votes, and what is known of those that they are for.
#[derive(Default)]
struct Elections {
    ballots: Ballots,
    /// By server and shard: its last words, and when they came.
    holders: BTreeMap<(u32, u32), (Instant, ShardHolder)>,
}

impl Voting {
    /// Records what `server` says of its part in a shard. Votes for it over `channel` if it is a candidate, and no other
    /// holder that answers leads.
    pub async fn hear(&self, config: &SessionConfig, channel: &Channel, server: u32, holder: ShardHolder) {
        let is_voted_on = {
            let Elections { ballots, holders } = &mut *self.elections.lock();
            ballots.hear(server, &holder);
            let mut others = config.holders(holder.shard).into_iter().filter(|other| *other != server);
            let other = others.find_map(|other| holders.get(&(other, holder.shard)));
            let other = other.filter(|(at, _)| at.elapsed() < FRESH).map(|(_, other)| other);
            let is_voted_on = holder.candidate && is_wanted(&holder, other);
            holders.insert((server, holder.shard), (Instant::now(), holder.clone()));
            is_voted_on
        };
        if is_voted_on {
            self.vote(config, channel.clone(), server, &holder).await;
        }
    }

    /// Records that `server` does not answer.
    pub fn lose(&self, server: u32) {
        self.elections.lock().holders.retain(|(of, _), _| *of != server);
    }

    /// Records what `server` says of its part in a shard, and votes on it over `channel` if it is a candidate; returns
    /// whether it was elected.
    pub async fn consider(&self, config: &SessionConfig, channel: Channel, server: u32, holder: &ShardHolder) -> bool {
        self.elections.lock().ballots.hear(server, holder);
        holder.candidate && self.vote(config, channel, server, holder).await
    }

    /// Votes on `candidate`, a process of `server`; returns whether it was elected.
    async fn vote(&self, config: &SessionConfig, channel: Channel, server: u32, candidate: &ShardHolder) -> bool {
        let (granted, outdated) = match self.elections.lock().ballots.consider(server, candidate) {
            Answer::Grant => (true, false),
            Answer::Refuse { outdated } => (false, outdated),
        };
        let (trainer, shard, term) = (Some(config.id()), candidate.shard, candidate.term);
        tracing::debug!(server, shard, term, granted, outdated, "votes");
        let request = proto::VoteRequest { trainer, shard, term, granted, outdated };
        let mut client = CoordinationClient::new(channel);
        match tokio::time::timeout(ANSWER, client.vote(request)).await {
            Ok(Ok(reply)) => reply.into_inner().elected,
            Ok(Err(_)) | Err(_) => false,
        }
    }

    /// Records that `leader` gives this trainer the blocks of its shard in `epoch`.
    pub fn follow(&self, leader: Option<&ShardHolder>, epoch: u64) {
        if let Some(leader) = leader {
            self.elections.lock().ballots.follow(leader, epoch);
        }
    }

    /// Returns the newest leader of `shard` that has given this trainer its blocks.
    #[must_use]
    pub fn followed(&self, shard: u32) -> Leader {
        self.elections.lock().ballots.followed(shard)
    }
}
