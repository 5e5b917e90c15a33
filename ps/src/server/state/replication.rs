//! The state of this server's replication: its role in each shard that it holds, and the stream to the other holder.

use std::collections::BTreeMap;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::replica_role::{Evidence, Role};
use crate::network::Network;
use crate::replication_log::ReplicaRole;
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
    /// The blocks have yet to receive the role. Until they have, the server refuses trainers and backups: a block that
    /// still has the role before would drop a gradient, or stop sending updates to a backup that has just followed.
    changing: bool,
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
        let shard =
            Shard { role: Role::Starting, changing: false, found: None, whole: false, stream: None, peer: None };
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
    /// If another server is, or may be, the primary, or if the blocks do not know yet that this one is.
    pub fn leads(&self, shard: u32) -> Result<(), Status> {
        self.check_leads(shard, self.lock().get(&shard))
    }

    fn check_leads(&self, shard: u32, here: Option<&Shard>) -> Result<(), Status> {
        match here.map(|here| here.role) {
            Some(Role::Primary { .. }) if here.is_some_and(|here| here.changing) => {
                Err(Status::unavailable(format!("it is about to lead the blocks of server {shard}; ask again")))
            }
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

    /// Changes the role of this server in `shard` by `evidence` about the other holder; returns the new role if it
    /// differs. [`Self::settle`] must follow when the blocks have it. The role [`Role::Starting`] is returned, but not
    /// taken: the blocks are lost.
    pub(in crate::server) fn learn(&self, shard: u32, evidence: Evidence) -> Option<Role> {
        let mut shards = self.lock();
        // A process that opened a stream since lives: the evidence is about the one before it.
        let here = shards.get_mut(&shard).filter(|here| here.stream.is_none())?;
        let role = here.role.after(evidence, shard == self.index);
        if role == here.role {
            return None;
        }
        if role != Role::Starting {
            (here.role, here.changing) = (role, true);
        }
        Some(role)
    }

    /// Records that the blocks of `shard` have received the role that [`Self::learn`] returned.
    pub(in crate::server) fn settle(&self, shard: u32) {
        self.change(shard, |here| here.changing = false);
    }

    /// Begins to send the blocks of `shard` to a backup, process `peer`; ends the stream before.
    ///
    /// # Errors
    /// Returns those of [`Self::leads`].
    pub(in crate::server) fn serve(&self, shard: u32, peer: u64) -> Result<CancellationToken, Status> {
        let token = CancellationToken::new();
        {
            let mut shards = self.lock();
            self.check_leads(shard, shards.get(&shard))?;
            if let Some(here) = shards.get_mut(&shard) {
                here.role = Role::Primary { alone: false };
                here.open_stream(token.clone(), Some(peer));
            }
        }
        self.changed.notify_waiters();
        Ok(token)
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

    /// Registers a stream to the primary of `shard` and ends the one before.
    pub(in crate::server) fn open_stream(&self, shard: u32) -> CancellationToken {
        let token = CancellationToken::new();
        let opened = token.clone();
        self.change(shard, |here| here.open_stream(opened, None));
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
        self.shards.lock()
    }
}

impl Shard {
    /// Registers a stream and ends the one before. Nothing has been copied over the new one.
    fn open_stream(&mut self, stream: CancellationToken, peer: Option<u64>) {
        if let Some(before) = self.stream.replace(stream) {
            before.cancel();
        }
        self.whole = false;
        self.peer = peer.or(self.peer);
    }

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::ShardRole;

    /// Server 0 of two, which has just become the primary of its own shard; its blocks do not know that yet.
    fn about_to_lead() -> Replication {
        let shard =
            Shard { role: Role::Starting, changing: false, found: None, whole: false, stream: None, peer: None };
        let replication = Replication {
            instance: 1,
            index: 0,
            servers: vec!["a:1".into(), "b:1".into()],
            network: Network::default(),
            shards: Mutex::new([(0, shard.clone()), (1, shard)].into()),
            changed: Notify::new(),
        };
        let role = replication.learn(0, Evidence::Is(ShardRole::Starting));
        assert_eq!(role, Some(Role::Primary { alone: false }));
        replication
    }

    #[test]
    fn nobody_is_served_before_the_blocks_have_their_role() {
        let replication = about_to_lead();
        assert!(replication.leads(0).is_err() && replication.serve(0, 2).is_err());
        replication.settle(0);
        assert!(replication.leads(0).is_ok() && replication.serve(0, 2).is_ok());
    }

    #[test]
    fn evidence_from_before_a_backup_followed_changes_nothing() {
        let replication = about_to_lead();
        replication.settle(0);
        let stream = replication.serve(0, 2).expect("it leads");
        assert_eq!(replication.learn(0, Evidence::Gone), None);
        assert_eq!(replication.role(0), Role::Primary { alone: false });
        replication.close_stream(0, &stream);
        assert_eq!(replication.learn(0, Evidence::Gone), Some(Role::Primary { alone: true }));
        assert!(replication.serve(0, 3).is_err(), "a backup would be dropped by the blocks that go on alone");
    }

    #[test]
    fn a_new_stream_has_copied_nothing() {
        let replication = about_to_lead();
        replication.settle(0);
        let _first = replication.serve(0, 2).expect("it leads");
        replication.change(0, |shard| shard.whole = true);
        let _second = replication.serve(0, 3).expect("it leads");
        assert!(replication.warnings(true).iter().any(|text| text.contains("server 0 are held once")));
    }
}
