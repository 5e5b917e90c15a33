//! `psjobs validate` over manifests that must be refused, and over the examples, which must not.
//! Each file in `manifests/` begins with the sentences it must get: `# LINE: sentence`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn validate(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_psjobs")).arg("validate").args(args).output().expect("psjobs runs")
}

fn yaml_files(folder: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let entries = fs::read_dir(&folder).expect("folder");
    let mut files: Vec<_> = entries.map(|entry| entry.expect("entry").path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "yaml"));
    files.sort();
    assert!(!files.is_empty(), "{} holds no manifests", folder.display());
    files
}

#[test]
fn a_wrong_manifest_gets_every_sentence_that_helps() {
    for file in yaml_files("tests/manifests") {
        let text = fs::read_to_string(&file).expect("readable");
        let name = file.display().to_string();
        let want: Vec<_> = text
            .lines()
            .map_while(|line| line.strip_prefix("# "))
            .map(|sentence| match sentence.starts_with(|c: char| c.is_ascii_digit()) {
                true => format!("{name}:{sentence}"),
                false => format!("{name}: {sentence}"),
            })
            .collect();
        let output = validate(&[&name]);
        let mut found: Vec<_> = String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
        let by_line = |line: &String| {
            line.rsplit_once(".yaml:").and_then(|(_, rest)| rest.split(':').next()?.parse::<u32>().ok())
        };
        found.sort_by_key(by_line);
        assert_eq!(found, want, "{name}");
        assert_eq!(output.status.code(), Some(2), "{name}");
    }
}

#[test]
fn the_examples_are_valid() {
    for file in yaml_files("../examples") {
        let output = validate(&[&file.display().to_string()]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
}

#[test]
fn json_holds_every_problem_with_file_line_and_field() {
    let file = format!("{}/tests/manifests/unknown-field.yaml", env!("CARGO_MANIFEST_DIR"));
    let output = validate(&["--json", &file]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!(report["valid"], false);
    let problem = &report["problems"][0];
    assert_eq!(problem["file"], file.as_str());
    assert_eq!((&problem["line"], &problem["field"]), (&9.into(), &"spec.ps.replica".into()));
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_file_that_cannot_be_read_is_one_sentence() {
    let output = validate(&["/no/such/file.yaml"]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.starts_with("cannot read /no/such/file.yaml: ") && text.lines().count() == 1, "{text}");
    assert_eq!(output.status.code(), Some(2));
}
