//! The task that owns a [`Shard`]: takes commands one after the other, lets rows go as time passes, and keeps the copy on
//! another server equal, where there is one.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior};
use tonic::Status;

use super::counts::Counts;
use super::gradients::Gradients;
use super::replica::{self, Copy};
use super::shard::{Clock, Holding, Plan, Shard, ShardState};
use crate::proto;
use crate::replication_log::{FrameSender, ReplicaRole, ReplicationLog};

/// Version of a shard that was replaced by that of a checkpoint, with all others of its epoch. Holders of different epochs do
/// not follow each other. Version 0 is that of a holder that has had no rows in its epoch: its tables may have become known
/// only after the other holder's were replaced by nothing.
const REPLACED: u64 = 1;
/// How often unused rows are looked for while no command arrives.
const LOOK: Duration = Duration::from_secs(1);

/// A command to a shard's task.
pub enum Command {
    /// Rows of a table, for a trainer.
    Pull { trainer: u32, table: usize, keys: Vec<u64>, reply: oneshot::Sender<Vec<f32>> },
    /// A trainer's gradients of a step, by table; answered when it may go on. Those of an earlier epoch belong to
    /// rows that are gone: they are not heard.
    Push { trainer: u32, epoch: u64, step: u64, gradients: Option<Vec<Gradients>>, reply: oneshot::Sender<()> },
    /// The first step that the shard does not have from a trainer.
    NextStep(u32, oneshot::Sender<u64>),
    /// A trainer has finished: no round waits for it.
    Finish(u32),
    /// Steps that the rows contain of every trainer that has not finished.
    Progress(oneshot::Sender<u64>),
    /// Everything, when the rows contain so many steps of every trainer that has not finished, or now; `None` if they
    /// contain more.
    Snapshot(Option<u64>, oneshot::Sender<Option<ShardState>>),
    /// Another shard, in an epoch of its own.
    Replace(Box<Owned>, u64, oneshot::Sender<()>),
    /// Changes the role in replication.
    SetRole(ReplicaRole),
    /// A backup that holds the given version follows from now on; answered with a copy if it needs one, `None` if this
    /// shard is a backup itself.
    Attach(u64, FrameSender, oneshot::Sender<Option<Attached>>),
    /// The backup has been sent the copy of this attach, at this version.
    Copied { attach: u64, version: u64, backup: FrameSender },
    /// The backup has acknowledged a version.
    Acknowledged(u64),
    /// On a backup: a stream from the primary begins; answered with the version held here.
    BeginFollow(oneshot::Sender<u64>),
    /// On a backup: rows of the primary's shard.
    Install(proto::RowsContents, FrameSender),
    /// On a backup: a piece of a change of the primary.
    Follow(proto::RowsUpdate, FrameSender),
}

/// The needs of a backup that follows.
pub enum Attached {
    /// It has been sent the updates that it lacked.
    UpToDate,
    /// It must be sent this copy.
    Lacks(Copy),
}

/// A caller whose answer shows the state of a shard. It is given when the backup has that state: what a caller has seen
/// must not be lost with this server.
enum Waiting {
    /// A push, which may be answered.
    Push(oneshot::Sender<()>),
    /// A pull, with its rows.
    Pull(oneshot::Sender<Vec<f32>>, Vec<f32>),
    /// The caller of [`Command::NextStep`], with the step.
    NextStep(oneshot::Sender<u64>, u64),
}

/// A shard whose pushes are answered through channels.
pub type Owned = Shard<oneshot::Sender<()>>;

/// Owns the shard until every sender is gone.
pub async fn own(mut owner: Owner, mut commands: mpsc::Receiver<Command>, counts: Arc<Counts>) {
    let began = Instant::now();
    let mut ticks = tokio::time::interval(LOOK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let watches = owner.shard.watches_time();
    let mut counted = vec![Holding::default(); owner.shard.holdings().count()];
    loop {
        let released = tokio::select! {
            biased;
            command = commands.recv() => match command {
                Some(command) => owner.handle(command),
                None => return,
            },
            _ = ticks.tick(), if watches => Vec::new(),
        };
        // One push ends one round at most, so that no step is passed over between two looks.
        owner.take_due_snapshots();
        // A backup evicts what its primary evicts.
        if owner.role != ReplicaRole::Backup {
            owner.shard.evict(u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX));
        }
        owner.send_change();
        owner.answer(released);
        for ((table, now), before) in (0..).zip(owner.shard.holdings()).zip(&mut counted) {
            counts.holds(table, *before, now);
            *before = now;
        }
    }
}

/// One shard, and the state of its replication.
pub struct Owner {
    shard: Owned,
    plan: Plan,
    /// Number of the shard among those of its server.
    part: u32,
    role: ReplicaRole,
    /// Changes so far; a backup has made the changes up to its version.
    version: u64,
    /// Set while the role is [`ReplicaRole::Primary`].
    log: Option<ReplicationLog<Waiting>>,
    /// Backups that have begun to follow.
    attaches: u64,
    /// On a backup: the pieces of the next change that have arrived.
    pieces: Vec<proto::RowsUpdate>,
    /// On a backup: the primary's shard, as far as it has arrived.
    incoming: Option<Owned>,
    /// That of the last checkpoint which the shard went to.
    epoch: u64,
    /// Snapshots of steps to come.
    snapshots: Vec<(u64, oneshot::Sender<Option<ShardState>>)>,
}

impl Owner {
    pub fn new(plan: &Plan, part: u32, role: ReplicaRole) -> Self {
        let mut owner = Self {
            shard: Shard::new(plan),
            plan: plan.clone(),
            part,
            role: ReplicaRole::Backup,
            version: 0,
            log: None,
            attaches: 0,
            pieces: Vec::new(),
            incoming: None,
            epoch: 0,
            snapshots: Vec::new(),
        };
        owner.set_role(role);
        owner
    }

    /// Executes a command; returns those that may be answered.
    fn handle(&mut self, command: Command) -> Vec<Waiting> {
        let shard = &mut self.shard;
        // A caller that has gone away no longer wants its answer: failed sends are fine.
        match command {
            // Dropping the reply makes the trainer look for the primary.
            Command::Pull { .. } | Command::Push { .. } if self.role == ReplicaRole::Backup => Vec::new(),
            Command::Pull { trainer, table, keys, reply } => {
                let rows = shard.pull(trainer, table, &keys);
                vec![Waiting::Pull(reply, rows)]
            }
            Command::Push { epoch, .. } if epoch < self.epoch => Vec::new(),
            Command::Push { trainer, step, gradients, reply, .. } => {
                pushes(shard.push(trainer, step, gradients, reply))
            }
            Command::NextStep(trainer, reply) => vec![Waiting::NextStep(reply, shard.next_step(trainer))],
            Command::Finish(trainer) => pushes(shard.finish(trainer)),
            Command::Progress(reply) => {
                let _ = reply.send(shard.settled_by_members());
                Vec::new()
            }
            Command::Snapshot(Some(at), reply) => {
                self.snapshots.push((at, reply));
                Vec::new()
            }
            Command::Snapshot(None, reply) => {
                let _ = reply.send(Some(shard.state()));
                Vec::new()
            }
            Command::Replace(other, epoch, reply) => {
                // The trainers that wait for the shard before see their replies dropped. Both holders of the shard count
                // anew from here, so that they find each other equal.
                let version = if other.is_blank() { 0 } else { REPLACED };
                (self.shard, self.epoch, self.version) = (*other, epoch, version);
                self.log = (self.role == ReplicaRole::Primary).then(|| ReplicationLog::new(version));
                self.attaches += 1;
                self.pieces.clear();
                self.incoming = None;
                self.snapshots.clear();
                let _ = reply.send(());
                Vec::new()
            }
            Command::SetRole(role) => self.set_role(role),
            Command::Attach(held, backup, reply) => {
                let _ = reply.send(self.attach(held, backup));
                Vec::new()
            }
            Command::Copied { attach, version, backup } => {
                if attach == self.attaches
                    && let Some(log) = &mut self.log
                {
                    if log.has_updates_since(Some(version), Some(self.version)) {
                        log.attach(backup, Some(version), Some(self.version), Bytes::new);
                    } else {
                        backup
                            .send(Err(Status::aborted("the rows were replaced while they were copied; follow again")));
                    }
                }
                Vec::new()
            }
            Command::Acknowledged(version) => self.log.as_mut().map(|log| log.acknowledge(version)).unwrap_or_default(),
            Command::BeginFollow(reply) => {
                self.pieces.clear();
                self.incoming = None;
                let _ = reply.send(self.version);
                Vec::new()
            }
            Command::Install(rows, primary) => {
                if let Err(status) = self.install(&rows, &primary) {
                    primary.send(Err(status));
                }
                Vec::new()
            }
            Command::Follow(update, primary) => {
                if let Err(status) = self.follow(update, &primary) {
                    primary.send(Err(status));
                }
                Vec::new()
            }
        }
    }

    /// Changes the role; returns those that may be answered.
    fn set_role(&mut self, role: ReplicaRole) -> Vec<Waiting> {
        let before = std::mem::replace(&mut self.role, role);
        if before == ReplicaRole::Backup && role != ReplicaRole::Backup {
            self.shard.take_over();
            self.pieces.clear();
            self.incoming = None;
        }
        match role {
            ReplicaRole::Primary if before != ReplicaRole::Primary => {
                self.log = Some(ReplicationLog::new(self.version));
                Vec::new()
            }
            ReplicaRole::Primary => Vec::new(),
            ReplicaRole::Alone => self.log.take().map(ReplicationLog::close).unwrap_or_default(),
            ReplicaRole::Backup => {
                self.log = None;
                // The leader is asked for them.
                self.snapshots.clear();
                Vec::new()
            }
        }
    }

    /// Lets a backup that holds version `held` follow; `None` if this shard is a backup itself.
    fn attach(&mut self, held: u64, backup: FrameSender) -> Option<Attached> {
        if self.role == ReplicaRole::Backup {
            return None;
        }
        if self.role == ReplicaRole::Alone {
            (self.role, self.log) = (ReplicaRole::Primary, Some(ReplicationLog::first_copy()));
        }
        self.attaches += 1;
        let log = self.log.as_mut()?;
        if log.has_updates_since(Some(held), Some(self.version)) {
            log.attach(backup, Some(held), Some(self.version), Bytes::new);
            // A change may have reached it although its acknowledgement got lost with the connection.
            let released = log.acknowledge(held);
            self.answer(released);
            return Some(Attached::UpToDate);
        }
        log.begin_copy();
        let (part, version, attach) = (self.part, self.version, self.attaches);
        Some(Attached::Lacks(Copy { part, version, state: self.shard.state(), attach }))
    }

    /// Counts the change that the last command made, and sends it to the backup.
    fn send_change(&mut self) {
        let Some(change) = self.shard.take_change() else { return };
        self.version += 1;
        if let Some(log) = &mut self.log {
            log.update(self.version, replica::change_frames(&change, self.part, self.version, &self.plan));
        }
    }

    /// Answers once the backup has all changes.
    fn answer(&mut self, released: Vec<Waiting>) {
        if let Some(log) = self.log.as_mut().filter(|log| log.lacks(self.version)) {
            return log.hold(self.version, released);
        }
        for waiting in released {
            // A caller that has gone away no longer wants its answer.
            match waiting {
                Waiting::Push(reply) => drop(reply.send(())),
                Waiting::Pull(reply, rows) => drop(reply.send(rows)),
                Waiting::NextStep(reply, step) => drop(reply.send(step)),
            }
        }
    }

    /// Takes rows of the primary's shard, which becomes this one when all have arrived.
    fn install(&mut self, rows: &proto::RowsContents, primary: &FrameSender) -> Result<(), Status> {
        if self.role != ReplicaRole::Backup {
            return Err(Status::data_loss(format!("part {} is no backup", self.part)));
        }
        let incoming = self.incoming.get_or_insert_with(|| Shard::new(&self.plan));
        let Some(proto::RowsClock { version, next_steps, requests }) = &rows.last else {
            return replica::insert(incoming, rows, &self.plan);
        };
        incoming.resume([&Clock { next_steps: next_steps.clone(), requests: *requests }]);
        self.shard = self.incoming.take().unwrap_or_else(|| Shard::new(&self.plan));
        self.version = *version;
        self.pieces.clear();
        replica::acknowledge(primary, self.part, self.version);
        Ok(())
    }

    /// Makes a change of the primary when its last piece is here. Acknowledges it before that, because it can no longer
    /// get lost then.
    fn follow(&mut self, update: proto::RowsUpdate, primary: &FrameSender) -> Result<(), Status> {
        if self.role != ReplicaRole::Backup || update.version != self.version + 1 {
            let (part, version) = (self.part, self.version);
            let text = format!("part {part} is at version {version}, the update makes {}", update.version);
            return Err(Status::data_loss(text));
        }
        let (version, last) = (update.version, update.last);
        self.pieces.push(update);
        if last {
            let change = replica::change(std::mem::take(&mut self.pieces), &self.plan)?;
            self.version = version;
            replica::acknowledge(primary, self.part, version);
            self.shard.follow(&change);
        }
        Ok(())
    }

    fn take_due_snapshots(&mut self) {
        if self.snapshots.is_empty() {
            return;
        }
        let now = self.shard.settled_by_members();
        for (at, reply) in self.snapshots.extract_if(.., |(at, _)| *at <= now) {
            let _ = reply.send((at == now).then(|| self.shard.state()));
        }
    }
}

fn pushes(released: Vec<oneshot::Sender<()>>) -> Vec<Waiting> {
    released.into_iter().map(Waiting::Push).collect()
}
