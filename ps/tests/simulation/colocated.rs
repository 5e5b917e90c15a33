//! Jobs whose servers share pods with trainers: a server and the trainer of its number are lost and replaced together.

use std::time::Duration;

use psjobs_api::training::{Consistency, ConsistencyMode};

use crate::fault::{Fault, MachineFault};
use crate::job;
use crate::plan::Plan;
use crate::sweep::{sample, sweep};

const MODES: [ConsistencyMode; 3] = [ConsistencyMode::Sync, ConsistencyMode::Bounded, ConsistencyMode::Async];

/// Runs three pods whose faults come at times from the first step to the last.
fn run(seed: u64, mode: ConsistencyMode, faults: &[Fault], plan: impl Fn(Plan) -> Plan) -> Result<(), String> {
    let consistency = Consistency { mode, staleness: 1, ..Consistency::default() };
    let plan = plan(Plan { consistency, ..Plan::fair(seed) }.made_colocated());
    let at = |nth: usize| plan.begins() + Duration::from_millis(25 * seed + 1_500 * nth as u64);
    let faults = faults.iter().enumerate().map(|(nth, fault)| (at(nth), fault.clone())).collect();
    job::run(&Plan { faults, ..plan }, false).verdict
}

/// A pod takes a server and a trainer along; with a checkpoint all go back to it, and nothing counts twice.
#[test]
fn pods_with_checkpoints_come_back_with_server_and_trainer() {
    let away = Duration::from_millis(300);
    let kill = |server, silent| Fault::Kill { server, away, silent };
    let replace = |trainer| Fault::Replace { trainer, away, silent: false };
    let rows = [
        ("the container of server 0 fails", vec![kill(0, false)]),
        ("the container of another server fails", vec![kill(1, false)]),
        ("the container of a trainer fails", vec![replace(1)]),
        ("that of the trainer beside server 0 fails, then another", vec![replace(0), replace(2)]),
        ("a pod is deleted", vec![Fault::Stop { server: 1, away }]),
        ("the machine of a pod vanishes", vec![kill(2, true)]),
        ("a node lives on after its pod was replaced", vec![Fault::ZombieServer { server: 1, away, lasts: None }]),
        ("one is cut off, and lives on", vec![Fault::Zombie { trainer: 0, away, lasts: 10 * away }]),
    ];
    for mode in MODES {
        for (label, faults) in &rows {
            let failures = sweep(sample(40), |seed| {
                let checkpoint = Some(Duration::from_millis(if seed.is_multiple_of(2) { 40 } else { 60_000 }));
                run(seed, mode, faults, |plan| Plan { checkpoint, ..plan })
            });
            assert!(failures.is_empty(), "{mode:?}, {label}: {failures:#?}");
        }
    }
}

/// With a second copy in another pod the loss of a pod costs its trainer's step alone.
#[test]
fn replicated_pods_lose_no_step_with_a_server_and_a_trainer() {
    let away = Duration::from_millis(300);
    let kill = |server, silent| Fault::Kill { server, away, silent };
    let lasts = Duration::from_secs(7);
    let lost = |number, what| Fault::Machine { number, what, lasts };
    let rows = [
        ("the container of server 0 fails", kill(0, false)),
        ("the container of a trainer fails", Fault::Replace { trainer: 1, away, silent: false }),
        ("a pod is deleted", Fault::Stop { server: 2, away }),
        ("the machine of a pod vanishes", lost(1, MachineFault::Lost)),
        ("that of server 0 vanishes", lost(0, MachineFault::Lost)),
        ("a machine is cut off", lost(0, MachineFault::CutOff)),
        ("a node lives on after its pod was replaced", lost(1, MachineFault::Replaced)),
    ];
    for mode in MODES {
        for (label, fault) in &rows {
            let failures = sweep(sample(24), |seed| {
                run(seed, mode, std::slice::from_ref(fault), |plan| Plan { steps: 80, replicated: true, ..plan })
            });
            assert!(failures.is_empty(), "{mode:?}, {label}: {failures:#?}");
        }
    }
}

/// Jobs of all kinds in pods, with all faults, in any weather. `PSJOBS_SIMULATE_PODS=1 make simulate FROM=123 SEEDS=1 TRACE=1` shows what
/// happens in one, and runs as many as wanted.
#[test]
fn jobs_in_pods_lose_and_repeat_nothing() {
    let failures = sweep(sample(900), |seed| job::run(&Plan::in_pods(seed), false).verdict);
    assert!(failures.is_empty(), "{failures:#?}");
}
