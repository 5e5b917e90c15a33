use psjobs_api::training::Codec;

use super::*;

/// 96 blocks of 1 MiB.
const PARAMETERS: u64 = 96 * 262_144;
/// Bytes of a message with a block.
const MESSAGE: f64 = 1_048_608.0;
const LINK: f64 = 1.25e9;

/// Trainers that compute nothing, and a network without delay.
fn setup(trainers: u32, servers: u32) -> Setup {
    Setup {
        parameters: PARAMETERS,
        compute: 0.0,
        examples: 32.0,
        trainers,
        servers,
        trainer_link: LINK,
        server_link: LINK,
        round_trip: 0.0,
        compression: Compression::default(),
        mode: ConsistencyMode::Sync,
        backup_trainers: 0,
        local: None,
        is_replicated: false,
        has_tls: false,
        overlap: 0.0,
        spread: 0.0,
        server_cores: 4.0,
        trainer_cores: 1.0,
        slots: 0.0,
        keeps_previous: false,
    }
}

/// Only the links take time.
fn free() -> Constants {
    Constants {
        byte_ns: 0.0,
        tls_ns: 0.0,
        element_ns: 0.0,
        update_ns: 0.0,
        coding_ns: 0.0,
        message_us: 0.0,
        heartbeat_us: 0.0,
        link_share: 1.0,
    }
}

fn step(setup: &Setup, constants: &Constants) -> f64 {
    estimate(setup, constants).expect("a model").step_seconds
}

fn is_near(found: f64, want: f64) -> bool {
    (found - want).abs() <= 1e-9 + 1e-6 * want.abs()
}

#[test]
fn an_exchange_takes_its_time_on_the_links() {
    // Times of one message in a step: 96 without end, and what is under way alone at the beginning of each window.
    for (trainers, servers, messages) in [
        // 16 blocks are under way: both ways at once.
        (1, 1, 6.0 * (2.0 + 15.0)),
        // One for each of 96 servers: the trainer's link.
        (1, 96, 2.0 + 95.0),
        // 2 of each trainer on one server's link.
        (8, 1, 48.0 * (2.0 + 15.0)),
        (8, 8, 12.0 * (2.0 + 7.0)),
        // 1 of each trainer.
        (64, 1, 96.0 * (2.0 + 63.0)),
        (64, 96, 2.0 + 95.0),
    ] {
        let found = step(&setup(trainers, servers), &free()) * LINK / MESSAGE;
        assert!(is_near(found, messages), "{trainers} trainers, {servers} servers: {found}, not {messages}");
    }
}

#[test]
fn one_block_at_a_time_goes_there_and_back_in_turn() {
    let one = Setup { parameters: 262_144, round_trip: 1e-3, ..setup(1, 1) };
    let found = step(&one, &free());
    assert!(is_near(found, 1e-3 + 2.0 * MESSAGE / LINK), "{found}");
}

#[test]
fn work_of_the_servers_and_trainers_takes_the_place_of_a_fast_link() {
    let fast = Setup { trainer_link: 1e15, server_link: 1e15, ..setup(8, 1) };
    let elements = 262_144.0;
    type Row = (&'static str, fn(&mut Setup, &mut Constants), f64);
    // The work of one block of one trainer at the server, in seconds of a core.
    let rows: [Row; 7] = [
        ("bytes", |_, constants| constants.byte_ns = 1.0, 2.0 * MESSAGE * 1e-9),
        ("bytes with TLS", |setup, constants| (setup.has_tls, constants.tls_ns) = (true, 1.0), 2.0 * MESSAGE * 1e-9),
        ("TLS without TLS", |_, constants| constants.tls_ns = 1.0, 0.0),
        ("messages", |_, constants| constants.message_us = 1.0, 2e-6),
        ("sums", |_, constants| constants.element_ns = 1.0, elements * 1e-9),
        ("one update for all", |_, constants| constants.update_ns = 1.0, elements * 1e-9 / 8.0),
        (
            "an update for each",
            |setup, constants| (setup.mode, constants.update_ns) = (ConsistencyMode::Async, 1.0),
            elements * 1e-9,
        ),
    ];
    for (label, change, work) in rows {
        let (mut setup, mut constants) = (fast.clone(), free());
        change(&mut setup, &mut constants);
        let payload = Payload::new(setup.parameters, 1, 8, &setup.compression).expect("a model");
        let demands = Demands::new(&setup, &payload, &constants);
        let found = demands.server_cores * setup.server_cores;
        assert!(is_near(found, work), "{label}: {found}, not {work}");
        let exchanged = step(&setup, &constants);
        let least = 96.0 * 8.0 * work / setup.server_cores;
        assert!(exchanged >= least * (1.0 - 1e-9), "{label}: {exchanged} of {least}");
    }
}

#[test]
fn computing_hides_an_exchange_and_local_steps_make_it_rare() {
    let exchanged = step(&setup(8, 1), &free());
    let computing = |compute| Setup { compute, ..setup(8, 1) };
    let local = |steps, overlap| Some(LocalSteps { steps, overlap });
    for (label, setup, want) in [
        ("nothing hides it", computing(exchanged), 2.0 * exchanged),
        ("half of it", Setup { overlap: 0.5, ..computing(exchanged) }, 1.5 * exchanged),
        ("all of it", Setup { overlap: 0.5, ..computing(4.0 * exchanged) }, 4.0 * exchanged),
        ("once in ten steps", Setup { local: local(10, false), ..computing(1.0) }, 1.0 + exchanged / 10.0),
        ("ten steps hide it", Setup { local: local(10, true), ..computing(exchanged) }, exchanged),
        (
            "ten steps hide a part of it",
            Setup { local: local(10, true), ..computing(exchanged / 20.0) },
            exchanged / 20.0 + exchanged / 20.0,
        ),
    ] {
        let found = step(&setup, &free());
        assert!(is_near(found, want), "{label}: {found}, not {want}");
    }
}

#[test]
fn trainers_that_wait_for_each_other_wait_for_the_slowest() {
    let deviates = (2.0 * 64.0_f64.ln()).sqrt();
    let spread = |mode, backup_trainers| Setup { mode, backup_trainers, compute: 10.0, spread: 0.1, ..setup(64, 96) };
    let waits = |setup: &Setup| estimate(setup, &free()).expect("a model").waiting_seconds;
    assert!(is_near(waits(&spread(ConsistencyMode::Sync, 0)), deviates));
    assert!(is_near(waits(&spread(ConsistencyMode::Sync, 63)), 0.0));
    for mode in [ConsistencyMode::Bounded, ConsistencyMode::Async] {
        assert!(is_near(waits(&spread(mode, 0)), 0.0), "{mode:?}");
    }
    let local = Setup { local: Some(LocalSteps { steps: 100, overlap: false }), ..spread(ConsistencyMode::Sync, 0) };
    assert!(is_near(waits(&local), deviates / 10.0), "a hundred steps spread less than one");
}

#[test]
fn asynchronous_trainers_share_the_servers_without_waiting_for_each_other() {
    let computing = |trainers, compute| Setup { mode: ConsistencyMode::Async, compute, ..setup(trainers, 1) };
    // 8 blocks of each are under way, and the server's link has time for both.
    let two = step(&computing(2, 10.0), &free());
    assert!(is_near(two, 10.0 + 12.0 * (2.0 + 7.0) * MESSAGE / LINK), "{two}");
    let many = step(&computing(1000, 10.0), &free());
    assert!(is_near(many, 96.0 * 1000.0 * MESSAGE / LINK), "the server's link has no time left: {many}");
}

#[test]
fn replication_forwards_one_sum_in_sync_and_each_gradient_else() {
    let demands = |mode, trainers| {
        let setup = Setup { mode, is_replicated: true, ..setup(trainers, 2) };
        let payload = Payload::new(setup.parameters, 2, trainers, &setup.compression).expect("a model");
        Demands::new(&setup, &payload, &free()).server_link * LINK
    };
    assert!(is_near(demands(ConsistencyMode::Sync, 8), MESSAGE + 1_048_576.0 / 8.0));
    assert!(is_near(demands(ConsistencyMode::Async, 8), 2.0 * MESSAGE));
}

#[test]
fn a_server_holds_its_part_of_the_parameters_with_what_goes_with_each() {
    for (slots, keeps_previous, is_replicated, values) in [
        (0.0, false, false, 1.0),
        (2.0, false, false, 3.0),
        (0.0, true, false, 2.0),
        (2.0, true, false, 4.0),
        (2.0, true, true, 8.0),
    ] {
        let setup = Setup { slots, keeps_previous, is_replicated, ..setup(8, 4) };
        let found = estimate(&setup, &free()).expect("a model").server_bytes;
        // A block of each trainer is under way.
        let want = values * 4.0 * PARAMETERS as f64 / 4.0 + 8.0 * MESSAGE;
        assert!(is_near(found, want), "{slots} slots, {keeps_previous}, {is_replicated}: {found}, not {want}");
    }
    let one = Setup { parameters: 1000, keeps_previous: true, ..setup(1, 1) };
    let kept = estimate(&one, &free()).expect("a model").server_bytes;
    let without = Setup { keeps_previous: false, ..one };
    let without = estimate(&without, &free()).expect("a model").server_bytes;
    assert!(is_near(kept, without), "a step of one block has no middle");
}

#[test]
fn what_limits_a_step_is_named() {
    let real = Constants::default;
    let slow = |codec| Compression { codec, ..Compression::default() };
    let fast = Setup { trainer_link: 1e12, server_link: 1e12, ..setup(8, 1) };
    let rows = [
        (Setup { compute: 100.0, ..setup(8, 8) }, Limit::Compute),
        (setup(8, 1), Limit::ServerLinks),
        (Setup { server_link: 1e12, server_cores: 64.0, ..setup(1, 8) }, Limit::TrainerLinks),
        (Setup { server_cores: 0.1, ..fast.clone() }, Limit::ServerMemory),
        (Setup { trainer_cores: 0.01, server_cores: 64.0, ..fast.clone() }, Limit::TrainerCores),
        (Setup { round_trip: 1.0, ..fast.clone() }, Limit::Latency),
        (Setup { parameters: 1000, compute: 0.001, trainers: 4096, server_cores: 0.2, ..fast }, Limit::Coordination),
        (Setup { compression: slow(Codec::BF16), ..setup(64, 1) }, Limit::ServerLinks),
    ];
    for (setup, want) in rows {
        let found = estimate(&setup, &real()).expect("a model");
        assert_eq!(found.limit, want, "{found:?} of {setup:?}");
    }
}

#[test]
fn more_of_anything_never_makes_a_step_longer() {
    for mode in [ConsistencyMode::Sync, ConsistencyMode::Bounded, ConsistencyMode::Async] {
        for (trainers, servers) in [(1, 1), (8, 1), (64, 4), (1024, 32), (4096, 256)] {
            let base = Setup { mode, compute: 0.1, round_trip: 1e-4, ..setup(trainers, servers) };
            let before = estimate(&base, &Constants::default()).expect("a model");
            assert!(before.efficiency > 0.0 && before.efficiency <= 1.0, "{before:?}");
            for better in [
                Setup { trainer_link: 2.0 * LINK, server_link: 2.0 * LINK, ..base.clone() },
                Setup { round_trip: 0.0, ..base.clone() },
                Setup { overlap: 0.5, ..base.clone() },
                Setup { server_cores: 8.0, ..base.clone() },
                Setup { compression: Compression { codec: Codec::INT8, ..Compression::default() }, ..base.clone() },
            ] {
                // The work of coding may cost more than a fast link gains: links alone.
                let (longer, shorter) = (step(&base, &free()), step(&better, &free()));
                assert!(shorter <= longer * (1.0 + 1e-9), "{shorter} after {longer}: {better:?}");
            }
        }
    }
}

#[test]
fn servers_are_enough_where_more_make_no_difference() {
    let enough = |setup: &Setup| enough_servers(setup, &free(), 256).expect("a model");
    assert_eq!(enough(&Setup { compute: 1000.0, ..setup(8, 1) }), 1, "computing hides the servers");
    let (eight, many) = (enough(&setup(8, 1)), enough(&setup(512, 1)));
    assert!((8..=96).contains(&eight) && many > eight, "{eight} for 8 trainers, {many} for 512");
    let slower = Setup { trainer_link: LINK / 8.0, ..setup(512, 1) };
    assert!(enough(&slower) < many, "the trainers' links are full sooner");
    let too_large = Setup { parameters: 1 << 47, ..setup(1, 1) };
    assert!(enough_servers(&too_large, &free(), 1).is_err(), "one server does not hold it");
}
