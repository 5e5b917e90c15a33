//! One server's part: written from the blocks while they train on, and read back into them.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures::future::{join, join_all};
use psjobs_api::training::ConsistencyMode;
use tokio::runtime::{Handle, RuntimeFlavor};

use super::{CheckpointConfig, LastCheckpoint, RecoveryError};
use crate::checkpoint::format::{FORMAT, PartEntry};
use crate::checkpoint::read::Damage;
use crate::checkpoint::rows::{self, RowsDescription};
use crate::checkpoint::{BlockState, Catalog, Checkpoint, Description, PartWriter, WriteError};
use crate::clock::now;
use crate::layout::Layout;
use crate::server::shared::Shared;
use crate::server::tables::difference;
use crate::sparse::TableSpec;

/// What a server has written.
pub struct Written {
    pub part: PartEntry,
    /// The rows of sparse tables, if the job has any.
    pub rows: Option<PartEntry>,
}

/// Writes this server's part of the checkpoint of `step`: the blocks at `version`, or as they are.
pub async fn write(shared: &Shared, step: u64, version: Option<u64>) -> Result<Written, RecoveryError> {
    let config = shared.config.checkpoint.as_ref().expect("only called where checkpoints are kept");
    let store = shared.store().map_err(|_| RecoveryError::Empty)?;
    // All blocks are asked at once, so that each is copied as soon as it is there.
    let states = join_all(store.shard(shared.config.index).map(|block| store.snapshot(block, version)));
    let (states, rows) = match shared.tables.get() {
        None => (states.await, None),
        // All at one step.
        Some(tables) if shared.config.training.consistency.mode == ConsistencyMode::Sync => {
            let (states, rows) = join(states, tables.snapshot(version)).await;
            (states, Some(rows))
        }
        // As they are when the trainers' layers have come: trainers are a step or two apart, and rows with them.
        Some(tables) => (states.await, Some(tables.snapshot(None).await)),
    };
    let past = || version.map_or(RecoveryError::Empty, RecoveryError::Past);
    let states: Vec<BlockState> = states.into_iter().collect::<Option<_>>().ok_or_else(past)?;
    let rows = rows.map(|rows| rows.ok_or_else(past)).transpose()?;
    let description = describe(shared, step, store.layout());
    let of_rows = shared.tables.get().map(|tables| describe_rows(&description, tables.specs()));
    let folder = Catalog::new(&config.folder).path(step);
    // A leader that has given up on a part may ask for it again while it is still being written.
    let writing = shared.recovery.writing.clone().lock_owned().await;
    on_disk(move || {
        let _writing = writing;
        let rows = rows.zip(of_rows).map(|(rows, of_rows)| rows::write(&folder, of_rows, &rows)).transpose()?;
        Ok(Written { part: write_part(&folder, &description, &states)?, rows })
    })
    .await
    .map_err(|error: WriteError| error.into())
}

fn write_part(folder: &Path, description: &Description, states: &[BlockState]) -> Result<PartEntry, WriteError> {
    let mut writer = PartWriter::create(folder, description)?;
    for state in states {
        writer.put(state)?;
    }
    writer.finish()
}

fn describe_rows(description: &Description, tables: &[TableSpec]) -> RowsDescription {
    let Description { format, job, step, server, servers, slots, .. } = description.clone();
    let (rows, clocks) = (Vec::new(), Vec::new());
    RowsDescription { format, job, step, server, servers, slots, tables: tables.to_vec(), rows, clocks }
}

fn describe(shared: &Shared, step: u64, layout: &Layout) -> Description {
    let config = &shared.config;
    Description {
        format: FORMAT,
        job: config.job_uid.clone(),
        step,
        server: config.index,
        servers: config.servers,
        trainers: config.trainers,
        block_elements: layout.block_elements(),
        slots: shared.rules.optimizer.slots(),
        training: serde_json::to_value(&config.training).expect("training is JSON"),
        tensors: shared.members().tensors().to_vec(),
    }
}

/// Ends the training streams and goes to the checkpoint of `step`, or back to nothing. Trainers that have `concluded`
/// in it need not come again.
pub async fn restore(shared: &Shared, epoch: u64, step: Option<u64>, concluded: &[u32]) -> Result<(), RecoveryError> {
    let config = shared.config.checkpoint.as_ref().expect("only called where checkpoints are kept");
    if epoch <= shared.recovery.epoch() {
        return Ok(()); // A message that was overtaken.
    }
    match step {
        None => rewind(shared, epoch, None, concluded).await,
        Some(step) => {
            let folder = Catalog::new(&config.folder).path(step);
            let opened = folder.clone();
            let checkpoint = on_disk(move || Checkpoint::open(&opened)).await;
            let checkpoint = checkpoint.map_err(|damage| unusable(&folder, damage.to_string()))?;
            fits(shared, &checkpoint)?;
            rewind(shared, epoch, Some(checkpoint), concluded).await
        }
    }
}

/// The trainers' steps, and the trainers, in the newest checkpoint, if it is this job's and all of them have concluded
/// in it.
pub async fn whole(shared: &Shared, config: &CheckpointConfig) -> Option<(Vec<u64>, Vec<u32>)> {
    let (catalog, uid, trainers) =
        (Catalog::new(&config.folder), shared.config.job_uid.clone(), shared.config.trainers as usize);
    on_disk(move || {
        let checkpoint = Checkpoint::open(&catalog.path(*catalog.complete().ok()?.last()?)).ok()?;
        let whole = checkpoint.description().job == uid && checkpoint.concluded().len() == trainers;
        let steps = whole.then(|| checkpoint.read(0..1).ok())??.next_steps;
        Some((steps, checkpoint.concluded().to_vec()))
    })
    .await
}

/// A checkpoint can be restored with other servers or another learning rate, not with another
/// model or optimizer.
fn fits(shared: &Shared, checkpoint: &Checkpoint) -> Result<(), RecoveryError> {
    let (description, want) = (checkpoint.description(), shared.rules.optimizer.slots());
    let kind = serde_json::to_value(shared.config.training.optimizer.kind).expect("an optimizer's name is JSON");
    let kind = kind.as_str().unwrap_or_default();
    if description.slots != want || description.optimizer() != kind {
        let why = format!(
            "it holds the state of optimizer {} ({} slots), the job has {kind} ({want} slots); choose the same \
             optimizer, or another checkpoint folder",
            description.optimizer(),
            description.slots
        );
        return Err(mismatch(checkpoint.folder(), why));
    }
    if let (Some(tables), Some(rows)) = (shared.tables.get(), checkpoint.rows().first())
        && let Some(difference) = difference(&rows.description().tables, tables.specs())
    {
        let why = format!("its tables are others: {difference}; give the trainers the same arguments as then");
        return Err(mismatch(checkpoint.folder(), why));
    }
    shared.members().adopt(&description.tensors).map_err(|difference| {
        let why = format!(
            "it is of another model: {difference}; start the job with the same model, or another checkpoint folder"
        );
        mismatch(checkpoint.folder(), why)
    })
}

async fn rewind(
    shared: &Shared,
    epoch: u64,
    checkpoint: Option<Checkpoint>,
    concluded: &[u32],
) -> Result<(), RecoveryError> {
    // From here on nobody joins, and what is still on its way to a block is ignored there.
    shared.recovery.epoch.store(0, Ordering::Release);
    shared.close_streams();
    if let Some(dealing) = &shared.dealing {
        dealing.dealer().restore(checkpoint.as_ref().map(|checkpoint| checkpoint.dealt().clone()).unwrap_or_default());
    }
    let Some(checkpoint) = checkpoint else {
        if let Ok(store) = shared.store() {
            join_all(store.numbers().map(|block| store.restore(block, epoch, None))).await;
        }
        if let Some(tables) = shared.tables.get() {
            tables.replace(tables.blank(), epoch).await;
        }
        shared.members().rewind(&[], &[], now());
        return finish(shared, epoch, None);
    };
    let description = checkpoint.description();
    let layout = Layout::new(&description.tensors, shared.config.servers as usize)
        .map_err(|error| unusable(checkpoint.folder(), error.to_string()))?;
    let store = shared.store_for(layout, &description.tensors);
    let checkpoint = Arc::new(checkpoint);
    let mut steps = Vec::new();
    for block in store.numbers() {
        let (reading, range) = (checkpoint.clone(), store.layout().range(block));
        let state = on_disk(move || reading.read(range)).await;
        let state = state.map_err(|damage| unusable(checkpoint.folder(), damage.to_string()))?;
        steps.clone_from(&state.next_steps);
        store.restore(block, epoch, Some(state)).await;
    }
    refill(shared, &checkpoint, epoch).await.map_err(|damage| unusable(checkpoint.folder(), damage.to_string()))?;
    let steps = match shared.tables.get() {
        // The layers may have been kept before the steps that the rows contain.
        Some(tables) => {
            let asked = (0..shared.config.trainers).map(|trainer| tables.next_step(trainer));
            join_all(asked).await.into_iter().map(Result::unwrap_or_default).collect()
        }
        None => steps,
    };
    shared.members().rewind(&steps, concluded, now());
    let (step, path) = (checkpoint.description().step, checkpoint.folder().to_owned());
    tracing::info!(step, path = %path.display(), "restored from a checkpoint");
    let newest = on_disk(move || LastCheckpoint::complete(step, path)).await;
    finish(shared, epoch, Some(newest))
}

/// Goes to the rows that a checkpoint holds, or to none.
async fn refill(shared: &Shared, checkpoint: &Arc<Checkpoint>, epoch: u64) -> Result<(), Damage> {
    let Some(rows) = checkpoint.rows().first() else {
        if let Some(tables) = shared.tables.get() {
            tables.replace(tables.blank(), epoch).await;
        }
        return Ok(());
    };
    let tables = shared.tables_for(&rows.description().tables);
    let (mut refill, reading, server) = (tables.blank(), checkpoint.clone(), shared.config.index as usize);
    let alike = checkpoint.rows().len() == shared.config.servers as usize;
    let refill = on_disk(move || {
        for (of_server, rows) in reading.rows().iter().enumerate() {
            if alike && of_server != server {
                continue; // None of its rows belong here.
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
    Ok(())
}

fn finish(shared: &Shared, epoch: u64, newest: Option<LastCheckpoint>) -> Result<(), RecoveryError> {
    if let Some(newest) = newest {
        shared.recovery.set_newest(newest);
    }
    shared.recovery.epoch.store(epoch, Ordering::Release);
    Ok(())
}

fn mismatch(folder: &Path, why: String) -> RecoveryError {
    RecoveryError::Mismatch { folder: folder.to_owned(), why }
}

fn unusable(folder: &Path, why: String) -> RecoveryError {
    RecoveryError::Unusable { folder: folder.to_owned(), why }
}

/// Runs `work` where waiting for a disk delays nobody. A runtime of one thread is a simulation's or a test's:
/// there the work is done at once, so that what follows does not depend on how long the disk takes.
pub async fn on_disk<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    if Handle::current().runtime_flavor() == RuntimeFlavor::CurrentThread {
        return work();
    }
    tokio::task::spawn_blocking(work).await.expect("disk work does not panic and is not cancelled")
}
