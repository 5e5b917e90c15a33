//! One server's part of a checkpoint: written from the blocks while training continues, and restored into them.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::future::{join, join_all};
use futures::stream::{self, StreamExt as _};
use psjobs_api::free_memory::return_free_memory;
use psjobs_api::training::ConsistencyMode;
use tonic::Status;

use super::error::RecoveryError;
use super::extent::extent;
use super::part_limits::{bytes_of, in_time, time_to_write, with_layers};
use crate::block::Store;
use crate::checkpoint::format::{FORMAT, LOCAL_STEPS, MANIFEST, PartEntry};
use crate::checkpoint::read::Damage;
use crate::checkpoint::rows::{self, RowsDescription};
use crate::checkpoint::runs::{JobIdentity, presumed};
use crate::checkpoint::write::flush_folder;
use crate::checkpoint::{
    BlockState, Checkpoint, CheckpointId, Concluded, Description, Folder, PartWriter, Runs, WriteError,
};
use crate::clock::now;
use crate::layout::Layout;
use crate::proto;
use crate::server::config::CheckpointConfig;
use crate::server::state::ServerState;
use crate::server::state::recovery::LastCheckpoint;
use crate::server::state::replication::Replication;
use crate::sparse::TableSpec;

/// Blocks that are read at once, 8 MiB of each column.
const GROUP: usize = 8;
/// Groups of blocks that are under way at the same time. While one is waited for, others are compared with their checksums.
const AT_ONCE: usize = 6;

/// Bytes of copies for a checkpoint that a server does not keep when it is written.
const MUCH_MEMORY: u64 = 16 << 20;

/// The files that a server has written.
pub struct Written {
    pub part: PartEntry,
    /// The rows of sparse tables, if the job has any.
    pub rows: Option<PartEntry>,
}

/// The state that all servers go to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The run of the job.
    pub run: u32,
    /// The checkpoint, of this run or one that it descends from; `None` begins from nothing.
    pub checkpoint: Option<CheckpointId>,
    /// Trainers of which the checkpoint has every step.
    pub concluded: Concluded,
}

/// Checks that a request is of the epoch that this server is in.
///
/// # Errors
/// If it is of another one.
pub fn check_epoch(state: &ServerState, asked: u64) -> Result<(), RecoveryError> {
    let (server, own) = (state.config.index, state.recovery.greatest_epoch());
    let same = asked == own && asked == state.recovery.epoch();
    if same { Ok(()) } else { Err(RecoveryError::Epoch { server, own, asked }) }
}

/// Checks that no later process of server 0 has asked for anything than that of incarnation `asked`, which asks now.
///
/// # Errors
/// If one has: a process that was replaced leads no more.
pub fn check_leader(state: &ServerState, asked: u32) -> Result<(), RecoveryError> {
    let server = state.config.index;
    state.recovery.hear_leader(asked).map_err(|newest| RecoveryError::Replaced { server, asked, newest })
}

/// Writes the part of `shard`, which this server leads, of the checkpoint that `request` names: the blocks at its version, or as
/// they are. A server that becomes a backup of the shard meanwhile writes nothing: the new leader is asked for the part. Nor
/// does one of which it is not certain that it has all that was acknowledged before the call.
/// Waits for the version as long as the caller does, and for the disk as long as the bytes of the part may take.
pub async fn write(
    state: &ServerState,
    shard: u32,
    request: &proto::SnapshotRequest,
) -> Result<Written, RecoveryError> {
    let proto::SnapshotRequest { run, step, version, epoch, leader, .. } = *request;
    let id = CheckpointId { run, step };
    let config = state.config.checkpoint.as_ref().expect("only called where checkpoints are kept");
    let store = state.store().map_err(|_| RecoveryError::Empty)?;
    let may_not_lead = |status: Status| RecoveryError::MayNotLead(status.message().to_owned());
    let led = state.replication.as_ref().map(|replication| Ok((replication, replication.leads(shard)?)));
    let led = led.transpose().map_err(may_not_lead)?;
    if request.hold {
        state.hold_training(epoch);
    }
    // All blocks are asked at once, so that each is copied as soon as it is there.
    let states = join_all(store.shard(shard).map(|block| store.snapshot(block, version)));
    let tables = state.tables(shard);
    let copies = async {
        match &tables {
            None => (states.await, None),
            Some(tables) => {
                let at = version.filter(|_| !state.servers_train_layers());
                let _layers = at.map(|at| tables.request_layers(at));
                if state.config.training.consistency.mode == ConsistencyMode::Sync {
                    // All at one step.
                    let (states, rows) = join(states, tables.snapshot(version)).await;
                    (states, Some(rows))
                } else {
                    // As they are when the blocks have come: trainers are a step or two apart, and rows with them.
                    (states.await, Some(tables.snapshot(None).await))
                }
            }
        }
    };
    let (states, rows) = match version.filter(|_| state.tables_beside_own_layers().is_some()) {
        Some(version) => with_layers(state, version, copies).await?,
        None => copies.await,
    };
    let past = || version.map_or(RecoveryError::Empty, RecoveryError::Past);
    if let Some((replication, term)) = led {
        let led_since = replication.confirm_leads(shard).await.map_err(may_not_lead)?;
        if led_since != term {
            let text = format!("another server led the blocks of server {shard} meanwhile");
            return Err(RecoveryError::MayNotLead(text));
        }
    }
    let states: Vec<BlockState> = states.into_iter().collect::<Option<_>>().ok_or_else(past)?;
    let rows = rows.map(|rows| rows.ok_or_else(past)).transpose()?;
    let previous = version.is_none() && store.keeps_previous();
    let description = Description { previous, ..describe(state, shard, id.step, store.layout()) };
    let of_rows = tables.map(|tables| describe_rows(state, &description, tables.specs()));
    let folder = Runs::new(&config.folder).path(id);
    let bytes = bytes_of(&states, rows.as_deref().unwrap_or_default());
    let limit = time_to_write(bytes);
    let _awaited = state.recovery.awaited.read().await;
    // A leader that has given up on a part may ask for it again while it is still being written.
    let writing = in_time(limit, state.recovery.writing.clone().lock_owned()).await?;
    check_epoch(state, epoch)?;
    // The part of a later process of server 0 may be there already.
    check_leader(state, leader)?;
    let written = config.folder.disk().work(move || {
        let _writing = writing;
        let manifest = folder.join(MANIFEST);
        if folder.disk().exists(&manifest).map_err(WriteError::at(&manifest))? {
            return Err(RecoveryError::Complete { folder: folder.to_path_buf() });
        }
        let rows = rows.zip(of_rows).map(|(rows, of_rows)| rows::write(&folder, of_rows, &rows)).transpose()?;
        let part = write_part(&folder, &description, states);
        // A server with 1 GB of parameters stayed at 1.3 to 2.9 GB after a checkpoint, and has 1.04 GB with this
        // (docs/performance.md has the command).
        if bytes >= MUCH_MEMORY {
            return_free_memory();
        }
        Ok(Written { part: part?, rows })
    });
    in_time(limit, written).await?
}

fn write_part(folder: &Folder, description: &Description, states: Vec<BlockState>) -> Result<PartEntry, WriteError> {
    let mut writer = PartWriter::create(folder, description)?;
    for state in states {
        writer.put(&state)?;
    }
    writer.finish()
}

fn describe_rows(state: &ServerState, description: &Description, tables: &[TableSpec]) -> RowsDescription {
    let Description { format, job, step, server, servers, .. } = description.clone();
    let (rows, clocks, slots) = (Vec::new(), Vec::new(), state.rules.rows_optimizer.slots());
    let (tables, servers_train_layers) = (tables.to_vec(), state.servers_train_layers());
    RowsDescription { format, job, step, server, servers, slots, tables, servers_train_layers, rows, clocks }
}

fn describe(state: &ServerState, shard: u32, step: u64, layout: &Layout) -> Description {
    let config = &state.config;
    Description {
        format: FORMAT,
        job: config.job_uid.clone(),
        step,
        server: shard,
        servers: config.servers,
        trainers: config.trainers,
        block_elements: layout.block_elements(),
        slots: state.rules.optimizer.slots(),
        previous: false,
        training: serde_json::to_value(&config.training).expect("training is JSON"),
        tensors: state.members().tensors().to_vec(),
    }
}

/// Answers server 0, which may be this server: restores what `request` names, also if the caller dies meanwhile, so that no
/// server is left between two states.
///
/// # Errors
/// If it cannot be restored, as the code of each [`RecoveryError`] says, or this server ends.
pub async fn answer_restore(
    state: &Arc<ServerState>,
    request: proto::RestoreRequest,
) -> Result<proto::RestoreReply, Status> {
    check_leader(state, request.leader)?;
    state.recovery.last_written.send_replace(false);
    let checkpoint = request.checkpoint.map(|place| CheckpointId { run: place.run, step: place.step });
    let target = Target { run: request.run, checkpoint, concluded: request.concluded };
    let (restored, epoch) = (state.clone(), request.epoch);
    let restoring = state.tasks.spawn(async move { restore(&restored, epoch, &target).await });
    restoring.await.map_err(|_| Status::unavailable("this server ends"))??;
    let has_blocks = state.store().is_ok_and(|store| store.shard(state.config.index).next().is_some());
    let extent = if has_blocks { extent(state).await.map(proto::Extent::from) } else { None };
    Ok(proto::RestoreReply { instance: state.recovery.instance, extent })
}

/// Aborts the training streams and restores `target`. Trainers that have concluded in it need not join again.
pub async fn restore(state: &ServerState, epoch: u64, target: &Target) -> Result<(), RecoveryError> {
    let (config, recovery) = (&state.config, &state.recovery);
    let kept = config.checkpoint.as_ref().expect("only called where checkpoints are kept");
    let overtaken = |own| RecoveryError::Epoch { server: config.index, own, asked: epoch };
    if epoch > recovery.greatest_epoch() {
        check_recorded(state, kept, epoch, target.run).await?;
    }
    recovery.ask_for(epoch).map_err(overtaken)?;
    let _loading = recovery.loading.lock().await;
    // Another leader may have asked for a later epoch meanwhile.
    recovery.ask_for(epoch).map_err(overtaken)?;
    // Where the epoch was only taken over with the blocks of one shard, the others are yet to be restored.
    if epoch == recovery.epoch() && !recovery.awaits_restore() {
        return Ok(()); // The request was carried out; its answer got lost.
    }
    recovery.set_run(target.run);
    let has_copies = |replication: &Replication| replication.holds_copies_alone(epoch);
    if epoch == recovery.epoch() && state.replication.as_ref().is_some_and(has_copies) {
        // The others went to the checkpoint before, and may be past it. What is in none of their copies is in the checkpoint.
        if let Some(id) = target.checkpoint {
            let checkpoint = open(state, kept, id).await?;
            let path = checkpoint.folder().clone();
            if let Some(batch_assignments) = &state.batch_assignments {
                batch_assignments.assigner().restore(checkpoint.dealt().clone());
            }
            recovery.set_newest(checkpoint.folder().disk().work(move || LastCheckpoint::complete(id, path)).await);
        }
        recovery.set_whole();
        return Ok(());
    }
    let Some(id) = target.checkpoint else {
        return rewind(state, epoch, None, &target.concluded).await;
    };
    let checkpoint = open(state, kept, id).await?;
    fits(state, &checkpoint)?;
    rewind(state, epoch, Some((id, checkpoint)), &target.concluded).await
}

async fn open(state: &ServerState, config: &CheckpointConfig, id: CheckpointId) -> Result<Checkpoint, RecoveryError> {
    let folder = Runs::new(&config.folder).path(id);
    let opened = folder.clone();
    let checkpoint = folder.disk().work(move || Checkpoint::open(&opened)).await;
    checkpoint.map_err(|damage| fault(state, &folder, &damage))
}

/// Checks that server 0 has recorded `asked` as the newest epoch of `run`. A request of anybody else, who cannot write to the
/// folder, or of a process of server 0 that was replaced and does not know it, neither discards this server's state nor makes it
/// refuse the epochs that follow.
async fn check_recorded(
    state: &ServerState,
    config: &CheckpointConfig,
    asked: u64,
    run: u32,
) -> Result<(), RecoveryError> {
    let runs = Runs::new(&config.folder);
    let why = match config.folder.disk().work(move || runs.record(run)).await {
        Ok(Some(record)) if record.epoch == asked => return Ok(()),
        // A process of server 0 that was replaced since asks.
        Ok(Some(record)) if record.epoch > asked => {
            return Err(RecoveryError::Epoch { server: state.config.index, own: record.epoch, asked });
        }
        Ok(Some(record)) => format!("the epoch of run {run} on record is {}", record.epoch),
        Ok(None) => format!("run {run} has no record"),
        Err(error) => error.to_string(),
    };
    Err(RecoveryError::NotRecorded { server: state.config.index, asked, why })
}

/// Returns the trainers' steps, and the trainers, in the newest checkpoint of this job's run, if that is known and all
/// trainers have concluded in it.
pub async fn whole(state: &ServerState, config: &CheckpointConfig) -> Option<(Vec<u64>, Concluded)> {
    let (uid, job, resume) = (state.config.job_uid.clone(), config.job.clone(), config.resume);
    let job = JobIdentity { uid, job, incarnation: config.incarnation, resume, given: false };
    let (server, trainers) = (state.config.index, state.config.trainers);
    let (runs, known) = (Runs::new(&config.folder), state.recovery.run());
    let found = config.folder.disk().work(move || {
        let chosen = || {
            let records = runs.list().ok()?;
            presumed(&records, &runs.kept(&records).ok()?, &job, server)
        };
        let catalog = runs.catalog(known.or_else(chosen)?);
        let checkpoint = Checkpoint::open(catalog.path(*catalog.complete().ok()?.last()?)).ok()?;
        // The process that wrote it may have ended before its manifest was durable.
        flush_folder(checkpoint.folder().clone()).ok()?;
        let concluded = checkpoint.concluded(trainers);
        let whole = checkpoint.description().job == job.uid && concluded.len() == trainers as usize;
        let steps = whole.then(|| checkpoint.read(0..1).ok())??.next_steps;
        Some((steps, concluded))
    });
    found.await
}

/// A checkpoint can be restored with other servers or another learning rate, not with another
/// model or optimizer.
fn fits(state: &ServerState, checkpoint: &Checkpoint) -> Result<(), RecoveryError> {
    let (description, want) = (checkpoint.description(), state.rules.optimizer.slots());
    let training = &state.config.training;
    let kind = if training.local.is_some() { LOCAL_STEPS } else { training.optimizer.kind.name() };
    if description.slots != want || description.optimizer() != kind {
        let why = format!(
            "it holds the state of optimizer {} ({} slots), the job has {kind} ({want} slots); choose the same \
             optimizer, or another checkpoint folder",
            description.optimizer(),
            description.slots
        );
        return Err(mismatch(checkpoint.folder(), why));
    }
    if let (Some(tables), Some(rows)) = (state.all_tables().first(), checkpoint.rows().first())
        && let Some(difference) = TableSpec::difference(&rows.description().tables, tables.specs())
    {
        let why = format!("its tables are others: {difference}; give the trainers the same arguments as then");
        return Err(mismatch(checkpoint.folder(), why));
    }
    state.members().adopt(&description.tensors).map_err(|difference| {
        let why = format!(
            "it is of another model: {difference}; start the job with the same model, or another checkpoint folder"
        );
        mismatch(checkpoint.folder(), why)
    })
}

async fn rewind(
    state: &ServerState,
    epoch: u64,
    checkpoint: Option<(CheckpointId, Checkpoint)>,
    concluded: &Concluded,
) -> Result<(), RecoveryError> {
    // From here on no trainer can join, and blocks ignore gradients that are still queued.
    state.recovery.set_epoch(0);
    state.close_streams();
    if let Some(replication) = &state.replication {
        replication.discard_copies(epoch);
    }
    if let Some(batch_assignments) = &state.batch_assignments {
        batch_assignments
            .assigner()
            .restore(checkpoint.as_ref().map(|(_, checkpoint)| checkpoint.dealt().clone()).unwrap_or_default());
    }
    let Some((id, checkpoint)) = checkpoint else {
        if let Ok(store) = state.store() {
            join_all(store.numbers().map(|block| store.restore(block, epoch, None))).await;
        }
        clear_tables(state, epoch).await;
        state.members().rewind(&[], &Concluded::new(), now());
        tracing::debug!(epoch, "begins from nothing");
        finish(state, epoch, None);
        return Ok(());
    };
    let description = checkpoint.description();
    let layout = Layout::new(&description.tensors, state.config.servers as usize).map_err(|error| {
        RecoveryError::Unusable { folder: checkpoint.folder().to_path_buf(), why: error.to_string() }
    })?;
    let store = state.store_for(layout, &description.tensors);
    let checkpoint = Arc::new(checkpoint);
    // By the server that wrote them, because its blocks lie one behind the other in its part.
    let mut parts = BTreeMap::<u32, Vec<u32>>::new();
    for block in store.numbers() {
        parts.entry(checkpoint.part_with(&store.layout().range(block))).or_default().push(block);
    }
    let groups: Vec<Vec<u32>> = parts.values().flat_map(|blocks| blocks.chunks(GROUP)).map(<[u32]>::to_vec).collect();
    let restoring: Vec<_> =
        groups.into_iter().map(|blocks| restore_blocks(store, &checkpoint, blocks, epoch)).collect();
    let mut restoring = stream::iter(restoring).buffered(AT_ONCE);
    let mut last = (0, Vec::new());
    while let Some(restored) = restoring.next().await {
        last = last.max(restored.map_err(|damage| fault(state, checkpoint.folder(), &damage))?);
    }
    let (_, steps) = last;
    refill(state, &checkpoint, epoch).await.map_err(|damage| fault(state, checkpoint.folder(), &damage))?;
    let steps = with_rows(state, steps).await;
    state.members().rewind(&steps, concluded, now());
    let path = checkpoint.folder().clone();
    tracing::info!(step = id.step, epoch, path = %path.display(), "restored from a checkpoint");
    let newest = checkpoint.folder().disk().work(move || LastCheckpoint::complete(id, path)).await;
    finish(state, epoch, Some(newest));
    Ok(())
}

/// Reads blocks of a checkpoint and puts them in their places. The state that they have is dropped first, so that a server that has
/// trained before needs no more memory than it has. Returns the last of them, and the next step of each trainer in it.
async fn restore_blocks(
    store: &Store,
    checkpoint: &Arc<Checkpoint>,
    blocks: Vec<u32>,
    epoch: u64,
) -> Result<(u32, Vec<u64>), Damage> {
    join_all(blocks.iter().map(|block| store.restore(*block, epoch, None))).await;
    let ranges: Vec<_> = blocks.iter().map(|block| store.layout().range(*block)).collect();
    let reading = checkpoint.clone();
    let states = checkpoint.folder().disk().work(move || reading.read_all(&ranges)).await?;
    let steps = states.last().map(|state| state.next_steps.clone());
    let last = blocks.last().copied().zip(steps).unwrap_or_default();
    join_all(blocks.into_iter().zip(states).map(|(block, state)| store.restore(block, epoch, Some(state)))).await;
    Ok(last)
}

/// Returns the next step of each trainer, of those that blocks (`of_blocks`) and rows here contain.
pub async fn with_rows(state: &ServerState, of_blocks: Vec<u64>) -> Vec<u64> {
    let Some(tables) = state.own_tables() else { return of_blocks };
    let asked = (0..state.config.trainers).map(|trainer| tables.next_step(trainer));
    let of_rows: Vec<u64> = join_all(asked).await.into_iter().map(Result::unwrap_or_default).collect();
    // Layers that trainers train themselves may have been kept before the steps that the rows contain.
    let both = || of_rows.iter().zip(&of_blocks).map(|(rows, blocks)| *rows.min(blocks)).collect();
    if state.servers_train_layers() { both() } else { of_rows }
}

/// Leaves the tables without rows.
async fn clear_tables(state: &ServerState, epoch: u64) {
    for tables in state.all_tables() {
        tables.replace(tables.blank(), epoch).await;
    }
}

/// Restores the rows of a checkpoint, or none, in every shard that this server holds.
async fn refill(state: &ServerState, checkpoint: &Arc<Checkpoint>, epoch: u64) -> Result<(), Damage> {
    let Some(rows) = checkpoint.rows().first() else {
        clear_tables(state, epoch).await;
        return Ok(());
    };
    let alike = checkpoint.rows().len() == state.config.servers as usize;
    state.set_servers_train_layers(rows.description().servers_train_layers);
    for shard in state.shards() {
        let tables = state.tables_for(shard, &rows.description().tables);
        let (mut refill, reading) = (tables.blank(), checkpoint.clone());
        let refill = checkpoint.folder().disk().work(move || {
            for (of_server, rows) in reading.rows().iter().enumerate() {
                if alike && of_server != shard as usize {
                    continue; // None of its rows belong to the shard.
                }
                for table in 0..rows.description().tables.len() {
                    rows.read(table, |row| {
                        refill.insert(table, row);
                        Ok::<_, Damage>(())
                    })?;
                }
            }
            let clocks: Vec<_> = reading.rows().iter().map(|rows| rows.description().clocks.clone()).collect();
            refill.resume(&clocks);
            Ok::<_, Damage>(refill)
        });
        tables.replace(refill.await?, epoch).await;
    }
    Ok(())
}

fn finish(state: &ServerState, epoch: u64, newest: Option<LastCheckpoint>) {
    if let Some(newest) = newest {
        state.recovery.set_newest(newest);
    }
    state.recovery.set_epoch(epoch);
    state.recovery.set_whole();
}

fn mismatch(folder: &Folder, why: String) -> RecoveryError {
    RecoveryError::Mismatch { folder: folder.to_path_buf(), why }
}

fn fault(state: &ServerState, folder: &Folder, damage: &Damage) -> RecoveryError {
    let (folder, why, server) = (folder.to_path_buf(), damage.to_string(), state.config.index);
    if damage.is_proved() {
        RecoveryError::Unusable { folder, why }
    } else {
        RecoveryError::Unreadable { folder, why, server }
    }
}
