use super::*;
use crate::manifest;

fn job(spec: &str) -> ParameterServerJob {
    let head = "apiVersion: psjobs.dev/v1alpha1\nkind: ParameterServerJob\nmetadata: {name: job}\nspec: ";
    let mut jobs = manifest::check(&format!("{head}{spec}")).expect(spec).jobs;
    jobs.remove(0)
}

fn machine() -> Machine {
    Machine {
        cores: 8,
        gpus: Vec::new(),
        worker: Some("/bin/worker".into()),
        data: None,
        threads_are_set: false,
        waiting_is_set: false,
        servers: vec!["127.0.0.1:4001".into(), "127.0.0.1:4002".into()],
        results: "/results".into(),
        checkpoints: "/kept".into(),
        metrics: None,
        uid: "f00".into(),
    }
}

fn plan(spec: &str, machine: Machine) -> Plan {
    Plan::new(&job(spec), machine).expect(spec)
}

const SERVER: Replica = Replica { role: Role::Server, index: 1 };
const TRAINER: Replica = Replica { role: Role::Trainer, index: 1 };

const TWO: &str = "{ps: {replicas: 2}, trainer: {replicas: 2, template: {spec: {containers: [\
                   {name: t, image: i, args: [train, mlp]}]}}}}";

#[test]
fn containers_without_a_command_run_the_worker() {
    let plan = plan(TWO, machine());
    let server = plan.launch(SERVER, 0, TrainerEnds::default());
    assert_eq!((server.program, server.args), ("/bin/worker".into(), vec!["serve".into()]));
    let trainer = plan.launch(TRAINER, 2, TrainerEnds::default());
    assert_eq!((trainer.program, trainer.args), ("/bin/worker".into(), vec!["train".into(), "mlp".into()]));
    let want = [
        ("RANK", "3"),
        ("PSJOB_INCARNATION", "2"),
        ("PSJOB_SUPERVISED", "1"),
        ("PSJOB_RESULT_FILE", "/results/trainer-1.json"),
    ];
    for (name, value) in want {
        assert_eq!(trainer.env[name], value, "{name}");
    }
    let read = Environment::from_vars(|name| trainer.env.get(name).cloned()).expect("complete").expect("in a job");
    assert_eq!((read.index, read.trainers, read.servers), (1, 2, machine().servers));
}

#[test]
fn a_command_runs_as_it_is_with_references_expanded() {
    let plan = plan(
        "{trainer: {template: {spec: {containers: [{name: t, command: [sh, -c], args: ['echo $(RANK) $(B)'], env: [\
         {name: A, value: 'a$(PSJOB_INDEX)'}, {name: B, value: '$(A)b'}, {name: RANK, value: '7'},\
         {name: SECRET, valueFrom: {secretKeyRef: {name: s, key: k}}}]}]}}}}",
        Machine { servers: vec!["127.0.0.1:1".into()], ..machine() },
    );
    let trainer = plan.launch(Replica { role: Role::Trainer, index: 0 }, 0, TrainerEnds::default());
    assert_eq!((trainer.program, trainer.args), ("sh".into(), vec!["-c".into(), "echo 1 a0b".into()]));
    assert_eq!(trainer.env["RANK"], "1", "the contract is not the manifest's to change");
    assert!(!trainer.env.contains_key("SECRET"));
    assert!(plan.warnings.iter().any(|warning| warning.contains("env[SECRET]")), "{:?}", plan.warnings);
}

#[test]
fn trainers_share_the_cores_unless_configured_otherwise() {
    let threads = |plan: &Plan| plan.launch(TRAINER, 0, TrainerEnds::default()).env.get("OMP_NUM_THREADS").cloned();
    assert_eq!(threads(&plan(TWO, machine())).as_deref(), Some("4"));
    assert_eq!(threads(&plan(TWO, Machine { cores: 1, ..machine() })).as_deref(), Some("1"));
    assert_eq!(threads(&plan(TWO, Machine { threads_are_set: true, ..machine() })), None);
    let set = TWO.replace("image: i", "image: i, env: [{name: OMP_NUM_THREADS, value: '3'}]");
    assert_eq!(threads(&plan(&set, machine())).as_deref(), Some("3"));
}

#[test]
fn threads_without_work_sleep_unless_configured_otherwise() {
    let waiting = |plan: &Plan| plan.launch(TRAINER, 0, TrainerEnds::default()).env.get("OMP_WAIT_POLICY").cloned();
    assert_eq!(waiting(&plan(TWO, machine())).as_deref(), Some("passive"));
    assert_eq!(waiting(&plan(TWO, Machine { waiting_is_set: true, ..machine() })), None);
}

#[test]
fn gpus_are_split_over_the_trainers_and_hidden_from_the_rest() {
    let with = |gpus: u32, there: &[&str]| {
        let spec = TWO.replace("trainer: {", &format!("trainer: {{gpus: {gpus}, "));
        plan(&spec, Machine { gpus: there.iter().map(ToString::to_string).collect(), ..machine() })
    };
    let seen = |plan: &Plan, replica| {
        let env = plan.launch(replica, 0, TrainerEnds::default()).env;
        let names = env.get("CUDA_VISIBLE_DEVICES").map_or(0, |names| names.split_terminator(',').count());
        let given = env.get("PSJOB_GPUS").map_or(0, |gpus| gpus.parse().expect("a number"));
        assert_eq!(given, names, "a process knows what it was given");
        (env.get("CUDA_VISIBLE_DEVICES").cloned(), env["LOCAL_RANK"].clone())
    };
    let some = |gpus: &str, rank: &str| (Some(gpus.to_owned()), rank.to_owned());
    let rows = [
        (0, &[][..], (None, "3".into()), 0),
        (1, &[][..], (None, "3".into()), 1),
        (0, &["0"][..], some("", "3"), 0),
        (1, &["0", "1"][..], some("1", "0"), 0),
        (2, &["a", "b", "c", "d"][..], some("c,d", "0"), 0),
        (1, &["0"][..], some("0", "0"), 1),
        (3, &["0", "1"][..], some("1,0", "0"), 1),
    ];
    for (gpus, there, want, notes) in rows {
        let plan = with(gpus, there);
        assert_eq!(seen(&plan, TRAINER), want, "{gpus} of {there:?}");
        let reported = plan.notes.iter().filter(|note| note.contains("GPUs")).count();
        assert_eq!(reported, notes, "{gpus} of {there:?}: {:?}", plan.notes);
    }
    assert_eq!(seen(&with(1, &["0", "1"]), SERVER), some("", "1"), "servers see none");
    let limited = "{replicas: 2, template: {spec: {containers: [{name: s, image: i, \
         resources: {limits: {nvidia.com/gpu: 1}}}]}}}";
    let spec = TWO.replacen("ps: {replicas: 2}", &format!("ps: {limited}"), 1);
    assert_ne!(spec, TWO);
    for (there, want, notes) in
        [(&["0", "1"][..], some("1", "0"), 0), (&["0"][..], some("0", "0"), 1), (&[][..], (None, "1".into()), 1)]
    {
        let plan = plan(&spec, Machine { gpus: there.iter().map(ToString::to_string).collect(), ..machine() });
        assert_eq!(seen(&plan, SERVER), want, "unless their template has some, of {there:?}");
        assert_eq!(
            plan.notes.iter().filter(|note| note.contains("the servers ask")).count(),
            notes,
            "{:?}",
            plan.notes
        );
    }
}

#[test]
fn what_cannot_run_here_is_refused() {
    let suspended = TWO.replace("{ps:", "{suspend: true, ps:");
    let no_worker = Machine { worker: None, ..machine() };
    for (spec, machine, want) in
        [(suspended.as_str(), machine(), "set spec.suspend to false"), (TWO, no_worker, "--worker")]
    {
        let error = Plan::new(&job(spec), machine).expect_err(spec).to_string();
        assert!(error.contains(want), "{error}");
    }
    assert_eq!(plan(TWO, machine()).warnings, [""; 0]);
}

#[test]
fn servers_are_waited_for_where_a_probe_would_be() {
    let with = |probe: &str| {
        format!("{{ps: {{template: {{spec: {{containers: [{{name: s, image: i{probe}}}]}}}}}}, {}", &TWO[19..])
    };
    let rows =
        [(TWO.to_owned(), true), (with(""), false), (with(", readinessProbe: {tcpSocket: {port: 29500}}"), true)];
    for (spec, probed) in rows {
        assert_eq!(plan(&spec, machine()).rules.servers_are_probed, probed, "{spec}");
    }
}

#[test]
fn servers_have_time_to_write_the_last_checkpoint() {
    let checkpoint = "checkpoint: {volumeClaim: {size: 1Gi}}, ";
    let ten = Duration::from_secs(10);
    for (label, spec, server) in [
        ("no checkpoints", TWO.to_owned(), ten),
        ("checkpoints", TWO.replacen('{', &format!("{{{checkpoint}"), 1), Duration::from_secs(300)),
    ] {
        let plan = plan(&spec, machine());
        assert_eq!((plan.grace(SERVER), plan.grace(TRAINER)), (server, ten), "{label}");
    }
}

#[test]
fn checkpoints_go_to_the_jobs_own_folder() {
    let spec = TWO.replacen('{', "{checkpoint: {volumeClaim: {size: 1Gi}, keep: 7}, ", 1);
    let plan = plan(&spec, machine());
    let server = plan.launch(SERVER, 0, TrainerEnds::default()).env;
    assert!(!server.contains_key("PSJOB_FINISHED_TRAINERS"));
    assert_eq!(server["PSJOB_CHECKPOINT_DIR"], format!("/kept/{}", plan.name));
    assert!(server["PSJOB_CHECKPOINT"].contains(r#""keep":7"#));
    assert!(
        !plan.launch(TRAINER, 0, TrainerEnds::default()).env.contains_key("PSJOB_CHECKPOINT_DIR"),
        "trainers keep nothing"
    );
}

#[test]
fn a_folder_of_the_command_line_counts_more_than_an_object_store() {
    let mut job = job(&TWO.replacen('{', "{checkpoint: {objectStore: {url: 's3://bucket/jobs'}, path: runs/7}, ", 1));
    let folder = |job: &ParameterServerJob| {
        let plan = Plan::new(job, machine()).expect("a plan");
        plan.launch(SERVER, 0, TrainerEnds::default()).env["PSJOB_CHECKPOINT_DIR"].clone()
    };
    assert_eq!(folder(&job), "s3://bucket/jobs/runs/7");
    crate::run::keep_elsewhere(&mut job);
    assert_eq!(folder(&job), "/kept/runs/7");
}

#[test]
fn servers_know_the_tracking_server_and_keep_what_it_gets_beyond_their_own_end() {
    let tracked = TWO.replacen('{', "{tracking: {mlflow: {uri: 'http://mlflow:5000'}}, ", 1);
    let with_checkpoints = tracked.replacen('{', "{checkpoint: {volumeClaim: {size: 1Gi}}, ", 1);
    let logged = Machine { metrics: Some("/logs/metrics/mnist-1".into()), ..machine() };
    for (label, spec, machine, uri, series) in [
        ("no tracking server", TWO, machine(), None, None),
        ("one", tracked.as_str(), machine(), Some("http://mlflow:5000"), Some("/results/metrics")),
        ("with checkpoints", with_checkpoints.as_str(), machine(), Some("http://mlflow:5000"), None),
        ("with logs", tracked.as_str(), logged, Some("http://mlflow:5000"), Some("/logs/metrics/mnist-1")),
    ] {
        let plan = plan(spec, machine);
        let env = plan.launch(SERVER, 0, TrainerEnds::default()).env;
        let variable = |name: &str| env.get(name).map(String::as_str);
        assert_eq!((variable("PSJOB_MLFLOW_URI"), variable("PSJOB_METRICS_DIR")), (uri, series), "{label}");
        let trainer = plan.launch(TRAINER, 0, TrainerEnds::default()).env;
        assert!(!trainer.contains_key("PSJOB_MLFLOW_URI") && !trainer.contains_key("PSJOB_METRICS_DIR"), "{label}");
    }
}

#[test]
fn servers_receive_the_trainers_that_have_finished() {
    let plan = plan(TWO, machine());
    let ends = || TrainerEnds { finished: vec![0], ..TrainerEnds::default() };
    let received = |replica| plan.launch(replica, 1, ends()).env.get("PSJOB_FINISHED_TRAINERS").cloned();
    assert_eq!((received(SERVER), received(TRAINER)), (Some("0".into()), None));
}

#[test]
fn an_elastic_job_starts_its_replicas_and_tells_them_of_all_places() {
    let elastic = TWO.replacen('{', "{elasticPolicy: {minReplicas: 2, maxReplicas: 5}, ", 1);
    for (spec, trainers, least) in [(TWO, "2", None), (elastic.as_str(), "5", Some("2"))] {
        let plan = plan(spec, machine());
        assert_eq!(plan.replicas().filter(|replica| replica.role == Role::Trainer).count(), 2);
        for replica in [SERVER, TRAINER] {
            let env = plan.launch(replica, 0, TrainerEnds::default()).env;
            assert_eq!(env["PSJOB_TRAINERS"], trainers);
            assert_eq!(env.get("PSJOB_MIN_TRAINERS").map(String::as_str), least);
        }
        let closing = TrainerEnds { closing: true, ..TrainerEnds::default() };
        let env = plan.launch(SERVER, 1, closing).env;
        assert_eq!(env.get("PSJOB_MIN_TRAINERS").map(String::as_str), least.map(|_| "1"), "the others have ended");
        assert_eq!(
            plan.launch(TRAINER, 0, TrainerEnds::default()).env["OMP_NUM_THREADS"],
            "4",
            "the cores are for those that run"
        );
    }
}
