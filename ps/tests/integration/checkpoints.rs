//! Jobs whose servers die, stop and come back: what the trainers end up with is what they would have
//! got from servers that never did.

use std::collections::BTreeMap;
use std::fs;
use std::future::pending;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use crate::support::job::*;
use crate::support::*;
use psjobs_api::training::{ConsistencyMode, OptimizerKind};
use psjobs_ps::checkpoint::format::MANIFEST;
use psjobs_ps::checkpoint::{Checkpoint, Runs};
use psjobs_ps::client::Session;
use psjobs_ps::proto;
use psjobs_ps::proto::recovery_client::RecoveryClient;
use psjobs_ps::series::writer::read_points;
use psjobs_ps::server::ServerError;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use safetensors::SafeTensors;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::Notify;
use tokio_stream::StreamExt as _;
use tonic::service::Routes;
use tonic::transport::Server;

#[test]
fn a_killed_server_costs_no_bit() {
    const STEPS: u64 = 300;
    let folder = tempfile::tempdir().expect("a folder");
    let job = Job::checkpointed(folder.path(), 2, 2, ConsistencyMode::Sync);
    job.limit.set(Running::AHEAD);
    let mut running = job.run(STEPS);
    running.restart_each_after_a_checkpoint(folder.path());
    let want = Job::undisturbed(2, STEPS);
    let same = running.finish().iter().all(|parameters| *parameters == want);
    assert!(same, "parameters differ from those of an undisturbed job");
    let model = fs::read(folder.path().join("model.safetensors")).expect("the model is exported");
    let model = SafeTensors::deserialize(&model).expect("safetensors");
    let weight = model.tensor("fc.weight").expect("the tensor").data().to_vec();
    assert_eq!(weight, bytemuck_f32(&want[7..]), "the exported model is the trained one");
    let run = Runs::new(folder.path()).catalog(1);
    let kept = run.complete().expect("a folder");
    assert!(kept.len() <= 2 && kept.contains(&STEPS), "{kept:?}");
    for trainer in ["trainer-0", "trainer-1"] {
        let points = read_points(&run.folder().folder("metrics").folder(trainer)).expect("readable");
        let points: Vec<_> = points.iter().map(|point| (point.step, point.values["loss"])).collect();
        let want: Vec<_> = (1..=STEPS).map(|step| (step, (1.0 / step as f64) as f32)).collect();
        assert_eq!(points, want, "{trainer}: every step is in its series once");
    }
}

fn bytemuck_f32(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn a_stopped_job_goes_on_with_another_number_of_servers() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut at = 0;
    let mut last = Vec::new();
    for (servers, until) in [(2, 7), (1, 15), (3, 20)] {
        let job = Job::checkpointed(folder.path(), servers, 2, ConsistencyMode::Sync);
        let running = job.start_all();
        let (sender, steps) = mpsc::channel();
        let trainers: Vec<_> = (0..2).map(|index| job.trainer(index, until, sender.clone())).collect();
        assert_eq!(steps.recv_timeout(Duration::from_secs(60)).expect("trains"), at + 1, "it goes on where it was");
        at = until;
        last = trainers.into_iter().map(|trainer| trainer.join().expect("no panic")).next_back().expect("two");
        let results = running.into_iter().map(|server| server.outcome().expect("ends well")).collect::<Vec<_>>();
        // Server 0 speaks for the job.
        let checkpoint = results[0].checkpoint.clone().expect("server 0 reports the last checkpoint");
        assert_eq!(
            (checkpoint.step, PathBuf::from(checkpoint.path)),
            (until, Runs::new(folder.path()).catalog(1).path(until).to_path_buf())
        );
        assert_eq!(results[0].model.as_deref().map(Path::new), Some(folder.path().join("model.safetensors").as_path()));
    }
    assert!(last == Job::undisturbed(2, 20), "parameters differ from those of an undisturbed job");
}

#[test]
fn a_stopped_job_goes_on_with_another_number_of_trainers() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut at = 0;
    for (trainers, until) in [(2, 7), (4, 15), (2, 20)] {
        let job = Job::checkpointed(folder.path(), 2, trainers, ConsistencyMode::Sync);
        let running = job.start_all();
        let (sender, steps) = mpsc::channel();
        let working: Vec<_> = (0..trainers).map(|index| job.trainer(index, until, sender.clone())).collect();
        let ends: Vec<_> = working.into_iter().map(|trainer| trainer.join().expect("no panic")).collect();
        assert!(ends.iter().all(|end| *end == ends[0]), "{trainers} trainers end with different parameters");
        running.into_iter().for_each(|server| drop(server.outcome().expect("ends well")));
        drop(sender);
        let mut done: Vec<u64> = steps.iter().collect();
        done.sort_unstable();
        let want: Vec<u64> = (at + 1..=until).flat_map(|step| vec![step; trainers as usize]).collect();
        assert_eq!(done, want, "{trainers} trainers do each step that is left once");
        at = until;
    }
}

#[test]
fn a_server_that_is_asked_to_stop_keeps_what_it_has() {
    let folder = tempfile::tempdir().expect("a folder");
    let job = Job::checkpointed(folder.path(), 2, 1, ConsistencyMode::Async);
    let servers = job.start_all();
    let mut session = Session::join(session_config(0, job.servers()), &vec![1.0; elements()]).expect("joins");
    for step in 0..5 {
        session.gradients_mut().fill(1.0);
        assert_eq!(session.exchange(step).expect("answers"), step + 1);
    }
    let parameters = session.parameters().to_vec();
    session.leave(false, 0, BTreeMap::new()).expect("leaves");
    servers.iter().for_each(|server| server.stop.cancel());
    for server in servers {
        assert!(matches!(server.outcome(), Err(ServerError::Stopped)));
    }
    let checkpoint = Checkpoint::open(Runs::new(folder.path()).catalog(1).path(5)).expect("the checkpoint of step 5");
    assert!(checkpoint.read(0..elements()).expect("whole").values == parameters);
}

#[test]
fn a_damaged_checkpoint_is_passed_over_and_a_foreign_one_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut job = Job::checkpointed(folder.path(), 1, 1, ConsistencyMode::Sync);
    // Only the first and the last step of each run are kept.
    job.interval = Duration::from_secs(3600);
    let (sender, steps) = mpsc::channel();
    for until in [3, 6] {
        let server = job.start(0);
        job.trainer(0, until, sender.clone()).join().expect("no panic");
        server.outcome().expect("ends well");
    }
    let newest = Runs::new(folder.path()).catalog(1).path(6).join("ps-00000-of-00001.safetensors");
    let mut bytes = fs::read(&newest).expect("a part");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&newest, bytes).expect("written");
    let server = job.start(0);
    while steps.try_recv().is_ok() {}
    job.trainer(0, 5, sender.clone()).join().expect("no panic");
    assert_eq!(steps.try_iter().collect::<Vec<_>>(), [4, 5], "it goes on from step 3");
    server.outcome().expect("ends well");

    (job.optimizer, job.momentum) = (OptimizerKind::Adam, 0.0);
    let error = job.start(0).outcome().expect_err("another optimizer").to_string();
    assert!(error.contains("SGD") && error.contains("Adam"), "{error}");
    assert!(Runs::new(folder.path()).catalog(1).complete().expect("a folder").contains(&5), "nothing is lost");
}

#[test]
fn a_checkpoint_that_is_removed_while_servers_go_to_it_gives_way_to_the_one_before() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut job = Job::checkpointed(folder.path(), 2, 1, ConsistencyMode::Sync);
    job.interval = Duration::from_secs(3600);
    let catalog = Runs::new(folder.path()).catalog(1);
    for until in [4, 8] {
        job.run(until).finish();
    }
    let kept: Vec<u64> = catalog.complete().expect("a folder").into_iter().collect();
    let [before, 8] = kept[..] else { panic!("{kept:?}") };
    // Server 1 cannot open its part, which is a link to itself.
    let part = catalog.path(8).join("ps-00001-of-00002.safetensors");
    fs::remove_file(&part).expect("removes");
    symlink(&part, &part).expect("links");
    let running = job.run(12);
    wait_for_warning(&job.servers()[0], &part.display().to_string());
    fs::remove_file(catalog.path(8).join(MANIFEST)).expect("removes");
    let first = running.steps.recv_timeout(Duration::from_secs(60)).expect("training goes on");
    assert_eq!(first, before + 1, "it goes on from the one before");
    running.finish();
}

#[test]
fn a_server_that_hangs_on_its_way_to_a_checkpoint_is_waited_for_until_its_successor_comes() {
    let folder = tempfile::tempdir().expect("a folder");
    let job = Job::checkpointed(folder.path(), 2, 1, ConsistencyMode::Sync);
    let leader = job.start(0);
    let runtime = Runtime::new().expect("a runtime");
    // It has asked to be restored, keeps its connection and answers pings, but its disk never does.
    let hanging = async {
        let listener = listen_again(job.addresses[1]);
        listener.set_nonblocking(true).expect("a socket");
        let listener = TcpListener::from_std(listener).expect("a socket");
        let mut leading = RecoveryClient::connect(format!("http://{}", job.servers()[0])).await.expect("connects");
        let request = proto::RecoverRequest { job_uid: UID.into(), server: 1, instance: 7, ..Default::default() };
        tokio::spawn(async move { leading.recover(request).await });
        let (connection, _) = listener.accept().await.expect("server 0 connects");
        let asked = Arc::new(Notify::new());
        let asking = asked.clone();
        let restore = move || {
            asking.notify_one();
            pending::<()>()
        };
        let routes = axum::Router::new().route("/psjobs.v1.Recovery/Restore", axum::routing::post(restore));
        let connections = tokio_stream::once(Ok::<_, std::io::Error>(connection)).chain(tokio_stream::pending());
        tokio::spawn(Server::builder().add_routes(Routes::from(routes)).serve_with_incoming(connections));
        asked.notified().await;
    };
    runtime.block_on(async { tokio::time::timeout(Duration::from_secs(60), hanging).await }).expect("it is asked");
    let successor = job.start(1);
    let (sender, _steps) = mpsc::channel();
    let parameters = job.trainer(0, 5, sender).join().expect("no panic");
    assert!(parameters == Job::undisturbed(1, 5), "parameters differ from those of an undisturbed job");
    for server in [leader, successor] {
        server.outcome().expect("ends well");
    }
}

#[test]
fn checkpoints_that_cannot_be_written_are_reported_while_training_goes_on_until_one_is_written() {
    const STEPS: u64 = 1200;
    let folder = tempfile::tempdir().expect("a folder");
    let job = Job::checkpointed(folder.path(), 1, 1, ConsistencyMode::Async);
    job.limit.set(1);
    let running = job.run(STEPS);
    let mut step = 1;
    // One step after the other, for a minute at least, so that there is always something to keep.
    let mut train_until = |what: &str, condition: &dyn Fn() -> bool| {
        while !condition() {
            step += 1;
            assert!(step < STEPS, "it takes too long: {what}");
            job.limit.set(step);
            wait_for(&running.steps, step);
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    let complete = || Runs::new(folder.path()).catalog(1).complete().expect("a folder");
    train_until("the first checkpoint", &|| !complete().is_empty());
    let (run, file) = (folder.path().join("run-00001"), folder.path().join("file"));
    fs::write(&file, "not a folder").expect("writes");
    // In one moment, so that the server does not make the folder again.
    let exchange = || {
        renameat_with(CWD, run.as_path(), CWD, file.as_path(), RenameFlags::EXCHANGE).expect("exchanges");
    };
    exchange();
    let servers = job.servers();
    let is_reported = || warns(&servers[0], "no checkpoint can be written");
    train_until("a report", &|| is_reported() == Some(true));
    exchange();
    train_until("a checkpoint after it", &|| is_reported() == Some(false));
    running.finish();
    assert!(complete().contains(&STEPS), "the last one is there");
}
