//! A checkpoint belongs to the run that wrote it: jobs beside older ones, damaged and unreadable checkpoints, two jobs in
//! one folder, leaders that were replaced, and disks that cannot be written.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use crate::support::job::*;
use crate::support::*;
use psjobs_api::training::ConsistencyMode;
use psjobs_ps::checkpoint::lock::{LOCK, Lock, LockFile};
use psjobs_ps::checkpoint::runs::{BY_HAND, RunRecord};
use psjobs_ps::checkpoint::{Catalog, CheckpointId, Runs};
use psjobs_ps::client::Session;
use psjobs_ps::proto::recovery_client::RecoveryClient;
use psjobs_ps::proto::{self, SnapshotRequest};
use psjobs_ps::server::ServerError;
use tokio::runtime::Runtime;
use tonic::Code;

/// A job that writes checkpoints at its first and last step only.
fn seldom(folder: &Path, servers: usize, uid: &str) -> Job {
    let job = Job::checkpointed(folder, servers, 1, ConsistencyMode::Sync);
    Job { uid: uid.into(), interval: Duration::from_secs(3600), ..job }
}

/// Trains to step `until` and returns the steps done.
fn train_to(job: &Job, until: u64) -> Vec<u64> {
    let running = job.run(until);
    job.limit.remove();
    let mut done = Vec::new();
    while done.last() != Some(&until) {
        done.push(running.steps.recv_timeout(Duration::from_secs(60)).expect("training goes on"));
    }
    running.finish();
    done
}

/// Contents of all files of a run.
fn files(run: &Catalog) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    for step in run.steps().expect("a folder") {
        for entry in fs::read_dir(run.path(step)).expect("a folder") {
            let path = entry.expect("an entry").path();
            files.insert(path.display().to_string(), fs::read(&path).expect("a file"));
        }
    }
    files
}

fn flip_a_bit(part: &Path) {
    let mut bytes = fs::read(part).expect("a part");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(part, bytes).expect("written");
}

#[test]
fn a_job_that_does_not_resume_keeps_its_own_beside_older_ones_of_higher_steps() {
    const STEPS: u64 = 300;
    for (before, after) in [("job-a", "job-b"), (BY_HAND, BY_HAND)] {
        let folder = tempfile::tempdir().expect("a folder");
        let runs = Runs::new(folder.path());
        train_to(&seldom(folder.path(), 1, before), 2 * STEPS);
        let older = files(&runs.catalog(1));
        assert!(runs.catalog(1).complete().expect("a folder").contains(&(2 * STEPS)));

        let job = Job::checkpointed(folder.path(), 2, 2, ConsistencyMode::Sync);
        let job = Job { uid: after.into(), resume: false, ..job };
        job.limit.set(Running::AHEAD);
        let mut running = job.run(STEPS);
        running.restart_each_after_a_checkpoint(folder.path());
        let want = Job::undisturbed(2, STEPS);
        assert!(running.finish().iter().all(|parameters| *parameters == want), "{after}: parameters differ");

        let model = fs::read(folder.path().join("model.safetensors")).expect("the model is exported");
        let weight: Vec<u8> = want[7..].iter().flat_map(|value| value.to_le_bytes()).collect();
        assert!(model.ends_with(&weight), "{after}: the exported model is its own");
        let kept = runs.catalog(2).complete().expect("a folder");
        assert!(kept.len() <= 2 && kept.contains(&STEPS), "{after}: {kept:?}");
        assert!(files(&runs.catalog(1)) == older, "{after}: the older run is untouched");
        assert_eq!(runs.list().expect("a folder").len(), 2, "{after}");
        assert!(!folder.path().join(LOCK).exists(), "{after}: the lock is given back");
    }
}

#[test]
fn with_one_to_keep_a_damaged_checkpoint_costs_none_that_follows() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut job = seldom(folder.path(), 1, UID);
    let catalog = Runs::new(folder.path()).catalog(1);
    train_to(&job, 3);
    train_to(&job, 6);
    flip_a_bit(&catalog.path(6).join("ps-00000-of-00001.safetensors"));
    job.keep = 1;
    assert_eq!(train_to(&job, 5), [4, 5], "it goes on from step 3");
    assert_eq!(catalog.complete().expect("a folder"), [5].into());
    assert!(catalog.path(6).join("manifest.damaged.json").exists(), "the damaged one is set aside");
    assert_eq!(train_to(&job, 8), [6, 7, 8], "it goes on from step 5");
    assert_eq!(catalog.complete().expect("a folder"), [8].into());

    flip_a_bit(&catalog.path(8).join("ps-00000-of-00001.safetensors"));
    for _ in 0..2 {
        let error = job.start(0).outcome().expect_err("nothing is left").to_string();
        assert!(error.contains("no checkpoint is left") && error.contains("run-00001"), "{error}");
    }
}

#[test]
fn what_cannot_be_read_for_a_while_is_waited_for() {
    let folder = tempfile::tempdir().expect("a folder");
    let job = seldom(folder.path(), 2, UID);
    let catalog = Runs::new(folder.path()).catalog(1);
    train_to(&job, 4);
    // The folder is a file, as on a broken mount; a part is a link to itself, which cannot be opened.
    let part = catalog.path(8).join("ps-00001-of-00002.safetensors");
    for (until, broken) in [(8, catalog.folder().to_path_buf()), (12, part)] {
        let aside = folder.path().join("aside");
        fs::rename(&broken, &aside).expect("moves");
        if until == 8 {
            fs::write(&broken, "").expect("writes");
        } else {
            symlink(&broken, &broken).expect("links");
        }
        let running = job.run(until);
        wait_for_warning(&job.servers()[0], &broken.display().to_string());
        fs::remove_file(&broken).expect("removes");
        fs::rename(&aside, &broken).expect("moves");
        let first = running.steps.recv_timeout(Duration::from_secs(60)).expect("training goes on");
        assert_eq!(first, until - 3, "it goes on where it was");
        running.finish();
        assert!(catalog.complete().expect("a folder").contains(&until));
    }
    assert_eq!(catalog.damaged().expect("a folder"), [].into());
}

#[test]
fn a_job_that_resumes_another_ones_checkpoint_leaves_it_whole_when_it_cannot_write() {
    let folder = tempfile::tempdir().expect("a folder");
    let runs = Runs::new(folder.path());
    train_to(&seldom(folder.path(), 2, "job-a"), 5);
    let before = files(&runs.catalog(1));
    // Server 1 cannot write its part of the step that the job begins from; the part of server 0 is written.
    let blocked = runs.path(CheckpointId { run: 2, step: 5 }).join("ps-00001-of-00002.safetensors");
    let mut job = seldom(folder.path(), 2, "job-b");
    job.momentum = 0.25;
    let servers = job.start_all();
    wait_until("run 2 begins", || runs.catalog(2).folder().join("run.json").exists());
    fs::create_dir_all(&blocked).expect("makes");
    let session = Session::join(job.session(0, 9), &vec![1.0; elements()]).expect("joins");
    assert_eq!(session.next_step(), 5);
    session.leave(false, 0, BTreeMap::new()).expect("leaves");
    let own = runs.path(CheckpointId { run: 2, step: 5 }).join("ps-00000-of-00002.safetensors");
    servers.iter().for_each(|server| server.stop.cancel());
    for server in servers {
        assert!(matches!(server.outcome(), Err(ServerError::Stopped)));
    }
    assert!(own.exists() && files(&runs.catalog(1)) == before, "the other job's checkpoint is as it was");
    assert_eq!(runs.catalog(2).complete().expect("a folder"), [].into());
    fs::remove_dir(&blocked).expect("removes");
    assert_eq!(train_to(&job, 9), [6, 7, 8, 9], "it goes on from the same checkpoint");
    assert_eq!(runs.list().expect("a folder").len(), 2);
}

#[test]
fn a_suspended_job_finds_its_checkpoint_after_another_one_that_keeps_one_only_and_is_refused_without() {
    let folder = tempfile::tempdir().expect("a folder");
    let runs = Runs::new(folder.path());
    let first = seldom(folder.path(), 1, "job-a");
    train_to(&first, 5);
    let second = Job { keep: 1, ..seldom(folder.path(), 1, "job-b") };
    assert_eq!(train_to(&second, 9), [6, 7, 8, 9], "it goes on from the other one's");
    assert_eq!(runs.catalog(1).complete().expect("a folder"), [5].into(), "which stays");
    assert_eq!(runs.catalog(2).complete().expect("a folder"), [9].into());
    assert_eq!(train_to(&first, 7), [6, 7], "it goes on from its own");

    for step in runs.catalog(1).complete().expect("a folder") {
        fs::remove_dir_all(runs.path(CheckpointId { run: 1, step })).expect("removes");
    }
    for _ in 0..2 {
        let error = first.start(0).outcome().expect_err("nothing is left").to_string();
        assert!(error.contains("no checkpoint is left") && error.contains("run-00001"), "{error}");
    }
}

#[test]
fn a_second_job_is_kept_out_of_a_folder_that_is_in_use_and_let_in_when_it_is_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let first = seldom(folder.path(), 1, "job-a");
    let server = first.start(0);
    wait_until("job-a has the lock", || folder.path().join(LOCK).exists());
    let second = seldom(folder.path(), 1, "job-b");
    match second.start(0).outcome() {
        Err(ServerError::FolderInUse { job, .. }) => assert_eq!(job, "job-a"),
        other => panic!("{other:?}"),
    }
    // A process that is gone renews nothing.
    server.kill();
    assert_eq!(train_to(&second, 2), [1, 2]);

    let server = first.start(0);
    let lock = LockFile::new(folder.path());
    // Between two renewals: the first one would replace what is written here.
    wait_until("job-a has renewed the lock", || lock.read().expect("reads").is_some_and(|lock| lock.counter > 0));
    lock.write(&Lock { job: "job-c".into(), uid: "job-c".into(), holder: 1, incarnation: 0, counter: 0 })
        .expect("writes");
    match server.outcome() {
        Err(ServerError::FolderTaken { job, .. }) => assert_eq!(job, "job-c"),
        other => panic!("{other:?}"),
    }
    assert!(folder.path().join(LOCK).exists(), "the lock of another job stays");
}

#[test]
fn epochs_go_on_from_the_greatest_that_a_server_has_heard_of() {
    const STEPS: u64 = 150;
    // As from a leader whose clock was far ahead.
    const AHEAD: u64 = 1 << 60;
    let folder = tempfile::tempdir().expect("a folder");
    let job = Job::checkpointed(folder.path(), 2, 2, ConsistencyMode::Sync);
    let mut running = job.run(STEPS);
    wait_for(&running.steps, 20);
    let newest = wait_for_checkpoint(folder.path(), 0);
    let runtime = Runtime::new().expect("a runtime");
    let address = format!("http://{}", job.servers()[1]);
    let job_uid = UID.to_owned();
    runtime.block_on(async {
        let mut server = RecoveryClient::connect(address).await.expect("connects");
        let restore = |epoch| proto::RestoreRequest { job_uid: job_uid.clone(), epoch, run: 1, ..Default::default() };
        let refused = server.restore(restore(u64::MAX)).await.expect_err("server 0 has not recorded it");
        assert!(
            refused.code() == Code::FailedPrecondition && refused.message().contains("on record is 1"),
            "{refused:?}"
        );
        // As if the folder were exchanged afterwards.
        let runs = Runs::new(folder.path());
        let record = runs.record(1).expect("readable").expect("it is there");
        runs.put(&RunRecord { epoch: AHEAD, ..record.clone() }).expect("written");
        server.restore(restore(AHEAD)).await.expect("restores");
        runs.put(&record).expect("written");
        let refused = server.restore(restore(AHEAD - 1)).await.expect_err("over");
        assert!(refused.code() == Code::Aborted && refused.message().contains("epoch"), "{refused:?}");
        let snapshot =
            |epoch, step| SnapshotRequest { job_uid: job_uid.clone(), epoch, step, run: 1, ..Default::default() };
        let refused = server.snapshot(snapshot(AHEAD - 1, newest)).await.expect_err("over");
        assert_eq!(refused.code(), Code::Aborted, "{refused:?}");
        let request = proto::GetEpochRequest { job_uid: job_uid.clone(), leader: 0 };
        assert_eq!(server.get_epoch(request).await.expect("answers").into_inner().epoch, AHEAD);
    });
    running.restart(0);
    let want = Job::undisturbed(2, STEPS);
    assert!(running.finish().iter().all(|parameters| *parameters == want), "parameters differ");
    let record = Runs::new(folder.path()).list().expect("a folder").remove(0);
    assert!(record.epoch > AHEAD, "{record:?}");
}

#[test]
fn a_complete_checkpoint_is_not_written_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let job = seldom(folder.path(), 1, UID);
    train_to(&job, 3);
    let before = files(&Runs::new(folder.path()).catalog(1));
    let server = job.start(0);
    let session = Session::join(job.session(0, 6), &vec![1.0; elements()]).expect("joins");
    Runtime::new().expect("a runtime").block_on(async {
        let address = format!("http://{}", job.servers()[0]);
        let mut client = RecoveryClient::connect(address).await.expect("connects");
        let request = proto::GetEpochRequest { job_uid: UID.into(), leader: 0 };
        let epoch = client.get_epoch(request).await.expect("answers").into_inner().epoch;
        let request = SnapshotRequest { job_uid: UID.into(), epoch, step: 3, run: 1, ..Default::default() };
        let refused = client.snapshot(request).await.expect_err("it is complete");
        assert_eq!(refused.code(), Code::AlreadyExists, "{refused:?}");
    });
    let now = files(&Runs::new(folder.path()).catalog(1));
    assert!(before.iter().all(|(file, bytes)| file.ends_with(".json") || now.get(file) == Some(bytes)));
    session.leave(true, 0, BTreeMap::new()).expect("leaves");
    server.outcome().expect("ends well");
}

#[test]
fn a_job_whose_model_cannot_be_written_does_not_succeed() {
    let folder = tempfile::tempdir().expect("a folder");
    let job = seldom(folder.path(), 1, UID);
    fs::create_dir(folder.path().join("model.safetensors")).expect("makes");
    let server = job.start(0);
    let (sender, _steps) = mpsc::channel();
    job.trainer(0, 3, sender).join().expect("no panic");
    match server.outcome() {
        Err(ServerError::NotKept { what, why }) => {
            assert!(
                what == "the model" && why.contains("model.safetensors") && why.contains("step-0"),
                "{what}: {why}"
            );
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_job_whose_last_checkpoint_cannot_be_written_does_not_succeed_and_trainers_are_notified() {
    for waits in [false, true] {
        let folder = tempfile::tempdir().expect("a folder");
        let job = seldom(folder.path(), 1, UID);
        let server = job.start(0);
        let config = psjobs_ps::client::SessionConfig { connect_timeout: Duration::from_secs(30), ..job.session(0, 4) };
        let mut session = Session::join(config, &vec![1.0; elements()]).expect("joins");
        for step in 0..3 {
            session.gradients_mut().fill(1.0);
            session.exchange(step).expect("answers");
        }
        // Nothing can be written any more: the folder of the run is a file.
        let run = Runs::new(folder.path()).catalog(1).folder().to_owned();
        fs::rename(&run, folder.path().join("aside")).expect("moves");
        fs::write(&run, "").expect("writes");
        if waits {
            session.gradients_mut().fill(1.0);
            let error = session.exchange(3).expect_err("the last step cannot be kept").to_string();
            assert!(error.contains("the last step is in no checkpoint yet") && error.contains("run-00001"), "{error}");
            continue;
        }
        session.leave(true, 0, BTreeMap::new()).expect("leaves");
        match server.outcome() {
            Err(ServerError::NotKept { what, why }) => {
                assert!(what == "the last checkpoint" && why.contains("run-00001"), "{what}: {why}");
            }
            other => panic!("{other:?}"),
        }
    }
}
