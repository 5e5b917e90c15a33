//! Two servers hold every block, so that the loss of one costs no step (spec.ps.replicationFactor 2). The shard
//! of server k is also held by server k+1. [`role`] says what a server is to a shard, [`follow`] is the backup's
//! side of the stream between the two, [`serve`] the primary's. The blocks do the rest (`crate::block`).

mod follow;
mod role;
mod serve;

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Status};

use super::shared::Shared;
use super::{ServerConfig, ServerError};
use crate::block::ReplicaRole;
use crate::network::Network;
use crate::proto;
use crate::proto::replication_client::ReplicationClient;

pub use role::{Evidence, Role};
pub use serve::Replicating;

/// Pause between two looks at a server that is not as it should be.
const PAUSE: Duration = Duration::from_millis(50);
/// A server that has not answered by then is silent.
const ANSWER: Duration = Duration::from_secs(2);

/// This server's part in replication.
pub struct Replication {
    /// Drawn at random by this process.
    instance: u64,
    index: u32,
    servers: Vec<String>,
    network: Network,
    shards: Mutex<BTreeMap<u32, Shard>>,
    /// Rung at every change of a shard.
    changed: Notify,
}

/// What is known of one of the shards here.
#[derive(Clone)]
struct Shard {
    role: Role,
    /// What this process has learned of the state that it should hold: none yet, that there is none, that
    /// there is some.
    found: Option<bool>,
    /// On a primary: the backup has all.
    whole: bool,
    /// The stream from the backup, or to the primary, if there is one.
    stream: Option<CancellationToken>,
    /// The process at its other end.
    peer: Option<u64>,
}

impl Replication {
    /// What `config` asks for; `None` if every block is held once.
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

    /// Calls `start` with what the blocks of each shard here are to begin as; that does not change meanwhile.
    pub fn with_roles<R>(&self, start: impl FnOnce(BTreeMap<u32, ReplicaRole>) -> R) -> R {
        let shards = self.lock();
        start(shards.iter().map(|(number, shard)| (*number, replica_role(shard.role))).collect())
    }

    /// Whether trainers may talk to this server about `shard`.
    ///
    /// # Errors
    /// Who leads it, for the trainer's next try.
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

    /// Waits until this server knows what it is to its shards; whether others hold all of its state.
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

    /// What is not held twice, in sentences; there is nothing to hold while the model is not known.
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

    /// Ends the streams between servers: they follow anew.
    pub fn restart(&self) {
        self.lock().values().filter_map(|shard| shard.stream.as_ref()).for_each(CancellationToken::cancel);
    }

    fn role(&self, shard: u32) -> Role {
        self.lock().get(&shard).map_or(Role::Starting, |shard| shard.role)
    }

    /// The other server that holds `shard`.
    fn other(&self, shard: u32) -> u32 {
        if shard == self.index { (shard + 1) % self.servers.len() as u32 } else { shard }
    }

    fn change(&self, shard: u32, change: impl FnOnce(&mut Shard)) {
        self.lock().entry(shard).and_modify(change);
        self.changed.notify_waiters();
    }

    /// Process `instance` holds the other copy of `shard`. If that was another one before, it has ended, even if
    /// its connection has not.
    fn meet(&self, shard: u32, instance: u64) {
        self.change(shard, |shard| {
            if shard.peer.replace(instance).is_some_and(|before| before != instance)
                && let Some(stream) = &shard.stream
            {
                stream.cancel();
            }
        });
    }

    /// A stream of `shard` with process `peer` begins: ends the one before.
    fn open_stream(&self, shard: u32, peer: Option<u64>) -> CancellationToken {
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

    fn close_stream(&self, shard: u32, token: &CancellationToken) {
        token.cancel();
        self.change(shard, |shard| {
            if shard.stream.take_if(|stream| stream.is_cancelled()).is_some() {
                shard.whole = false;
            }
        });
    }

    /// Waits until a primary lacks a backup that it should have.
    async fn without_backup(&self, shard: u32) {
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

    /// Asks the other holder of `shard`, after a look at whether it is there.
    async fn look(&self, shard: u32, job_uid: &str) -> Evidence {
        let address = &self.servers[self.other(shard) as usize];
        match tokio::time::timeout(ANSWER, self.network.probe(address)).await {
            Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused => return Evidence::Gone,
            Ok(Ok(())) => {}
            _ => return Evidence::Silent,
        }
        let request = proto::GreetRequest { job_uid: job_uid.to_owned(), shard, instance: self.instance };
        let greet = async {
            let endpoint = self.network.endpoint(address).ok()?;
            let mut client = ReplicationClient::new(self.network.connect(&endpoint).await.ok()?);
            client.greet(Request::new(request)).await.ok().map(|reply| reply.into_inner().role())
        };
        tokio::time::timeout(ANSWER, greet).await.ok().flatten().map_or(Evidence::Silent, Evidence::Is)
    }
}

impl Shard {
    /// Whether another process holds what belongs here; `None` while that is not known.
    fn restores(&self) -> Option<bool> {
        match self.role {
            Role::Starting => None,
            Role::Primary { .. } => Some(false),
            Role::Backup { .. } => self.found,
        }
    }
}

fn replica_role(role: Role) -> ReplicaRole {
    match role {
        Role::Primary { alone: true } => ReplicaRole::Alone,
        Role::Primary { alone: false } => ReplicaRole::Primary,
        Role::Starting | Role::Backup { .. } => ReplicaRole::Backup,
    }
}

/// Plays this server's part in all shards that it holds, until one is lost.
pub async fn run(shared: &Arc<Shared>) -> ServerError {
    let Some(replication) = &shared.replication else { return std::future::pending().await };
    let shards: Vec<u32> = replication.lock().keys().copied().collect();
    let kept = shards.into_iter().map(|shard| Box::pin(keep(shared, replication, shard)));
    let (shard, ..) = futures::future::select_all(kept).await;
    ServerError::Lost { shard, other: replication.other(shard) }
}

/// Plays this server's part in `shard`, until it is lost.
async fn keep(shared: &Arc<Shared>, replication: &Replication, shard: u32) -> u32 {
    let home = shard == replication.index;
    loop {
        match replication.role(shard) {
            Role::Backup { .. } => {
                if let Err(status) = follow::follow(shared, replication, shard).await {
                    tracing::debug!(shard, reason = status.message(), "no longer following");
                }
            }
            Role::Primary { .. } => replication.without_backup(shard).await,
            Role::Starting => {}
        }
        let evidence = replication.look(shard, &shared.config.job_uid).await;
        let before = replication.role(shard);
        let role = before.after(evidence, home);
        if role == Role::Starting && before != role {
            return shard;
        }
        if role == before {
            tokio::time::sleep(PAUSE).await;
        } else {
            assume(shared, replication, shard, role).await;
        }
    }
}

/// Takes on another role.
async fn assume(shared: &Shared, replication: &Replication, shard: u32, role: Role) {
    let other = replication.other(shard);
    match role {
        Role::Primary { alone: true } => {
            tracing::info!("server {other} has ended; this one goes on with the blocks of server {shard} alone");
        }
        Role::Primary { alone: false } => tracing::info!("this server leads the blocks of server {shard}"),
        Role::Backup { .. } => tracing::info!("backs up the blocks of server {shard}, which server {other} leads"),
        Role::Starting => {}
    }
    replication.change(shard, |shard| shard.role = role);
    if let Ok(store) = shared.store() {
        store.set_role(shard, replica_role(role)).await;
        if shared.config.min_trainers.is_some() && matches!(role, Role::Primary { .. }) {
            // Updates that were under way told of trainers that had gone meanwhile.
            let absent = shared.members().absent();
            for trainer in absent {
                store.finish(trainer).await;
            }
        }
    }
}
