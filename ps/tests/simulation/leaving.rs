//! The end of a job, in which servers are lost.

use std::time::Duration;

use psjobs_api::training::{Consistency, ConsistencyMode};

use crate::fault::Fault;
use crate::job;
use crate::network::Weather;
use crate::plan::Plan;
use crate::sweep::sweep;

/// Server 0 ends when all trainers have left it, and server 1, lost in that moment, is never started again: the trainers end
/// without it.
#[test]
fn a_server_that_is_lost_while_trainers_leave_holds_none_of_them_up() {
    let kinds = [
        ("layers", None, false),
        ("tables", None, true),
        ("layers, with checkpoints", Some(Duration::from_secs(1)), false),
        ("tables, with checkpoints", Some(Duration::from_secs(1)), true),
    ];
    for (kind, checkpoint, tables) in kinds {
        let fair = Plan::fair(7);
        let weather = Weather { delay: 100, ..fair.weather };
        let undisturbed = Plan { trainers: 2, steps: 2, supervised: true, checkpoint, tables, weather, ..fair };
        let mut without_it = 0;
        for at in (0..150).map(|tick| Duration::from_millis(20 * tick)) {
            let kill = Fault::Kill { server: 1, away: Duration::from_secs(1), silent: false };
            let plan = Plan { faults: vec![(at, kill)], forgets: checkpoint.is_none(), ..undisturbed.clone() };
            let outcome = job::run(&plan, false);
            assert_eq!(outcome.verdict, Ok(()), "{kind}: server 1 is lost after {at:?}");
            without_it += u32::from(outcome.missed);
        }
        assert!(without_it > 0, "{kind}: server 1 was always started again");
    }
}

/// By hand and without checkpoints only the other trainers know who has finished: a server that is started again hears it from
/// them, and lets the slower ones go on.
#[test]
fn a_server_that_is_lost_when_a_trainer_has_finished_does_not_wait_for_it() {
    let consistency = Consistency { mode: ConsistencyMode::Bounded, staleness: 6, ..Consistency::default() };
    let failures = sweep(0..120, |seed| {
        let kill = Fault::Kill { server: 1, away: Duration::from_millis(200), silent: false };
        let faults = vec![(Duration::from_millis(1_000 + 75 * seed), kill)];
        let plan =
            Plan { steps: 12, compute: 1_500, forgets: true, consistency: consistency.clone(), ..Plan::fair(seed) };
        job::run(&Plan { faults, ..plan }, false).verdict
    });
    assert!(failures.is_empty(), "{failures:#?}");
}

/// Without checkpoints the trainers have the only copy of what a lost server held: they wait for its successor and fill it, however
/// near the end they are.
#[test]
fn trainers_without_checkpoints_wait_for_a_server_that_is_lost_at_the_end() {
    let fair = Plan::fair(7);
    let undisturbed = Plan { trainers: 2, steps: 2, supervised: true, forgets: true, ..fair };
    for at in (100..260).step_by(8).map(Duration::from_millis) {
        let kill = Fault::Kill { server: 1, away: Duration::from_secs(300), silent: false };
        let outcome = job::run(&Plan { faults: vec![(at, kill)], ..undisturbed.clone() }, false);
        assert_eq!((outcome.verdict, outcome.restarts), (Ok(()), 0), "server 1 is lost after {at:?}");
    }
}
