//! Jobs with sparse tables whose servers die, stop and come back: rows, and the layers that trainers train themselves,
//! are what they would have been.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::support::job::*;
use crate::support::session_config;
use psjobs_api::training::{ConsistencyMode, OptimizerKind};
use psjobs_ps::checkpoint::Runs;
use psjobs_ps::client::{ClientError, Layers, Member, RowGradients, SessionConfig, Tables, TensorSpec};
use psjobs_ps::sparse::TableSpec;
use safetensors::SafeTensors;

const WIDTH: usize = 3;
const KEYS: u64 = 500;
/// Elements of the layers: of more than one block, so that both servers have some.
const LAYERS: usize = 300_000;

fn specs() -> Vec<TableSpec> {
    vec![TableSpec::new("user", WIDTH, 0.5), TableSpec::new("count", 1, 0.0)]
}

/// A trainer whose rows' gradients depend on its layers, and those on the step: of another step they would give others.
struct Trainer {
    index: u32,
    sync: bool,
    slots: usize,
    tables: Tables,
    layers: Layers,
}

impl Trainer {
    fn new(config: SessionConfig, sync: bool, slots: usize) -> Self {
        let index = config.trainer;
        let tables = Tables::open(config, specs()).expect("opens");
        let mut trainer =
            Self { index, sync, slots, tables, layers: Layers { steps: 0, updates: 0, state: Vec::new() } };
        while let Err(error) = trainer.resume() {
            trainer.reopen(&error);
        }
        trainer
    }

    fn reopen(&mut self, error: &ClientError) {
        assert!(matches!(error, ClientError::TablesLost { .. }), "{error}");
        self.tables.reopen().expect("opens again");
    }

    fn resume(&mut self) -> Result<(), ClientError> {
        self.layers = match self.tables.kept()? {
            Some(kept) => kept,
            None => Layers { steps: 0, updates: 0, state: vec![0.5; LAYERS * (1 + self.slots)] },
        };
        let next = self.tables.next_step();
        let apart = next.checked_sub(self.layers.steps).expect("rows are as far as the layers");
        assert!(apart <= if self.sync { 0 } else { 2 }, "layers of step {}, rows of {next}", self.layers.steps);
        self.layers.steps = next;
        self.keep(true)
    }

    fn keep(&mut self, now: bool) -> Result<(), ClientError> {
        if self.index == 0 && (now || self.tables.wants_layers(self.layers.steps)) {
            self.tables.keep(&self.layers)?;
        }
        Ok(())
    }

    fn step(&mut self) -> Result<(), ClientError> {
        let step = self.layers.steps;
        let keys: Vec<u64> = (0..20).map(|i| (step * 31 + i * 17 + u64::from(self.index)) % KEYS).collect();
        let rows = self.tables.pull(&[(0, &keys)])?.remove(0);
        let weight = self.layers.state[LAYERS - 1];
        let values: Vec<f32> = rows.iter().map(|row| row * 0.1 + weight).collect();
        let gradients = [
            RowGradients { table: 0, keys: &keys, values: &values },
            RowGradients { table: 1, keys: &[7], values: &[1.0] },
        ];
        self.tables.push(step, &gradients)?;
        let moved = (step as f32).sin() * 0.1;
        self.layers.state.iter_mut().for_each(|value| *value = *value * 0.9 + moved);
        self.layers = Layers { steps: step + 1, updates: step + 1, state: std::mem::take(&mut self.layers.state) };
        self.keep(false)
    }

    fn rows(&mut self) -> Result<Vec<Vec<f32>>, ClientError> {
        let keys: Vec<u64> = (0..KEYS).collect();
        self.tables.pull(&[(0, &keys), (1, &[7])])
    }

    /// To step `until`, kept: the rows at the end.
    fn train(&mut self, until: &AtomicU64, steps: &mpsc::Sender<u64>) -> Result<Vec<Vec<f32>>, ClientError> {
        while self.layers.steps < until.load(Relaxed) {
            self.step()?;
            // The receiver may no longer exist.
            let _ = steps.send(self.layers.steps);
        }
        self.keep(true)?;
        if self.tables.epoch() > 0 && !self.tables.conclude()? {
            return Err(ClientError::TablesLost { address: "any".to_owned() });
        }
        self.rows()
    }
}

/// A trainer on a thread, that ends with the rows of each table.
type Training = JoinHandle<Vec<Vec<f32>>>;

/// Trains on a thread, going back when the servers do.
fn trainer(job: &Job, index: u32, until: Arc<AtomicU64>, steps: mpsc::Sender<u64>) -> Training {
    let tensors = vec![TensorSpec::new("dense", vec![LAYERS as u64])];
    let replication_factor = 1 + u32::from(job.replicated);
    // Where the end is not known yet, it is far.
    let total_steps = until.load(Relaxed).min(1 << 40);
    let config = SessionConfig { tensors, total_steps, replication_factor, ..session_config(index, job.servers()) };
    let sync = job.mode == ConsistencyMode::Sync;
    let slots = if job.optimizer == OptimizerKind::Adam { 2 } else { usize::from(job.momentum > 0.0) };
    std::thread::spawn(move || {
        let member = Member::join(config.clone()).expect("joins");
        let mut trainer = Trainer::new(config, sync, slots);
        let rows = loop {
            match trainer.train(&until, &steps) {
                Ok(rows) => break rows,
                Err(error) => trainer.reopen(&error),
            }
            while let Err(error) = trainer.resume() {
                trainer.reopen(&error);
            }
        };
        member.leave(true).expect("leaves");
        rows
    })
}

/// The trainers of a job, and what they report.
fn trainers(job: &Job, until: u64) -> (Vec<Training>, mpsc::Receiver<u64>) {
    let (sender, steps) = mpsc::channel();
    let until = Arc::new(AtomicU64::new(until));
    ((0..job.trainers).map(|index| trainer(job, index, until.clone(), sender.clone())).collect(), steps)
}

/// Trainers that train until they receive the last step, so that whatever a test does to the servers comes before it.
struct Endless {
    trainers: Vec<Training>,
    steps: mpsc::Receiver<u64>,
    until: Arc<AtomicU64>,
}

impl Endless {
    /// Steps that trainers may do before they see the last step: far more than they do while a thread sleeps.
    const AHEAD: u64 = 500;

    fn start(job: &Job) -> Self {
        let (until, (sender, steps)) = (Arc::new(AtomicU64::new(u64::MAX)), mpsc::channel());
        let trainers = (0..job.trainers).map(|index| trainer(job, index, until.clone(), sender.clone())).collect();
        Self { trainers, steps, until }
    }

    /// Returns the rows at the end, and the last step.
    fn end(self) -> (Vec<Vec<f32>>, u64) {
        let last = self.steps.try_iter().max().unwrap_or(0);
        let last = last.max(self.steps.recv_timeout(Duration::from_secs(60)).expect("training goes on"));
        self.until.store(last + Self::AHEAD, Relaxed);
        (join(self.trainers), last + Self::AHEAD)
    }
}

fn join(trainers: Vec<Training>) -> Vec<Vec<f32>> {
    trainers.into_iter().map(|trainer| trainer.join().expect("no panic")).next_back().expect("a trainer")
}

/// Returns the result of a job whose servers are killed one after the other, each when there is a checkpoint to go
/// back to, and its last step.
fn disturbed(job: &Job, folder: &Path, victims: [usize; 2]) -> (Vec<Vec<f32>>, u64) {
    let mut servers = job.start_all();
    let trainers = Endless::start(job);
    let mut newest = 0;
    for victim in victims {
        wait_for(&trainers.steps, newest + 15);
        newest = wait_for_checkpoint(folder, newest);
        servers.remove(victim).kill();
        servers.insert(victim, job.start(victim as u32));
    }
    let ended = trainers.end();
    servers.into_iter().for_each(|server| drop(server.outcome().expect("ends well")));
    ended
}

/// Returns the result of a job that keeps no checkpoint and loses no process.
fn undisturbed(like: &Job, until: u64) -> Vec<Vec<f32>> {
    let mut job = Job::replicated(1, like.trainers, like.mode);
    (job.replicated, job.optimizer, job.momentum) = (false, like.optimizer, like.momentum);
    let servers = job.start_all();
    let rows = join(trainers(&job, until).0);
    servers.into_iter().for_each(|server| drop(server.outcome().expect("ends well")));
    rows
}

#[test]
fn killed_servers_cost_no_bit_of_rows_or_layers() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut job = Job::checkpointed(folder.path(), 2, 2, ConsistencyMode::Sync);
    job.optimizer = OptimizerKind::Adam;
    let (rows, last) = disturbed(&job, folder.path(), [1, 0]);
    assert!(rows == undisturbed(&job, last), "rows differ from those of an undisturbed job");

    let read = |name: &str| fs::read(folder.path().join(name)).expect("it is exported");
    let (tables, model) = (read("tables.safetensors"), read("model.safetensors"));
    let tables = SafeTensors::deserialize(&tables).expect("safetensors");
    let (keys, values) = (tables.tensor("user.keys").expect("keys"), tables.tensor("user.values").expect("values"));
    assert_eq!(values.shape(), [KEYS as usize, WIDTH]);
    let keys = keys.data().as_chunks::<8>().0.iter().map(|key| u64::from_le_bytes(*key));
    let values = values.data().as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value)).collect::<Vec<_>>();
    let exported: BTreeMap<u64, &[f32]> = keys.zip(values.chunks(WIDTH)).collect();
    let want: BTreeMap<u64, &[f32]> = (0..).zip(rows[0].chunks(WIDTH)).collect();
    assert!(exported == want, "the exported tables are the trained ones");
    let model = SafeTensors::deserialize(&model).expect("safetensors");
    assert_eq!(model.tensor("dense").expect("the layers").shape(), [LAYERS]);
}

#[test]
fn a_stopped_job_goes_on_with_another_number_of_servers() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut rows = Vec::new();
    let mut last = None;
    for (servers, until) in [(2, 7), (1, 15), (3, 22)] {
        let job = Job::checkpointed(folder.path(), servers, 2, ConsistencyMode::Sync);
        let running = job.start_all();
        let (trainers, steps) = trainers(&job, until);
        let begun = last.replace(until).unwrap_or(0);
        assert_eq!(steps.recv_timeout(Duration::from_secs(60)).expect("trains"), begun + 1, "it goes on where it was");
        rows = join(trainers);
        running.into_iter().for_each(|server| drop(server.outcome().expect("ends well")));
    }
    let job = Job::checkpointed(folder.path(), 1, 2, ConsistencyMode::Sync);
    assert!(rows == undisturbed(&job, 22), "rows differ from those of an undisturbed job");
}

#[test]
fn in_async_what_is_given_again_counts_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut job = Job::checkpointed(folder.path(), 2, 1, ConsistencyMode::Async);
    job.momentum = 0.0;
    let (rows, last) = disturbed(&job, folder.path(), [0, 1]);
    // At a rate of an eighth, from 0, along 1: exact in f32.
    assert_eq!(rows[1], [-0.125 * last as f32]);
}

#[test]
fn a_checkpoint_with_damaged_rows_is_passed_over() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut job = Job::checkpointed(folder.path(), 1, 1, ConsistencyMode::Sync);
    // Few steps are kept: the last of each run, and perhaps one just after its begin.
    job.interval = Duration::from_secs(3600);
    for until in [3, 6] {
        let servers = job.start_all();
        join(trainers(&job, until).0);
        servers.into_iter().for_each(|server| drop(server.outcome().expect("ends well")));
    }
    let catalog = Runs::new(folder.path()).catalog(1);
    let complete = catalog.complete().expect("lists");
    let newest = *complete.range(..6).next_back().expect("that of the first run");
    assert!(complete.contains(&6) && newest >= 3, "{complete:?}");
    let rows = catalog.path(6).join("rows-00000-of-00001.safetensors");
    let mut bytes = fs::read(&rows).expect("rows");
    let place = bytes.len() * 3 / 4;
    bytes[place] ^= 1;
    fs::write(&rows, bytes).expect("written");
    let servers = job.start_all();
    let (trainers, steps) = trainers(&job, 8);
    join(trainers);
    assert!(steps.try_iter().eq(newest + 1..=8), "it goes on from step {newest}");
    servers.into_iter().for_each(|server| drop(server.outcome().expect("ends well")));
}

/// A job whose rows and layers are held by two servers and kept in checkpoints.
fn replicated(folder: &Path, servers: usize, mode: ConsistencyMode) -> Job {
    let mut job = Job::checkpointed(folder, servers, 2, mode);
    job.replicated = true;
    job
}

#[test]
fn with_replicas_only_the_loss_of_both_goes_back_to_a_checkpoint() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut job = replicated(folder.path(), 2, ConsistencyMode::Sync);
    job.optimizer = OptimizerKind::Adam;
    let mut servers = job.start_all();
    let trainers = Endless::start(&job);
    let (mut newest, mut done) = (0, Vec::new());
    for victim in [0, 1, 0] {
        wait_for(&trainers.steps, 5);
        wait_for_all_copies(&job.servers());
        servers.remove(victim).kill();
        servers.insert(victim, job.start(victim as u32));
        // Whoever leads, both servers' parts are written.
        newest = wait_for_checkpoint(folder.path(), newest);
        done.extend(trainers.steps.try_iter());
    }
    wait_for_all_copies(&job.servers());
    done.extend(trainers.steps.try_iter());
    assert!(done.windows(3).all(|seen| seen[2] + 1 >= seen[0]), "no trainer went back: {done:?}");
    wait_for_checkpoint(folder.path(), newest);
    servers.drain(..).for_each(Process::kill);
    servers = job.start_all();
    let (rows, last) = trainers.end();
    servers.into_iter().for_each(|server| drop(server.outcome().expect("ends well")));
    assert!(rows == undisturbed(&job, last), "rows differ from those of an undisturbed job");
}

#[test]
fn a_backup_has_the_rows_of_the_checkpoint_that_its_owner_went_to() {
    for survivor in [0, 1] {
        let folder = tempfile::tempdir().expect("a folder");
        let job = replicated(folder.path(), 2, ConsistencyMode::Sync);
        let mut servers = job.start_all();
        let trainers = Endless::start(&job);
        wait_for(&trainers.steps, 10);
        wait_for_checkpoint(folder.path(), 0);
        servers.drain(..).for_each(Process::kill);
        servers = job.start_all();
        // Nothing but the checkpoint and what followed it is there when one of them goes.
        while trainers.steps.try_recv().is_ok() {}
        wait_for(&trainers.steps, 0);
        wait_for_all_copies(&job.servers());
        servers.remove(1 - survivor).kill();
        servers.insert(1 - survivor, job.start(1 - survivor as u32));
        let (rows, last) = trainers.end();
        servers.into_iter().for_each(|server| drop(server.outcome().expect("ends well")));
        assert!(rows == undisturbed(&job, last), "rows of server {survivor} differ from those of an undisturbed job");
    }
}

#[test]
fn a_stopped_job_with_replicas_goes_on_with_another_number_of_servers() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut rows = Vec::new();
    let mut begun = 0;
    for (servers, until) in [(2, 7), (3, 15), (2, 22)] {
        let job = replicated(folder.path(), servers, ConsistencyMode::Sync);
        let running = job.start_all();
        let (trainers, steps) = trainers(&job, until);
        assert_eq!(steps.recv_timeout(Duration::from_secs(60)).expect("trains"), begun + 1, "it goes on where it was");
        rows = join(trainers);
        running.into_iter().for_each(|server| drop(server.outcome().expect("ends well")));
        begun = until;
    }
    let job = Job::checkpointed(folder.path(), 1, 2, ConsistencyMode::Sync);
    assert!(rows == undisturbed(&job, 22), "rows differ from those of an undisturbed job");
}

#[test]
fn in_async_replicas_and_checkpoints_count_each_push_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut job = replicated(folder.path(), 2, ConsistencyMode::Async);
    (job.momentum, job.trainers) = (0.0, 1);
    let mut servers = job.start_all();
    let trainers = Endless::start(&job);
    let mut newest = 0;
    for victims in [&[0][..], &[0, 1], &[1]] {
        wait_for(&trainers.steps, newest + 10);
        wait_for_all_copies(&job.servers());
        newest = wait_for_checkpoint(folder.path(), newest);
        victims.iter().rev().for_each(|victim| servers.remove(*victim).kill());
        victims.iter().for_each(|victim| servers.insert(*victim, job.start(*victim as u32)));
    }
    let (rows, last) = trainers.end();
    servers.into_iter().for_each(|server| drop(server.outcome().expect("ends well")));
    // At a rate of an eighth, from 0, along 1: exact in f32.
    assert_eq!(rows[1], [-0.125 * last as f32]);
}
