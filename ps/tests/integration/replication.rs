//! Jobs whose blocks are held by two servers: one that is killed costs neither a step nor a bit.

use crate::support::job::*;
use crate::support::*;
use psjobs_api::training::ConsistencyMode;

const DIFFER: &str = "parameters differ from those of an undisturbed job";

#[test]
fn training_goes_on_without_the_server_that_was_killed() {
    const STEPS: u64 = 120;
    for victim in [0, 1] {
        let job = Job::replicated(2, 2, ConsistencyMode::Sync);
        let mut running = job.run(STEPS);
        wait_for(&running.steps, 10);
        wait_for_two_copies(&job.servers()[1 - victim]);
        running.kill(victim);
        let want = Job::undisturbed(2, STEPS);
        assert!(running.finish().iter().all(|parameters| *parameters == want), "{DIFFER}");
    }
}

#[test]
fn a_server_that_comes_back_is_filled_again_and_can_take_over() {
    const STEPS: u64 = 300;
    let job = Job::replicated(3, 2, ConsistencyMode::Sync);
    let mut running = job.run(STEPS);
    wait_for(&running.steps, 10);
    for victim in [1, 2, 0, 1] {
        wait_for_all_copies(&job.servers());
        running.kill(victim);
        wait_for(&running.steps, 0);
        running.servers.insert(victim, job.start(victim as u32));
    }
    let want = Job::undisturbed(2, STEPS);
    assert!(running.finish().iter().all(|parameters| *parameters == want), "{DIFFER}");
}

#[test]
fn an_acknowledged_asynchronous_update_is_neither_lost_nor_made_twice() {
    const STEPS: u64 = 200;
    let mut job = Job::replicated(2, 3, ConsistencyMode::Async);
    job.momentum = 0.0;
    // Powers of two: however the updates interleave, their sum is exact.
    let mut running = job.run_of(STEPS, |_| |_| vec![0.0625_f32; elements()]);
    wait_for(&running.steps, 20);
    for victim in [1, 0] {
        wait_for_all_copies(&job.servers());
        running.restart(victim);
        wait_for(&running.steps, 0);
    }
    let last = running.finish().into_iter().reduce(|a, b| a.into_iter().zip(b).map(|(a, b)| a.min(b)).collect());
    let (last, want) = (last.expect("trainers"), 1.0 - 3.0 * STEPS as f32 * 0.125 * 0.0625);
    let wrong: Vec<_> = last.iter().filter(|value| **value != want).take(3).collect();
    assert!(wrong.is_empty(), "expected {want} everywhere, found {wrong:?}");
}

#[test]
fn with_checkpoints_only_the_loss_of_both_copies_goes_back_to_one() {
    const STEPS: u64 = 400;
    let folder = tempfile::tempdir().expect("a folder");
    let mut job = Job::checkpointed(folder.path(), 2, 2, ConsistencyMode::Sync);
    job.replicated = true;
    let mut running = job.run(STEPS);
    for victim in [0, 1] {
        wait_for(&running.steps, 10);
        wait_for_all_copies(&job.servers());
        running.restart(victim);
    }
    wait_for_all_copies(&job.servers());
    let kept = wait_for_checkpoint(folder.path(), 0);
    let done: Vec<u64> = running.steps.try_iter().collect();
    let furthest = done.iter().copied().max().unwrap_or(kept);
    assert!(done.windows(3).all(|seen| seen[2] + 1 >= seen[0]), "no trainer went back: {done:?}");
    running.servers.drain(..).for_each(Process::kill);
    running.servers = (0..2).map(|server| job.start_again(server, 3)).collect();
    let want = Job::undisturbed(2, STEPS);
    assert!(running.finish().iter().all(|parameters| *parameters == want), "{DIFFER}");
    assert!(furthest < STEPS, "the servers were killed while it trained");
}
