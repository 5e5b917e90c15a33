use clap::Parser;
use serde_json::json;

use super::*;

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    estimate: EstimateArgs,
}

fn flags(line: &str) -> EstimateArgs {
    Flags::try_parse_from(["estimate"].into_iter().chain(line.split(' '))).expect("flags").estimate
}

#[test]
fn numbers_are_read_with_their_letters() {
    let rows = [("110M", 110_000_000), ("7B", 7_000_000_000), ("1.5G", 1_500_000_000), ("300k", 300_000), ("12", 12)];
    for (text, want) in rows {
        assert_eq!(count(text), Ok(want), "{text}");
    }
    for (text, want) in [("440MB", 440_000_000), ("440M", 440_000_000), ("2GB", 2_000_000_000), ("400", 400)] {
        assert_eq!(bytes(text), Ok(want), "{text}");
    }
    for wrong in ["", "M", "-3", "0", "many", "1e20", "3Q"] {
        assert!(count(wrong).is_err(), "{wrong}");
    }
    assert!(bytes("3").is_err(), "less than one parameter");
    assert_eq!(codec("onebit"), Ok(Codec::OneBit));
    assert!(codec("F64").is_err());
}

#[test]
fn flags_alone_describe_a_job() {
    let setup = flags("--bytes 400MB --compute 0.5").setup(None);
    assert_eq!((setup.parameters, setup.trainers, setup.servers), (100_000_000, 8, 1));
    assert_eq!((setup.mode, setup.local, setup.has_tls), (ConsistencyMode::Sync, None, false));
    assert_eq!((setup.trainer_link, setup.server_link, setup.trainer_cores), (1.25e9, 1.25e9, 1.0));
    let line = "--parameters 1M --compute 1 --mode local --gbit 25 --server-gbit 100 --tls --replication 2";
    let setup = flags(line).setup(None);
    assert_eq!(setup.local, Some(LocalSteps { steps: 50, overlap: false }));
    assert_eq!((setup.trainer_link, setup.server_link), (3.125e9, 12.5e9));
    assert!(setup.has_tls && setup.is_replicated && setup.trainer_cores == 2.0);
    let one_size = "--parameters 1M --bytes 4M --compute 1";
    for wrong in ["--compute 1", "--parameters 1M", one_size, "--parameters 1M --compute 0"] {
        assert!(Flags::try_parse_from(["estimate"].into_iter().chain(wrong.split(' '))).is_err(), "{wrong}");
    }
}

#[test]
fn a_manifest_describes_a_job_and_flags_come_first() {
    let spec: ParameterServerJobSpec = serde_json::from_value(json!({
        "training": {
            "consistency": {"mode": "Async"},
            "optimizer": {"type": "Adam", "learningRate": 0.001},
            "compression": {"codec": "INT8"},
            "batch": {"base": 64},
        },
        "ps": {"replicas": 4, "replicationFactor": 2},
        "trainer": {"replicas": 32, "template": {"spec": {"containers": []}}},
    }))
    .expect("a spec");
    let setup = flags("--parameters 110M --compute 0.25").setup(Some(&spec));
    assert_eq!((setup.trainers, setup.servers, setup.is_replicated, setup.has_tls), (32, 4, true, true));
    assert_eq!((setup.mode, setup.compression.codec), (ConsistencyMode::Async, Codec::INT8));
    assert_eq!((setup.examples, setup.slots), (64.0, 2.0));
    let line = "--parameters 110M --compute 0.25 --trainers 8 --servers 2 --mode Sync --codec f32 --tls=false \
                --replication 1";
    let setup = flags(line).setup(Some(&spec));
    assert_eq!((setup.trainers, setup.servers, setup.is_replicated, setup.has_tls), (8, 2, false, false));
    assert_eq!((setup.mode, setup.compression.codec), (ConsistencyMode::Sync, Codec::F32));
}

/// The setup of a manifest with this `spec.training` and these flags beside the model's.
fn setup_of(training: &serde_json::Value, line: &str) -> Setup {
    let template = json!({"spec": {"containers": []}});
    let spec = json!({"training": training, "ps": {"replicas": 2}, "trainer": {"replicas": 8, "template": template}});
    let spec: ParameterServerJobSpec = serde_json::from_value(spec).expect("a spec");
    flags(format!("--compute 0.25 {line}").trim_end()).setup(Some(&spec))
}

#[test]
fn a_manifest_says_how_much_of_an_exchange_is_hidden() {
    let (overlap, parts) = (json!({"consistency": {"overlap": true}}), json!({"batch": {"microBatches": 4}}));
    for (training, flags, want) in [
        (json!({}), "", 0.5),
        (overlap.clone(), "", 1.0),
        (overlap.clone(), "--mode Bounded", 1.0),
        // In Sync no gradient is stale.
        (overlap.clone(), "--mode Sync", 0.5),
        (overlap, "--overlap 0", 0.0),
        (parts.clone(), "", 0.125),
        (parts, "--overlap 0.25", 0.25),
        (json!({"consistency": {"overlap": true}, "batch": {"microBatches": 4}}), "", 1.0),
    ] {
        let found = setup_of(&training, &format!("--parameters 1M {flags}")).overlap;
        assert_eq!(found, want, "{training} {flags}");
    }
}

#[test]
fn slots_are_those_of_the_mode_and_local_steps_that_flags_ask_for() {
    let momentum = json!({"optimizer": {"type": "SGD", "momentum": 0.9}});
    let adam = json!({"optimizer": {"type": "Adam"}});
    let local = json!({"optimizer": {"type": "Adam"}, "local": {"steps": 8, "overlap": true}});
    for (training, flags, slots, local) in [
        // Each trainer has its own momentum, and in Sync the servers have one.
        (&momentum, "", 0.0, None),
        (&momentum, "--mode Sync", 1.0, None),
        (&adam, "", 2.0, None),
        // With local steps the servers have a momentum, in Sync.
        (&adam, "--mode Local", 1.0, Some((50, false))),
        (&adam, "--local-steps 4", 0.0, Some((4, false))),
        (&local, "", 0.0, Some((8, true))),
        (&local, "--mode Local", 1.0, Some((8, true))),
        (&local, "--local-steps 4", 0.0, Some((4, true))),
    ] {
        let setup = setup_of(training, &format!("--parameters 1M {flags}"));
        let found = setup.local.map(|local| (local.steps, local.overlap));
        assert_eq!((setup.slots, found), (slots, local), "{training} {flags}");
    }
}

#[test]
fn previous_values_are_counted_where_the_servers_keep_them() {
    let sync = |fields: &str| format!(r#"{{"consistency": {{"mode": "Sync"{fields}}}}}"#);
    for (training, flags, want) in [
        (sync(""), "--parameters 16777216", true),
        (sync(""), "--parameters 16777217", false),
        (sync(r#", "exactRecovery": true"#), "--parameters 7B", true),
        (sync(r#", "exactRecovery": false"#), "--parameters 1M", false),
        (sync(r#", "backupTrainers": 1"#), "--parameters 1M", false),
        (sync(""), "--parameters 1M --mode Async", false),
        ("{}".to_owned(), "--parameters 1M", false),
        ("{}".to_owned(), "--parameters 1M --mode Sync", true),
    ] {
        let training: serde_json::Value = serde_json::from_str(&training).expect("JSON");
        assert_eq!(setup_of(&training, flags).keeps_previous, want, "{training} {flags}");
    }
}
