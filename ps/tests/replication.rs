//! Jobs whose blocks are held by two servers: one that is killed costs neither a step nor a bit.

mod support;

use std::sync::mpsc;
use std::time::{Duration, Instant};

use psjobs_api::training::ConsistencyMode;
use psjobs_ps::proto::StatusRequest;
use psjobs_ps::proto::coordination_client::CoordinationClient;
use support::job::*;
use support::*;
use tokio::runtime::Runtime;

/// What `trainers` trainers get that nobody disturbs, from one server.
fn undisturbed(trainers: u32, steps: u64) -> Vec<f32> {
    let mut job = Job::replicated(1, trainers, ConsistencyMode::Sync);
    job.replicated = false;
    let servers = job.start_all();
    let (sender, _steps) = mpsc::channel();
    let trainers: Vec<_> = (0..trainers).map(|index| job.trainer(index, steps, sender.clone())).collect();
    let parameters = trainers.into_iter().map(|trainer| trainer.join().expect("no panic")).next_back();
    servers.into_iter().for_each(|server| drop(server.outcome().expect("ends well")));
    parameters.expect("a trainer")
}

/// Waits until `server` says that all that it holds is held twice.
fn wait_for_two_copies(job: &Job, server: usize) {
    let address = format!("http://{}", job.addresses[server]);
    let runtime = Runtime::new().expect("a runtime");
    let deadline = Instant::now() + Duration::from_secs(60);
    runtime.block_on(async {
        loop {
            let warnings = match CoordinationClient::connect(address.clone()).await {
                Ok(mut client) => client.status(StatusRequest {}).await.map(|reply| reply.into_inner().warnings),
                Err(error) => Err(tonic::Status::from_error(error.into())),
            };
            match warnings {
                Ok(warnings) if !warnings.iter().any(|warning| warning.contains("held once")) => return,
                other => assert!(Instant::now() < deadline, "{other:?}"),
            }
            tokio::task::yield_now().await;
        }
    });
}

#[test]
fn training_goes_on_without_the_server_that_was_killed() {
    const STEPS: u64 = 120;
    for victim in [0, 1] {
        let job = Job::replicated(2, 2, ConsistencyMode::Sync);
        let mut servers = job.start_all();
        let (sender, steps) = mpsc::channel();
        let trainers: Vec<_> = (0..2).map(|index| job.trainer(index, STEPS, sender.clone())).collect();
        wait_for(&steps, 10);
        wait_for_two_copies(&job, 1 - victim);
        servers.remove(victim).kill();
        drop(steps);
        let want = undisturbed(2, STEPS);
        for trainer in trainers {
            assert!(trainer.join().expect("no panic") == want, "parameters differ from those of an undisturbed job");
        }
        servers.into_iter().for_each(|server| drop(server.outcome().expect("ends well")));
    }
}

#[test]
fn a_server_that_comes_back_is_filled_again_and_can_take_over() {
    const STEPS: u64 = 300;
    let job = Job::replicated(3, 2, ConsistencyMode::Sync);
    let mut servers = job.start_all();
    let (sender, steps) = mpsc::channel();
    let trainers: Vec<_> = (0..2).map(|index| job.trainer(index, STEPS, sender.clone())).collect();
    wait_for(&steps, 10);
    for victim in [1, 2, 0, 1] {
        for server in 0..3 {
            wait_for_two_copies(&job, server);
        }
        servers.remove(victim).kill();
        wait_for(&steps, 0);
        servers.insert(victim, job.start(victim as u32));
    }
    drop(steps);
    let want = undisturbed(2, STEPS);
    for trainer in trainers {
        assert!(trainer.join().expect("no panic") == want, "parameters differ from those of an undisturbed job");
    }
    servers.into_iter().for_each(|server| drop(server.outcome().expect("ends well")));
}

#[test]
fn an_acknowledged_asynchronous_update_is_neither_lost_nor_made_twice() {
    const STEPS: u64 = 200;
    let mut job = Job::replicated(2, 3, ConsistencyMode::Async);
    job.momentum = 0.0;
    let mut servers = job.start_all();
    let (sender, steps) = mpsc::channel();
    // Powers of two: however the updates interleave, their sum is exact.
    let gradient = |_| vec![0.0625_f32; elements()];
    let trainers: Vec<_> = (0..3).map(|index| job.trainer_of(index, STEPS, sender.clone(), gradient)).collect();
    wait_for(&steps, 20);
    for victim in [1, 0] {
        for server in 0..2 {
            wait_for_two_copies(&job, server);
        }
        servers.remove(victim).kill();
        servers.insert(victim, job.start(victim as u32));
        wait_for(&steps, 0);
    }
    drop(steps);
    let last = trainers
        .into_iter()
        .map(|trainer| trainer.join().expect("no panic"))
        .reduce(|a, b| a.into_iter().zip(b).map(|(a, b)| a.min(b)).collect());
    let want = 1.0 - 3.0 * STEPS as f32 * 0.125 * 0.0625;
    let last = last.expect("trainers");
    let wrong: Vec<_> = last.iter().filter(|value| **value != want).take(3).collect();
    assert!(wrong.is_empty(), "expected {want} everywhere, found {wrong:?}");
    servers.into_iter().for_each(|server| drop(server.outcome().expect("ends well")));
}

#[test]
fn with_checkpoints_only_the_loss_of_both_copies_goes_back_to_one() {
    const STEPS: u64 = 400;
    let folder = tempfile::tempdir().expect("a folder");
    let mut job = Job::checkpointed(folder.path(), 2, 2, ConsistencyMode::Sync);
    job.replicated = true;
    let mut servers = job.start_all();
    let (sender, steps) = mpsc::channel();
    let trainers: Vec<_> = (0..2).map(|index| job.trainer(index, STEPS, sender.clone())).collect();
    for victim in [0, 1] {
        wait_for(&steps, 10);
        for server in 0..2 {
            wait_for_two_copies(&job, server);
        }
        servers.remove(victim).kill();
        servers.insert(victim, job.start(victim as u32));
    }
    for server in 0..2 {
        wait_for_two_copies(&job, server);
    }
    let kept = wait_for_checkpoint(folder.path(), 0);
    let done: Vec<u64> = steps.try_iter().collect();
    let furthest = done.iter().copied().max().unwrap_or(kept);
    assert!(done.windows(3).all(|seen| seen[2] + 1 >= seen[0]), "nobody went back: {done:?}");
    servers.drain(..).for_each(Process::kill);
    servers = job.start_all();
    let want = undisturbed(2, STEPS);
    for trainer in trainers {
        assert!(trainer.join().expect("no panic") == want, "parameters differ from those of an undisturbed job");
    }
    assert!(furthest < STEPS, "the servers were killed while it trained");
    servers.into_iter().for_each(|server| drop(server.outcome().expect("ends well")));
}
