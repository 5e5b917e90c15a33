//! Runs the benchmarks that lose servers or bear with strangers, on few parameters.

use std::process::Command;

use serde_json::Value;

/// Runs `psjobs bench` with `args`, and `path` to find programs in; the lines of its report.
fn report(args: &str, path: Option<&str>) -> Vec<Value> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_psjobs-bench"));
    command.args(args.split(' ')).args(["--json", "--runs", "1"]).envs(path.map(|path| ("PATH", path)));
    let output = command.output().expect("the program starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{args}: {said}");
    let lines = String::from_utf8(output.stdout).expect("text");
    print!("{lines}");
    lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn a_server_that_was_replaced_and_lives_on_is_measured() {
    let lines = report("recovery --case replica-zombie --megabytes 1", None);
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert_eq!((&lines[0]["case"], &lines[0]["limit"]), (&"replica-zombie".into(), &10.0.into()));
    assert!(lines[0]["value"].is_f64(), "{lines:?}");
}

#[test]
fn a_machine_that_vanishes_is_measured_or_left_out() {
    let lines = report("recovery --case replica-silent --megabytes 1", None);
    assert_eq!((lines.len(), &lines[0]["case"]), (1, &"replica-silent".into()), "{lines:?}");
    assert!(lines[0]["left_out"].is_string() != lines[0]["value"].is_f64(), "{lines:?}");
}

#[test]
fn without_namespaces_the_case_is_left_out_and_says_so() {
    let lines = report("recovery --case replica-silent --case replica-zombie --megabytes 1", Some("/nowhere"));
    let why = lines[0]["left_out"].as_str().expect("a sentence");
    assert!(why.contains("takes root and the program ip (iproute2)") && why.contains("cannot start ip"), "{why}");
    assert_eq!((lines.len(), &lines[1]["case"]), (2, &"replica-zombie".into()), "{lines:?}");
}

#[test]
fn strangers_are_measured() {
    let lines = report("hostile --peers 50", None);
    assert_eq!((lines.len(), &lines[0]["case"]), (1, &"hostile-mib".into()), "{lines:?}");
    assert_eq!((&lines[0]["unit"], &lines[0]["limit"]), (&"MiB".into(), &64.0.into()), "{lines:?}");
    assert!(lines[0]["value"].is_f64(), "{lines:?}");
}
