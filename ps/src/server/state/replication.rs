//! The state of this server's replication: its role in each shard that it holds, and the stream to the other holder.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::replica_role::Role;
use crate::block::ReplicaRole;
use crate::network::Network;
use crate::server::config::ServerConfig;

/// The replication state of this server.
pub struct Replication {
    /// Drawn at random by this process.
    pub(in crate::server) instance: u64,
    pub(in crate::server) index: u32,
    pub(in crate::server) servers: Vec<String>,
    pub(in crate::server) network: Network,
    shards: Mutex<BTreeMap<u32, Shard>>,
    /// Notified at every change of a shard.
    changed: Notify,
}

/// The state of one shard on this server.
#[derive(Clone)]
pub(in crate::server) struct Shard {
    pub(in crate::server) role: Role,
    /// True if the other server holds values of the shard; `None` while this process has not learned it.
    pub(in crate::server) found: Option<bool>,
    /// On a primary: the backup has every block.
    pub(in crate::server) whole: bool,
    /// The stream from the backup, or to the primary, if there is one.
    pub(in crate::server) stream: Option<CancellationToken>,
    /// The process that holds the other copy.
    pub(in crate::server) peer: Option<u64>,
}

impl Replication {
    /// Creates the state that `config` asks for, `None` if every block is held once.
    #[must_use]
    pub fn new(config: &ServerConfig) -> Option<Self> {
        if config.replicas.len() < 2 {
            return None;
        }
        let before = (config.index + config.servers - 1) % config.servers;
        let shard = Shard { role: Role::Starting, found: None, whole: false, stream: None, peer: None };
        Some(Self {
            instance: rand::random(),
            index: config.index,
            servers: config.replicas.clone(),
            network: config.network.clone(),
            shards: Mutex::new([config.index, before].map(|number| (number, shard.clone())).into()),
            changed: Notify::new(),
        })
    }

    /// Calls `start` with the initial role of the blocks of each shard. Roles do not change during the call.
    pub fn with_roles<R>(&self, start: impl FnOnce(BTreeMap<u32, ReplicaRole>) -> R) -> R {
        let shards = self.lock();
        start(shards.iter().map(|(number, shard)| (*number, replica_role(shard.role))).collect())
    }

    /// Checks that this server is the primary of `shard`, which trainers talk to.
    ///
    /// # Errors
    /// If another server is, or may be, the primary.
    pub fn leads(&self, shard: u32) -> Result<(), Status> {
        match self.lock().get(&shard).map(|shard| shard.role) {
            Some(Role::Primary { .. }) => Ok(()),
            Some(Role::Starting) => {
                let other = self.other(shard);
                Err(Status::unavailable(format!("it asks server {other} who leads the blocks of server {shard}")))
            }
            Some(Role::Backup { .. }) => {
                let other = self.other(shard);
                Err(Status::unavailable(format!("server {other} leads the blocks of server {shard}; ask it")))
            }
            None => Err(Status::invalid_argument(format!(
                "the blocks of server {shard} are not held here; servers {shard} and {} hold them",
                (shard as usize + 1) % self.servers.len()
            ))),
        }
    }

    /// Waits until the role in every shard is known; returns whether other servers hold all state of this one.
    pub async fn settled(&self) -> bool {
        loop {
            let changed = self.changed.notified();
            let known: Option<Vec<bool>> = self.lock().values().map(Shard::restores).collect();
            if let Some(known) = known {
                return known.into_iter().all(|there| there);
            }
            changed.await;
        }
    }

    /// Describes the shards that only one server holds. While the model is not known, there is nothing to hold.
    #[must_use]
    pub fn warnings(&self, model_is_known: bool) -> Vec<String> {
        let describe = |(number, shard): (&u32, &Shard)| {
            let other = self.other(*number);
            if !model_is_known && shard.restores().is_some() {
                return None;
            }
            match shard.role {
                Role::Primary { alone: true } => {
                    Some(format!("the blocks of server {number} are held once: server {other} has ended"))
                }
                Role::Primary { alone: false } if !shard.whole => {
                    Some(format!("the blocks of server {number} are held once: server {other} has yet to copy them"))
                }
                Role::Starting => {
                    Some(format!("the blocks of server {number} are held once: this server waits for server {other}"))
                }
                Role::Backup { complete: false } => {
                    Some(format!("the blocks of server {number} are held once: this server has yet to copy them"))
                }
                Role::Primary { .. } | Role::Backup { .. } => None,
            }
        };
        self.lock().iter().filter_map(describe).collect()
    }

    /// Ends the streams between servers; the backups follow again.
    pub fn restart(&self) {
        self.lock().values().filter_map(|shard| shard.stream.as_ref()).for_each(CancellationToken::cancel);
    }

    /// Returns the shards that this server holds, ascending.
    pub(in crate::server) fn shards(&self) -> Vec<u32> {
        self.lock().keys().copied().collect()
    }

    pub(in crate::server) fn role(&self, shard: u32) -> Role {
        self.lock().get(&shard).map_or(Role::Starting, |shard| shard.role)
    }

    /// Returns the other server that holds `shard`.
    pub(in crate::server) fn other(&self, shard: u32) -> u32 {
        if shard == self.index { (shard + 1) % self.servers.len() as u32 } else { shard }
    }

    pub(in crate::server) fn change(&self, shard: u32, change: impl FnOnce(&mut Shard)) {
        self.lock().entry(shard).and_modify(change);
        self.changed.notify_waiters();
    }

    /// Records that process `instance` holds the other copy of `shard`. An earlier process has ended, so its stream is
    /// closed even if the connection is still open.
    pub(in crate::server) fn meet(&self, shard: u32, instance: u64) {
        self.change(shard, |shard| {
            if shard.peer.replace(instance).is_some_and(|before| before != instance)
                && let Some(stream) = &shard.stream
            {
                stream.cancel();
            }
        });
    }

    /// Registers a stream of `shard` with process `peer` and ends the one before.
    pub(in crate::server) fn open_stream(&self, shard: u32, peer: Option<u64>) -> CancellationToken {
        let token = CancellationToken::new();
        let opened = token.clone();
        self.change(shard, |shard| {
            if let Some(before) = shard.stream.replace(opened) {
                before.cancel();
            }
            shard.peer = peer.or(shard.peer);
        });
        token
    }

    pub(in crate::server) fn close_stream(&self, shard: u32, token: &CancellationToken) {
        token.cancel();
        self.change(shard, |shard| {
            if shard.stream.take_if(|stream| stream.is_cancelled()).is_some() {
                shard.whole = false;
            }
        });
    }

    /// Waits until the primary of `shard` has lost its backup.
    pub(in crate::server) async fn without_backup(&self, shard: u32) {
        loop {
            let changed = self.changed.notified();
            let here = self.lock().get(&shard).cloned();
            if here.is_none_or(|shard| shard.stream.is_none() && shard.role == Role::Primary { alone: false }) {
                return;
            }
            changed.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, Shard>> {
        // Assignments only are made under this lock.
        self.shards.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shard {
    /// Returns whether another process holds the values of this shard, `None` while that is not known.
    fn restores(&self) -> Option<bool> {
        match self.role {
            Role::Starting => None,
            Role::Primary { .. } => Some(false),
            Role::Backup { .. } => self.found,
        }
    }
}

pub(in crate::server) fn replica_role(role: Role) -> ReplicaRole {
    match role {
        Role::Primary { alone: true } => ReplicaRole::Alone,
        Role::Primary { alone: false } => ReplicaRole::Primary,
        Role::Starting | Role::Backup { .. } => ReplicaRole::Backup,
    }
}
