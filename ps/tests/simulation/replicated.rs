//! Jobs whose blocks and rows two servers hold: the loss of one of them costs no step.

use std::time::Duration;

use psjobs_api::training::{Consistency, ConsistencyMode};

use crate::fault::{Fault, MachineFault};
use crate::job;
use crate::plan::Plan;
use crate::sweep::{sample, sweep};
use crate::with_rows;

/// Jobs whose blocks two servers hold: one server at a time is lost, silently or not, or cut off from the other.
#[test]
fn replicated_jobs_lose_no_step_with_a_server() {
    let away = Duration::from_millis(300);
    let kill = |server, silent| Fault::Kill { server, away, silent };
    let split = |lasts| Fault::Split { one: 0, other: 1, there: true, back: true, lasts };
    let later = |faults: Vec<Fault>| faults.into_iter().zip([0, 1500].map(Duration::from_millis)).collect::<Vec<_>>();
    let rows = [
        ("nothing happens", later(Vec::new())),
        ("server 0 dies", later(vec![kill(0, false)])),
        ("the other server dies", later(vec![kill(1, false)])),
        ("one dies without a word", later(vec![kill(1, true)])),
        ("server 0 dies without a word", later(vec![kill(0, true)])),
        ("the servers do not hear each other for a while", later(vec![split(away)])),
        ("the servers do not hear each other for long", later(vec![split(Duration::from_secs(35))])),
        ("a firewall refuses the servers to each other", later(vec![Fault::Refuse { server: 1, lasts: 100 * away }])),
        ("one dies, then the other", later(vec![kill(1, false), kill(0, false)])),
        (
            "a trainer dies, then a server",
            later(vec![Fault::Replace { trainer: 0, away, silent: false }, kill(0, false)]),
        ),
    ];
    for mode in [ConsistencyMode::Sync, ConsistencyMode::Bounded, ConsistencyMode::Async] {
        for (label, faults) in &rows {
            let failures = sweep(sample(16), |seed| {
                let consistency = Consistency { mode, staleness: 1, ..Consistency::default() };
                let plan = Plan { consistency, steps: 80, replicated: true, ..Plan::fair(seed) };
                let at = |after: &Duration| plan.begins() + *after + Duration::from_millis(25 * seed);
                let faults = faults.iter().map(|(fault, after)| (at(after), fault.clone())).collect();
                let plan = Plan { faults, ..plan };
                job::run(&plan, false).verdict
            });
            assert!(failures.is_empty(), "{mode:?}, {label}: {failures:#?}");
        }
    }
}

/// Jobs whose blocks two servers hold: a machine that runs one of them and a trainer is cut off, paused or lost.
#[test]
fn replicated_jobs_lose_no_step_with_a_machine() {
    let faults = [MachineFault::CutOff, MachineFault::Paused, MachineFault::Lost];
    let struck = [0, 1].into_iter().flat_map(|number| faults.map(|what| (number, what)));
    for mode in [ConsistencyMode::Sync, ConsistencyMode::Bounded, ConsistencyMode::Async] {
        for (number, what) in struck.clone() {
            let failures = sweep(sample(24), |seed| {
                let consistency = Consistency { mode, staleness: 1, ..Consistency::default() };
                let plan = Plan { consistency, steps: 80, replicated: true, trainers: 2, ..Plan::fair(seed) };
                // From less than the time after which a silent server may be replaced to more than it.
                let lasts = Duration::from_millis(4000 + 250 * seed);
                let at = plan.begins() + Duration::from_millis(25 * seed);
                job::run(&Plan { faults: vec![(at, Fault::Machine { number, what, lasts })], ..plan }, false).verdict
            });
            assert!(failures.is_empty(), "{mode:?}, machine {number}, {what:?}: {failures:#?}");
        }
    }
}

/// Each server is elected to lead its own shard while a firewall keeps them apart. Then one of them is lost together with the
/// trainer that elected it: the other one's copy lacks its steps, and is not elected by trainers that do not know that.
#[test]
fn a_copy_that_was_left_behind_is_not_elected_when_its_leader_is_lost() {
    let (firewall, away) = (Duration::from_secs(6), Duration::from_millis(300));
    let checkpoint = Some(Duration::from_secs(10));
    for mode in [ConsistencyMode::Sync, ConsistencyMode::Async] {
        let failures = sweep(sample(16), |seed| {
            let consistency = Consistency { mode, ..Consistency::default() };
            let (replicated, trainers, steps, compute) = (true, 1, 60, 400);
            let plan = Plan { consistency, replicated, trainers, steps, compute, checkpoint, ..Plan::fair(seed) };
            // When the copies are whole, and the trainer has made some steps; later it makes some that one server alone has.
            let apart = plan.begins() + Duration::from_millis(1500);
            let lost = apart + Duration::from_millis(2000 + 100 * seed);
            let faults = vec![
                (apart, Fault::Refuse { server: 1, lasts: firewall }),
                (lost, Fault::Machine { number: 0, what: MachineFault::Lost, lasts: away }),
            ];
            job::run(&Plan { faults, ..plan }, false).verdict
        });
        assert!(failures.is_empty(), "{mode:?}: {failures:#?}");
    }
}

/// Jobs of which one server goes and does not come back while they train, or whose servers are kept apart.
#[test]
fn without_one_server_trainers_wait_no_longer_than_promised() {
    let away = Duration::from_secs(300);
    let kill = |server, silent| Fault::Kill { server, away, silent };
    let (soon, promised) = (Duration::from_secs(1), Duration::from_secs(10));
    let one_way = Duration::from_secs(12);
    let split = |there, back| Fault::Split { one: 0, other: 1, there, back, lasts: away };
    let rows = [
        ("server 0 dies", kill(0, false), soon),
        ("the other server dies", kill(1, false), soon),
        ("server 0 vanishes", kill(0, true), promised),
        ("the other server vanishes", kill(1, true), promised),
        ("the servers do not hear each other", split(true, true), promised),
        ("server 0 is not heard", split(true, false), one_way),
        ("the other server is not heard", split(false, true), one_way),
        ("a firewall refuses the servers to each other", Fault::Refuse { server: 1, lasts: away }, soon),
    ];
    for mode in [ConsistencyMode::Sync, ConsistencyMode::Async] {
        for (label, fault, limit) in &rows {
            let failures = sweep(sample(16), |seed| {
                let consistency = Consistency { mode, ..Consistency::default() };
                let (kernels, moves) = (seed % 2 == 0, seed % 4 >= 2);
                let plan = Plan { consistency, steps: 80, replicated: true, kernels, moves, ..Plan::fair(seed) };
                let at = plan.begins() + Duration::from_millis(1000 + 25 * seed);
                let outcome = job::run(&Plan { faults: vec![(at, fault.clone())], ..plan }, false);
                outcome.verdict?;
                // The name of a server that has gone says nothing, where one that refuses says that it has gone.
                let limit = if moves { promised.max(*limit) } else { *limit };
                if outcome.longest_wait <= limit {
                    return Ok(());
                }
                Err(format!("a trainer waited for {:?}, not {limit:?}", outcome.longest_wait))
            });
            assert!(failures.is_empty(), "{mode:?}, {label}: {failures:#?}");
        }
    }
}

/// Jobs whose servers do not hear each other, so that one is elected, which then loses what it holds: the other one's
/// copy lacks steps that trainers have gone on from, and must not take its place.
#[test]
fn an_elected_server_that_is_lost_is_not_followed_by_one_that_lacks_its_steps() {
    let kill = |server, away| Fault::Kill { server, away: Duration::from_millis(away), silent: false };
    let rows = [
        ("server 0 is lost, and soon back", kill(0, 300)),
        ("server 0 is lost, and back when they hear each other", kill(0, 15_000)),
        ("the other server is lost, and soon back", kill(1, 300)),
        ("the other server is lost, and back when they hear each other", kill(1, 15_000)),
    ];
    for mode in [ConsistencyMode::Sync, ConsistencyMode::Async] {
        for (label, lost) in &rows {
            let failures = sweep(sample(16), |seed| {
                let consistency = Consistency { mode, ..Consistency::default() };
                let checkpoint = Some(Duration::from_millis(1000));
                let at = |seconds: u64| Duration::from_millis(1000 * seconds + 50 * seed);
                let split = Fault::Split { one: 0, other: 1, there: true, back: true, lasts: Duration::from_secs(15) };
                let faults = vec![(at(1), split), (at(11), lost.clone())];
                let plan = Plan { consistency, checkpoint, faults, steps: 60, compute: 500, ..Plan::fair(seed) };
                job::run(&Plan { replicated: true, ..plan }, false).verdict
            });
            assert!(failures.is_empty(), "{mode:?}, {label}: {failures:#?}");
        }
    }
}

/// Jobs with a sparse table that two servers hold, and with checkpoints: the loss of one server costs nothing, both go
/// back together.
#[test]
fn replicated_rows_count_every_push_once_whatever_dies() {
    let away = Duration::from_millis(300);
    let kill = |server, silent| Fault::Kill { server, away, silent };
    let later = |faults: Vec<Fault>| faults.into_iter().zip([0, 1500].map(Duration::from_millis)).collect::<Vec<_>>();
    let together = |faults: Vec<Fault>| faults.into_iter().map(|fault| (fault, Duration::ZERO)).collect::<Vec<_>>();
    let rows = [
        ("nothing happens", later(Vec::new())),
        ("server 0 dies", later(vec![kill(0, false)])),
        ("the other server dies", later(vec![kill(1, true)])),
        ("one dies, then the other", later(vec![kill(0, false), kill(1, false)])),
        ("both die", together(vec![kill(0, false), kill(1, false)])),
        ("one dies, then both", {
            let mut faults = later(vec![kill(1, false), kill(0, false)]);
            faults.push((kill(1, false), Duration::from_millis(1500)));
            faults
        }),
        ("a trainer and a server", together(vec![Fault::Replace { trainer: 0, away, silent: false }, kill(0, false)])),
    ];
    for mode in [ConsistencyMode::Sync, ConsistencyMode::Bounded, ConsistencyMode::Async] {
        for (label, faults) in &rows {
            let failures = sweep(sample(6), |seed| {
                let consistency = Consistency { mode, staleness: 1, ..Consistency::default() };
                // When the rows are held twice.
                let at = |after: &Duration| *after + Duration::from_millis(500 + 60 * seed);
                let faults = faults.iter().map(|(fault, after)| (at(after), fault.clone())).collect();
                let (checkpoint, steps) = (Some(Duration::from_millis(40)), 80);
                let plan = Plan { consistency, checkpoint, faults, steps, ..Plan::fair(seed) };
                job::run(&with_rows(Plan { replicated: true, ..plan }, seed), false).verdict
            });
            assert!(failures.is_empty(), "{mode:?}, {label}: {failures:#?}");
        }
    }
}

/// Jobs without checkpoints whose blocks two servers hold: trainers have elected a leader before, and then both servers are lost.
/// The trainers fill their successors, which need none of what that leader gave.
#[test]
fn replicated_jobs_go_on_when_both_servers_are_lost_after_an_election() {
    let away = Duration::from_millis(300);
    let kill = |server| Fault::Kill { server, away, silent: false };
    for mode in [ConsistencyMode::Sync, ConsistencyMode::Bounded, ConsistencyMode::Async] {
        let failures = sweep(sample(24), |seed| {
            let consistency = Consistency { mode, staleness: 1, ..Consistency::default() };
            let (steps, compute) = (80, 500);
            let plan = Plan { consistency, steps, compute, servers: 2, replicated: true, ..Plan::fair(seed) };
            let first = plan.begins() + Duration::from_millis(25 * seed);
            // The server that was lost first has all blocks again.
            let second = first + Duration::from_secs(3);
            let faults = vec![(first, kill(seed as u32 % 2)), (second, kill(0)), (second, kill(1))];
            job::run(&Plan { faults, forgets: true, supervised: true, ..plan }, false).verdict
        });
        assert!(failures.is_empty(), "{mode:?}: {failures:#?}");
    }
}
