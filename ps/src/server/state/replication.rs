//! The state of this server's replication: its role in each shard that it holds, and the stream to the other holder.

mod shard;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use prost::Message as _;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Status;

pub(in crate::server) use self::shard::{Process, Shard};
use super::election::Voter;
use super::recovery::Recovery;
use super::replica_role::{Evidence, Known, Role, Transition};
use crate::network::Network;
use crate::proto;
use crate::replication_log::ReplicaRole;
use crate::server::config::ServerConfig;

/// The replication state of this server.
pub struct Replication {
    /// This process.
    pub(in crate::server) process: Process,
    pub(in crate::server) index: u32,
    pub(in crate::server) servers: Vec<String>,
    pub(in crate::server) network: Network,
    /// Servers that have lost all go back to a checkpoint, in an epoch of its own; else trainers fill them anew.
    has_checkpoints: bool,
    /// The epoch that this server is in.
    recovery: Arc<Recovery>,
    shards: Mutex<BTreeMap<u32, Shard>>,
    /// Notified at every change of a shard.
    changed: Notify,
    /// Notified when a backup is to confirm that it follows.
    asked: Notify,
}

/// How long the other holder may be silent before this one asks the trainers to elect it.
pub(in crate::server) const SILENCE: Duration = Duration::from_secs(5);
/// How often the two ends of a stream between servers say that they live.
pub(in crate::server) const ALIVE: Duration = Duration::from_secs(1);
/// How long a trainer waits to hear whether the candidate that it voted for was elected.
const DECISION: Duration = Duration::from_secs(1);

impl Replication {
    /// Creates the state that `config` asks for, `None` if every block is held once.
    #[must_use]
    pub fn new(config: &ServerConfig, recovery: Arc<Recovery>) -> Option<Self> {
        if config.replicas.len() < 2 {
            return None;
        }
        let before = (config.index + config.servers - 1) % config.servers;
        Some(Self {
            process: Process { instance: rand::random(), incarnation: config.incarnation },
            index: config.index,
            servers: config.replicas.clone(),
            network: config.network.clone(),
            has_checkpoints: config.checkpoint.is_some(),
            recovery,
            shards: Mutex::new([config.index, before].map(|shard| (shard, Shard::new(shard == config.index))).into()),
            changed: Notify::new(),
            asked: Notify::new(),
        })
    }

    /// Calls `start` with the initial role of the blocks of each shard. Roles do not change during the call.
    pub fn with_roles<R>(&self, start: impl FnOnce(BTreeMap<u32, ReplicaRole>) -> R) -> R {
        let shards = self.lock();
        start(shards.iter().map(|(number, shard)| (*number, replica_role(shard.role))).collect())
    }

    /// Checks that this server is the primary of `shard`, which trainers talk to. Returns the term of the newest elected
    /// leader whose updates it has.
    ///
    /// # Errors
    /// If another server is, or may be, the primary, or if the blocks do not know yet that this one is. The error has the
    /// [`proto::ShardHolder`] in the details, so that a trainer can vote for a candidate, and knows of one that is no more.
    pub fn leads(&self, shard: u32) -> Result<u64, Status> {
        let shards = self.lock();
        let Some(here) = shards.get(&shard) else { return Err(self.not_held(shard)) };
        let text = if here.election.is_candidate() {
            format!("server {} does not answer; the trainers elect who leads the blocks", self.other(shard))
        } else if let Err(text) = self.check_leads(shard, here) {
            text
        } else {
            return Ok(here.election.newest_term());
        };
        Err(with_holder(&Status::unavailable(text), &self.describe(shard, here)))
    }

    /// Waits until it is certain that no other process had been elected to lead `shard` before this call: all updates that
    /// trainers had the acknowledgement of are here. A server that was cut off may have been outvoted without having heard of it,
    /// so its role proves nothing; that its backup follows it still does, as the answer of a majority in Raft (Ongaro and
    /// Ousterhout 2014, section 6.4 of the thesis).
    ///
    /// Returns the term of the newest elected leader whose updates it has.
    ///
    /// # Errors
    /// If this server does not lead the shard, or its backup does not answer soon.
    pub(in crate::server) async fn confirm_leads(&self, shard: u32) -> Result<u64, Status> {
        let mut number = 0;
        self.change_quietly(shard, |here| {
            here.confirmations.0 += 1;
            number = here.confirmations.0;
        });
        self.asked.notify_waiters();
        let confirmed = async {
            loop {
                let changed = self.changed.notified();
                let term = self.leads(shard)?;
                let here = self.lock().get(&shard).map(|here| (here.role, here.confirmations.1));
                if here.is_some_and(|(role, answered)| role == Role::Primary { alone: true } || answered >= number) {
                    return Ok(term);
                }
                changed.await;
            }
        };
        let text = || format!("server {} does not confirm that this one leads the blocks", self.other(shard));
        tokio::time::timeout(SILENCE, confirmed).await.unwrap_or_else(|_| Err(Status::unavailable(text())))
    }

    /// Resolves when a backup is to confirm that it follows, after this call.
    pub(in crate::server) fn asked(&self) -> impl Future<Output = ()> + '_ {
        self.asked.notified()
    }

    /// Returns the newest confirmation that was asked for of the backup of `shard`, 0 if none was.
    pub(in crate::server) fn confirmation(&self, shard: u32) -> u64 {
        self.lock().get(&shard).map_or(0, |here| here.confirmations.0)
    }

    /// Records that the backup of `shard` has answered confirmation `number`.
    pub(in crate::server) fn confirmed(&self, shard: u32, number: u64) {
        self.change(shard, |here| here.confirmations.1 = here.confirmations.1.max(number));
    }

    fn check_leads(&self, shard: u32, here: &Shard) -> Result<(), String> {
        let other = self.other(shard);
        Err(match here.role {
            Role::Primary { .. } if here.election.is_outdated() => {
                format!("it lacks updates of the blocks of server {shard} that a later leader made; ask server {other}")
            }
            Role::Primary { .. } if !here.changing => return Ok(()),
            Role::Primary { .. } => format!("it is about to lead the blocks of server {shard}; ask again"),
            Role::Starting => format!("it asks server {other} who leads the blocks of server {shard}"),
            Role::Backup { .. } => format!("server {other} leads the blocks of server {shard}; ask it"),
        })
    }

    fn not_held(&self, shard: u32) -> Status {
        let next = (shard as usize + 1) % self.servers.len();
        let text = format!("the blocks of server {shard} are not held here; servers {shard} and {next} hold them");
        Status::invalid_argument(text)
    }

    /// Describes this process and its part in `shard`, `None` if it does not hold the shard.
    #[must_use]
    pub fn holder(&self, shard: u32) -> Option<proto::ShardHolder> {
        self.lock().get(&shard).map(|here| self.describe(shard, here))
    }

    /// Describes this process and its part in all shards that it holds.
    #[must_use]
    pub fn holders(&self) -> Vec<proto::ShardHolder> {
        self.lock().iter().map(|(shard, here)| self.describe(*shard, here)).collect()
    }

    fn describe(&self, shard: u32, here: &Shard) -> proto::ShardHolder {
        let Process { instance, incarnation } = self.process;
        let described = here.election.describe(shard, here.role.shard_role());
        proto::ShardHolder { instance, incarnation, epoch: self.epoch(here), ..described }
    }

    /// Returns the epoch of the contents with which this process would lead a shard.
    fn epoch(&self, here: &Shard) -> u64 {
        match here.role {
            // It is called 0 meanwhile.
            _ if self.recovery.is_restoring() => self.recovery.greatest_epoch(),
            // It is being given this shard, and may be given the other one by a server of another epoch.
            Role::Backup { .. } if self.recovery.awaits_restore() => here.leaders_epoch,
            _ => self.recovery.epoch(),
        }
    }

    /// Waits until it is known whether other servers hold all state of this one; returns that.
    pub async fn settled(&self) -> bool {
        loop {
            let changed = self.changed.notified();
            if let Some(given) = self.is_given() {
                return given;
            }
            changed.await;
        }
    }

    /// Returns whether other servers hold all state of this one. They do not as soon as one shard is in no other process:
    /// the trainers may elect the leader of another shard only when all have gone to a checkpoint. `None` until it is known.
    #[must_use]
    pub fn is_given(&self) -> Option<bool> {
        let known: Vec<_> = self.lock().values().map(Shard::restores).collect();
        if known.contains(&Some(false)) { Some(false) } else { known.iter().all(Option::is_some).then_some(true) }
    }

    /// Returns whether the role in every shard is known.
    #[must_use]
    pub fn has_settled(&self) -> bool {
        self.lock().values().all(|shard| shard.restores().is_some())
    }

    /// Describes the shards that only one server holds. While the model is not known, there is nothing to hold.
    #[must_use]
    pub fn warnings(&self, model_is_known: bool) -> Vec<String> {
        let describe = |(number, shard): (&u32, &Shard)| {
            let other = self.other(*number);
            if !model_is_known && shard.restores().is_some() {
                return None;
            }
            let once = |why: &str| Some(format!("the blocks of server {number} are held once: {why}"));
            match shard.role {
                _ if shard.election.is_candidate() => {
                    once(&format!("server {other} does not answer, and the trainers elect this one"))
                }
                Role::Primary { alone: true } => once(&format!("server {other} does not answer")),
                Role::Primary { alone: false } if !shard.whole => once(&format!("server {other} has yet to copy them")),
                Role::Starting => once(&format!("this server waits for server {other}")),
                Role::Backup { complete: false } => once("this server has yet to copy them"),
                Role::Primary { .. } | Role::Backup { .. } => None,
            }
        };
        self.lock().iter().filter_map(describe).collect()
    }

    /// Ends the streams between servers, which go to a checkpoint or end; the backups follow again.
    pub fn restart(&self) {
        for shard in self.lock().values_mut() {
            // A copy that counts no more since it was outdated has to be made anew, or the shard is lost.
            if shard.role.is_whole() {
                shard.election.restore();
            }
            // Votes of before are for a term that is over.
            shard.election.withdraw();
            shard.stream.iter().for_each(CancellationToken::cancel);
        }
    }

    /// Returns whether all that this server holds are complete copies of shards which other servers lead in `epoch`.
    pub(in crate::server) fn holds_copies_alone(&self, epoch: u64) -> bool {
        let is_copy = |shard: &Shard| shard.role == Role::Backup { complete: true } && shard.leaders_epoch == epoch;
        self.lock().values().all(is_copy)
    }

    /// Records that this server goes to the checkpoint of `epoch`. Leaders of its copies that are in that epoch already may be
    /// past the checkpoint: those copies count no more before they are made anew.
    pub(in crate::server) fn discard_copies(&self, epoch: u64) {
        for shard in self.lock().values_mut() {
            if matches!(shard.role, Role::Backup { .. }) && shard.leaders_epoch >= epoch {
                (shard.role, shard.diverged) = (Role::Backup { complete: false }, true);
            }
        }
        self.changed.notify_waiters();
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

    /// Applies what follows from `evidence` about the other holder of `shard`. After [`Transition::To`],
    /// [`Self::settle`] must follow when the blocks have the role. After [`Transition::Lost`] nothing has changed.
    pub(in crate::server) fn learn(&self, shard: u32, evidence: Evidence) -> Transition {
        let mut transition = Transition::Stay;
        self.change(shard, |here| {
            // A process that opened a stream since lives: the evidence is about the one before it.
            if here.stream.is_some() {
                return;
            }
            let known = Known {
                home: shard == self.index,
                rival: here.election.has_rival(),
                replaced: here.heard_from.is_some_and(|heard| here.rival_is_replaced_by(heard)),
                outdated: here.election.is_outdated(),
            };
            transition = here.role.after(evidence, known);
            here.peer_restarted |= evidence == Evidence::Is(proto::ShardRole::Starting) || known.replaced;
            match transition {
                Transition::To(role) => {
                    // The updates that no backup has acknowledged are in no other copy. A backup that hears of a later leader only
                    // lacks some of its.
                    let was_backup = matches!(here.role, Role::Backup { .. }) && evidence == Evidence::LeadsLater;
                    here.diverged |= here.role.is_whole() && matches!(role, Role::Backup { .. }) && !was_backup;
                    let is_filled_anew = here.role == Role::Starting && matches!(role, Role::Primary { .. });
                    if is_filled_anew && !self.has_checkpoints {
                        let there = here.heard_from.map_or(0, |heard| heard.incarnation);
                        here.election.begin(u64::from(self.process.incarnation) + u64::from(there));
                    }
                    here.take(role);
                }
                Transition::Stand if !here.election.is_candidate() => here.election.stand(),
                Transition::Stand => transition = Transition::Stay,
                Transition::Withdraw if here.election.is_candidate() => here.election.withdraw(),
                Transition::Withdraw => transition = Transition::Stay,
                Transition::Stay | Transition::Lost => {}
            }
        });
        transition
    }

    /// Records that a trainer was given blocks of `shard` by the leader of `term`. If the copy here lacks that leader's
    /// updates, it leads no more; returns whether that is so since now.
    pub(in crate::server) fn hear_of_leader(&self, shard: u32, term: u64) -> bool {
        let mut is_new = false;
        self.change(shard, |here| {
            // A copy that is not whole leads nothing anyway.
            if here.role.is_whole() && !here.election.is_outdated() {
                here.election.hear_of_leader(term);
                is_new = here.election.is_outdated();
            }
            if is_new {
                here.stream.iter().for_each(CancellationToken::cancel);
            }
        });
        is_new
    }

    /// Ends the candidacy for `shard`.
    pub(in crate::server) fn withdraw(&self, shard: u32) {
        self.change(shard, |here| here.election.withdraw());
    }

    /// Counts a trainer's vote.
    ///
    /// # Errors
    /// If this server does not hold the shard.
    pub(in crate::server) fn vote(&self, vote: &proto::VoteRequest, voter: Voter) -> Result<(), Status> {
        let proto::VoteRequest { shard, term, granted, outdated, epoch, instance, .. } = *vote;
        if !self.lock().contains_key(&shard) {
            return Err(self.not_held(shard));
        }
        if instance == self.process.instance {
            self.change(shard, |here| {
                let (was_outdated, is_of_now) = (here.election.is_outdated(), epoch == self.epoch(here));
                here.election.vote(voter, term, granted, outdated && is_of_now);
                // It may lead already, elected by others.
                if here.election.is_outdated() && !was_outdated {
                    here.stream.iter().for_each(CancellationToken::cancel);
                }
            });
        }
        Ok(())
    }

    /// Waits for a moment until it is decided whether this server leads `shard` in `term`; returns whether it does.
    pub(in crate::server) async fn decided(&self, shard: u32, term: u64) -> bool {
        let decided = async {
            loop {
                let changed = self.changed.notified();
                let outcome = self.lock().get(&shard).map(|here| {
                    // The blocks have to know, too.
                    here.election.outcome(term).filter(|_| !here.changing)
                });
                if let Some(Some(elected)) = outcome {
                    return elected;
                }
                changed.await;
            }
        };
        tokio::time::timeout(DECISION, decided).await.unwrap_or(false)
    }

    /// Waits until the candidate for `shard` is elected, and makes it the primary; `gone` says which voters are not there
    /// any more. [`Self::settle`] must follow when the blocks have the role. Never resolves on a server that is no
    /// candidate.
    pub(in crate::server) async fn elected(&self, shard: u32, gone: impl Fn(Voter) -> bool) -> Role {
        let role = Role::Primary { alone: true };
        loop {
            let changed = self.changed.notified();
            let candidate = self.lock().get(&shard).map(|here| (here.election.clone(), here.peer_restarted));
            if candidate.is_some_and(|(election, restarted)| election.is_elected(restarted, &gone)) {
                let mut wins = false;
                self.change(shard, |here| {
                    // The other holder may have come back since.
                    wins = here.election.is_candidate() && !here.election.is_outdated() && here.stream.is_none();
                    if wins {
                        here.election.win();
                        here.take(role);
                    }
                });
                if wins {
                    return role;
                }
            }
            changed.await;
        }
    }

    /// Records that the blocks of `shard` have received the role that [`Self::learn`] or [`Self::elected`] returned.
    pub(in crate::server) fn settle(&self, shard: u32) {
        self.change(shard, |here| here.changing = false);
    }

    /// Records that the other holder of `shard` was heard just now.
    pub(in crate::server) fn hear(&self, shard: u32) {
        if let Some(here) = self.lock().get_mut(&shard) {
            here.heard = Instant::now();
        }
    }

    /// Records what the other holder of a shard says of itself, just now; returns what that means.
    pub(in crate::server) fn meet_holder(&self, other: &proto::ShardHolder) -> Evidence {
        let mut shards = self.lock();
        let Some(here) = shards.get_mut(&other.shard) else { return Evidence::Unknown };
        here.heard = Instant::now();
        here.heard_from = Some(Process::of(other));
        here.election.hear(other);
        let leads = other.role() == proto::ShardRole::Primary && !other.candidate;
        // One that has yet to go to the checkpoint that this server has gone to is no leader to follow.
        let leads_now = leads && other.epoch >= self.epoch(here);
        if leads_now && here.election.terms_beyond(other) { Evidence::LeadsLater } else { Evidence::Is(other.role()) }
    }

    /// Returns what it means that the other holder of `shard` does not answer.
    pub(in crate::server) fn silence(&self, shard: u32) -> Evidence {
        let silent = self.lock().get(&shard).is_some_and(|here| here.heard.elapsed() >= SILENCE);
        if silent { Evidence::Silent } else { Evidence::Unknown }
    }

    /// Begins to send the blocks of a shard to `backup`; ends the stream before.
    ///
    /// # Errors
    /// If this server is not the primary, or the process was replaced.
    pub(in crate::server) fn serve(&self, backup: &proto::ShardHolder) -> Result<CancellationToken, Status> {
        let (token, shard, peer) = (CancellationToken::new(), backup.shard, Process::of(backup));
        {
            let mut shards = self.lock();
            let here = shards.get_mut(&shard).ok_or_else(|| self.not_held(shard))?;
            self.check_leads(shard, here).map_err(Status::unavailable)?;
            if let Some(successor) = here.successor_of(peer) {
                return Err(replaced(self.other(shard), peer, successor));
            }
            if here.rival_is_replaced_by(peer) {
                here.peer_restarted = true;
                let text = format!(
                    "the trainers have yet to elect this server for the blocks of server {shard}; follow again"
                );
                return Err(Status::unavailable(text));
            }
            here.role = Role::Primary { alone: false };
            // The backup is there, and no candidate.
            here.election.withdraw();
            here.election.hear(backup);
            here.heard = Instant::now();
            // A report from before it followed says nothing about a process that takes its place.
            here.peer_restarted = false;
            here.open_stream(token.clone(), Some(peer));
        }
        self.changed.notify_waiters();
        Ok(token)
    }

    /// Records that this backup of `shard` holds everything.
    pub(in crate::server) fn complete(&self, shard: u32, complete: proto::Complete) {
        self.change(shard, |here| {
            here.role = Role::Backup { complete: true };
            here.diverged = false;
            here.election.completed(complete);
        });
    }

    /// Returns whether this copy of `shard` has updates that the elected leader's lacks.
    pub(in crate::server) fn has_diverged(&self, shard: u32) -> bool {
        self.lock().get(&shard).is_some_and(|here| here.diverged)
    }

    pub(in crate::server) fn change(&self, shard: u32, change: impl FnOnce(&mut Shard)) {
        self.change_quietly(shard, change);
        self.changed.notify_waiters();
    }

    /// As [`Self::change`], of what no task waits for.
    pub(in crate::server) fn change_quietly(&self, shard: u32, change: impl FnOnce(&mut Shard)) {
        self.lock().entry(shard).and_modify(change);
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

    /// Waits until no stream to the other holder of `shard` is open.
    pub(in crate::server) async fn without_backup(&self, shard: u32) {
        loop {
            let changed = self.changed.notified();
            if self.lock().get(&shard).is_none_or(|here| here.stream.is_none()) {
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

/// Adds to a refusal what this server is in the shard that was meant.
pub fn with_holder(refusal: &Status, holder: &proto::ShardHolder) -> Status {
    Status::with_details(refusal.code(), refusal.message(), holder.encode_to_vec().into())
}

#[cfg(test)]
mod tests;
