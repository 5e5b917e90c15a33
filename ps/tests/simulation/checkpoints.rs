//! Checkpoints that take long, and restores that were asked for too late.

use std::time::Duration;

use crate::job;
use crate::plan::Plan;

/// In Sync a checkpoint is of a step to come: that step is waited for, however long the exchanges before it take.
#[test]
fn a_job_of_slow_exchanges_keeps_checkpoints_while_it_trains() {
    let (checkpoint, compute) = (Some(Duration::from_secs(1)), 200_000);
    for seed in 0..4 {
        let plan = Plan { checkpoint, compute, trainers: 4, steps: 5, keep: 10, ..Plan::fair(seed) };
        let outcome = job::run(&plan, false);
        assert_eq!(outcome.verdict, Ok(()), "seed {seed}");
        let between = outcome.checkpoints.iter().filter(|step| (1..plan.steps).contains(*step)).count();
        assert!(between > 0, "seed {seed}: {:?}", outcome.checkpoints);
    }
}

/// Server 0 is asked to stop and cannot say so to the trainers: no server takes gradients any more from when its part of the
/// last checkpoint is cut, so that all parts are of one step.
#[test]
fn the_last_checkpoint_is_of_one_step_while_trainers_are_at_work() {
    assert_eq!(job::run(&Plan::new(743_080), false).verdict, Ok(()));
}

/// The rows of the last step are lost with their server, and the parameters are not. No checkpoint counts as the trainer's last
/// before it has given the rows again.
#[test]
fn a_trainer_has_not_finished_while_rows_of_its_last_step_are_missing() {
    assert_eq!(job::run(&Plan::new(721_970), false).verdict, Ok(()));
}

/// A process of server 0 that was replaced lives on, and its request to restore reaches a server that has just started and
/// knows neither of them.
#[test]
fn a_server_restores_nothing_for_a_process_that_was_replaced() {
    assert_eq!(job::run(&Plan::new(720_565), false).verdict, Ok(()));
}

/// The rows of one holder of a shard were cleared before the job had any at the other one, which leads and has had a push since:
/// the two are not equal.
#[test]
fn rows_that_were_cleared_are_not_those_after_the_first_push() {
    assert_eq!(job::run(&Plan::new(806_947), false).verdict, Ok(()));
}

/// A trainer that an elastic job has given up comes back while server 0 writes its last checkpoint, which a disk delays: it is
/// not in that checkpoint, and the job has its model.
#[test]
fn a_trainer_that_comes_back_when_an_elastic_job_is_over_does_not_take_part() {
    assert_eq!(job::run(&Plan::new(803_273), false).verdict, Ok(()));
}

/// A job that is started by hand loses a server for good after the last step: its trainers of tables wait as long as a server may
/// be away, and no longer.
#[test]
fn trainers_of_tables_do_not_wait_for_ever_until_their_last_step_is_kept() {
    assert_eq!(job::run(&Plan::new(821_467), false).verdict, Ok(()));
}
