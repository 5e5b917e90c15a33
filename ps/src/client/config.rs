//! The settings of a session: the job, the model, and the way to its servers.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use psjobs_api::Environment;
use psjobs_api::training::Compression;

use super::lane::{connections, cores};
use super::last_heard::LastHeard;
use super::voting::Voting;
use crate::layout::TensorSpec;
use crate::network::Network;
use crate::parameter_group::{in_groups, warn_of_empty};
use crate::proto;
use crate::retry::WITHOUT_LIMIT;

/// The settings of a trainer's session.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// The job; servers of another one refuse this trainer.
    pub job_uid: String,
    /// Index among the trainers.
    pub trainer: u32,
    /// How often this trainer was replaced.
    pub incarnation: u32,
    /// `host:port` of every server, in order.
    pub servers: Vec<String>,
    /// The model's parameters, in the order of the flat space.
    pub tensors: Vec<TensorSpec>,
    /// Steps that this trainer is going to do; in an elastic job the batches that all trainers are going to read.
    /// [`SessionConfig::UNKNOWN_STEPS`] until [`AsyncSession::set_total_steps`](super::AsyncSession::set_total_steps).
    pub total_steps: u64,
    /// Steps that this trainer makes alone for one exchange; 0 if it exchanges in every step.
    pub local_steps: u32,
    /// This trainer computes each gradient while the exchange of the one before is under way.
    pub overlap: bool,
    /// The job is elastic: trainers come and go, and are assigned what they read.
    pub elastic: bool,
    /// How long to wait for a server that does not answer, at the start and after it was lost.
    pub connect_timeout: Duration,
    /// Somebody starts the processes of this job again. A wrong server at an address is then waited for like an absent
    /// one: it has got the address of a server that is being replaced.
    pub supervised: bool,
    /// Connections to each server, over which its blocks are dealt, at most 16: more than one where one core for a
    /// connection is the limit. Shared memory needs but one.
    pub connections: u32,
    /// Exchange blocks through shared memory with servers of this host that offer it.
    pub shared_memory: bool,
    /// Servers that hold each block: server k's are also held by server k+1 if it is 2.
    pub replication_factor: u32,
    /// How gradients are coded where they travel.
    pub compression: Compression,
    /// The network that the servers are reached through.
    pub network: Network,
    /// Set, from a signal handler for instance, to give up whatever is being waited for.
    pub interrupt: Arc<AtomicBool>,
    /// The votes of this process on who leads the blocks that two servers hold, and the leaders that it has followed. Its
    /// [`Member`](super::Member) and its [`Tables`](super::Tables) share that: both are made from clones of one configuration.
    pub voting: Voting,
    /// When servers have answered this process last, shared like `voting`.
    pub last_heard: LastHeard,
    /// Losing servers can no longer cost a step of this process, which has given its last one; shared like `voting`.
    pub concluded: Arc<AtomicBool>,
    /// The trainers that have finished, as servers without checkpoints and replication say; shared like `voting`. A server that
    /// is started anew learns them from this process.
    pub finished_trainers: Arc<Mutex<BTreeSet<u32>>>,
}

impl SessionConfig {
    /// Steps of a trainer that does not know yet how many it is going to do.
    pub const UNKNOWN_STEPS: u64 = u64::MAX;

    /// The configuration of a trainer in `environment`.
    #[must_use]
    pub fn new(environment: &Environment, tensors: Vec<TensorSpec>, total_steps: u64) -> Self {
        let training = &environment.training;
        warn_of_empty(&training.optimizer.groups, &tensors);
        // With local steps the groups are the trainers' own: servers treat all differences alike.
        let groups = if training.local.is_some() { &[][..] } else { &training.optimizer.groups };
        Self {
            job_uid: environment.uid.clone(),
            trainer: environment.index,
            incarnation: environment.incarnation,
            servers: environment.servers.clone(),
            tensors: in_groups(tensors, groups),
            total_steps,
            local_steps: training.local_steps(),
            overlap: training.local.is_none() && training.consistency.overlaps_exchanges(),
            elastic: environment.min_trainers.is_some(),
            connect_timeout: Self::waiting_time(environment.supervised),
            supervised: environment.supervised,
            connections: connections(environment.connections, environment.tls_folder.is_some(), cores()),
            shared_memory: true,
            replication_factor: environment.replication_factor,
            compression: training.compression.clone(),
            network: Network::default(),
            interrupt: Arc::default(),
            voting: Voting::default(),
            last_heard: LastHeard::default(),
            concluded: Arc::default(),
            finished_trainers: Arc::default(),
        }
    }

    /// How long a trainer waits for a server unless it is configured otherwise: without limit where somebody starts servers
    /// again (`supervised`), 2 minutes where a person has to notice that one is away.
    #[must_use]
    pub const fn waiting_time(supervised: bool) -> Duration {
        if supervised { WITHOUT_LIMIT } else { Duration::from_secs(120) }
    }

    /// How long a trainer waits for a server in `epoch` once a checkpoint may have its last step. The servers may have missed it
    /// and counted it as finished, and have ended: a trainer that somebody starts again then ends as one without a server, and
    /// whoever starts it knows whether it is still needed. Without checkpoints, epoch 0, servers wait for each trainer's last
    /// message, and one that is started anew gets its parameters from trainers, which therefore wait for it. Elastic jobs start
    /// no trainer again when others have finished: the batches of one that gives up would be lost.
    pub(crate) fn waiting_time_at_end(&self, epoch: u64) -> Duration {
        let may_be_done = self.supervised && epoch > 0 && !self.elastic;
        if may_be_done { self.connect_timeout.min(Self::waiting_time(false)) } else { self.connect_timeout }
    }

    /// Steps that this trainer has given when it has given all; 0 in an elastic job, where others give some of them.
    pub(crate) fn given_steps(&self) -> u64 {
        if self.elastic || self.total_steps == Self::UNKNOWN_STEPS { 0 } else { self.total_steps }
    }

    /// The servers that may lead the blocks of server `shard`.
    pub(crate) fn holders(&self, shard: u32) -> Vec<u32> {
        holders(shard, self.servers.len() as u32, self.replication_factor)
    }

    pub(crate) fn interrupted(&self) -> bool {
        self.interrupt.load(Ordering::Relaxed)
    }

    pub(crate) fn id(&self) -> proto::TrainerId {
        proto::TrainerId { job_uid: self.job_uid.clone(), index: self.trainer, incarnation: self.incarnation }
    }
}

/// Returns those of `servers` servers that may lead the blocks of server `shard`, if `copies` hold each block.
pub(super) fn holders(shard: u32, servers: u32, copies: u32) -> Vec<u32> {
    (0..copies.clamp(1, servers.max(1))).map(|copy| (shard + copy) % servers).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trainer_waits_without_limit_where_somebody_starts_servers_again() {
        for (supervised, want) in [(true, WITHOUT_LIMIT), (false, Duration::from_secs(120))] {
            assert_eq!(SessionConfig::waiting_time(supervised), want, "supervised: {supervised}");
        }
    }
}
