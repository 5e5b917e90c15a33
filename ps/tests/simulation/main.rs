//! Whole jobs, servers and trainers as they are, over a network in memory that delays, tears, breaks and partitions,
//! on a clock that jumps. A seed says all of it, so what fails once fails again:
//!
//! ```sh
//! make simulate FROM=1234 SEEDS=1 TRACE=1
//! ```

mod backups;
mod checkpoints;
mod colocated;
mod disk;
mod elastic;
mod end;
mod fault;
mod job;
mod leaving;
mod model;
mod network;
mod overlapped;
mod plan;
mod replicated;
mod rows_beside;
mod sweep;
mod tables;
mod trace;
mod trainer;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use disk::DiskFault;
use fault::{FOR_GOOD, Fault, MachineFault};
use plan::Plan;
use psjobs_api::training::{Consistency, ConsistencyMode};
use sweep::{sample, sweep, variable};

/// Seeds of an ordinary run of the tests.
const SEEDS: u64 = 2000;
/// Failing seeds that are printed; one is enough to begin with.
const PRINTED: usize = 60;

/// Kinds of jobs and faults, of each of which an ordinary run has some.
const KINDS: [&str; 61] = [
    "backup trainers",
    "checkpoints",
    "coded gradients",
    "colocated",
    "colocated and replicated",
    "connections broken",
    "connections broken for one side",
    "cut off in one direction",
    "disk cannot be read",
    "disk full",
    "disk refuses to flush",
    "disk refuses to rename",
    "disk refuses writes",
    "disk slow",
    "elastic",
    "exchanges that overlap",
    "folder not permitted",
    "folder stale",
    "gradients that leave early",
    "half-open connections",
    "local steps",
    "machine died in a file operation",
    "machine with server and trainer cut off",
    "machine with server and trainer lost",
    "machine with server and trainer paused",
    "machine with server and trainer replaced, lives on",
    "mode Async",
    "mode Bounded",
    "mode Sync",
    "no checkpoints of others",
    "one checkpoint kept",
    "one connection broken",
    "optimizer Adagrad",
    "optimizer Adam",
    "optimizer AdamW",
    "optimizer FTRL",
    "optimizer RMSprop",
    "optimizer SGD",
    "processes that wait without limit",
    "replicated",
    "server killed",
    "server lost for good",
    "server replaced, cut off, lives on",
    "server replaced, lives on",
    "server stopped",
    "server vanished",
    "servers cut off",
    "servers cut off in one direction",
    "servers refused by a firewall",
    "several connections",
    "sparse tables",
    "sparse tables beside parameters",
    "successors at new addresses",
    "trainer and server cut off",
    "trainer killed",
    "trainer late",
    "trainer left",
    "trainer lost for good",
    "trainer replaced, lives on",
    "trainer vanished",
    "wall clock jumps",
];

#[test]
fn no_job_loses_or_repeats_a_gradient_or_hangs() {
    let (from, seeds) = (variable("FROM").unwrap_or(0), variable("SEEDS").unwrap_or(SEEDS));
    let trace = variable("TRACE").is_some();
    if trace {
        drop(tracing_subscriber::fmt().with_env_filter("psjobs=debug").with_test_writer().try_init());
    }
    let struck: Mutex<BTreeMap<&str, u64>> = Mutex::default();
    let in_pods = variable("PODS").is_some();
    let failures = sweep(from..from + seeds, |seed| {
        let plan = if in_pods { Plan::in_pods(seed) } else { Plan::new(seed) };
        if trace {
            println!("{plan:#?}");
        }
        let outcome = job::run(&plan, trace);
        let mut struck = struck.lock().expect("no panic");
        for name in plan.kinds().into_iter().chain(outcome.faults) {
            *struck.entry(name).or_default() += 1;
        }
        outcome.verdict
    });
    println!("of {seeds} jobs, so many had");
    let struck = struck.into_inner().expect("no panic");
    struck.iter().for_each(|(name, seeds)| println!("{seeds:>7}  {name}"));
    for (seed, what) in failures.iter().take(PRINTED) {
        println!("seed {seed}: {what}\n  replay: make simulate FROM={seed} SEEDS=1 TRACE=1");
    }
    assert!(failures.is_empty(), "{} of {seeds} jobs went wrong", failures.len());
    let missing: Vec<_> = KINDS.iter().filter(|name| !struck.contains_key(*name)).collect();
    assert!(seeds < SEEDS || in_pods || missing.is_empty(), "of {seeds} jobs none had {missing:?}");
}

/// Jobs in fair weather with the one fault that once was too much, at times from the first step to the last.
#[test]
fn what_was_found_before_stays_mended() {
    let away = Duration::from_millis(300);
    let killed = Fault::Kill { server: 1, away, silent: false };
    let (sync, free) = (ConsistencyMode::Sync, ConsistencyMode::Async);
    let soon = Some(Duration::from_millis(40));
    let rows = [
        ("a trainer dies within a round", sync, None, Fault::Replace { trainer: 0, away, silent: false }),
        ("an answer from before the servers went back", free, soon, killed.clone()),
        ("the servers go back to nothing", sync, Some(Duration::from_secs(60)), killed.clone()),
        ("a server dies when others have finished", free, Some(Duration::from_secs(60)), killed),
        ("asked to stop while the last ones finish", free, soon, Fault::Stop { server: 0, away }),
    ];
    for (label, mode, checkpoint, fault) in rows {
        let failures = sweep(0..80, |seed| {
            let consistency = Consistency { mode, ..Consistency::default() };
            let faults = vec![(Duration::from_millis(5 * seed), fault.clone())];
            job::run(&Plan { consistency, checkpoint, faults, ..Plan::fair(seed) }, false).verdict
        });
        assert!(failures.is_empty(), "{label}: {failures:#?}");
    }
}

/// Seeds that went wrong when they were first run: jobs without a model, checkpoints that were waited for in vain, locks
/// that a replaced process wrote late.
#[test]
fn seeds_that_failed_before_stay_mended() {
    let failures: Vec<String> = [
        6449, 7641, 7997, 9963, 13_575, 13_877, 16_346, 16_644, 16_906, 18_731, 18_927, 25_212, 37_134, 37_157, 37_654,
        29_404, 5276, 26_342, 39_782, 38_883, 49_623, 51_449, 57_034, 47_533, 60_722, 61_023, 77_695, 97_760, 14_814,
        20_688,
    ]
    .into_iter()
    .filter_map(|seed| {
        let mut plan = Plan::without_what_came_later(seed);
        // Simulated machines came later, too.
        plan.faults.retain(|(_, fault)| !matches!(fault, Fault::Machine { .. }));
        job::run(&plan, false).verdict.err().map(|why| format!("seed {seed}: {why}"))
    })
    .collect();
    assert!(failures.is_empty(), "{failures:#?}");
}

/// A trainer's old process ends well after its successor has joined, which is ended for that: the servers waited for it.
#[test]
fn a_replaced_trainer_has_not_finished() {
    for seed in [702_956, 704_678] {
        assert_eq!(job::run(&Plan::new(seed), false).verdict, Ok(()), "seed {seed}");
    }
}

/// The machine of a server is lost before a trainer has filled its blocks: the other server, which has had nothing to copy,
/// ends and is started again.
#[test]
fn a_machine_that_is_lost_before_the_first_gradient_costs_a_start() {
    let verdict = job::run(&Plan::without_what_came_later(80_021), false).verdict;
    assert_eq!(verdict, Ok(()));
}

/// Both holders of a shard are elected, the one after the other. The trainers have tables alone and know which leader has
/// acknowledged their steps, so that none leads that lacks them.
#[test]
fn two_elections_cost_trainers_of_tables_no_step() {
    assert_eq!(job::run(&Plan::new(17_283), false).verdict, Ok(()));
}

/// A process that was replaced has given two steps to a server that did not know of its successor, which gives both again.
#[test]
fn a_successor_gives_two_steps_of_the_process_before_again() {
    assert_eq!(job::run(&Plan::new(31_780), false).verdict, Ok(()));
}

/// Servers whose machine was replaced in the middle of an election or a checkpoint: a vote for the process before is free
/// again, and that process writes into no checkpoint of its successor.
#[test]
fn a_process_that_was_replaced_holds_neither_a_vote_nor_a_checkpoint() {
    for seed in [58_589, 94_676] {
        assert_eq!(job::run(&Plan::new(seed), false).verdict, Ok(()), "seed {seed}");
    }
}

/// The process of server 0 before, and a trainer that was replaced, finish the job while both live on: their last checkpoint has
/// every step, and the other servers end with it. The successor of server 0 exports its model.
#[test]
fn a_successor_takes_the_last_checkpoint_of_the_process_before() {
    assert_eq!(job::run(&Plan::new(87_910), false).verdict, Ok(()));
}

/// Servers that go back to a checkpoint while a trainer enters: it is given no values of another epoch.
#[test]
fn a_trainer_that_enters_gets_values_of_one_epoch() {
    for seed in [71_738, 87_156] {
        assert_eq!(job::run(&Plan::new(seed), false).verdict, Ok(()), "seed {seed}");
    }
}

/// A machine whose processes live on after they were replaced, as when its kubelet dies, in jobs that nothing but the names of
/// servers leads to the successors: without checkpoints and copies. What the server held is lost, as documented.
#[test]
fn a_server_that_lives_on_after_it_was_replaced_holds_no_trainer_back() {
    let lasts = Duration::from_millis(300);
    for mode in [ConsistencyMode::Sync, ConsistencyMode::Bounded, ConsistencyMode::Async] {
        for servers in [1, 2] {
            let failures = sweep(0..20, |seed| {
                let consistency = Consistency { mode, ..Consistency::default() };
                let number = seed as u32 % servers;
                let replaced = Fault::Machine { number, what: MachineFault::Replaced, lasts };
                let faults = vec![(Duration::from_millis(10 * seed), replaced)];
                // Long enough that the old process finds out; trainers do not finish with it before.
                let (steps, compute) = (60, 500);
                let plan = Plan { consistency, servers, steps, compute, faults, ..Plan::fair(seed) };
                job::run(&Plan { forgets: true, supervised: true, ..plan }, false).verdict
            });
            assert!(failures.is_empty(), "{mode:?}, {servers} servers: {failures:#?}");
        }
    }
}

/// A machine that is lost with a server and a trainer, in jobs without checkpoints and copies: the trainer's successor goes on
/// with the others, although its server has forgotten their steps. Before, some of these jobs stood still for ever in Sync.
#[test]
fn a_machine_with_a_server_and_a_trainer_is_lost_and_the_others_go_on() {
    let away = Duration::from_millis(300);
    let kill = |server| Fault::Kill { server, away, silent: false };
    let zombie = |server| Fault::ZombieServer { server, away, lasts: None };
    let replace = |trainer| Fault::Replace { trainer, away, silent: false };
    let rows = [
        ("a server dies", vec![kill(1)]),
        ("server 0 and trainer 0 die", vec![kill(0), replace(0)]),
        ("the other server and a trainer die", vec![kill(1), replace(1)]),
        ("a trainer dies, the server is replaced and lives on", vec![zombie(1), replace(1)]),
        ("both servers and a trainer die", vec![kill(0), kill(1), replace(2)]),
    ];
    for mode in [ConsistencyMode::Sync, ConsistencyMode::Bounded, ConsistencyMode::Async] {
        for (label, faults) in &rows {
            let failures = sweep(0..12, |seed| {
                let consistency = Consistency { mode, ..Consistency::default() };
                let at = Duration::from_millis(30 + 180 * seed);
                let faults = faults.iter().map(|fault| (at, fault.clone())).collect();
                let (steps, compute) = (60, 500);
                let plan = Plan { consistency, steps, compute, faults, ..Plan::fair(seed) };
                job::run(&Plan { forgets: true, supervised: true, ..plan }, false).verdict
            });
            assert!(failures.is_empty(), "{mode:?}, {label}: {failures:#?}");
        }
    }
}

/// Blocks that travel over several connections of a trainer, of which one breaks, and then that of another.
#[test]
fn jobs_with_several_connections_lose_one_and_go_on() {
    let away = Duration::from_millis(300);
    let severed = |nth| Fault::Sever { trainer: 0, server: 0, nth };
    let rows = [
        ("two break", false, vec![severed(0), severed(1)]),
        ("one breaks, its trainer dies", false, vec![severed(2), Fault::Replace { trainer: 0, away, silent: false }]),
        ("trainers come and go", true, vec![severed(1), Fault::Leave { trainer: 1, back: Some(away) }]),
    ];
    for mode in [ConsistencyMode::Sync, ConsistencyMode::Async] {
        for (label, elastic, faults) in &rows {
            let failures = sweep(0..6, |seed| {
                let consistency = Consistency { mode, ..Consistency::default() };
                let at = |nth: usize| Duration::from_millis(12 * seed + 30 * nth as u64);
                let faults = faults.iter().enumerate().map(|(nth, fault)| (at(nth), fault.clone())).collect();
                let plan = Plan { consistency, faults, ..Plan::fair(seed).large(1, 2 + seed as u32 % 2) };
                let plan = if *elastic { plan.made_elastic(1) } else { plan };
                job::run(&plan, false).verdict
            });
            assert!(failures.is_empty(), "{mode:?}, {label}: {failures:#?}");
        }
    }
}

/// Runs jobs whose faults each show in few jobs of many.
#[test]
fn elastic_jobs_go_on_with_those_who_are_there() {
    let away = Duration::from_millis(300);
    let lost = Fault::Lost { trainer: 2, silent: true };
    let rows = [
        ("nothing happens", None, Vec::new()),
        ("one comes late", None, vec![Fault::Late { trainer: 1, away: 8 * away }]),
        ("one is asked to leave", None, vec![Fault::Leave { trainer: 1, back: None }]),
        ("one leaves and comes back", None, vec![Fault::Leave { trainer: 1, back: Some(away) }]),
        ("one is lost without a word", None, vec![lost.clone()]),
        ("one is lost, a server too", Some(away / 4), vec![lost, Fault::Kill { server: 0, away, silent: false }]),
        ("one is replaced", None, vec![Fault::Replace { trainer: 0, away, silent: false }]),
    ];
    for mode in [ConsistencyMode::Sync, ConsistencyMode::Bounded, ConsistencyMode::Async] {
        for (label, checkpoint, faults) in &rows {
            let failures = sweep(0..20, |seed| {
                let consistency = Consistency { mode, ..Consistency::default() };
                let faults = faults.iter().map(|fault| (Duration::from_millis(20 * seed), fault.clone())).collect();
                let plan = Plan { consistency, checkpoint: *checkpoint, faults, ..Plan::fair(seed).made_elastic(1) };
                job::run(&plan, false).verdict
            });
            assert!(failures.is_empty(), "{mode:?}, {label}: {failures:#?}");
        }
    }
}

/// Jobs whose trainers compute each gradient while the exchange of the one before is under way: with dense parameters alone, with
/// rows beside them, and elastic.
#[test]
fn exchanges_that_overlap_lose_and_repeat_nothing() {
    let away = Duration::from_millis(300);
    let kill = |server, silent| Fault::Kill { server, away, silent };
    let soon = Some(Duration::from_millis(40));
    let rows = [
        ("nothing happens", None, Vec::new()),
        ("a trainer dies", None, vec![Fault::Replace { trainer: 0, away, silent: false }]),
        ("one is replaced and lives on", soon, vec![Fault::Zombie { trainer: 0, away, lasts: 10 * away }]),
        ("connections break", None, vec![Fault::Break { trainer: 1, server: 0, half: false }]),
        ("a server dies", soon, vec![kill(1, false)]),
        ("server 0 dies, and the other one", soon, vec![kill(0, true), kill(1, false)]),
        ("the servers go back to nothing", Some(Duration::from_secs(60)), vec![kill(1, false)]),
        ("a server is asked to stop", soon, vec![Fault::Stop { server: 0, away }]),
    ];
    for mode in [ConsistencyMode::Bounded, ConsistencyMode::Async] {
        for (label, checkpoint, faults) in &rows {
            let failures = sweep(sample(30), |seed| {
                let consistency = Consistency { mode, staleness: 1, ..Consistency::default() };
                let faults = faults.iter().map(|fault| (Duration::from_millis(20 * seed), fault.clone())).collect();
                let plan = Plan { consistency, checkpoint: *checkpoint, faults, overlap: true, ..Plan::fair(seed) };
                let plan = match seed % 3 {
                    0 => plan,
                    1 => Plan { beside: true, ..plan },
                    _ => plan.made_elastic(1),
                };
                job::run(&plan, false).verdict
            });
            assert!(failures.is_empty(), "{mode:?}, {label}: {failures:#?}");
        }
    }
}

/// Jobs with a sparse table, and layers that the trainers train themselves.
#[test]
fn rows_count_every_push_once_whatever_dies() {
    let away = Duration::from_millis(300);
    let kill = |server, silent| Fault::Kill { server, away, silent };
    let replace = |trainer, silent| Fault::Replace { trainer, away, silent };
    let zombie = Fault::Zombie { trainer: 0, away, lasts: 10 * away };
    let soon = Some(Duration::from_millis(40));
    let rows = [
        ("nothing happens", None, Vec::new()),
        ("a trainer dies within a push", None, vec![replace(1, false)]),
        ("the one that keeps the layers dies", soon, vec![replace(0, true)]),
        ("one is replaced and lives on", soon, vec![zombie]),
        ("a server dies", soon, vec![kill(1, false)]),
        ("server 0 dies", soon, vec![kill(0, false)]),
        ("both die", soon, vec![kill(0, true), kill(1, false)]),
        ("the servers go back to nothing", Some(Duration::from_secs(60)), vec![kill(1, false)]),
        ("a server is asked to stop", soon, vec![Fault::Stop { server: 1, away }]),
    ];
    for mode in [ConsistencyMode::Sync, ConsistencyMode::Bounded, ConsistencyMode::Async] {
        for (label, checkpoint, faults) in &rows {
            let failures = sweep(sample(16), |seed| {
                let consistency = Consistency { mode, staleness: 1, ..Consistency::default() };
                let faults = faults.iter().map(|fault| (Duration::from_millis(25 * seed), fault.clone())).collect();
                let plan = Plan { consistency, checkpoint: *checkpoint, faults, ..Plan::fair(seed) };
                job::run(&with_rows(plan, seed), false).verdict
            });
            assert!(failures.is_empty(), "{mode:?}, {label}: {failures:#?}");
        }
    }
}

/// The plan with a sparse table: alone, or in every other seed beside parameters that the servers train.
fn with_rows(plan: Plan, seed: u64) -> Plan {
    let tables = seed.is_multiple_of(2);
    Plan { tables, beside: !tables, ..plan }
}

/// Every way in which a disk fails, with how long a piece of work takes on a slow one.
const DISK_FAULTS: [DiskFault; 8] = [
    DiskFault::Full,
    DiskFault::Write,
    DiskFault::Flush,
    DiskFault::Rename,
    DiskFault::Read,
    DiskFault::Denied,
    DiskFault::Stale,
    DiskFault::Slow(Duration::from_secs(5)),
];

/// Jobs whose disk fails for a while, until after their last step, and which lose a server meanwhile or not.
#[test]
fn jobs_go_on_when_their_disk_is_whole_again() {
    let (away, lasts) = (Duration::from_millis(300), Duration::from_secs(30));
    let kill = |server| Fault::Kill { server, away, silent: false };
    let crash = |server, after| Fault::Crash { server, after, away };
    let rows = [
        ("the disk of all", None, Vec::new()),
        ("that of server 0", Some(0), Vec::new()),
        ("that of the other server", Some(1), Vec::new()),
        ("that of the other server, which dies", Some(1), vec![kill(1)]),
        ("server 0 dies meanwhile", None, vec![kill(0)]),
        ("the other server dies meanwhile", None, vec![kill(1)]),
        ("a machine dies in a file operation", None, vec![crash(0, 20)]),
        ("both machines do", None, vec![crash(0, 10), crash(1, 5)]),
    ];
    for mode in [ConsistencyMode::Sync, ConsistencyMode::Async] {
        for fault in DISK_FAULTS {
            for (label, server, faults) in &rows {
                let failures = sweep(sample(4), |seed| {
                    let consistency = Consistency { mode, ..Consistency::default() };
                    let at = |nth: usize| Duration::from_millis(90 * seed + 150 * nth as u64);
                    let disk = Fault::Disk { server: *server, fault, lasts };
                    let faults = std::iter::once(&disk).chain(faults).enumerate();
                    let faults = faults.map(|(nth, fault)| (at(nth), fault.clone())).collect();
                    let (checkpoint, tables, beside) = (Some(Duration::from_millis(40)), seed % 4 == 1, seed % 4 == 3);
                    let plan = Plan { consistency, checkpoint, tables, beside, faults, ..Plan::fair(seed) };
                    job::run(&plan, false).verdict
                });
                assert!(failures.is_empty(), "{mode:?}, {fault:?}, {label}: {failures:#?}");
            }
        }
    }
}

/// Machines that die in each of the file operations of a few checkpoints, one after the other.
#[test]
fn a_machine_that_dies_in_any_file_operation_costs_no_checkpoint_that_is_complete() {
    let away = Duration::from_millis(300);
    for (label, servers) in [("server 0", vec![0]), ("the other server", vec![1]), ("both", vec![0, 1])] {
        let failures = sweep(0..80, |seed| {
            let crash = |server| Fault::Crash { server, after: seed as u32, away };
            let faults = servers.iter().map(|server| (Duration::from_millis(200), crash(*server))).collect();
            let (checkpoint, tables, beside) = (Some(Duration::from_millis(40)), seed % 3 == 2, seed % 6 == 1);
            let mode = if seed % 2 == 0 { ConsistencyMode::Sync } else { ConsistencyMode::Async };
            let consistency = Consistency { mode, ..Consistency::default() };
            let plan = Plan { consistency, checkpoint, tables, beside, faults, ..Plan::fair(seed) };
            job::run(&plan, false).verdict
        });
        assert!(failures.is_empty(), "{label}: {failures:#?}");
    }
}

/// Jobs whose last checkpoint or model can never be written.
#[test]
fn a_job_whose_disk_is_never_mended_does_not_succeed() {
    for fault in DISK_FAULTS.into_iter().filter(|fault| !matches!(fault, DiskFault::Read | DiskFault::Slow(_))) {
        let failures = sweep(sample(8), |seed| {
            let mode = if seed % 2 == 0 { ConsistencyMode::Sync } else { ConsistencyMode::Async };
            let consistency = Consistency { mode, ..Consistency::default() };
            let disk = Fault::Disk { server: None, fault, lasts: FOR_GOOD };
            let faults = vec![(Duration::from_millis(30 * seed), disk)];
            // Servers try what cannot be written until they give up, after many minutes.
            let checkpoint = Some(Duration::from_secs(2));
            job::run(&Plan { consistency, checkpoint, faults, doomed: true, ..Plan::fair(seed) }, false).verdict
        });
        assert!(failures.is_empty(), "{fault:?}: {failures:#?}");
    }
}

/// The wall clock is shown and never compared: a run in which it jumps is the same as one in which it does not.
#[test]
fn a_clock_that_jumps_changes_nothing() {
    let failures = sweep(0..60, |seed| {
        let run = |hours| {
            let mut plan = Plan::new(seed);
            plan.faults.retain(|(_, fault)| !matches!(fault, Fault::Jump { .. }));
            plan.faults
                .extend((1..9).map(|nth| (Duration::from_millis(70 * nth), Fault::Jump { hours: hours * nth as i32 })));
            job::run(&plan, false)
        };
        let [still, ahead, back] = [0, 7, -7].map(run);
        let same = still.digest == ahead.digest && still.digest == back.digest;
        if same { still.verdict } else { Err(format!("{:?}, {:?}, {:?}", still.verdict, ahead.verdict, back.verdict)) }
    });
    assert!(failures.is_empty(), "seeds whose run differs when the clock jumps: {failures:#?}");
}

#[test]
fn a_seed_gives_the_same_run_each_time() {
    let failures = sweep(0..120, |seed| {
        let plan = Plan::new(seed);
        let (one, two) = (job::run(&plan, false), job::run(&plan, false));
        if one.digest == two.digest { Ok(()) } else { Err(format!("{:?} and {:?}", one.verdict, two.verdict)) }
    });
    assert!(failures.is_empty(), "seeds whose second run differed from the first: {failures:#?}");
}
