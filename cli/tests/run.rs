//! `psjobs run` over containers that are shell scripts: what happens to processes, whatever they do.
//! Waits are for events (a file, a line, an exit), each with a deadline.

mod process;

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use process::Running;
use process::job::{Job, Report, wait_until_gone};
use rustix::process::{Signal, kill_process};
use serde_json::Value;

/// Ends well once both trainers have written their files, as a real server does.
const SERVER: &str = "until [ -e $DIR/done-0 ] && [ -e $DIR/done-1 ]; do sleep 0.02; done";
/// Writes its process id, starts a child that writes its own, and waits for ever.
const STUCK: &str =
    "echo $$ > $DIR/$PSJOB_ROLE-$PSJOB_INDEX; sleep 1000 & echo $! > $DIR/$PSJOB_ROLE-$PSJOB_INDEX-child; wait";

const ALL: [&str; 6] = ["ps-0", "ps-0-child", "trainer-0", "trainer-0-child", "trainer-1", "trainer-1-child"];

#[test]
fn a_good_run_ends_with_one_json_object_of_the_results() {
    let trainer = r#"
        echo "{\"steps\": 100, \"examples\": 3200, \"seconds\": 5$PSJOB_INDEX, \"waitingSeconds\": 10.1,
               \"metrics\": {\"accuracy\": 0.97$PSJOB_INDEX}}" > $PSJOB_RESULT_FILE
        touch $DIR/done-$PSJOB_INDEX"#;
    let job = Job::new(SERVER, trainer, "");
    let report = job.run(&["--json"]);
    assert_eq!(report.code, Some(0), "{}", report.stderr);
    let summary: Value = serde_json::from_str(&report.stdout).expect("one JSON object");
    assert_eq!((&summary["state"], &summary["name"]), (&"Succeeded".into(), &"job".into()));
    assert_eq!((&summary["trainers"], &summary["servers"]), (&2.into(), &1.into()));
    for (key, want) in [
        ("accuracy", 0.97),
        ("seconds", 51.0),
        ("steps_per_second", 200.0 / 51.0),
        ("examples_per_second", 6400.0 / 51.0),
        ("waiting_share", 20.2 / 101.0),
    ] {
        let found = summary[key].as_f64().unwrap_or_else(|| panic!("{key} in {summary}"));
        assert!((found - want).abs() < 1e-9, "{key}: {found}, want {want}");
    }
    let left: Vec<_> =
        fs::read_dir(job.folder.path()).expect("folder").flatten().map(|entry| entry.file_name()).collect();
    let scratch = left.iter().find(|name| name.to_string_lossy().starts_with("psjobs-"));
    assert_eq!(scratch, None, "the temporary folder is gone");
}

#[test]
fn every_process_receives_its_place_and_all_output_is_logged() {
    let echo = "echo role=$PSJOB_ROLE rank=$RANK of $WORLD_SIZE threads=${OMP_NUM_THREADS:-none}; ";
    let trainer = format!("{echo} touch $DIR/done-$PSJOB_INDEX");
    let job = Job::new(&format!("{echo} {SERVER}"), &trainer, "");
    let logs = job.path("logs");
    let mut command = job.command(&["--verbose", "--log-dir", &logs.display().to_string()]);
    let report = Report::of(Running::start(command.env("OMP_NUM_THREADS", "7")));
    assert_eq!(report.code, Some(0), "{}", report.stderr);
    for (file, who, want) in [
        ("ps-0.log", "server 0", "role=ps rank=0 of 3 threads=7"),
        ("trainer-0.log", "trainer 0", "role=trainer rank=1 of 3 threads=7"),
        ("trainer-1.log", "trainer 1", "role=trainer rank=2 of 3 threads=7"),
    ] {
        let log = fs::read_to_string(logs.join(file)).expect(file);
        assert_eq!(log.trim(), want, "{file}");
        assert!(report.stderr.contains(&format!("{who} | {want}")), "{}", report.stderr);
    }
}

#[test]
fn a_dying_trainer_fails_the_job_with_its_last_lines_and_ends_all_others() {
    let trainer = format!(
        "if [ $PSJOB_INDEX = 1 ]; then until [ -s $DIR/trainer-0-child ] && [ -s $DIR/ps-0-child ]; do sleep 0.02; done; \
         for i in $(seq 30); do echo line $i; done; echo no such data >&2; exit 3; fi; {STUCK}"
    );
    let job = Job::new(STUCK, &trainer, "failurePolicy: {maxRestarts: 0}");
    let report = job.run(&["--json"]);
    assert_eq!(report.code, Some(1), "{}", report.stderr);
    let err = &report.stderr;
    for want in
        ["job job failed: trainer 1 ended with exit code 3", "trainer 1 (rank 2)", "  line 30\n  no such data\n"]
    {
        assert!(err.contains(want), "{want:?} is not in {err}");
    }
    assert!(!err.contains("line 11\n") && err.contains("line 12\n"), "the last 20 lines: {err}");
    let log = err.lines().find_map(|line| line.strip_prefix("all of them: ")).expect("the log is named");
    assert!(fs::read_to_string(log).expect("the log is kept").contains("line 1\n"));
    let summary: Value = serde_json::from_str(&report.stdout).expect("one JSON object");
    assert_eq!(summary["state"], "Failed");
    assert_eq!((&summary["failure"]["exit_code"], &summary["failure"]["rank"]), (&3.into(), &2.into()));
    for name in &ALL[..4] {
        wait_until_gone(job.pid(name), name);
    }
}

#[test]
fn the_page_of_a_failed_job_is_kept_and_names_the_cause() {
    let trainer = format!("[ $PSJOB_INDEX = 0 ] && {{ echo 'no <data>'; exit 3; }}; {STUCK}");
    let job = Job::new(STUCK, &trainer, "failurePolicy: {maxRestarts: 0}");
    let logs = job.path("logs");
    let report = job.run(&["--web=127.0.0.1:0", "--log-dir", &logs.display().to_string()]);
    assert_eq!(report.code, Some(1), "{}", report.stderr);
    assert!(report.stderr.contains("the job's page: http://127.0.0.1:"), "{}", report.stderr);
    let page = fs::read_to_string(logs.join("job.html")).expect("the page is there");
    let (_, record) = page.split_once("id=\"record\">").expect("it has a record");
    let (record, _) = record.split_once("</script>").expect("the record ends");
    let record: Value = serde_json::from_str(record).expect("JSON");
    let job = &record["job"];
    assert_eq!((&job["phase"], &job["isOver"]), (&"Failed".into(), &true.into()));
    let cause = "trainer 0 ended with exit code 3, and spec.failurePolicy.maxRestarts is 0.";
    assert_eq!(job["explanation"]["sentences"][0], cause);
    assert_eq!(job["explanation"]["log"]["text"], "no <data>");
    let processes = job["processes"].as_array().expect("a list");
    let failed: Vec<_> = processes.iter().map(|process| process["runs"][0]["failed"] == true).collect();
    assert_eq!((processes[1]["name"].as_str(), failed[1]), (Some("trainer-0"), true), "{processes:?}");
    assert_eq!(record["tails"]["trainer-0"], "no <data>\n");
}

#[test]
fn wrong_input_fails_the_job_at_once_with_the_sentence_of_the_program() {
    let trainer = "echo started; echo $PSJOB_INCARNATION >> $DIR/tries-$PSJOB_INDEX; \
                   [ $PSJOB_INDEX = 1 ] && exec sleep 1000; until [ -e $DIR/tries-1 ]; do sleep 0.02; done; \
                   echo psjobs-worker: there is no data set at /data >&2; exit 2";
    let job = Job::new(STUCK, trainer, "");
    let report = job.run(&["--json"]);
    assert_eq!(report.code, Some(1), "{}", report.stderr);
    let want = "trainer 0 ended with exit code 2, and that means wrong input, so it is not started again: there is no \
                data set at /data";
    assert!(report.stderr.contains(&format!("error: job job failed: {want}\n")), "{}", report.stderr);
    assert_eq!(fs::read_to_string(job.path("tries-0")).expect("written"), "0\n");
    let summary: Value = serde_json::from_str(&report.stdout).expect("one JSON object");
    assert_eq!((&summary["failure"]["reason"], &summary["restarts"]), (&want.into(), &0.into()));
}

#[test]
fn a_failed_trainer_is_started_again_with_a_higher_incarnation() {
    let trainer = "if [ $PSJOB_INDEX = 0 ] && [ $PSJOB_INCARNATION = 0 ]; then kill -9 $$; fi; \
                   echo $PSJOB_INCARNATION > $DIR/done-$PSJOB_INDEX";
    let job = Job::new(SERVER, trainer, "failurePolicy: {maxRestarts: 1}");
    let report = job.run(&["--json"]);
    assert_eq!(report.code, Some(0), "{}", report.stderr);
    assert!(report.stderr.contains("trainer 0 was killed by signal 9 (SIGKILL)"), "{}", report.stderr);
    assert!(report.stderr.contains("(restart 1 of 1)"), "{}", report.stderr);
    let incarnation = |index| fs::read_to_string(job.path(&format!("done-{index}"))).expect("written");
    assert_eq!((incarnation(0).trim(), incarnation(1).trim()), ("1", "0"));
    let summary: Value = serde_json::from_str(&report.stdout).expect("one JSON object");
    assert_eq!(summary["restarts"], 1);
}

#[test]
fn an_elastic_job_goes_on_without_a_trainer_that_keeps_failing() {
    // The server of an elastic job ends when those that are there have ended.
    let server = "until [ -e $DIR/done-0 ]; do sleep 0.02; done";
    let trainer = r#"
        echo "$PSJOB_TRAINERS $PSJOB_MIN_TRAINERS $WORLD_SIZE" > $DIR/places-$PSJOB_INDEX
        if [ $PSJOB_INDEX = 1 ]; then echo no disk; touch $DIR/gone-$PSJOB_INCARNATION; exit 3; fi
        until [ -e $DIR/gone-1 ]; do sleep 0.02; done
        touch $DIR/done-0"#;
    let spec = "elasticPolicy: {minReplicas: 1, maxReplicas: 8}\n  failurePolicy: {maxRestarts: 1}";
    let job = Job::new(server, trainer, spec);
    let report = job.run(&["--no-progress"]);
    assert_eq!(report.code, Some(0), "{}", report.stderr);
    let said = format!("{}{}", report.stdout, report.stderr);
    assert!(said.contains("trainer 1 ended with exit code 3"), "{said}");
    for index in [0, 1] {
        assert_eq!(fs::read_to_string(job.path(&format!("places-{index}"))).expect("written"), "8 1 9\n");
    }
}

#[test]
fn ctrl_c_ends_every_process_and_their_children() {
    let job = Job::new(STUCK, STUCK, "");
    let child = Running::start(&mut job.command(&["--json"]));
    let pids = ALL.map(|name| job.pid(name));
    kill_process(child.pid(), Signal::INT).expect("sent");
    let report = Report::of(child);
    assert_eq!(report.code, Some(130), "{}", report.stderr);
    for (pid, name) in pids.into_iter().zip(ALL) {
        wait_until_gone(pid, name);
    }
    let summary: Value = serde_json::from_str(&report.stdout).expect("one JSON object");
    assert_eq!(summary["state"], "Interrupted");
}

#[test]
fn processes_that_ignore_sigterm_are_killed_after_their_grace_period() {
    let deaf = format!("trap '' TERM; {STUCK}; while :; do sleep 1; done");
    let job = Job::new(&deaf, &deaf, "");
    let child = Running::start(&mut job.command(&[]));
    let pids = ALL.map(|name| job.pid(name));
    let began = Instant::now();
    kill_process(child.pid(), Signal::TERM).expect("sent");
    assert_eq!(Report::of(child).code, Some(143));
    assert!(began.elapsed() >= Duration::from_secs(2), "they had their time");
    pids.into_iter().zip(ALL).for_each(|(pid, name)| wait_until_gone(pid, name));
}

#[test]
fn a_second_ctrl_c_kills_at_once() {
    let deaf = format!("trap '' TERM; {STUCK}; while :; do sleep 1; done");
    let job = Job::new(&deaf, &deaf, "");
    let manifest = fs::read_to_string(job.path("job.yaml")).expect("readable");
    fs::write(job.path("job.yaml"), manifest.replace("PeriodSeconds: 2", "PeriodSeconds: 3600")).expect("written");
    let mut child = Running::start(&mut job.command(&[]));
    let pids = ALL.map(|name| job.pid(name));
    let psjobs = child.pid();
    let mut lines = BufReader::new(child.child().stderr.take().expect("piped")).lines();
    kill_process(psjobs, Signal::INT).expect("sent");
    let heard = lines.any(|line| line.expect("text").contains("Ctrl-C again"));
    assert!(heard, "the first was heard");
    kill_process(psjobs, Signal::INT).expect("sent");
    assert_eq!(Report::of(child).code, Some(130));
    pids.into_iter().zip(ALL).for_each(|(pid, name)| wait_until_gone(pid, name));
}

#[test]
fn no_process_survives_psjobs_even_if_it_is_killed() {
    let job = Job::new(STUCK, STUCK, "");
    let mut child = Running::start(&mut job.command(&[]));
    let pids = ALL.map(|name| job.pid(name));
    child.child().kill().expect("killed");
    child.child().wait().expect("gone");
    for (pid, name) in pids.into_iter().zip(ALL) {
        wait_until_gone(pid, name);
    }
}

#[test]
fn servers_that_do_not_end_are_stopped_and_it_is_said() {
    let job =
        Job::new(STUCK, "until [ -s $DIR/ps-0-child ]; do sleep 0.02; done", "runPolicy: {serverDrainSeconds: 1}");
    let report = job.run(&[]);
    assert_eq!(report.code, Some(0), "{}", report.stderr);
    assert!(report.stderr.contains("the servers did not end within 1 s"), "{}", report.stderr);
    wait_until_gone(job.pid("ps-0"), "the server");
}

#[test]
fn the_active_deadline_ends_the_job() {
    let job = Job::new(STUCK, STUCK, "runPolicy: {activeDeadlineSeconds: 1}");
    let report = job.run(&[]);
    assert_eq!(report.code, Some(1), "{}", report.stderr);
    assert!(report.stderr.contains("activeDeadlineSeconds"), "{}", report.stderr);
}

#[test]
fn all_processes_start_again_where_the_strategy_says_so() {
    let server = format!("echo $PSJOB_INCARNATION >> $DIR/servers; {SERVER}");
    let trainer = "echo $PSJOB_INCARNATION >> $DIR/trainers-$PSJOB_INDEX; \
                   if [ $PSJOB_INCARNATION = 0 ]; then [ $PSJOB_INDEX = 0 ] && exec sleep 1000; \
                   until [ -s $DIR/servers ] && [ -s $DIR/trainers-0 ]; do sleep 0.02; done; exit 3; fi; \
                   touch $DIR/done-$PSJOB_INDEX";
    let job = Job::new(&server, trainer, "failurePolicy: {restartStrategy: RecreateAll}");
    let report = job.run(&["--json"]);
    assert_eq!(report.code, Some(0), "{}", report.stderr);
    let want = "trainer 1 ended with exit code 3; all processes are started again (restart 1 of 3)";
    assert!(report.stderr.contains(want), "{}", report.stderr);
    for name in ["servers", "trainers-0", "trainers-1"] {
        assert_eq!(fs::read_to_string(job.path(name)).expect("written"), "0\n1\n", "{name}");
    }
    let summary: Value = serde_json::from_str(&report.stdout).expect("one JSON object");
    assert_eq!(summary["restarts"], 3);
}

#[test]
fn what_still_runs_is_stopped_when_the_first_trainer_is_enough() {
    let trainer = format!(
        "if [ $PSJOB_INDEX = 0 ]; then until [ -s $DIR/trainer-1-child ] && [ -s $DIR/ps-0-child ]; do sleep 0.02; done; \
                           exit 0; fi; {STUCK}"
    );
    let job = Job::new(STUCK, &trainer, "successPolicy: {operator: RankZero}");
    let report = job.run(&[]);
    assert_eq!(report.code, Some(0), "{}", report.stderr);
    for name in ["ps-0", "ps-0-child", "trainer-1", "trainer-1-child"] {
        wait_until_gone(job.pid(name), name);
    }
    assert!(!report.stderr.contains("serverDrainSeconds"), "they were stopped at once: {}", report.stderr);
}

#[test]
fn trainers_wait_for_a_server_that_does_not_listen_until_the_startup_deadline() {
    let job = Job::new(STUCK, "touch $DIR/started", "runPolicy: {startupDeadlineSeconds: 1}");
    let manifest = fs::read_to_string(job.path("job.yaml")).expect("readable");
    let probe = "name: server, readinessProbe: {tcpSocket: {port: 29500}},";
    fs::write(job.path("job.yaml"), manifest.replacen("name: server,", probe, 1)).expect("written");
    let report = job.run(&[]);
    assert_eq!(report.code, Some(1), "{}", report.stderr);
    let want = "it did not run within the 1 s of spec.runPolicy.startupDeadlineSeconds: server 0 is not ready";
    assert!(report.stderr.contains(want), "{}", report.stderr);
    assert!(!job.path("started").exists());
}

#[test]
fn fields_that_mean_nothing_here_are_named_in_one_warning() {
    let spec = "runPolicy: {ttlSecondsAfterFinished: 9}\n  schedulingPolicy: {queue: team-a}";
    let job = Job::new(SERVER, "touch $DIR/done-$PSJOB_INDEX", spec);
    let report = job.run(&["--json", "--quiet"]);
    assert_eq!(report.code, Some(0), "{}", report.stderr);
    let want = "these fields of the manifest mean nothing on one machine and are ignored: \
                spec.runPolicy.ttlSecondsAfterFinished, spec.schedulingPolicy.queue";
    assert_eq!(report.stderr, format!("warning: {want}\n"));
    let summary: Value = serde_json::from_str(&report.stdout).expect("one JSON object");
    assert_eq!(summary["warnings"], serde_json::json!([want]));
}

#[test]
fn a_command_runs_as_each_trainer_without_a_manifest() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let server = SERVER.replace("done-1", "done-2");
    let template = format!("ps.template={{spec: {{containers: [{{name: server, command: [sh, -c, '{server}']}}]}}}}");
    let script =
        r#"echo "$0 $1 $PSJOB_TRAINERS $PSJOB_TRAINING" > $DIR/said-$PSJOB_INDEX; touch $DIR/done-$PSJOB_INDEX"#;
    let mut command = Command::new(env!("CARGO_BIN_EXE_psjobs"));
    command.args(["run", "--json", "--trainers", "3", "--set", "training.seed=77", "--set", &template]);
    command.args(["--", "sh", "-c", script, "$(PSJOB_INDEX)", "a $$ b"]);
    command.env("DIR", folder.path()).env("TMPDIR", folder.path());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let report = Report::of(Running::start(&mut command));
    assert_eq!(report.code, Some(0), "{}", report.stderr);
    let summary: Value = serde_json::from_str(&report.stdout).expect("one JSON object");
    assert_eq!((&summary["trainers"], &summary["name"]), (&3.into(), &"sh".into()));
    for index in 0..3 {
        let said = fs::read_to_string(folder.path().join(format!("said-{index}"))).expect("the trainer wrote it");
        assert!(said.starts_with("$(PSJOB_INDEX) a $$ b 3 "), "arguments arrive as they were typed: {said}");
        assert!(said.contains(r#""seed":77"#), "{said}");
    }
}

#[test]
fn flags_set_fields_of_a_manifest() {
    let job = Job::new(&SERVER.replace("done-1", "done-2"), "touch $DIR/done-$PSJOB_INDEX", "");
    let report = job.run(&["--json", "--set", "trainer.replicas=3"]);
    assert_eq!(report.code, Some(0), "{}", report.stderr);
    let summary: Value = serde_json::from_str(&report.stdout).expect("one JSON object");
    assert_eq!(summary["trainers"], 3);
    for (flags, says) in [
        (&["--set", "trainer.replica=3"][..], "spec.trainer.replica"),
        (&["--set", "trainer.replicas=many"], "spec.trainer.replicas"),
        (&["--set", "trainer"], "--set training.consistency.mode=Async"),
        (&["--trainers", "3"], "cannot be used with"),
    ] {
        let report = job.run(flags);
        assert_eq!(report.code, Some(2), "{flags:?}: {}", report.stderr);
        assert!(report.stderr.contains(says), "{flags:?}: {}", report.stderr);
    }
}

#[test]
fn bad_input_is_one_sentence_and_exit_code_2() {
    let worker_job = Job::new(SERVER, "exit 0", "suspend: true");
    let plain = |text: &str| {
        let job = Job::new(SERVER, "exit 0", "");
        fs::write(job.path("job.yaml"), text).expect("written");
        job
    };
    let invalid = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/manifests/nesterov.yaml"));
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/mlp.yaml");
    let example = fs::read_to_string(example).expect("readable");
    let rows = [
        (worker_job, &[][..], "job job is suspended"),
        (plain(&invalid.expect("readable")), &[][..], "nesterov needs momentum"),
        (plain(&format!("{example}\n---\n{example}")), &[][..], "holds 2 jobs"),
        (plain(&example), &["--worker", "/no/such/worker"][..], "--worker /no/such/worker: there is no such file"),
        (plain(&example), &["--data", "/no/such/folder"][..], "--data /no/such/folder: there is no such folder"),
        // An address of documentation, which no machine has.
        (plain(&example), &["--web=192.0.2.1:80"][..], "--web: cannot listen on 192.0.2.1:80: "),
    ];
    for (job, args, want) in rows {
        let report = job.run(args);
        assert!(report.stderr.contains(want), "{want:?} is not in {}", report.stderr);
        assert_eq!((report.code, report.stderr.lines().count()), (Some(2), 1), "{}", report.stderr);
        assert_eq!(report.stdout, "");
    }
}

#[test]
fn a_command_that_does_not_exist_fails_the_job_at_once() {
    let job = Job::new(STUCK, "exit 0", "");
    let manifest = fs::read_to_string(job.path("job.yaml")).expect("readable");
    let (servers, trainers) = manifest.split_once("trainer: {").expect("in the manifest");
    let manifest = format!("{servers}trainer: {{{}", trainers.replace("[sh, -c,", "[no-such-program,"));
    fs::write(job.path("job.yaml"), manifest).expect("written");
    let report = job.run(&[]);
    assert_eq!(report.code, Some(1), "{}", report.stderr);
    assert!(report.stderr.contains("no-such-program: No such file"), "{}", report.stderr);
}

#[test]
fn with_a_log_folder_server_processes_get_a_new_folder_for_metrics() {
    let server = format!("echo $PSJOB_METRICS_DIR; mkdir -p $PSJOB_METRICS_DIR; {SERVER}");
    let trainer = "echo metrics of a trainer: $PSJOB_METRICS_DIR.; touch $DIR/done-$PSJOB_INDEX";
    let job = Job::new(&server, trainer, "");
    let (logs, metrics) = (job.path("logs"), job.path("logs/metrics"));
    for run in 1..=2 {
        (0..2).for_each(|trainer| drop(fs::remove_file(job.path(&format!("done-{trainer}")))));
        let report = job.run(&["--log-dir", &logs.display().to_string()]);
        assert_eq!(report.code, Some(0), "{}", report.stderr);
        let shown = format!("metrics over time: tensorboard --logdir {}", metrics.display());
        assert!(report.stderr.contains(&shown), "{}", report.stderr);
        // Logs are appended to those of the run before.
        let log = |name: &str| fs::read_to_string(logs.join(name)).expect("a log").lines().last().map(str::to_owned);
        assert_eq!(log("ps-0.log"), Some(format!("{}/job-{run}", metrics.display())));
        assert_eq!(log("trainer-0.log").as_deref(), Some("metrics of a trainer: ."));
    }
}

#[test]
fn a_reader_that_goes_away_does_not_stop_the_run() {
    let job = Job::new(SERVER, "touch $DIR/done-$PSJOB_INDEX", "");
    let mut command = job.command(&["--verbose"]);
    let status = command.stdout(File::create("/dev/full").expect("there")).status().expect("runs");
    assert_eq!(status.code(), Some(0));
}

#[test]
fn variables_of_a_job_that_the_caller_has_do_not_reach_the_processes() {
    let trainer = "env > $DIR/env-$PSJOB_INDEX; touch $DIR/done-$PSJOB_INDEX";
    let job = Job::new(SERVER, trainer, "");
    let mut command = job.command(&[]);
    command.env("PSJOB_FINISHED_TRAINERS", "0").env("PSJOB_TLS_DIR", "/no/such/folder").env("PSJOB_ROLE", "ps");
    command.env("PSJOB_DATA", "/their/data");
    let report = Report::of(Running::start(&mut command));
    assert_eq!(report.code, Some(0), "{}", report.stderr);
    let variables = fs::read_to_string(job.path("env-0")).expect("written");
    let has = |entry: &str| variables.lines().any(|line| line.starts_with(entry));
    assert!(!has("PSJOB_FINISHED_TRAINERS=") && !has("PSJOB_TLS_DIR="), "{variables}");
    assert!(has("PSJOB_ROLE=trainer") && has("PSJOB_DATA=/their/data"), "{variables}");
}

#[test]
fn a_hang_up_that_is_ignored_at_the_start_does_not_end_the_run() {
    let trainer = "until [ -e $DIR/go ]; do sleep 0.02; done; touch $DIR/done-$PSJOB_INDEX";
    let job = Job::new(&format!("echo $$ > $DIR/ps-0; {SERVER}"), trainer, "");
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' HUP; exec \"$0\" run \"$1\"", env!("CARGO_BIN_EXE_psjobs")]);
    command.arg(job.path("job.yaml")).env("TMPDIR", job.path(""));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = Running::start(&mut command);
    job.pid("ps-0");
    kill_process(child.pid(), Signal::HUP).expect("sent");
    fs::write(job.path("go"), "").expect("written");
    let report = Report::of(child);
    assert_eq!(report.code, Some(0), "{}", report.stderr);
}

/// Starts a process in a session of its own, which waits for ever.
const APART: &str = "setsid sh -c 'echo $$ > $DIR/apart-$PSJOB_INDEX; exec sleep 1000' & \
                     until [ -s $DIR/apart-$PSJOB_INDEX ]; do sleep 0.02; done";

#[test]
fn a_process_with_a_group_of_its_own_ends_with_its_trainer() {
    let job = Job::new(SERVER, &format!("{APART}; touch $DIR/done-$PSJOB_INDEX"), "");
    let report = job.run(&[]);
    assert_eq!(report.code, Some(0), "{}", report.stderr);
    for name in ["apart-0", "apart-1"] {
        wait_until_gone(job.pid(name), name);
    }
}

#[test]
fn a_process_with_a_group_of_its_own_does_not_survive_psjobs() {
    let job = Job::new(STUCK, &format!("{APART}; {STUCK}"), "");
    let mut child = Running::start(&mut job.command(&[]));
    let names = ["apart-0", "apart-1", "trainer-0", "trainer-1"];
    let pids = names.map(|name| job.pid(name));
    child.child().kill().expect("killed");
    child.child().wait().expect("gone");
    for (pid, name) in pids.into_iter().zip(names) {
        wait_until_gone(pid, name);
    }
}
