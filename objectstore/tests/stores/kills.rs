//! The process that writes checkpoints is killed at a request that a seed chooses: each one that it said is complete is
//! there and right, half of one never counts, and the next process goes on in the same run.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::{env, io, thread};

use psjobs_ps::checkpoint::runs::{RunChoice, choose, lineage};
use psjobs_ps::checkpoint::{Catalog, Checkpoint, CheckpointId, Runs, write};
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::checkpoints::{description, identity, manifest, state, write_part};
use crate::store::{Kind, Store, sample};
use crate::training::DEADLINE;

/// Jobs of each store in `make test-stores`, and kills in the life of each.
const JOBS: u32 = 10;
const KILLS: u32 = 6;
/// Checkpoints that a writer keeps.
const KEPT: usize = 2;
/// Elements of every third checkpoint, whose part is sent in two pieces, and of the others.
const LARGE: u64 = 1_050_000;
const SMALL: u64 = 1_000;
/// The variable that makes a process of this program a writer; it has the URL of the folder.
const WRITES_TO: &str = "PSJOBS_TEST_WRITES_TO";

/// The place of a kill.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// Which of the writer's requests that change something, from 1.
    request: u32,
    /// Bytes of it that the store gets. Of one with fewer it gets all, and the writer does not get its answer.
    bytes: usize,
}

/// A process between a writer and a store, which says when the writer has come to its place.
struct Between {
    address: SocketAddr,
    reached: Receiver<()>,
    is_over: Arc<AtomicBool>,
}

#[test]
fn no_kill_of_a_writer_to_s3_loses_a_checkpoint_or_leaves_half_of_one() {
    run(Kind::S3, "kills::no_kill_of_a_writer_to_s3_loses_a_checkpoint_or_leaves_half_of_one");
}

#[test]
fn no_kill_of_a_writer_to_google_loses_a_checkpoint_or_leaves_half_of_one() {
    run(Kind::Google, "kills::no_kill_of_a_writer_to_google_loses_a_checkpoint_or_leaves_half_of_one");
}

#[test]
fn no_kill_of_a_writer_to_azure_loses_a_checkpoint_or_leaves_half_of_one() {
    run(Kind::Azure, "kills::no_kill_of_a_writer_to_azure_loses_a_checkpoint_or_leaves_half_of_one");
}

/// Runs `test` with a store of its own, or, in a process that the test has started, writes.
fn run(kind: Kind, test: &str) {
    match env::var(WRITES_TO) {
        Ok(url) => write_checkpoints(&url),
        Err(_) => Store::start(kind).iter().for_each(|store| survive(store, test)),
    }
}

fn survive(store: &Store, test: &str) {
    let mut random = ChaCha8Rng::seed_from_u64(23);
    let (jobs, mut written) = (sample(JOBS), 0);
    for job in 0..jobs {
        let folder = format!("jobs/killed-{job}");
        let runs = Runs::new(store.folder(&folder));
        let (mut acknowledged, mut right) = (BTreeSet::<u64>::new(), BTreeSet::<u64>::new());
        for kill in 0..KILLS {
            let bytes = match random.random_range(0..4) {
                0 => 0,
                1 => random.random_range(1..2_000),
                2 => random.random_range(1..8_000_000),
                _ => usize::MAX,
            };
            let place = Place { request: random.random_range(1..=12), bytes };
            acknowledged.extend(write_until_killed(store, test, &folder, place));
            let said = format!("{:?}, job {job}, kill {kill} at {place:?}", store.kind);

            let records = runs.list().expect("the store itself is sound");
            assert!(records.len() <= 1, "{said}: a process that goes on begins no other run: {records:?}");
            let Some(run) = records.first().map(|record| record.run) else {
                assert!(acknowledged.is_empty(), "{said}: the run of {acknowledged:?} is gone");
                continue;
            };
            let catalog = runs.catalog(run);
            let complete = catalog.complete().expect("the store itself is sound");
            let oldest = complete.iter().rev().nth(KEPT - 1).copied().unwrap_or(0);
            let is_there = acknowledged.iter().all(|step| *step < oldest || complete.contains(step));
            assert!(is_there, "{said}: {acknowledged:?} were written, {complete:?} are there");
            for step in complete.difference(&right) {
                assert_right(&catalog, *step, &said);
            }
            right.extend(complete);
        }
        written += acknowledged.len();
        assert_goes_on(&runs, &format!("{:?}, job {job}", store.kind));
    }
    let kills = jobs * KILLS;
    assert!(written > kills as usize / 4, "{:?}: {written} checkpoints, so that little was tried", store.kind);
    eprintln!("{:?}: {kills} kills, {written} checkpoints were acknowledged", store.kind);
}

/// Lets a process write until it is killed at `place`. Returns the steps of the checkpoints that it said are complete.
fn write_until_killed(store: &Store, test: &str, folder: &str, place: Place) -> Vec<u64> {
    let between = Between::start(store.address, place);
    let mut command = Command::new(env::current_exe().expect("this program"));
    command.args(["--exact", test, "--nocapture"]).env(WRITES_TO, store.url(folder));
    command.envs(store.variables_at(between.address)).env_remove("RUST_LOG");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut writer = command.spawn().expect("starts");
    let reached = between.reached.recv_timeout(DEADLINE);
    writer.kill().expect("it was not waited for yet");
    let output = writer.wait_with_output().expect("ends");
    let [said, log] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(reached.is_ok(), "the writer did not come to {place:?} in {} s: {said}{log}", DEADLINE.as_secs());
    // The first line has the name of the test, too.
    let steps = said.lines().filter_map(|line| line.split_once("wrote ")?.1.parse().ok());
    steps.collect()
}

/// Writes checkpoints as server 0 does, and says each one that is complete, until it is killed.
fn write_checkpoints(url: &str) {
    let runs = Runs::new(psjobs_object_store::folder(url, env::vars()).expect("a folder"));
    let run = own_run(&runs);
    loop {
        let written = write_next(&runs, run);
        let mut out = io::stdout();
        writeln!(out, "wrote {}", written.step).and_then(|()| out.flush()).expect("the test reads it");
        tidy(&runs, written);
    }
}

/// Finds the run of the job, or begins it, and removes what others have begun to write.
fn own_run(runs: &Runs) -> u32 {
    let records = runs.list().expect("lists");
    let kept = runs.kept(&records).expect("lists");
    let run = match choose(&records, &kept, &identity()) {
        RunChoice::GoOn(run) => run,
        RunChoice::Begin => runs.begin(&identity(), None, 1).expect("begins").run,
    };
    runs.remove_left_overs().expect("removes");
    run
}

/// Writes the checkpoint that follows the newest complete one: of the same step as what a writer before has left of it.
fn write_next(runs: &Runs, run: u32) -> CheckpointId {
    let catalog = runs.catalog(run);
    let step = catalog.complete().expect("lists").last().map_or(1, |newest| newest + 1);
    let folder = catalog.path(step);
    let part = write_part(&folder, &description(step, elements(step), 0, 1)).expect("sends the part");
    write::commit(&folder, &manifest(step, vec![part])).expect("completes it");
    CheckpointId { run, step }
}

/// Removes what is not needed any more after the checkpoint `written`.
fn tidy(runs: &Runs, written: CheckpointId) {
    runs.note_kept(written).expect("writes");
    let records = runs.list().expect("lists");
    runs.prune(&lineage(&records, written.run), KEPT, written).expect("removes");
}

fn elements(step: u64) -> u64 {
    if step.is_multiple_of(3) { LARGE } else { SMALL }
}

fn assert_right(catalog: &Catalog, step: u64, said: &str) {
    let all = 0..elements(step) as usize;
    let found = Checkpoint::open(catalog.path(step)).and_then(|checkpoint| checkpoint.read(all.clone()));
    let found = found.unwrap_or_else(|damage| panic!("{said}: step {step} counts as complete: {damage}"));
    assert!(found == state(step, all), "{said}: step {step} is not what was written");
}

/// Goes on with a job whose writer was killed, after which nothing is left of what was not completed.
fn assert_goes_on(runs: &Runs, said: &str) {
    let run = own_run(runs);
    let before = runs.catalog(run).complete().expect("lists");
    let written = write_next(runs, run);
    tidy(runs, written);
    let catalog = runs.catalog(run);
    let (steps, complete) = (catalog.steps().expect("lists"), catalog.complete().expect("lists"));
    let wanted: BTreeSet<_> = before.into_iter().rev().take(KEPT - 1).chain([written.step]).collect();
    assert_eq!((&steps, &complete), (&wanted, &wanted), "{said}");
    for step in steps {
        assert_right(&catalog, step, said);
        let folder = catalog.path(step);
        let names = folder.disk().names(&folder).expect("lists");
        assert_eq!(names.len(), 2, "{said}: a part and a manifest: {names:?}");
    }
}

impl Between {
    fn start(store: SocketAddr, place: Place) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        let (sender, reached) = mpsc::channel();
        let (requests, is_over) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
        let ends = is_over.clone();
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if ends.load(Ordering::SeqCst) {
                    return;
                }
                let (requests, sender) = (requests.clone(), sender.clone());
                thread::spawn(move || drop(carry(client, store, place, &requests, &sender)));
            }
        });
        Self { address, reached, is_over }
    }
}

impl Drop for Between {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        // The thread that listens hears of it.
        drop(TcpStream::connect(self.address));
    }
}

/// Carries a connection of the writer until it comes to its place. From then on nothing is carried: the writer waits
/// until it is killed.
fn carry(
    mut client: TcpStream,
    store: SocketAddr,
    place: Place,
    requests: &AtomicU32,
    reached: &Sender<()>,
) -> io::Result<()> {
    let mut server = TcpStream::connect(store)?;
    let is_last = Arc::new(AtomicBool::new(false));
    let (mut replies, mut back) = (server.try_clone()?, client.try_clone()?);
    let (last, answered) = (is_last.clone(), reached.clone());
    thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(count @ 1..) = replies.read(&mut buffer) {
            if last.load(Ordering::SeqCst) {
                answered.send(()).ok();
                return;
            }
            if back.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        drop(back.shutdown(Shutdown::Both));
    });
    let mut buffer = vec![0; 1 << 16];
    // Bytes that the store still gets.
    let mut left = usize::MAX;
    while let Ok(count @ 1..) = client.read(&mut buffer) {
        let bytes = &buffer[..count];
        // A client sends a request when it has the answer to the one before, so that each begins what is read.
        let is_change = [b"PUT ".as_slice(), b"POST ", b"DELETE "].iter().any(|method| bytes.starts_with(method));
        if is_change && requests.fetch_add(1, Ordering::SeqCst) + 1 == place.request {
            is_last.store(true, Ordering::SeqCst);
            left = place.bytes;
        }
        server.write_all(&bytes[..count.min(left)])?;
        if count > left {
            reached.send(()).ok();
            break;
        }
        left -= count;
    }
    // A connection that is closed would be made again.
    drop(io::copy(&mut client, &mut io::sink()));
    server.shutdown(Shutdown::Both)
}
