//! Elastic jobs over real sockets: trainers come, leave and are lost, and the others go on.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::support::job::{Process, listen_again, wait_for_all_copies, wait_for_checkpoint};
use crate::support::*;
use psjobs_api::ReplicaResult;
use psjobs_api::training::ConsistencyMode;
use psjobs_ps::client::{ClientError, Session, SessionConfig};
use psjobs_ps::server::{CheckpointConfig, ServerConfig, ServerError, Timeouts};

/// How often each batch was done.
type Done = Arc<Mutex<BTreeMap<u64, u32>>>;

/// A job of two servers with places for four trainers.
struct Elastic {
    addresses: Vec<std::net::SocketAddr>,
    servers: Vec<Process>,
    mode: ConsistencyMode,
    batches: u64,
    least: u32,
    checkpoint: Option<std::path::PathBuf>,
    /// Every block is held by both servers.
    replicated: bool,
    /// How long a trainer may be silent.
    silence: Duration,
    done: Done,
}

/// A trainer on a thread.
struct Trainer {
    /// Leaves when this is set.
    leave: Arc<AtomicBool>,
    /// Batches that it has done.
    done: Arc<AtomicU64>,
    thread: JoinHandle<Result<u64, ClientError>>,
}

impl Trainer {
    fn wait_for(&self, batches: u64) {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            // Asked first: it may do the batches and end in between.
            let has_ended = self.thread.is_finished();
            if self.done.load(Relaxed) >= batches {
                return;
            }
            assert!(!has_ended && Instant::now() < deadline, "it does no more batches");
            std::thread::sleep(POLL);
        }
    }

    /// Batches that it has done, when it has left.
    fn end(self) -> u64 {
        self.thread.join().expect("no panic").expect("ends well")
    }

    fn leave(self) -> u64 {
        self.leave.store(true, Relaxed);
        self.end()
    }
}

impl Elastic {
    fn start(mode: ConsistencyMode, batches: u64, least: u32, checkpoint: Option<std::path::PathBuf>) -> Self {
        Self::begin(Self { checkpoint, ..Self::new(mode, batches, least) })
    }

    fn replicated(mode: ConsistencyMode, batches: u64, checkpoint: Option<std::path::PathBuf>) -> Self {
        Self::begin(Self { replicated: true, checkpoint, ..Self::new(mode, batches, 1) })
    }

    fn new(mode: ConsistencyMode, batches: u64, least: u32) -> Self {
        let listeners: Vec<_> =
            (0..2).map(|_| std::net::TcpListener::bind("127.0.0.1:0").expect("a free port")).collect();
        let addresses = listeners.iter().map(|listener| listener.local_addr().expect("bound")).collect();
        let (servers, done, silence) = (Vec::new(), Done::default(), Timeouts::default().silence);
        Self { addresses, servers, mode, batches, least, checkpoint: None, replicated: false, silence, done }
    }

    fn begin(mut self) -> Self {
        self.servers = (0..2).map(|index| self.server(index)).collect();
        self
    }

    fn names(&self) -> Vec<String> {
        self.addresses.iter().map(ToString::to_string).collect()
    }

    fn server(&self, index: u32) -> Process {
        let checkpoint = self.checkpoint.clone().map(|folder| CheckpointConfig {
            job: "job".into(),
            incarnation: 0,
            folder: folder.into(),
            interval: Duration::from_millis(50),
            keep: 2,
            resume: true,
            servers: self.names(),
        });
        let config = ServerConfig {
            min_trainers: Some(self.least),
            timeouts: Timeouts { silence: self.silence, ..Timeouts::default() },
            checkpoint,
            replicas: if self.replicated { self.names() } else { Vec::new() },
            ..config(index, 2, 4, self.mode)
        };
        Process::start(listen_again(self.addresses[index as usize]), config)
    }

    fn config(&self, trainer: u32, incarnation: u32) -> SessionConfig {
        SessionConfig {
            elastic: true,
            total_steps: self.batches,
            incarnation,
            shared_memory: trainer.is_multiple_of(2),
            replication_factor: 1 + u32::from(self.replicated),
            ..session_config(trainer, self.names())
        }
    }

    fn join(&self, trainer: u32, incarnation: u32) -> Session {
        Session::join(self.config(trainer, incarnation), &vec![1.0; elements()]).expect("joins")
    }

    /// A trainer that takes `compute` for each batch.
    fn trainer(&self, index: u32, compute: Duration) -> Trainer {
        let (leave, done) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (asked, count, all) = (leave.clone(), done.clone(), self.done.clone());
        let config = self.config(index, 0);
        let thread = std::thread::spawn(move || {
            let mut session = Session::join(config, &vec![1.0; elements()])?;
            let mut finished = false;
            while !asked.load(Relaxed) {
                let Some(batch) = session.next_batch()? else {
                    finished = true;
                    break;
                };
                std::thread::sleep(compute);
                do_batch(&mut session, batch, &all)?;
                count.fetch_add(1, Relaxed);
            }
            session.leave(finished, 0, BTreeMap::new())?;
            Ok(count.load(Relaxed))
        });
        Trainer { leave, done, thread }
    }

    /// The servers' results, and how often each batch was done.
    fn end(self) -> (Vec<ReplicaResult>, BTreeMap<u64, u32>) {
        let results = self.servers.into_iter().map(|server| server.outcome().expect("ends well")).collect();
        (results, self.done.lock().expect("no panic").clone())
    }
}

fn do_batch(session: &mut Session, batch: u64, all: &Done) -> Result<(), ClientError> {
    let (entries, step) = (session.entries(), session.next_step());
    session.gradients_mut().fill(batch as f32 * 1e-6);
    session.exchange(step)?;
    if session.entries() == entries {
        *all.lock().expect("no panic").entry(batch).or_default() += 1;
    }
    Ok(())
}

fn once(batches: u64) -> BTreeMap<u64, u32> {
    (0..batches).map(|batch| (batch, 1)).collect()
}

#[test]
fn a_job_grows_and_shrinks_and_reads_every_batch_once() {
    const BATCHES: u64 = 400;
    // Long enough that batches are left for those that come later.
    let quick = Duration::from_millis(10);
    for mode in [ConsistencyMode::Sync, ConsistencyMode::Bounded, ConsistencyMode::Async] {
        let job = Elastic::start(mode, BATCHES, 1, None);
        let first = job.trainer(0, quick);
        first.wait_for(20);
        let others = [2, 3].map(|index| job.trainer(index, quick));
        others.iter().for_each(|trainer| trainer.wait_for(20));
        let steps: Vec<u64> = others.into_iter().map(Trainer::leave).collect();
        let alone = first.end();
        assert_eq!(alone + steps.iter().sum::<u64>(), BATCHES, "{mode:?}: {alone} and {steps:?}");
        let (results, done) = job.end();
        assert_eq!(done, once(BATCHES), "{mode:?}");
        assert_eq!(results[0].steps, BATCHES, "{mode:?}");
    }
}

#[test]
fn sync_trainers_of_different_speed_go_in_step() {
    let job = Elastic::start(ConsistencyMode::Sync, 120, 2, None);
    let trainers = [job.trainer(0, Duration::from_millis(10)), job.trainer(1, Duration::from_millis(20))];
    trainers.iter().for_each(|trainer| trainer.wait_for(1));
    // The first may have gone on alone until the second took part.
    let begun = loop {
        let [fast, slow, again] = [0, 1, 0].map(|index: usize| trainers[index].done.load(Relaxed));
        if fast == again {
            break [fast, slow];
        }
    };
    let [fast, slow] = trainers.map(Trainer::end);
    assert_eq!(fast + slow, 120);
    assert!((fast - begun[0]).abs_diff(slow - begun[1]) <= 8, "{fast} and {slow} from {begun:?}");
    assert_eq!(job.end().1, once(120));
}

#[test]
fn what_a_lost_trainer_held_is_read_by_the_others() {
    for mode in [ConsistencyMode::Sync, ConsistencyMode::Bounded, ConsistencyMode::Async] {
        let job = Elastic::begin(Elastic { silence: Duration::from_secs(2), ..Elastic::new(mode, 200, 1) });
        let mut lost = job.join(1, 0);
        // Long enough that the loss is noticed.
        let other = job.trainer(0, Duration::from_millis(25));
        for _ in 0..5 {
            let batch = lost.next_batch().expect("answers").expect("there are batches");
            do_batch(&mut lost, batch, &job.done).expect("answers");
        }
        lost.next_batch().expect("answers").expect("there are batches");
        drop(lost); // Without a word.
        assert_eq!(
            other.end() + 5,
            200 + job.done.lock().expect("no panic").values().map(|n| u64::from(n - 1)).sum::<u64>()
        );
        let (_, done) = job.end();
        assert_eq!(done.len(), 200, "{mode:?}: all batches");
        assert!(done.values().filter(|times| **times > 1).count() <= 8, "{mode:?}: what it did, and could not report");
    }
}

#[test]
fn too_few_trainers_wait_for_more() {
    let job = Elastic::start(ConsistencyMode::Async, 60, 2, None);
    let first = job.trainer(0, Duration::from_millis(50));
    let mut second = job.join(1, 0);
    first.wait_for(1);
    second.next_batch().expect("answers").expect("there are two now");
    second.leave(false, 0, BTreeMap::new()).expect("leaves");
    let replaced = job.trainer(2, Duration::ZERO);
    assert_eq!(first.end() + replaced.end(), 60);
    assert_eq!(job.end().1, once(60));
}

/// A question for batches waits for the exchange under way, whose answer the trainer does not ask for: the next exchange is made
/// all the same, and ended by its own answer.
#[test]
fn an_answer_that_nobody_asked_for_ends_no_other_exchange() {
    const BATCHES: u64 = 40;
    let job = Elastic::start(ConsistencyMode::Async, BATCHES, 1, None);
    let mut session = job.join(0, 0);
    session.next_batch().expect("answers").expect("there are batches");
    session.gradients_mut().fill(1.0);
    session.begin_exchange(0);
    // While it is under way seven of the eight that are assigned at a time are there. The session asks for the next one.
    for _ in 1..9 {
        session.next_batch().expect("answers").expect("there are batches");
    }
    for step in 1..9 {
        assert_eq!(session.exchange(step).expect("answers"), step + 1);
    }
    while session.next_batch().expect("answers").is_some() {
        let step = session.next_step();
        assert_eq!(session.exchange(step).expect("answers"), step + 1);
    }
    session.leave(true, 0, BTreeMap::new()).expect("leaves");
    let (results, _) = job.end();
    assert_eq!(results[0].steps, BATCHES);
}

#[test]
fn a_killed_server_comes_back_from_a_checkpoint_and_no_batch_is_left_out() {
    for mode in [ConsistencyMode::Sync, ConsistencyMode::Async] {
        let folder = tempfile::tempdir().expect("a folder");
        let mut job = Elastic::start(mode, 400, 1, Some(folder.path().to_owned()));
        let quick = Duration::from_millis(5);
        let first = job.trainer(0, quick);
        let mut newest = 0;
        let mut others = Vec::new();
        for victim in [1, 0] {
            others.push(job.trainer(2 + victim as u32, quick));
            others.iter().for_each(|trainer| trainer.wait_for(10));
            newest = wait_for_checkpoint(folder.path(), newest);
            job.servers.remove(victim).kill();
            let again = job.server(victim as u32);
            job.servers.insert(victim, again);
        }
        others.pop().expect("two").leave();
        others.into_iter().chain([first]).for_each(|trainer| assert!(trainer.end() > 0));
        let (results, done) = job.end();
        assert_eq!(done.len(), 400, "{mode:?}: all batches");
        assert_eq!(results[0].steps, 400, "{mode:?}");
        assert!(results[0].model.is_some(), "{mode:?}: the model is written");
    }
}

#[test]
fn a_killed_replicated_server_costs_no_batch() {
    for (mode, keeps) in
        [(ConsistencyMode::Sync, false), (ConsistencyMode::Async, false), (ConsistencyMode::Async, true)]
    {
        let folder = tempfile::tempdir().expect("a folder");
        let mut job = Elastic::replicated(mode, 400, keeps.then(|| folder.path().to_owned()));
        let quick = Duration::from_millis(5);
        let mut trainers = vec![job.trainer(0, quick), job.trainer(1, quick)];
        for (victim, newcomer, batches) in [(1, 2, 10), (0, 3, 50)] {
            trainers.iter().for_each(|trainer| trainer.wait_for(batches));
            wait_for_all_copies(&job.names());
            job.servers.remove(victim).kill();
            let again = job.server(victim as u32);
            job.servers.insert(victim, again);
            trainers.push(job.trainer(newcomer, quick));
        }
        trainers.into_iter().for_each(|trainer| assert!(trainer.end() > 0, "{mode:?}"));
        let (_, done) = job.end();
        assert_eq!(done.len(), 400, "{mode:?}, checkpoints: {keeps}: all batches");
        let again = done.values().filter(|times| **times > 1).count();
        // A trainer that asks before the others have said how far they are gets some that they have.
        assert!(again < 60, "{mode:?}, checkpoints: {keeps}: {again} batches were read again");
    }
}

#[test]
fn a_stopped_job_goes_on_with_the_batches_that_are_left() {
    let folder = tempfile::tempdir().expect("a folder");
    let job = Elastic::start(ConsistencyMode::Sync, 100, 1, Some(folder.path().to_owned()));
    let trainer = job.trainer(0, Duration::from_millis(1));
    trainer.wait_for(30);
    trainer.leave();
    job.servers.iter().for_each(|server| server.stop.cancel());
    let before = job.done.clone();
    for server in job.servers {
        assert!(matches!(server.outcome(), Err(ServerError::Stopped)));
    }
    let job = Elastic::start(ConsistencyMode::Sync, 100, 1, Some(folder.path().to_owned()));
    let trainers = [1, 2].map(|index| job.trainer(index, Duration::ZERO));
    let after: u64 = trainers.into_iter().map(Trainer::end).sum();
    let before = before.lock().expect("no panic").clone();
    assert_eq!(before.len() as u64 + after, 100, "none is read again");
    assert!(job.end().1.keys().all(|batch| !before.contains_key(batch)));
}

#[test]
fn what_does_not_go_together_is_said() {
    let job = Elastic::start(ConsistencyMode::Sync, 10, 1, None);
    let said = |config| Session::join(config, &vec![1.0; elements()]).err().expect("refused").to_string();
    let error = said(SessionConfig { elastic: false, ..job.config(0, 0) });
    assert!(error.contains("this job is elastic, the trainer is not"), "{error}");
    let _first = job.join(0, 0).next_batch().expect("answers");
    let mut other =
        Session::join(SessionConfig { total_steps: 11, ..job.config(1, 0) }, &vec![1.0; elements()]).expect("joins");
    let error = other.next_batch().expect_err("another number of batches").to_string();
    assert!(error.contains("11 batches in all, the job has 10"), "{error}");

    let mut backups = ServerConfig { min_trainers: Some(1), ..config(0, 1, 3, ConsistencyMode::Sync) };
    backups.training.consistency.backup_trainers = 1;
    let mut adaptive = ServerConfig { min_trainers: Some(1), ..config(0, 1, 3, ConsistencyMode::Sync) };
    adaptive.training.batch.adaptive = true;
    for (config, want) in [(backups, "remove backupTrainers"), (adaptive, "remove the adaptive batch")] {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let error = Process::start(listener, config).outcome().expect_err(want).to_string();
        assert!(error.contains(want), "{error}");
    }
}

#[test]
fn a_trainer_that_comes_when_the_others_have_finished_is_notified_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let job = Elastic::start(ConsistencyMode::Sync, 4, 1, Some(folder.path().to_owned()));
    let mut session = job.join(0, 0);
    for _ in 0..4 {
        let batch = session.next_batch().expect("answers").expect("a batch is left");
        do_batch(&mut session, batch, &job.done).expect("answers");
    }
    // The servers cannot write the last checkpoint, so they are about to end for a while.
    let (run, aside) = (folder.path().join("run-00001"), folder.path().join("aside"));
    std::fs::rename(&run, &aside).expect("moves");
    std::fs::write(&run, "").expect("writes");
    session.leave(true, 0, BTreeMap::new()).expect("leaves");
    let begun = Instant::now();
    let come = |incarnation| match Session::join(job.config(1, incarnation), &vec![1.0; elements()]) {
        // Server 0 has yet to see that the job is done.
        Ok(session) => {
            session.leave(false, 0, BTreeMap::new()).expect("leaves");
            None
        }
        Err(error) => Some(error),
    };
    let late = (0..).find_map(come);
    assert!(matches!(&late, Some(ClientError::Over { reason }) if reason.contains("nothing is left")), "{late:?}");
    assert!(begun.elapsed() < session_config(1, job.names()).connect_timeout, "it does not ask again and again");
    std::fs::remove_file(&run).expect("removes");
    std::fs::rename(&aside, &run).expect("moves");
    job.servers.into_iter().for_each(|server| drop(server.outcome().expect("ends well")));
}
