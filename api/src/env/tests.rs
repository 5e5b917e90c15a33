use std::collections::BTreeMap;

use super::*;

fn trainer() -> Environment {
    Environment {
        name: "mnist".into(),
        namespace: "default".into(),
        uid: "0b6c".into(),
        role: Role::Trainer,
        index: 1,
        servers: vec!["mnist-ps-0.mnist.default.svc:29500".into(), "mnist-ps-1.mnist.default.svc:29500".into()],
        replication_factor: 2,
        connections: Some(2),
        trainers: 3,
        min_trainers: Some(2),
        finished_trainers: Vec::new(),
        training: Training::default(),
        incarnation: 2,
        supervised: true,
        local_rank: 0,
        gpus: 2,
        result_file: Some("/dev/termination-log".into()),
        checkpoint: Some(Checkpoint { folder: "/checkpoints".into(), policy: CheckpointPolicy::default() }),
        metrics_folder: Some("/metrics".into()),
        mlflow: Some(Mlflow { uri: "http://mlflow:5000".into(), experiment: "digits".into() }),
        tls_folder: Some("/etc/psjobs/tls".into()),
    }
}

fn read(vars: &BTreeMap<&str, String>) -> Result<Option<Environment>, EnvironmentError> {
    Environment::from_vars(|name| vars.get(name).cloned())
}

#[test]
fn what_is_written_is_read_back() {
    let vars = trainer().to_vars().into_iter().collect::<BTreeMap<_, _>>();
    assert_eq!(vars[RANK], "3", "trainers come after the two servers");
    assert_eq!(vars[WORLD_SIZE], "5");
    assert_eq!(vars[MASTER_ADDR], "mnist-ps-0.mnist.default.svc");
    assert_eq!(vars[MASTER_PORT], "29500");
    assert_eq!(read(&vars), Ok(Some(trainer())));

    let server = Environment { min_trainers: None, finished_trainers: vec![0, 2], ..trainer() };
    let vars = server.to_vars().into_iter().collect::<BTreeMap<_, _>>();
    assert_eq!(vars[PSJOB_FINISHED_TRAINERS], "0,2");
    assert_eq!(read(&vars), Ok(Some(server)));
}

#[test]
fn a_run_of_mlflow_is_in_the_default_experiment_unless_one_is_named() {
    let mut vars = trainer().to_vars().into_iter().collect::<BTreeMap<_, _>>();
    vars.remove(PSJOB_MLFLOW_EXPERIMENT);
    let mlflow = read(&vars).expect("readable").expect("of a job").mlflow;
    let wanted = Mlflow { uri: "http://mlflow:5000".into(), experiment: DEFAULT_EXPERIMENT.into() };
    assert_eq!(mlflow, Some(wanted));
    vars.insert(PSJOB_MLFLOW_URI, String::new());
    assert_eq!(read(&vars).expect("readable").expect("of a job").mlflow, None);
}

#[test]
fn finished_trainers_are_trainers_of_the_job() {
    let with = |text: &str, elastic: bool| {
        let environment = Environment { min_trainers: elastic.then_some(2), ..trainer() };
        let mut vars = environment.to_vars().into_iter().collect::<BTreeMap<_, _>>();
        vars.insert(PSJOB_FINISHED_TRAINERS, text.to_owned());
        read(&vars)
    };
    assert_eq!(with("0-2", false).expect("readable").expect("of a job").finished_trainers, [0, 1, 2]);
    for (text, elastic) in [("3", false), ("1,x", false), ("2-1", false), ("0", true)] {
        let error = with(text, elastic).expect_err(text).to_string();
        assert!(error.contains(PSJOB_FINISHED_TRAINERS) && error.contains(text), "{error}");
    }
}

#[test]
fn a_process_outside_a_job_has_no_environment() {
    assert_eq!(read(&BTreeMap::new()), Ok(None));
}

#[test]
fn a_wrong_variable_is_named() {
    let rows = [
        (PSJOB_ROLE, "worker", "ps or trainer"),
        (PSJOB_INDEX, "3", "below 3"),
        (PSJOB_INDEX, "x", "whole number"),
        (PSJOB_SERVERS, "nohost", "host:port"),
        (PSJOB_SERVERS, "a:99999", "host:port"),
        (PSJOB_TRAINERS, "0", "at least 1"),
        (PSJOB_MIN_TRAINERS, "4", "1 to 3"),
        (PSJOB_REPLICATION_FACTOR, "3", "at least 2 servers"),
        (PSJOB_CONNECTIONS, "0", "1 to 16"),
        (PSJOB_SUPERVISED, "yes", "1, or nothing"),
        (PSJOB_TRAINING, "{", "JSON"),
        (PSJOB_TRAINING, r#"{"optimizer":{"momentum":7}}"#, "momentum"),
        (PSJOB_CHECKPOINT, r#"{"keep":0}"#, "at least 1"),
        (RANK, "0", "3 for trainer 1"),
        (WORLD_SIZE, "4", "5 for trainer 1"),
    ];
    for (name, value, want) in rows {
        let mut vars = trainer().to_vars().into_iter().collect::<BTreeMap<_, _>>();
        vars.insert(name, value.into());
        let error = read(&vars).expect_err(name).to_string();
        assert!(error.contains(name) && error.contains(want), "{name}={value}: {error}");
    }
}

#[test]
fn ranks_map_to_places() {
    let rows = [
        (0, Some((Role::Server, 0))),
        (1, Some((Role::Server, 1))),
        (2, Some((Role::Trainer, 0))),
        (4, Some((Role::Trainer, 2))),
        (5, None),
    ];
    for (rank, want) in rows {
        assert_eq!(Environment::place(rank, 2, 5), want, "rank {rank}");
    }
}
