//! The state that the services and tasks of one server share: the members, the blocks once the model is known, the open
//! streams, and the server's part in recovery and replication. Nothing here waits for the network or the disk.

pub mod batch_assignment;
pub mod election;
pub mod failed_write;
pub mod membership;
pub mod metrics;
pub mod recovery;
pub mod replica_role;
pub mod replication;
pub mod series;
pub mod streams;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio_util::task::TaskTracker;
use tonic::Status;

use self::batch_assignment::BatchAssignments;
use self::membership::Membership;
use self::metrics::Metrics;
use self::recovery::Recovery;
use self::replication::Replication;
use self::series::Series;
use self::streams::{Arrival, StreamKind, Streams};
use crate::batch::sharing::Sharing;
use crate::block::{Progress, Start, Store};
use crate::clock::now;
use crate::layout::{Layout, TensorSpec};
use crate::owner_tasks::OwnerTasks;
use crate::parameter_group::stretches;
use crate::proto;
use crate::replication_log::ReplicaRole;
use crate::series::past::SharedPast;
use crate::server::config::ServerConfig;
use crate::shm::{self, Mapping, Offer};
use crate::sparse::{Place, TableSpec, Tables};
use crate::training_rules::TrainingRules;
use crate::unknown_peers::StreamPlaces;
use crate::wire::StreamAbort;

/// Upper limit on the tasks that hold the rows of tables; more do not make them faster.
const MOST_SHARDS: usize = 16;
/// Number of those tasks where two servers hold the rows: both divide them alike, however many cores they have.
const REPLICATED_SHARDS: usize = 8;
/// Streams that may be open at once and have yet to say whose they are. With the longest first message each, 64 KiB, they
/// cost 64 MiB.
const MAX_UNKNOWN_STREAMS: usize = 1024;

/// How long a trainer that joins waits for the checkpoint before it is refused: half of the time that it gives to an attempt
/// (`TRY` in client/connecting.rs).
const JOIN_WAIT: Duration = Duration::from_secs(5);

/// The state of one server. Its locks are held for a few assignments, never across an await.
pub struct ServerState {
    pub config: ServerConfig,
    pub metrics: Metrics,
    pub rules: Arc<TrainingRules>,
    pub tasks: TaskTracker,
    /// The tasks of blocks and rows, of `tasks`.
    pub owners: OwnerTasks,
    /// Notified when the last trainer has left.
    pub done: Notify,
    /// Notified when a trainer leaves.
    pub left: Notify,
    pub recovery: Arc<Recovery>,
    /// Set if every block is held by two servers.
    pub replication: Option<Replication>,
    /// The socket on which trainers of this host offer their memory.
    pub shared_memory: Option<Arc<Offer>>,
    /// The share of each trainer in a batch, on server 0 of a job with adaptive batches.
    pub sharing: Option<Mutex<Sharing>>,
    /// The points of metrics that trainers send, on server 0 of a job that keeps them.
    pub series: Option<Series>,
    /// The curves of the job until now, on server 0.
    pub past: SharedPast,
    /// The batches of each trainer, on server 0 of an elastic job.
    pub batch_assignments: Option<BatchAssignments>,
    membership: Mutex<Membership>,
    store: OnceLock<Store>,
    /// The sparse tables by shard, once a trainer or another server has described them.
    tables: Mutex<BTreeMap<u32, Arc<Tables>>>,
    /// Beside sparse tables the servers train the dense layers, not the trainers.
    servers_train_layers: AtomicBool,
    /// Notified when the model or tables are known.
    known: Notify,
    streams: Mutex<Streams>,
    /// Places of streams that have yet to say whose they are.
    pub(in crate::server) unknown: StreamPlaces,
}

impl ServerState {
    pub fn new(config: ServerConfig) -> Arc<Self> {
        let (uid, timeouts) = (config.job_uid.clone(), config.timeouts.clone());
        let mut membership = Membership::new(uid, config.trainers, config.min_trainers, timeouts, now());
        membership.expect_no_more_of(&config.finished_trainers);
        let shared_memory = config.shared_memory.then(shm::offer).and_then(|offer| {
            offer.inspect_err(|error| tracing::warn!(%error, "no shared memory; trainers of this host use TCP")).ok()
        });
        let (recovery, tasks) = (Arc::new(Recovery::new(config.servers)), TaskTracker::new());
        let replication = Replication::new(&config, recovery.clone());
        let batch = &config.training.batch;
        let sharing =
            (batch.adaptive && config.index == 0).then(|| Mutex::new(Sharing::new(config.trainers, batch.into())));
        let keeps_series = config.index == 0 && (config.series.is_some() || config.checkpoint.is_some());
        let batch_assignments = (config.min_trainers.is_some() && config.index == 0).then(BatchAssignments::default);
        let series = keeps_series.then(|| Series::for_trainers(config.trainers));
        Arc::new(Self {
            shared_memory,
            rules: Arc::new(TrainingRules::new(&config.training, config.trainers, &config.finished_trainers)),
            config,
            metrics: Metrics::default(),
            owners: OwnerTasks::new(tasks.clone()),
            tasks,
            done: Notify::new(),
            left: Notify::new(),
            recovery,
            replication,
            sharing,
            series,
            past: SharedPast::default(),
            batch_assignments,
            known: Notify::new(),
            tables: Mutex::default(),
            servers_train_layers: AtomicBool::new(false),
            membership: Mutex::new(membership),
            store: OnceLock::new(),
            streams: Mutex::default(),
            unknown: StreamPlaces::new(MAX_UNKNOWN_STREAMS),
        })
    }

    pub fn members(&self) -> MutexGuard<'_, Membership> {
        // A panic under this lock leaves counters behind, nothing half-written that matters.
        self.membership.lock()
    }

    /// Returns the shares of the trainers in a batch; an error where batches are fixed.
    pub fn sharing(&self) -> Result<MutexGuard<'_, Sharing>, Status> {
        let sharing = self.sharing.as_ref().ok_or_else(|| {
            Status::invalid_argument(
                "the batch of this job's trainers is fixed; set spec.training.batch.adaptive, or start server 0 with \
                 --adaptive-batch",
            )
        })?;
        // A panic under this lock leaves a state that shares can still be computed from.
        Ok(sharing.lock())
    }

    /// Returns the blocks; an error before the first Join, which a trainer sees if this server was restarted after its
    /// own.
    pub fn store(&self) -> Result<&Store, Status> {
        self.store.get().ok_or_else(|| Status::aborted("no trainer has joined yet; call Join first"))
    }

    /// Returns the blocks; the first trainer's tensors determine them.
    pub fn store_for(&self, layout: Layout, tensors: &[TensorSpec]) -> &Store {
        let start = |shards| {
            let config = &self.config;
            tracing::info!(
                tensors = tensors.len(),
                parameters = layout.elements(),
                blocks = layout.owned_by(config.index).count(),
                "the first trainer has described the model"
            );
            Store::start(Start {
                layout,
                stretches: &stretches(tensors),
                shards,
                trainers: config.trainers,
                elastic: config.min_trainers.is_some(),
                epoch: self.recovery.epoch(),
                rules: &self.rules,
                metrics: &self.metrics.blocks,
                tasks: &self.owners,
            })
        };
        let store = match &self.replication {
            Some(replication) => replication.with_roles(|shards| self.store.get_or_init(|| start(shards))),
            None => self.store.get_or_init(|| start([(self.config.index, ReplicaRole::Alone)].into())),
        };
        self.known.notify_waiters();
        store
    }

    /// Returns the epoch for a trainer that joins; an error while the servers look for a checkpoint to begin with.
    pub fn epoch(&self) -> Result<u64, Status> {
        let epoch = self.recovery.epoch();
        if self.config.checkpoint.is_some() && (epoch == 0 || self.recovery.awaits_restore()) {
            return Err(Status::unavailable("the servers are looking for the newest checkpoint"));
        }
        if self.recovery.is_held() {
            return Err(Status::unavailable("server 0 ends, and its successor is waited for"));
        }
        Ok(epoch)
    }

    /// As [`ServerState::epoch`], but first waits until the checkpoint is restored. A trainer that is refused meanwhile would pause
    /// for about as long as the restore has taken. Where two servers hold the blocks the answer comes at once, because it names
    /// the server that may lead them.
    pub async fn epoch_when_whole(&self) -> Result<u64, Status> {
        if self.config.checkpoint.is_some() && self.replication.is_none() {
            tokio::select! {
                biased;
                () = self.recovery.wait_until_whole() => {}
                () = self.config.ending.cancelled() => {}
                () = tokio::time::sleep(JOIN_WAIT) => {}
            }
        }
        self.epoch()
    }

    /// Refuses a message from before the servers restored a checkpoint: it belongs to a state that was discarded. A server that
    /// takes no more gradients refuses all messages, as its state is discarded soon.
    pub fn check_epoch(&self, epoch: u64) -> Result<(), Status> {
        if epoch == self.recovery.epoch() && !self.recovery.is_held() {
            return Ok(());
        }
        Err(Status::aborted("the servers went to a checkpoint since this trainer joined; join again"))
    }

    /// Returns the sparse tables of `shard`; the first trainer's specs, or those of a checkpoint or of the shard's primary,
    /// determine them. `specs` must be valid.
    pub fn tables_for(&self, shard: u32, specs: &[TableSpec]) -> Arc<Tables> {
        let start = |role| {
            let mut tables = self.lock_tables();
            let start = || {
                tracing::info!(tables = specs.len(), "the sparse tables of server {shard} are known");
                let config = &self.config;
                let cores = || thread::available_parallelism().map_or(1, |cores| cores.get().min(MOST_SHARDS));
                let place = Place {
                    server: shard,
                    servers: config.servers,
                    trainers: config.trainers,
                    seed: config.training.seed,
                    shards: if self.replication.is_some() { REPLICATED_SHARDS } else { cores() },
                };
                Arc::new(Tables::start(specs.to_vec(), place, role, &self.rules, &self.owners))
            };
            tables.entry(shard).or_insert_with(start).clone()
        };
        let tables = match &self.replication {
            Some(replication) => {
                replication.with_roles(|roles| start(roles.get(&shard).copied().unwrap_or(ReplicaRole::Backup)))
            }
            None => start(ReplicaRole::Alone),
        };
        self.known.notify_waiters();
        tables
    }

    /// Returns the sparse tables of `shard`, if they are known.
    pub fn tables(&self, shard: u32) -> Option<Arc<Tables>> {
        self.lock_tables().get(&shard).cloned()
    }

    /// Returns the sparse tables of this server's own shard, if they are known.
    pub fn own_tables(&self) -> Option<Arc<Tables>> {
        self.tables(self.config.index)
    }

    /// Returns the sparse tables of this server's own shard in a job whose trainers train the dense layers themselves.
    pub fn tables_beside_own_layers(&self) -> Option<Arc<Tables>> {
        self.own_tables().filter(|_| !self.servers_train_layers())
    }

    /// Returns whether the servers train the dense layers beside sparse tables, as far as is known.
    pub fn servers_train_layers(&self) -> bool {
        self.servers_train_layers.load(Ordering::Relaxed)
    }

    /// Records who trains the dense layers beside sparse tables: all trainers and checkpoints of a job say the same.
    pub fn set_servers_train_layers(&self, servers: bool) {
        self.servers_train_layers.store(servers, Ordering::Relaxed);
    }

    /// Returns the sparse tables of all shards that this server holds.
    pub fn all_tables(&self) -> Vec<Arc<Tables>> {
        self.lock_tables().values().cloned().collect()
    }

    fn lock_tables(&self) -> MutexGuard<'_, BTreeMap<u32, Arc<Tables>>> {
        // Only insertions are made under this lock.
        self.tables.lock()
    }

    /// Resolves when the model or tables become known after this call.
    pub fn known(&self) -> impl Future<Output = ()> + '_ {
        self.known.notified()
    }

    /// Returns how far training has come on this server, `None` while blocks have no values.
    pub async fn progress(&self) -> Option<Progress> {
        let store = self.store().ok()?;
        let Some(tables) = self.tables_beside_own_layers() else { return store.progress(self.config.index).await };
        // The blocks hold the layers that trainers train themselves, as they were stored last.
        let step = tables.progress().await.ok()?;
        Some(Progress { version: step, step })
    }

    /// Returns the name of the tensor that a block begins with, for display.
    pub fn tensor_of(&self, block: u32) -> String {
        let Ok(store) = self.store() else { return String::new() };
        let (start, mut end) = (store.layout().range(block).start, 0);
        let members = self.members();
        let named = members.tensors().iter().find(|tensor| {
            end += tensor.elements().unwrap_or(0);
            start < end
        });
        named.map_or_else(String::new, |tensor| tensor.name.clone())
    }

    /// Waits until the model is known.
    pub async fn model_known(&self) {
        loop {
            let known = self.known();
            if self.store.get().is_some() {
                return;
            }
            known.await;
        }
    }

    /// Returns the shards that this server holds, ascending.
    pub fn shards(&self) -> Vec<u32> {
        self.replication.as_ref().map_or_else(|| vec![self.config.index], Replication::shards)
    }

    /// Returns the servers that hold `shard`; the one that it is named after comes first.
    pub fn holders(&self, shard: u32) -> Vec<u32> {
        let next = self.replication.as_ref().map(|_| (shard + 1) % self.config.servers);
        std::iter::once(shard).chain(next).collect()
    }

    /// Returns the shard that a trainer means, by default this server's; an error if another server is its primary.
    pub fn shard(&self, shard: Option<u32>) -> Result<u32, Status> {
        let own = self.config.index;
        let shard = shard.unwrap_or(own);
        match &self.replication {
            Some(replication) => drop(replication.leads(shard)?),
            None if shard != own => {
                return Err(Status::invalid_argument(format!(
                    "the blocks of server {shard} are not here; this is server {own}, check the order of addresses"
                )));
            }
            None => {}
        }
        Ok(shard)
    }

    /// Returns the term of the newest elected leader whose updates this server, which leads `shard`, has; 0 if none was
    /// elected. An answer that a trainer relies on is given only if this succeeds afterwards.
    ///
    /// # Errors
    /// If this server leads the shard no more.
    pub fn leader_term(&self, shard: u32) -> Result<u64, Status> {
        self.replication.as_ref().map_or(Ok(0), |replication| replication.leads(shard))
    }

    /// Checks that no leader of `shard` was elected since a trainer joined it in `term`.
    ///
    /// # Errors
    /// If one was, or this server leads the shard no more.
    pub fn check_leader_term(&self, shard: u32, term: u64) -> Result<(), Status> {
        if self.leader_term(shard)? == term {
            return Ok(());
        }
        Err(Status::unavailable("a leader of these blocks was elected since this trainer joined; join again"))
    }

    /// Adds to a refusal what this server is in the shard that was meant.
    pub fn with_holder(&self, shard: Option<u32>, refusal: Status) -> Status {
        let replication = self.replication.as_ref();
        match shard.zip(replication).and_then(|(shard, replication)| replication.holder(shard)) {
            Some(holder) => replication::with_holder(&refusal, &holder),
            None => refusal,
        }
    }

    /// Records that a trainer was given what it has of `shard` by the leader of `term` in `epoch`. If the copy here is of
    /// that epoch and lacks that leader's updates, this server leads the shard no more.
    pub fn hear_of_leader(&self, shard: u32, term: u64, epoch: u64) {
        let replication = self.replication.as_ref().filter(|_| epoch == self.recovery.epoch());
        if replication.is_some_and(|replication| replication.hear_of_leader(shard, term)) {
            self.close_streams_to(shard);
        }
    }

    /// Returns the memory that a stream's trainer shares; nothing for token 0.
    pub fn memory(&self, token: u64, elements: usize) -> Result<Option<Arc<Mapping>>, Status> {
        if token == 0 {
            return Ok(None);
        }
        let memory =
            self.shared_memory.as_ref().and_then(|offer| offer.take(token)).ok_or_else(|| {
                Status::aborted("the shared memory token is not known here; hand the memory over again")
            })?;
        if memory.elements() != elements {
            return Err(Status::invalid_argument(format!(
                "the shared memory holds {} parameters, the model has {elements}",
                memory.elements()
            )));
        }
        Ok(Some(memory))
    }

    /// Returns the memory in which a trainer wants the values that it pulls; nothing if it is not known here, or has another number
    /// of parameters. The values are sent then.
    pub fn mapping_of_pull(&self, token: u64, elements: usize) -> Option<Arc<Mapping>> {
        self.shared_memory.as_ref()?.mapping_of_pull(token).filter(|memory| memory.elements() == elements)
    }

    /// Records that a call arrived, in the order in which the streams of a trainer replace one another.
    pub fn arrive(&self) -> Arrival {
        self.streams().arrive()
    }

    /// Registers a stream of a trainer, which `end` aborts, and aborts the streams that it replaces; or itself, if the
    /// trainer has opened a newer one meanwhile.
    pub fn open_stream(
        &self,
        id: &proto::TrainerId,
        shard: u32,
        kind: StreamKind,
        (arrival, end): (Arrival, &StreamAbort),
    ) {
        let why = Status::aborted(format!("a newer stream of trainer {} has taken the place of this", id.index));
        let replaced = self.streams().open(id, shard, kind, (arrival, end.clone()));
        replaced.into_iter().for_each(|before| before.abort(why.clone()));
    }

    /// Aborts all streams of a trainer.
    pub fn disconnect(&self, trainer: u32, why: &Status) {
        let open = self.streams().of(trainer);
        open.into_iter().for_each(|end| end.abort(why.clone()));
    }

    /// Returns whether this server decides that the job has ended. In an elastic job with checkpoints only server 0 does
    /// and notifies the others, because each server detects lost trainers at another time.
    pub fn decides_the_end(&self) -> bool {
        self.config.min_trainers.is_none() || self.config.checkpoint.is_none() || self.config.index == 0
    }

    /// Returns whether this server has the state of the job, as far as any is kept: from a checkpoint or the other holder of
    /// its blocks.
    pub fn has_state(&self) -> bool {
        if self.config.checkpoint.is_some() {
            return !self.recovery.awaits_restore();
        }
        self.replication.as_ref().is_none_or(Replication::has_settled)
    }

    /// Returns whether a checkpoint is going to take the place of what this server holds: it is on its way there, or has
    /// started, and some of its state is in no other process.
    pub fn is_to_be_restored(&self) -> bool {
        let is_given = || self.replication.as_ref().and_then(Replication::is_given);
        let awaits = || self.config.checkpoint.is_some() && self.recovery.awaits_restore();
        self.recovery.is_restoring() || awaits() && is_given() == Some(false)
    }

    /// Ends the job if every trainer has left well and this server decides that. No trainer can join from then on: it would
    /// wait for servers that end, and one of an elastic job would be missing in the last checkpoint.
    pub fn end_if_done(&self, members: &mut Membership) -> bool {
        let done = members.done() && self.decides_the_end();
        if done {
            members.close();
            self.done.notify_one();
        }
        done
    }

    /// Removes a trainer of an elastic job: rounds no longer wait for it, and others are assigned its unfinished batches.
    pub async fn part(&self, trainer: u32, why: &Status) {
        // First, so that no gradient of it reaches a block after the block has removed it.
        self.disconnect(trainer, why);
        if let Some(batch_assignments) = &self.batch_assignments {
            batch_assignments.assigner().give_back(trainer);
        }
        self.finish(trainer).await;
    }

    /// Returns whether this server's end would leave no process but trainers that knows who has finished.
    pub fn is_alone_with_the_finished(&self) -> bool {
        self.config.min_trainers.is_none() && self.config.checkpoint.is_none() && self.replication.is_none()
    }

    /// Waits no longer for trainers that have finished, as a process before this one has said to others.
    pub async fn learn_finished(&self, trainers: &[u32]) {
        if trainers.is_empty() || !self.is_alone_with_the_finished() {
            return;
        }
        let finished = self.members().learn_finished(trainers);
        for trainer in finished {
            tracing::info!(trainer, "had finished before this server was started");
            self.finish(trainer).await;
        }
    }

    /// Notifies all blocks and tables that a trainer has finished or left.
    pub async fn finish(&self, trainer: u32) {
        if let Ok(store) = self.store() {
            store.finish(trainer).await;
        }
        for tables in self.all_tables() {
            tables.finish(trainer).await;
        }
    }

    fn streams(&self) -> MutexGuard<'_, Streams> {
        self.streams.lock()
    }

    /// Aborts the streams of trainers to the blocks of `shard`.
    pub fn close_streams_to(&self, shard: u32) {
        let open = self.streams().to(shard);
        for end in open {
            end.abort(Status::unavailable("another server may lead these blocks now; join again"));
        }
    }

    /// Takes no more gradients in `epoch`, until this server is restored.
    pub fn hold_training(&self, epoch: u64) {
        self.recovery.hold(epoch);
        self.close_streams();
    }

    /// Aborts all streams.
    pub fn close_streams(&self) {
        let open = self.streams().all();
        for end in open {
            end.abort(Status::aborted("the servers go to a checkpoint or end; join again"));
        }
        if let Some(replication) = &self.replication {
            replication.restart();
        }
    }
}
