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
    /// This process.
    pub(in crate::server) process: Process,
    pub(in crate::server) index: u32,
    pub(in crate::server) servers: Vec<String>,
    pub(in crate::server) network: Network,
    shards: Mutex<BTreeMap<u32, Shard>>,
    /// Notified at every change of a shard.
    changed: Notify,
}

/// One process of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::server) struct Process {
    /// Drawn at random by the process.
    pub(in crate::server) instance: u64,
    /// How often the server was replaced before. A process of a lower number than was known has been replaced, although
    /// it still runs: its machine is cut off from whoever replaced it.
    pub(in crate::server) incarnation: u32,
}

/// The state of one shard on this server.
#[derive(Clone, Default)]
pub(in crate::server) struct Shard {
    pub(in crate::server) role: Role,
    /// The blocks have yet to receive the role. Until they have, the server refuses trainers and backups: a block that
    /// still has the role before would drop a gradient, or stop sending updates to a backup that has just followed.
    changing: bool,
    /// True if the other server holds values of the shard; `None` while this process has not learned it.
    pub(in crate::server) found: Option<bool>,
    /// On a primary: the backup has every block.
    pub(in crate::server) whole: bool,
    /// On a primary: the backup has been away and silent for so long that trainers should ask the other holder, which may
    /// lead by now. This server cannot answer them alone.
    pub(in crate::server) cut_off: bool,
    /// The stream from the backup, or to the primary, if there is one.
    pub(in crate::server) stream: Option<CancellationToken>,
    /// The process that holds the other copy, and the highest incarnation of that server.
    pub(in crate::server) peer: Option<Process>,
}

impl Replication {
    /// Creates the state that `config` asks for, `None` if every block is held once.
    #[must_use]
    pub fn new(config: &ServerConfig) -> Option<Self> {
        if config.replicas.len() < 2 {
            return None;
        }
        let before = (config.index + config.servers - 1) % config.servers;
        let shard = Shard::default();
        Some(Self {
            process: Process { instance: rand::random(), incarnation: config.incarnation },
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
        let shards = self.lock();
        let here = shards.get(&shard);
        self.check_leads(shard, here)?;
        if here.is_some_and(|here| here.cut_off) {
            let other = self.other(shard);
            let text = format!("server {other} holds the blocks of server {shard} too and does not answer; ask it");
            return Err(Status::unavailable(text));
        }
        Ok(())
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
            (here.role, here.changing, here.cut_off) = (role, true, false);
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
    pub(in crate::server) fn serve(&self, shard: u32, peer: Process) -> Result<CancellationToken, Status> {
        let token = CancellationToken::new();
        {
            let mut shards = self.lock();
            self.check_leads(shard, shards.get(&shard))?;
            if let Some(successor) = shards.get(&shard).and_then(|here| here.successor_of(peer)) {
                return Err(replaced(self.other(shard), peer, successor));
            }
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

    /// Records that process `peer` holds the other copy of `shard`. A process before it has ended or was replaced, so
    /// its stream is closed even if the connection is still open. If `peer` was replaced itself, nothing changes; the
    /// incarnation that replaced it is returned.
    pub(in crate::server) fn meet(&self, shard: u32, peer: Process) -> Option<u32> {
        let mut successor = None;
        self.change(shard, |shard| {
            successor = shard.successor_of(peer);
            if successor.is_none()
                && shard.peer.replace(peer).is_some_and(|before| before.instance != peer.instance)
                && let Some(stream) = &shard.stream
            {
                stream.cancel();
            }
        });
        successor
    }

    /// Returns whether a process of `incarnation`, which holds the other copy of `shard`, was replaced.
    pub(in crate::server) fn was_replaced(&self, shard: u32, incarnation: u32) -> bool {
        let process = Process { instance: 0, incarnation };
        self.lock().get(&shard).is_some_and(|here| here.successor_of(process).is_some())
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
    fn open_stream(&mut self, stream: CancellationToken, peer: Option<Process>) {
        if let Some(before) = self.stream.replace(stream) {
            before.cancel();
        }
        (self.whole, self.cut_off) = (false, false);
        self.peer = peer.or(self.peer);
    }

    /// Returns the incarnation that has replaced `peer`, if one has.
    fn successor_of(&self, peer: Process) -> Option<u32> {
        self.peer.map(|known| known.incarnation).filter(|known| *known > peer.incarnation)
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

/// Returns the answer to a process of server `server` that was replaced.
fn replaced(server: u32, process: Process, successor: u32) -> Status {
    let incarnation = process.incarnation;
    Status::failed_precondition(format!(
        "server {server} incarnation {incarnation} was replaced by incarnation {successor}; this process must end"
    ))
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

    const PROCESS: Process = Process { instance: 1, incarnation: 0 };

    fn process(instance: u64, incarnation: u32) -> Process {
        Process { instance, incarnation }
    }

    /// Server 0 of two, which has just become the primary of its own shard; its blocks do not know that yet.
    fn about_to_lead() -> Replication {
        let shard = Shard::default();
        let replication = Replication {
            process: PROCESS,
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
        assert!(replication.leads(0).is_err() && replication.serve(0, process(2, 0)).is_err());
        replication.settle(0);
        assert!(replication.leads(0).is_ok() && replication.serve(0, process(2, 0)).is_ok());
    }

    #[test]
    fn evidence_from_before_a_backup_followed_changes_nothing() {
        let replication = about_to_lead();
        replication.settle(0);
        let stream = replication.serve(0, process(2, 0)).expect("it leads");
        assert_eq!(replication.learn(0, Evidence::Gone), None);
        assert_eq!(replication.role(0), Role::Primary { alone: false });
        replication.close_stream(0, &stream);
        assert_eq!(replication.learn(0, Evidence::Gone), Some(Role::Primary { alone: true }));
        assert!(
            replication.serve(0, process(3, 0)).is_err(),
            "a backup would be dropped by the blocks that go on alone"
        );
    }

    #[test]
    fn a_new_stream_has_copied_nothing() {
        let replication = about_to_lead();
        replication.settle(0);
        let _first = replication.serve(0, process(2, 0)).expect("it leads");
        replication.change(0, |shard| shard.whole = true);
        let _second = replication.serve(0, process(3, 0)).expect("it leads");
        assert!(replication.warnings(true).iter().any(|text| text.contains("server 0 are held once")));
    }

    #[test]
    fn a_process_that_was_replaced_closes_no_stream_of_its_successor() {
        let replication = about_to_lead();
        replication.settle(0);
        let old = replication.serve(0, process(2, 0)).expect("it leads");
        assert_eq!(replication.meet(0, process(3, 1)), None, "a successor");
        assert!(old.is_cancelled(), "the process before it may still be connected");
        let new = replication.serve(0, process(3, 1)).expect("it leads");
        assert_eq!(replication.meet(0, process(2, 0)), Some(1), "it still runs");
        assert!(replication.serve(0, process(2, 0)).is_err());
        assert!(!new.is_cancelled());
        assert_eq!(replication.meet(0, process(4, 1)), None, "started again without a new number");
        assert!(new.is_cancelled());
    }
}
