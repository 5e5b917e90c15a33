//! All tables of one server: checks what comes from outside before a task sees it, deals keys out to
//! the tasks and puts their answers together.

use std::sync::Arc;

use futures::future::try_join_all;
use psjobs_api::training::NonFinite;
use psjobs_arithmetic::sums::all_finite;
use tokio::sync::{mpsc, oneshot};
use tokio_util::task::TaskTracker;

use super::counts::Counts;
use super::gradients::Gradients;
use super::layer_requests::{LayerRequest, LayerRequests};
use super::owner::{self, Attached, Command, Owner};
use super::place::Place;
use super::refill::Refill;
use super::shard::{Plan, Shard, ShardState};
use super::{MAX_MESSAGE, TableSpec, key};
use crate::owner_tasks::{Owned, OwnerTasks};
use crate::proto;
use crate::replication_log::{FrameSender, ReplicaRole};
use crate::training_rules::TrainingRules;

/// Commands that wait for one task: a few of every trainer.
const QUEUE: usize = 64;

/// Keys of one table whose rows are wanted.
#[derive(Clone, Debug, PartialEq)]
pub struct Pull {
    /// Place of the table among the job's.
    pub table: u32,
    /// Any keys of this server.
    pub keys: Vec<u64>,
}

/// Gradients of one table's rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Push<B> {
    /// Place of the table among the job's.
    pub table: u32,
    /// Any keys of this server.
    pub keys: Vec<u64>,
    /// A row for each, little-endian f32.
    pub gradients: B,
}

/// A request that does not fit the tables; nothing of it was done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TablesError {
    /// No such table.
    #[error("table {found} does not exist; the job has tables 0 to {}", .tables - 1)]
    NoSuchTable {
        /// Its number.
        found: u32,
        /// Tables of the job.
        tables: usize,
    },
    /// A table comes twice in one push.
    #[error("table {0} comes twice in one push; send all its keys together")]
    Twice(String),
    /// The key's row is on another server.
    #[error("key {key} of table {table} belongs to server {owner}; send it there")]
    Elsewhere {
        /// The table.
        table: String,
        /// The key.
        key: u64,
        /// Its server.
        owner: u32,
    },
    /// Keys and gradients do not belong together.
    #[error("table {table}: {keys} keys with rows of {width} numbers need {} bytes of gradients, {found} came", keys * width * 4)]
    Length {
        /// The table.
        table: String,
        /// Keys that came.
        keys: usize,
        /// Numbers in a row.
        width: usize,
        /// Bytes that came.
        found: usize,
    },
    /// A gradient is not finite.
    #[error(
        "the gradient of trainer {trainer}, step {step}, table {table}, key {key} holds NaN or infinity; nothing of \
         the push was applied: lower the learning rate or look at the loss"
    )]
    NotFinite {
        /// The trainer that sent it.
        trainer: u32,
        /// Its step.
        step: u64,
        /// The table.
        table: String,
        /// The first key of which it is so.
        key: u64,
    },
    /// The answer would be longer than a message may be.
    #[error("the rows asked for have {bytes} bytes, a message has {MAX_MESSAGE} at most; ask for fewer keys at once")]
    TooManyRows {
        /// Bytes of the rows.
        bytes: usize,
    },
    /// The server's tasks are gone.
    #[error("the server is ending; reconnect")]
    Ended,
}

/// The tables of one server.
pub struct Tables {
    plan: Plan,
    place: Place,
    shards: Vec<mpsc::Sender<Command>>,
    counts: Arc<Counts>,
    layer_requests: LayerRequests,
}

impl Tables {
    /// Starts the tasks that own the rows, with a role in replication; they end when the tables are dropped. The specs
    /// were validated.
    pub(crate) fn start(
        specs: Vec<TableSpec>,
        place: Place,
        role: ReplicaRole,
        rules: &Arc<TrainingRules>,
        tasks: &OwnerTasks,
    ) -> Self {
        let counts = Arc::new(Counts::new(&specs));
        let plan = Plan {
            specs: specs.into(),
            rules: rules.clone(),
            trainers: place.trainers,
            seed: place.seed,
            shards: u64::from(place.servers) * place.shards as u64,
        };
        let start = |part| {
            let (sender, receiver) = mpsc::channel(QUEUE);
            tasks
                .spawn(Owned::Rows(part as usize), owner::own(Owner::new(&plan, part, role), receiver, counts.clone()));
            sender
        };
        let shards = (0..place.shards.max(1) as u32).map(start).collect();
        Self { plan, place, shards, counts, layer_requests: LayerRequests::default() }
    }

    /// The job's tables.
    #[must_use]
    pub fn specs(&self) -> &[TableSpec] {
        &self.plan.specs
    }

    /// Returns the counters of these tables.
    #[must_use]
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Rows for a trainer: of each of `wanted` its rows in the order of its keys, little-endian f32.
    ///
    /// # Errors
    /// If a table or key is not of this server, or the answer would be too long.
    pub async fn pull(&self, trainer: u32, wanted: &[Pull]) -> Result<Vec<Vec<u8>>, TablesError> {
        let mut bytes = 0_usize;
        for Pull { table, keys } in wanted {
            let row = self.check(*table, keys)?.width * size_of::<f32>();
            bytes = bytes.saturating_add(keys.len().saturating_mul(row));
        }
        // Before any memory is taken: a row may be hundreds of times as long as its key.
        if bytes > MAX_MESSAGE {
            return Err(TablesError::TooManyRows { bytes });
        }
        try_join_all(wanted.iter().map(|pull| self.pull_one(trainer, pull))).await
    }

    async fn pull_one(&self, trainer: u32, Pull { table, keys }: &Pull) -> Result<Vec<u8>, TablesError> {
        let table = *table as usize;
        let row_bytes = self.plan.specs[table].width * size_of::<f32>();
        let dealt = self.deal(keys);
        let asked = dealt.iter().zip(&self.shards).filter(|(places, _)| !places.is_empty());
        let rows = asked.map(|(places, shard)| async move {
            let keys = places.iter().map(|place| keys[*place]).collect();
            let rows = ask(shard, |reply| Command::Pull { trainer, table, keys, reply }).await?;
            Ok::<_, TablesError>((places, rows))
        });
        let mut bytes = vec![0; keys.len() * row_bytes];
        for (places, rows) in try_join_all(rows).await? {
            let rows: &[u8] = bytemuck::cast_slice(&rows);
            for (place, row) in places.iter().zip(rows.chunks_exact(row_bytes)) {
                bytes[place * row_bytes..][..row_bytes].copy_from_slice(row);
            }
        }
        self.counts.pulls(table, keys.len());
        Ok(bytes)
    }

    /// Takes a trainer's gradients of `step`, sent in the server's `epoch`; returns when the consistency rule lets it
    /// go on.
    ///
    /// # Errors
    /// If something does not fit; nothing was applied then.
    pub async fn push<B: AsRef<[u8]>>(
        &self,
        (trainer, epoch): (u32, u64),
        step: u64,
        pushes: &[Push<B>],
    ) -> Result<(), TablesError> {
        self.check_push(pushes)?;
        let left_out = self.not_finite(trainer, step, pushes)?;
        let mut dealt: Vec<Option<Vec<Gradients>>> = self
            .shards
            .iter()
            .map(|_| (!left_out).then(|| vec![Gradients::default(); self.plan.specs.len()]))
            .collect();
        for Push { table, keys, gradients } in pushes {
            let (table, shards) = (*table as usize, self.shards.len());
            let rows = gradients.as_ref().as_chunks().0.chunks_exact(self.plan.specs[table].width);
            for (key, row) in keys.iter().zip(rows) {
                if let Some(gradients) = &mut dealt[key::shard(*key, shards)] {
                    gradients[table].add_bytes(*key, row);
                }
            }
            self.counts.pushes(table, keys.len());
        }
        // Tasks without a key of it hear of the step, too: a round waits for everybody.
        let given = dealt
            .into_iter()
            .zip(&self.shards)
            .map(|(gradients, shard)| ask(shard, |reply| Command::Push { trainer, epoch, step, gradients, reply }));
        try_join_all(given).await.map(drop)
    }

    /// The first step that not all tasks have from the trainer.
    ///
    /// # Errors
    /// If the server is ending.
    pub async fn next_step(&self, trainer: u32) -> Result<u64, TablesError> {
        let steps = self.shards.iter().map(|shard| ask(shard, |reply| Command::NextStep(trainer, reply)));
        Ok(try_join_all(steps).await?.into_iter().min().unwrap_or(0))
    }

    /// Steps that all rows contain of every trainer that has not finished.
    ///
    /// # Errors
    /// If the server is ending.
    pub async fn progress(&self) -> Result<u64, TablesError> {
        let steps = self.shards.iter().map(|shard| ask(shard, Command::Progress));
        Ok(try_join_all(steps).await?.into_iter().min().unwrap_or(0))
    }

    /// By task everything that outlives this server, when it contains the steps before `at`, or now; `None` if it
    /// contains more, or the server is ending.
    pub async fn snapshot(&self, at: Option<u64>) -> Option<Vec<ShardState>> {
        let states = self.shards.iter().map(|shard| ask(shard, |reply| Command::Snapshot(at, reply)));
        try_join_all(states).await.ok()?.into_iter().collect()
    }

    /// No rows, and as many tasks as there are here: what a checkpoint is read into.
    pub(crate) fn blank(&self) -> Refill {
        let shards = self.shards.iter().map(|_| Shard::new(&self.plan)).collect();
        Refill { place: self.place, shards }
    }

    /// Goes to what was read; pushes from before `epoch` are no longer heard.
    pub(crate) async fn replace(&self, rows: Refill, epoch: u64) {
        let replaced = self.shards.iter().zip(rows.shards);
        let replaced =
            replaced.map(|(shard, other)| ask(shard, |reply| Command::Replace(Box::new(other), epoch, reply)));
        // A task that has ended needs no rows.
        drop(try_join_all(replaced).await);
    }

    /// Asks the trainers for their layers when they have done the steps before `at`, for as long as the request is held.
    pub(crate) fn request_layers(&self, at: u64) -> LayerRequest<'_> {
        self.layer_requests.open(at)
    }

    /// The step after which the trainers' layers are wanted; 0: not.
    pub(crate) fn layers_wanted(&self) -> u64 {
        self.layer_requests.first()
    }

    /// Notifies every task that a trainer has finished.
    pub async fn finish(&self, trainer: u32) {
        for shard in &self.shards {
            // A task that has ended waits for no trainer.
            drop(shard.send(Command::Finish(trainer)).await);
        }
    }

    /// Number of tasks that share the rows.
    pub(crate) fn parts(&self) -> u32 {
        self.shards.len() as u32
    }

    /// Changes the role of these tables in replication.
    pub(crate) async fn set_role(&self, role: ReplicaRole) {
        for shard in &self.shards {
            // A task that has ended needs no role.
            drop(shard.send(Command::SetRole(role)).await);
        }
    }

    /// Lets a backup that holds version `held` of a part follow; returns whether it is sent a copy, which a task of its
    /// own does.
    ///
    /// # Errors
    /// If the server is ending, or is a backup itself.
    pub(crate) async fn attach(
        &self,
        part: u32,
        held: u64,
        backup: &FrameSender,
        tasks: &TaskTracker,
    ) -> Result<bool, TablesError> {
        let shard = &self.shards[part as usize];
        match ask(shard, |reply| Command::Attach(held, backup.clone(), reply)).await?.ok_or(TablesError::Ended)? {
            Attached::UpToDate => Ok(false),
            Attached::Lacks(copy) => {
                let (shard, backup) = (shard.clone(), backup.clone());
                tasks.spawn(async move {
                    if copy.send(&backup).await {
                        let (attach, version) = (copy.attach, copy.version);
                        // A task that has ended sends no updates.
                        drop(shard.send(Command::Copied { attach, version, backup }).await);
                    }
                });
                Ok(true)
            }
        }
    }

    /// Records that the backup has `version` of a part.
    pub(crate) async fn acknowledged(&self, part: u32, version: u64) {
        if let Some(shard) = self.shards.get(part as usize) {
            // A task that has ended holds back no answers.
            drop(shard.send(Command::Acknowledged(version)).await);
        }
    }

    /// Prepares these tables for a new stream from their primary; returns the version of each part.
    ///
    /// # Errors
    /// If the server is ending.
    pub(crate) async fn begin_follow(&self) -> Result<Vec<u64>, TablesError> {
        try_join_all(self.shards.iter().map(|shard| ask(shard, Command::BeginFollow))).await
    }

    /// Takes rows of the primary. The acknowledgement goes to `primary`.
    ///
    /// # Errors
    /// If there is no such part, or the server is ending.
    pub(crate) async fn install(&self, rows: proto::RowsContents, primary: &FrameSender) -> Result<(), TablesError> {
        let shard = self.shards.get(rows.part as usize).ok_or(TablesError::Ended)?;
        shard.send(Command::Install(rows, primary.clone())).await.map_err(|_| TablesError::Ended)
    }

    /// Takes a piece of a change of the primary. The acknowledgement goes to `primary`.
    ///
    /// # Errors
    /// If there is no such part, or the server is ending.
    pub(crate) async fn follow(&self, update: proto::RowsUpdate, primary: &FrameSender) -> Result<(), TablesError> {
        let shard = self.shards.get(update.part as usize).ok_or(TablesError::Ended)?;
        shard.send(Command::Follow(update, primary.clone())).await.map_err(|_| TablesError::Ended)
    }

    /// By task, the places of its keys.
    fn deal(&self, keys: &[u64]) -> Vec<Vec<usize>> {
        let mut dealt = vec![Vec::new(); self.shards.len()];
        for (place, key) in keys.iter().enumerate() {
            dealt[key::shard(*key, self.shards.len())].push(place);
        }
        dealt
    }

    fn check(&self, table: u32, keys: &[u64]) -> Result<&TableSpec, TablesError> {
        let spec = self
            .plan
            .specs
            .get(table as usize)
            .ok_or(TablesError::NoSuchTable { found: table, tables: self.plan.specs.len() })?;
        let Place { server, servers, .. } = self.place;
        match keys.iter().map(|key| (*key, key::server(*key, servers))).find(|(_, owner)| *owner != server) {
            Some((key, owner)) => Err(TablesError::Elsewhere { table: spec.name.clone(), key, owner }),
            None => Ok(spec),
        }
    }

    fn check_push<B: AsRef<[u8]>>(&self, pushes: &[Push<B>]) -> Result<(), TablesError> {
        for (place, Push { table, keys, gradients }) in pushes.iter().enumerate() {
            let spec = self.check(*table, keys)?;
            if pushes[..place].iter().any(|before| before.table == *table) {
                return Err(TablesError::Twice(spec.name.clone()));
            }
            let (keys, width, found) = (keys.len(), spec.width, gradients.as_ref().len());
            if found != keys * width * size_of::<f32>() {
                return Err(TablesError::Length { table: spec.name.clone(), keys, width, found });
            }
        }
        Ok(())
    }

    /// Returns whether the push is left out because of NaN or infinity; an error if it is refused.
    fn not_finite<B: AsRef<[u8]>>(&self, trainer: u32, step: u64, pushes: &[Push<B>]) -> Result<bool, TablesError> {
        if self.plan.rules.non_finite == NonFinite::Pass {
            return Ok(false);
        }
        for Push { table, keys, gradients } in pushes {
            let gradients = gradients.as_ref().as_chunks().0;
            if all_finite(gradients) {
                continue;
            }
            self.counts.left_out();
            if self.plan.rules.non_finite == NonFinite::Skip {
                return Ok(true);
            }
            let spec = &self.plan.specs[*table as usize];
            let bad = gradients.chunks_exact(spec.width).position(|row| !all_finite(row)).unwrap_or(0);
            return Err(TablesError::NotFinite { trainer, step, table: spec.name.clone(), key: keys[bad] });
        }
        Ok(false)
    }
}

async fn ask<T>(
    shard: &mpsc::Sender<Command>,
    command: impl FnOnce(oneshot::Sender<T>) -> Command,
) -> Result<T, TablesError> {
    let (reply, answer) = oneshot::channel();
    shard.send(command(reply)).await.map_err(|_| TablesError::Ended)?;
    answer.await.map_err(|_| TablesError::Ended)
}

#[cfg(test)]
mod tests {
    use psjobs_api::Training;

    use super::*;
    use crate::sparse::shard::Clock;

    fn start(role: ReplicaRole) -> Tables {
        let rules = Arc::new(TrainingRules::new(&Training::default(), 1, &[]));
        let place = Place { server: 0, servers: 1, trainers: 1, seed: 0, shards: 2 };
        let specs = vec![TableSpec::new("user", 2, 0.5)];
        Tables::start(specs, place, role, &rules, &OwnerTasks::new(TaskTracker::new()))
    }

    #[tokio::test]
    async fn a_backup_whose_rows_were_cleared_is_equal_to_a_primary_that_begins_and_to_no_later_one() {
        let backup = start(ReplicaRole::Backup);
        backup.replace(backup.blank(), 1).await;
        assert_eq!(backup.begin_follow().await, start(ReplicaRole::Primary).begin_follow().await);
        let mut refill = backup.blank();
        refill.resume(&[vec![Clock { next_steps: vec![3], requests: 7 }; 2]]);
        backup.replace(refill, 2).await;
        assert_eq!(backup.begin_follow().await, Ok(vec![1, 1]), "a primary that begins has version 0");
    }

    #[tokio::test]
    async fn tables_that_become_a_backup_make_their_checkpoint_wait_no_longer() {
        let tables = start(ReplicaRole::Alone);
        assert_eq!(tables.snapshot(Some(0)).await.map(|states| states.len()), Some(2));
        let waiting = tables.snapshot(Some(7));
        // The part of a step to come is asked for before the role changes.
        let (states, ()) = futures::future::join(waiting, tables.set_role(ReplicaRole::Backup)).await;
        assert!(states.is_none());
    }
}
