//! `fields.txt` names a test for each field of the definition.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::Value;

#[test]
fn every_field_has_a_test() {
    let text = include_str!("../../crds/parameterserverjobs.psjobs.dev.yaml");
    let definition: Value = serde_yaml::from_str(text).expect("crds/ holds a definition");
    let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"];
    let mut fields = BTreeSet::new();
    for part in ["spec", "status"] {
        leaves(&schema[part], part, &mut fields);
    }
    assert!(fields.len() > 150, "fields are found: {fields:?}");

    let (mut listed, mut named) = (BTreeSet::new(), BTreeSet::new());
    let rows = include_str!("fields.txt").lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    for row in rows {
        let (prefix, rest) = row.split_once(": ").expect("PREFIX: FIELDS = TEST");
        let (names, test) = rest.split_once(" = ").expect("PREFIX: FIELDS = TEST");
        named.insert(test.to_owned());
        for name in names.split(' ') {
            assert!(listed.insert(format!("{prefix}.{name}")), "{prefix}.{name} is listed twice");
        }
    }
    let missing = fields.difference(&listed).collect::<Vec<_>>();
    assert!(missing.is_empty(), "fields.txt names no test for {missing:#?}");
    let gone = listed.difference(&fields).collect::<Vec<_>>();
    assert!(gone.is_empty(), "the definition has no field {gone:#?}");

    let mut tests = BTreeSet::new();
    for folder in ["api", "arithmetic", "operator", "policy", "ps", "worker", "workloads"] {
        collect_tests(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(folder), &mut tests);
    }
    let unknown = named.difference(&tests).collect::<Vec<_>>();
    assert!(unknown.is_empty(), "there is no test {unknown:#?}");
}

/// Collects the fields that hold values; what a pod's template holds is Kubernetes' business.
fn leaves(schema: &Value, path: &str, found: &mut BTreeSet<String>) {
    match (schema["properties"].as_object(), schema.get("items")) {
        (Some(fields), _) if !path.ends_with(".template") => {
            fields.iter().for_each(|(name, field)| leaves(field, &format!("{path}.{name}"), found));
        }
        (None, Some(items)) => leaves(items, &format!("{path}[]"), found),
        _ => {
            found.insert(path.to_owned());
        }
    }
}

/// Collects the names of the functions that are marked as tests in a folder's sources.
fn collect_tests(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).expect("the folder is there") {
        let path = entry.expect("it can be read").path();
        if path.is_dir() {
            collect_tests(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).expect("it can be read");
            let marked = text.split("#[test]").skip(1).chain(text.split("#[tokio::test").skip(1));
            let names = marked.filter_map(|after| after.split_once("fn ")?.1.split_once('('));
            found.extend(names.map(|(name, _)| name.to_owned()));
        }
    }
}
