//! What the services of one server share: the members, the blocks once the model is known, and the
//! open streams.

pub mod batch_assignment;
pub mod membership;
pub mod metrics;
pub mod recovery;
pub mod replica_role;
pub mod replication;
pub mod streams;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use tokio::sync::Notify;
use tokio_util::task::TaskTracker;
use tonic::Status;

use self::batch_assignment::Dealing;
use self::membership::Membership;
use self::metrics::Metrics;
use self::recovery::Recovery;
use self::replication::Replication;
use self::streams::{StreamKind, Streams};
use crate::batch::sharing::Sharing;
use crate::block::{Progress, ReplicaRole, Start, Store};
use crate::clock::now;
use crate::layout::{Layout, TensorSpec};
use crate::proto;
use crate::server::config::ServerConfig;
use crate::shm::{self, Mapping, Offer};
use crate::sparse::{Place, TableSpec, Tables};
use crate::training_rules::TrainingRules;
use crate::wire::StreamAbort;

/// More tasks than this share the rows of tables no better.
const MOST_SHARDS: usize = 16;

/// ServerState by the services; the locks are held for a few assignments, never across an await.
pub struct ServerState {
    pub config: ServerConfig,
    pub metrics: Metrics,
    pub rules: Arc<TrainingRules>,
    pub tasks: TaskTracker,
    /// Rung when the last trainer has left.
    pub done: Notify,
    /// Rung when a trainer leaves.
    pub left: Notify,
    pub recovery: Recovery,
    /// If every block is held twice.
    pub replication: Option<Replication>,
    /// Where trainers of this host hand over their memory.
    pub shared_memory: Option<Arc<Offer>>,
    /// Who reads how many examples, on server 0 of a job where that follows the trainers' speed.
    pub sharing: Option<Mutex<Sharing>>,
    /// Who reads which batches, on server 0 of an elastic job.
    pub dealing: Option<Dealing>,
    /// The sparse tables, once a trainer has told them.
    pub tables: OnceLock<Tables>,
    membership: Mutex<Membership>,
    store: OnceLock<Store>,
    /// Rung when the model is known.
    model: Notify,
    streams: Mutex<Streams>,
}

impl ServerState {
    pub fn new(config: ServerConfig) -> Arc<Self> {
        let (uid, timeouts) = (config.job_uid.clone(), config.timeouts.clone());
        let membership = Membership::new(uid, config.trainers, config.min_trainers, timeouts, now());
        let shared_memory = config.shared_memory.then(shm::offer).and_then(|offer| {
            offer.inspect_err(|error| tracing::warn!(%error, "no shared memory; trainers of this host use TCP")).ok()
        });
        let recovery = Recovery::new(config.servers);
        let replication = Replication::new(&config);
        let batch = &config.training.batch;
        let sharing =
            (batch.adaptive && config.index == 0).then(|| Mutex::new(Sharing::new(config.trainers, batch.into())));
        let dealing = (config.min_trainers.is_some() && config.index == 0).then(Dealing::default);
        Arc::new(Self {
            shared_memory,
            rules: Arc::new(TrainingRules::new(&config.training, config.trainers)),
            config,
            metrics: Metrics::default(),
            tasks: TaskTracker::new(),
            done: Notify::new(),
            left: Notify::new(),
            recovery,
            replication,
            sharing,
            dealing,
            model: Notify::new(),
            tables: OnceLock::new(),
            membership: Mutex::new(membership),
            store: OnceLock::new(),
            streams: Mutex::default(),
        })
    }

    pub fn members(&self) -> MutexGuard<'_, Membership> {
        // A panic under this lock leaves counters behind, nothing half-written that matters.
        self.membership.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who reads how many examples; an error where that is fixed.
    pub fn sharing(&self) -> Result<MutexGuard<'_, Sharing>, Status> {
        let sharing = self.sharing.as_ref().ok_or_else(|| {
            Status::failed_precondition(
                "the batch of this job's trainers is fixed; set spec.training.batch.adaptive, or start server 0 with \
                 --adaptive-batch",
            )
        })?;
        // Whatever a panic leaves behind, shares are dealt out of it.
        Ok(sharing.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The blocks; an error for whoever comes before the first Join, perhaps because this server was started anew
    /// after it.
    pub fn store(&self) -> Result<&Store, Status> {
        self.store.get().ok_or_else(|| Status::aborted("no trainer has joined yet; call Join first"))
    }

    /// The blocks, made from the first trainer's tensors.
    pub fn store_for(&self, layout: Layout, tensors: &[TensorSpec]) -> &Store {
        let start = |shards| {
            let config = &self.config;
            tracing::info!(
                tensors = tensors.len(),
                parameters = layout.elements(),
                blocks = layout.owned_by(config.index).count(),
                "the first trainer has told the model"
            );
            Store::start(Start {
                layout,
                shards,
                trainers: config.trainers,
                elastic: config.min_trainers.is_some(),
                epoch: self.recovery.epoch(),
                rules: &self.rules,
                metrics: &self.metrics.blocks,
                tasks: &self.tasks,
            })
        };
        let store = match &self.replication {
            Some(replication) => replication.with_roles(|shards| self.store.get_or_init(|| start(shards))),
            None => self.store.get_or_init(|| start([(self.config.index, ReplicaRole::Alone)].into())),
        };
        self.model.notify_waiters();
        store
    }

    /// The epoch that a trainer comes into; an error while the servers look for a checkpoint to begin with.
    pub fn epoch(&self) -> Result<u64, Status> {
        let epoch = self.recovery.epoch();
        if self.config.checkpoint.is_some() && epoch == 0 {
            return Err(Status::unavailable("the servers are looking for the newest checkpoint"));
        }
        Ok(epoch)
    }

    /// What a trainer sends from before the servers went to a checkpoint belongs to a state that is gone.
    pub fn check_epoch(&self, epoch: u64) -> Result<(), Status> {
        if epoch == self.recovery.epoch() {
            return Ok(());
        }
        Err(Status::aborted("the servers went to a checkpoint since this trainer joined; join again"))
    }

    /// The sparse tables, made from the first trainer's specs or those of a checkpoint, which were validated.
    pub fn tables_for(&self, specs: &[TableSpec]) -> &Tables {
        self.tables.get_or_init(|| {
            tracing::info!(tables = specs.len(), "the sparse tables are known");
            let config = &self.config;
            let place = Place {
                server: config.index,
                servers: config.servers,
                trainers: config.trainers,
                seed: config.training.seed,
                shards: thread::available_parallelism().map_or(1, |cores| cores.get().min(MOST_SHARDS)),
            };
            Tables::start(specs.to_vec(), place, &self.rules, &self.tasks)
        })
    }

    /// How far training is here; `None` while blocks are without values.
    pub async fn progress(&self) -> Option<Progress> {
        let progress = self.store().ok()?.progress(self.config.index).await?;
        let Some(tables) = self.tables.get() else { return Some(progress) };
        // The blocks hold what trainers train themselves, as it was kept last.
        let step = tables.progress().await.ok()?;
        Some(Progress { version: step, step })
    }

    /// Name of the tensor that a block begins with, for people.
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

    /// Waits for the first trainer, who tells the model.
    pub async fn model_known(&self) {
        loop {
            let told = self.model.notified();
            if self.store.get().is_some() {
                return;
            }
            told.await;
        }
    }

    /// The shard that a trainer means: this server's unless it says otherwise; an error if another one leads it.
    pub fn shard(&self, shard: Option<u32>) -> Result<u32, Status> {
        let own = self.config.index;
        let shard = shard.unwrap_or(own);
        match &self.replication {
            Some(replication) => replication.leads(shard)?,
            None if shard != own => {
                return Err(Status::invalid_argument(format!(
                    "the blocks of server {shard} are not here; this is server {own}, check the order of addresses"
                )));
            }
            None => {}
        }
        Ok(shard)
    }

    /// What a stream's trainer shares: nothing for token 0.
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

    /// A trainer opens a stream, which `end` ends: ends those whose place it takes.
    pub fn open_stream(&self, id: &proto::TrainerId, shard: u32, kind: StreamKind, end: &StreamAbort) {
        let why = Status::aborted(format!("a newer stream of trainer {} has taken the place of this", id.index));
        let replaced = self.streams().open(id, shard, kind, end.clone());
        replaced.into_iter().for_each(|before| before.abort(why.clone()));
    }

    /// Ends what a trainer has open.
    pub fn disconnect(&self, trainer: u32, why: &Status) {
        let open = self.streams().of(trainer);
        open.into_iter().for_each(|end| end.abort(why.clone()));
    }

    /// Whether this server ends when its trainers are done. Of an elastic job with checkpoints only server 0 does, and
    /// tells the others: who was lost, and when, each server finds by itself.
    pub fn decides_the_end(&self) -> bool {
        self.config.min_trainers.is_none() || self.config.checkpoint.is_none() || self.config.index == 0
    }

    /// A trainer of an elastic job has gone: nobody waits for it, and what it has not read is dealt to others.
    pub async fn part(&self, trainer: u32, why: &Status) {
        // First, so that nothing of it reaches a block after that has heard.
        self.disconnect(trainer, why);
        if let Some(dealing) = &self.dealing {
            dealing.dealer().give_back(trainer);
        }
        self.finish(trainer).await;
    }

    /// Nobody waits for a trainer any more.
    pub async fn finish(&self, trainer: u32) {
        if let Ok(store) = self.store() {
            store.finish(trainer).await;
        }
        if let Some(tables) = self.tables.get() {
            tables.finish(trainer).await;
        }
    }

    fn streams(&self) -> MutexGuard<'_, Streams> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all streams.
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
