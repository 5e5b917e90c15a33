//! Sparse tables whose rows are held by two servers: one that is killed costs neither a row nor a bit.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc;
use std::thread::JoinHandle;

use psjobs_api::training::ConsistencyMode;
use psjobs_ps::client::{ClientError, Member, RowGradients, SessionConfig, Tables};
use psjobs_ps::sparse::TableSpec;

use crate::sparse::{WIDTH, keys, local, member, row, specs};
use crate::support::job::*;

type Rows = BTreeMap<u64, Vec<f32>>;

/// The keys that `trainers` trainers use in `steps` steps.
fn all_keys(trainers: u32, steps: u64) -> Vec<u64> {
    let all: BTreeSet<u64> = (0..trainers).flat_map(|t| (0..steps).flat_map(move |s| keys(t, s))).collect();
    all.into_iter().collect()
}

/// Reads the rows of `keys` in table 0.
fn read(tables: &mut Tables, keys: &[u64]) -> Rows {
    let rows = tables.pull(&[(0, keys)]).expect("answers").remove(0);
    keys.iter().copied().zip(rows.chunks(WIDTH).map(<[f32]>::to_vec)).collect()
}

fn replicated(trainer: u32, job: &Job) -> SessionConfig {
    SessionConfig { replication_factor: 2, ..member(trainer, job.servers()) }
}

/// Servers and trainers of a job with tables.
struct Running {
    servers: Vec<Process>,
    /// Steps done, of all trainers.
    steps: mpsc::Receiver<u64>,
    /// Each trainer's rows of `all_keys` before the first step and after the last.
    trainers: Vec<JoinHandle<(Rows, Rows)>>,
    limit: Limit,
}

impl Running {
    /// Starts a job that trains to step `until`, whose last step is made in `finish`; each step pushes the gradients that `gradient` makes of trainer, step
    /// and key.
    fn start(job: &Job, until: u64, gradient: fn(u32, u64, u64) -> [f32; WIDTH]) -> Self {
        let (servers, (sender, steps)) = (job.start_all(), mpsc::channel());
        let all = all_keys(job.trainers, until);
        job.limit.lower(until - 1);
        let train = |index| {
            let (config, all, sender, limit) = (replicated(index, job), all.clone(), sender.clone(), job.limit.clone());
            move || {
                let member = Member::join(config.clone()).expect("joins");
                let mut tables = Tables::open(config, specs()).expect("opens");
                let initial = read(&mut tables, &all);
                for step in 0..until {
                    limit.wait(step);
                    let keys = keys(index, step);
                    tables.pull(&[(0, &keys)]).expect("answers");
                    let values: Vec<f32> = keys.iter().flat_map(|key| gradient(index, step, *key)).collect();
                    tables.push(step, &[RowGradients { table: 0, keys: &keys, values: &values }]).expect("goes on");
                    // The test may no longer be interested.
                    let _ = sender.send(step + 1);
                }
                let trained = read(&mut tables, &all);
                member.leave(true).expect("leaves");
                (initial, trained)
            }
        };
        let trainers = (0..job.trainers).map(|index| std::thread::spawn(train(index))).collect();
        Self { servers, steps, trainers, limit: job.limit.clone() }
    }

    fn kill(&mut self, server: usize) {
        self.servers.remove(server).kill();
    }

    /// Kills a server when everything is held twice, and starts it again at once.
    fn restart(&mut self, server: usize, job: &Job) {
        wait_for_all_copies(&job.servers());
        self.kill(server);
        self.servers.insert(server, job.start(server as u32));
    }

    /// Returns what each trainer has read, after the servers have ended well.
    fn finish(self) -> Vec<(Rows, Rows)> {
        self.limit.remove();
        let read = self.trainers.into_iter().map(|trainer| trainer.join().expect("no panic")).collect();
        self.servers.into_iter().for_each(|server| drop(server.outcome().expect("ends well")));
        read
    }
}

#[test]
fn training_goes_on_without_the_server_that_was_killed() {
    const STEPS: u64 = 120;
    for victim in [0, 1] {
        let job = Job::replicated(2, 2, ConsistencyMode::Sync);
        let mut running = Running::start(&job, STEPS, row);
        wait_for(&running.steps, 10);
        wait_for_all_copies(&job.servers());
        running.kill(victim);
        for (initial, trained) in running.finish() {
            assert!(
                trained == local(2, STEPS, &initial),
                "rows differ from those of one process without server {victim}"
            );
        }
    }
}

#[test]
fn a_server_that_comes_back_is_filled_again_and_can_take_over() {
    const STEPS: u64 = 400;
    let job = Job::replicated(3, 2, ConsistencyMode::Sync);
    let mut running = Running::start(&job, STEPS, row);
    wait_for(&running.steps, 10);
    for victim in [1, 2, 0, 1] {
        running.restart(victim, &job);
        wait_for(&running.steps, 0);
    }
    for (initial, trained) in running.finish() {
        assert!(trained == local(2, STEPS, &initial), "rows differ from those of one process");
    }
}

#[test]
fn an_acknowledged_asynchronous_push_is_neither_lost_nor_made_twice() {
    const STEPS: u64 = 300;
    const TRAINERS: u32 = 3;
    let mut job = Job::replicated(2, TRAINERS, ConsistencyMode::Async);
    job.momentum = 0.0;
    // Powers of two: however the pushes interleave, their sum is exact.
    let mut running = Running::start(&job, STEPS, |_, _, _| [0.0625; WIDTH]);
    wait_for(&running.steps, 20);
    for victim in [1, 0, 1] {
        running.restart(victim, &job);
        wait_for(&running.steps, 0);
    }
    let read = running.finish();
    // A trainer pushes a gradient of the keys that it alone uses in every step.
    for (trainer, (initial, trained)) in (0_u32..).zip(read) {
        let key = 1_000_000_000_000 + u64::from(trainer);
        for (before, after) in initial[&key].iter().zip(&trained[&key]) {
            let want = before - STEPS as f32 * 0.125 * 0.0625;
            assert!((after - want).abs() < 1e-3, "trainer {trainer}: {after} instead of {want}");
        }
    }
}

#[test]
fn a_large_table_is_copied_while_it_changes() {
    const ROWS: u64 = 200_000;
    let job = Job::replicated(2, 1, ConsistencyMode::Sync);
    let mut servers = job.start_all();
    let config = replicated(0, &job);
    let member = Member::join(config.clone()).expect("joins");
    let mut tables = Tables::open(config, vec![TableSpec::new("user", WIDTH, 0.0)]).expect("opens");
    let keys: Vec<u64> = (0..ROWS).collect();
    let push = |tables: &mut Tables, step, keys: &[u64]| {
        let values = vec![1.0; keys.len() * WIDTH];
        tables.push(step, &[RowGradients { table: 0, keys, values: &values }]).expect("goes on");
    };
    push(&mut tables, 0, &keys);
    wait_for_all_copies(&job.servers());
    // Server 1 is copied all rows of both shards while they change; again if this thread stood still meanwhile.
    let mut steps = 1;
    for _ in 0..5 {
        servers.remove(1).kill();
        servers.push(job.start(1));
        while held_once(&job.servers()) {
            push(&mut tables, steps, &keys[..100]);
            steps += 1;
        }
        if steps > 1 {
            break;
        }
    }
    assert!(steps > 1, "no copy took any time");
    servers.remove(0).kill();
    let rows = tables.pull(&[(0, &keys)]).expect("answers").remove(0);
    // SGD with momentum 0.5 and rate 0.125.
    let (mut value, mut momentum) = (0.0_f32, 0.0_f32);
    for _ in 0..steps {
        momentum = 0.5 * momentum + 1.0;
        value -= 0.125 * momentum;
    }
    for (key, row) in keys.iter().zip(rows.chunks(WIDTH)) {
        let want = if *key < 100 { value } else { -0.125 };
        assert!(row.iter().all(|number| *number == want), "key {key}: {row:?} instead of {want} after {steps} steps");
    }
    member.leave(true).expect("leaves");
    for server in servers {
        server.outcome().expect("ends well");
    }
}

#[test]
fn a_trainer_does_not_go_on_with_rows_that_both_holders_have_lost() {
    let job = Job::replicated(2, 1, ConsistencyMode::Sync);
    let mut servers = job.start_all();
    let config = replicated(0, &job);
    let _member = Member::join(config.clone()).expect("joins");
    let mut tables = Tables::open(config, specs()).expect("opens");
    let gradients = RowGradients { table: 0, keys: &[1, 2, 3], values: &[1.0; 3 * WIDTH] };
    tables.push(0, &[gradients]).expect("goes on");
    servers.drain(..).for_each(Process::kill);
    let servers = job.start_all();
    let error = tables.push(1, &[gradients]).expect_err("the rows are lost");
    assert!(matches!(error, ClientError::TablesLost { .. }), "{error}");
    servers.into_iter().for_each(Process::kill);
}
