//! Votes of a trainer on who leads the blocks and rows that two servers hold. Its heartbeats hear of candidates, and those
//! who ask servers for blocks; [`super::ballots`] decides.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tonic::transport::Channel;

use super::ballots::{Answer, Ballots, Leader, is_wanted};
use crate::proto::coordination_client::CoordinationClient;
use crate::proto::{self, ShardHolder, TrainerId};

/// How old an answer may be by which a server still leads.
const FRESH: Duration = Duration::from_secs(3);
/// How long a candidate may take to answer a vote, which it holds back for a second.
const ANSWER: Duration = Duration::from_secs(3);

/// The votes of a trainer, and the leaders that it has followed. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Voting {
    elections: Arc<Mutex<Elections>>,
}

/// The votes, and what is known of those that they are for.
#[derive(Debug, Default)]
struct Elections {
    ballots: Ballots,
    /// By server and shard: its last words, and when they came.
    holders: BTreeMap<(u32, u32), (Instant, ShardHolder)>,
}

impl Voting {
    /// Records what `server` says of its part in a shard, which `other` holds, too. `voter` votes on it over `channel` if it
    /// is a candidate, and the other one does not answer as the leader, or the candidate may never lead with its copy: others may
    /// not know that.
    pub(super) async fn hear(
        &self,
        voter: TrainerId,
        channel: &Channel,
        (server, other): (u32, u32),
        holder: ShardHolder,
    ) {
        let is_voted_on = {
            let Elections { ballots, holders } = &mut *self.elections.lock();
            ballots.hear(server, &holder);
            let other = holders.get(&(other, holder.shard));
            let other = other.filter(|(at, _)| at.elapsed() < FRESH).map(|(_, other)| other);
            let is_voted_on = holder.candidate && (is_wanted(&holder, other) || ballots.lacks_followed(&holder));
            holders.insert((server, holder.shard), (Instant::now(), holder.clone()));
            is_voted_on
        };
        if is_voted_on {
            self.vote(voter, channel.clone(), server, &holder).await;
        }
    }

    /// Records that `server` does not answer.
    pub(super) fn lose(&self, server: u32) {
        self.elections.lock().holders.retain(|(of, _), _| *of != server);
    }

    /// Records what `server` says of its part in a shard, and votes on it over `channel` if it is a candidate; returns
    /// whether it was elected.
    pub(super) async fn consider(&self, voter: TrainerId, channel: Channel, server: u32, holder: &ShardHolder) -> bool {
        self.elections.lock().ballots.hear(server, holder);
        holder.candidate && self.vote(voter, channel, server, holder).await
    }

    /// Votes on `candidate`, a process of `server`; returns whether it was elected.
    async fn vote(&self, voter: TrainerId, channel: Channel, server: u32, candidate: &ShardHolder) -> bool {
        let (granted, outdated) = match self.elections.lock().ballots.consider(server, candidate) {
            Answer::Grant => (true, false),
            Answer::Refuse { outdated } => (false, outdated),
        };
        let &ShardHolder { shard, term, epoch, instance, .. } = candidate;
        tracing::debug!(server, shard, term, granted, outdated, "votes");
        let trainer = Some(voter);
        let request = proto::VoteRequest { trainer, shard, term, granted, outdated, epoch, instance };
        let mut client = CoordinationClient::new(channel);
        match tokio::time::timeout(ANSWER, client.vote(request)).await {
            Ok(Ok(reply)) => reply.into_inner().elected,
            Ok(Err(_)) | Err(_) => false,
        }
    }

    /// Records that `leader` has let this trainer in for `shard`.
    pub(super) fn follow(&self, shard: u32, leader: Leader) {
        self.elections.lock().ballots.follow(shard, leader);
    }

    /// Records that `leader` has answered a call for `shard`.
    pub(super) fn answered(&self, shard: u32, leader: Leader) {
        self.elections.lock().ballots.answered(shard, leader);
    }

    /// Returns the newest leader of `shard` that has given this trainer blocks or rows.
    pub(super) fn followed(&self, shard: u32) -> Leader {
        self.elections.lock().ballots.followed(shard)
    }
}
