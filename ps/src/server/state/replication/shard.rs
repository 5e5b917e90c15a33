//! One shard as a server that holds it sees it.

use std::collections::BTreeSet;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::proto;
use crate::server::state::election::{Election, Voter};
use crate::server::state::replica_role::Role;

/// One process of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::server) struct Process {
    /// Drawn at random by the process.
    pub(in crate::server) instance: u64,
    /// How often the server was replaced before. A process of a lower number than was known has been replaced, although
    /// it still runs: its machine is cut off from whoever replaced it.
    pub(in crate::server) incarnation: u32,
}

impl Process {
    pub(in crate::server) fn of(holder: &proto::ShardHolder) -> Self {
        Self { instance: holder.instance, incarnation: holder.incarnation }
    }
}

/// The state of one shard on this server.
#[derive(Clone)]
pub(in crate::server) struct Shard {
    pub(in crate::server) role: Role,
    /// The blocks have yet to receive the role. Until they have, the server refuses trainers and backups: a block that
    /// still has the role before would drop a gradient, or stop sending updates to a backup that has just followed.
    pub(super) changing: bool,
    /// True if the other server holds values of the shard; `None` while this process has not learned it.
    pub(in crate::server) found: Option<bool>,
    /// On a primary: the backup has every block.
    pub(in crate::server) whole: bool,
    /// On a primary: the newest confirmation that was asked for, and that the backup has answered.
    pub(super) confirmations: (u64, u64),
    /// The stream from the backup, or to the primary, if there is one.
    pub(in crate::server) stream: Option<CancellationToken>,
    /// The process that holds the other copy, and the highest incarnation of that server.
    pub(in crate::server) peer: Option<Process>,
    /// The process of the other server that was heard last.
    pub(super) heard_from: Option<Process>,
    /// On a primary: the process that was given everything last, so that it may be elected.
    pub(super) rival: Option<Process>,
    /// On a backup: the epoch of the primary when it sent the copy here.
    pub(in crate::server) leaders_epoch: u64,
    /// On a backup: the primary has started anew, and holds nothing.
    pub(in crate::server) peer_restarted: bool,
    /// The last time that the other holder was heard.
    pub(super) heard: Instant,
    /// This copy has updates that the elected leader's lacks, so that nothing of it counts.
    pub(in crate::server) diverged: bool,
    pub(in crate::server) election: Election,
}

impl Shard {
    pub(super) fn new(home: bool) -> Self {
        Self {
            role: Role::Starting,
            changing: false,
            found: None,
            whole: false,
            confirmations: (0, 0),
            stream: None,
            peer: None,
            heard_from: None,
            rival: None,
            leaders_epoch: 0,
            peer_restarted: false,
            heard: Instant::now(),
            diverged: false,
            election: Election::new(home),
        }
    }
}

impl Shard {
    /// Registers a stream and ends the one before. Nothing has been copied over the new one.
    pub(super) fn open_stream(&mut self, stream: CancellationToken, peer: Option<Process>) {
        if let Some(before) = self.stream.replace(stream) {
            before.cancel();
        }
        self.whole = false;
        self.peer = peer.or(self.peer);
    }

    /// Records on a primary that its backup holds everything, and may be elected from then on.
    pub(in crate::server) fn complete(&mut self, voters: BTreeSet<Voter>) -> proto::Complete {
        self.whole = true;
        self.rival = self.peer;
        self.election.complete(voters)
    }

    /// Returns whether the process that may be elected beside this one is not `process`, which holds the other copy now. It may
    /// have been elected meanwhile, so that this one leads a new process only if the trainers elect it.
    pub(super) fn rival_is_replaced_by(&self, process: Process) -> bool {
        self.election.has_rival() && self.rival.is_some_and(|rival| rival.instance != process.instance)
    }

    /// Forgets that the shard had a leader: there is nothing of it to lose.
    pub(in crate::server) fn begin_anew(&mut self) {
        self.role = Role::Starting;
        self.election.restore();
    }

    /// Takes a role that the blocks have yet to receive.
    pub(super) fn take(&mut self, role: Role) {
        (self.role, self.changing) = (role, true);
        self.election.withdraw();
    }

    /// Returns the incarnation that has replaced `peer`, if one has.
    pub(super) fn successor_of(&self, peer: Process) -> Option<u32> {
        self.peer.map(|known| known.incarnation).filter(|known| *known > peer.incarnation)
    }

    /// Returns whether another process holds the values of this shard, `None` while that is not known.
    pub(super) fn restores(&self) -> Option<bool> {
        match self.role {
            Role::Starting => None,
            Role::Primary { .. } => Some(false),
            Role::Backup { .. } => self.found,
        }
    }
}
