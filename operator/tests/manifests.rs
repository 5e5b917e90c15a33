//! Checks the messages for manifests that cannot work: one row for each rule, judged by a real API server
//! as `kubectl apply` asks it to. A rule without a row fails the last test here.

#[expect(dead_code, reason = "the other test programs use the rest")]
mod support;
#[path = "manifests/table.rs"]
mod table;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Patch, PatchParams, PostParams};
use psjobs_api::crd::ParameterServerJob;
use psjobs_operator::controller::validate::validate;
use serde_json::{Value, json};
use support::Team;
use table::{ACCEPTED, ACCEPTED_CHANGES, CHANGES, ELASTIC_CHANGES, NEVER, NOT_BETWEEN, RULES, SCHEMA, START_CHANGED};

/// A manifest that every rule lets through; the rows change it.
const GOOD: &str = r#"
apiVersion: psjobs.dev/v1alpha1
kind: ParameterServerJob
metadata: {name: mnist}
spec:
  trainer:
    replicas: 2
    template: {spec: {containers: [{name: trainer, image: "psjobs-worker:0.1.0", args: [train, mnist]}]}}
"#;

#[tokio::test]
async fn manifests_that_cannot_work_are_refused_with_a_sentence() {
    let Some(team) = Team::new("manifests").await else { return };
    let mut wrong = String::new();
    for &(change, sentence) in SCHEMA.iter().chain(RULES) {
        expect_refusal(&mut wrong, change, create(&team, change).await, sentence);
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[tokio::test]
async fn manifests_at_the_edge_of_a_rule_are_accepted() {
    let Some(team) = Team::new("edges").await else { return };
    for change in ACCEPTED {
        create(&team, change).await.unwrap_or_else(|said| panic!("{change} was refused: {said}"));
    }
}

#[tokio::test]
async fn changes_that_a_running_job_cannot_follow_are_refused_until_it_is_suspended() {
    let Some(team) = Team::new("changes").await else { return };
    team.apply("").await;
    let mut wrong = String::new();
    for &(change, sentence) in CHANGES.iter().chain(NEVER) {
        expect_refusal(&mut wrong, change, update(&team, change).await, sentence);
    }
    assert!(wrong.is_empty(), "{wrong}");
    for change in ACCEPTED_CHANGES {
        update(&team, change).await.unwrap_or_else(|said| panic!("{change} was refused: {said}"));
    }
    team.patch(json!({"suspend": true})).await;
    for &(change, _) in CHANGES {
        update(&team, change).await.unwrap_or_else(|said| panic!("{change} of a suspended job was refused: {said}"));
    }
    for &(change, sentence) in NEVER {
        expect_refusal(&mut wrong, change, update(&team, change).await, sentence);
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[tokio::test]
async fn a_status_without_a_phase_is_in_no_rules_way() {
    let Some(team) = Team::new("phaseless").await else { return };
    team.apply("").await;
    let some = Patch::Merge(json!({"status": {"restarts": 1}}));
    let jobs = team.api::<ParameterServerJob>();
    jobs.patch_status("mnist", &PatchParams::default(), &some).await.expect("a first status");
    update(&team, "spec: {failurePolicy: {maxRestarts: 9}}").await.expect("a change that a running job takes");
    let mut wrong = String::new();
    let change = "spec: {trainer: {gpus: 1}}";
    expect_refusal(&mut wrong, change, update(&team, change).await, START_CHANGED);
    assert!(wrong.is_empty(), "{wrong}");
    team.patch(json!({"suspend": true})).await;
    update(&team, change).await.expect("a change of a suspended job");
    for status in [json!({"restarts": 2}), json!({"phase": "Running"}), json!(null)] {
        let patch = Patch::Merge(json!({"status": status}));
        jobs.patch_status("mnist", &PatchParams::default(), &patch).await.expect("another status");
    }
}

#[tokio::test]
async fn a_running_elastic_job_takes_another_number_of_trainers_and_nothing_else() {
    let Some(team) = Team::new("elastic-changes").await else { return };
    team.apply("elasticPolicy: {minReplicas: 2, maxReplicas: 4}").await;
    let mut wrong = String::new();
    for &(change, sentence) in ELASTIC_CHANGES {
        expect_refusal(&mut wrong, change, update(&team, change).await, sentence);
    }
    assert!(wrong.is_empty(), "{wrong}");
    for change in ["spec: {trainer: {replicas: 4}}", "spec: {failurePolicy: {maxRestarts: 9}}"] {
        update(&team, change).await.unwrap_or_else(|said| panic!("{change} was refused: {said}"));
    }
    team.patch(json!({"suspend": true})).await;
    for change in ["spec: {elasticPolicy: {maxReplicas: 5}, trainer: {replicas: 5}}", "spec: {elasticPolicy: null}"] {
        update(&team, change).await.unwrap_or_else(|said| panic!("{change} of a suspended job was refused: {said}"));
    }
    let between = update(&team, "spec: {trainer: {replicas: 5}}").await;
    expect_refusal(&mut wrong, "5 trainers of a suspended job", between, NOT_BETWEEN);
    assert!(wrong.is_empty(), "{wrong}");
}

#[tokio::test]
async fn kubectl_scale_changes_the_trainers_of_a_suspended_job() {
    let Some(team) = Team::new("scale").await else { return };
    team.apply("").await;
    let three = Patch::Merge(json!({"spec": {"replicas": 3}}));
    let jobs = team.api::<psjobs_api::crd::ParameterServerJob>();
    let params = PatchParams::default();
    let set = || jobs.patch_scale("mnist", &params, &three);
    let Err(kube::Error::Api(refused)) = set().await else { panic!("a running job was scaled") };
    assert!(
        refused.message.contains("spec.training, spec.ps and spec.trainer cannot change while the job runs"),
        "{}",
        refused.message
    );
    team.patch(json!({"suspend": true})).await;
    let scale = set().await.expect("a suspended job can be scaled");
    assert_eq!(scale.spec.and_then(|spec| spec.replicas), Some(3));
    assert_eq!(team.job().await.spec.trainer.replicas, 3);
}

#[tokio::test]
async fn a_policy_has_one_owner_and_applied_again_nothing_changes() {
    let Some(team) = Team::new("owners").await else { return };
    let jobs = team.api::<ParameterServerJob>();
    let mut job: Value = serde_yaml::from_str(GOOD).expect("YAML");
    merge(&mut job, &json!({"spec": {"training": {"batch": {"base": 64}}, "runPolicy": {"serverDrainSeconds": 9}}}));
    let (params, patch) = (PatchParams::apply("git"), Patch::Apply(&job));
    let apply = || jobs.patch("mnist", &params, &patch);
    let stored = apply().await.expect("applied").metadata;
    let owners = serde_json::to_value(&stored.managed_fields).expect("JSON");
    assert_eq!(owners[0]["fieldsV1"]["f:spec"]["f:training"], json!({}), "{owners:#}");
    // As a controller that keeps a cluster as its repository says does every few minutes.
    let again = apply().await.expect("applied").metadata;
    assert_eq!(again.resource_version, stored.resource_version);
    // A user who suspends it causes no conflict.
    team.patch(json!({"suspend": true})).await;
    let applied = apply().await.expect("no conflict");
    assert!(applied.spec.suspend);
    assert_eq!(applied.spec.training.batch.base, 64);
}

#[tokio::test]
async fn manifests_of_the_first_version_still_work() {
    let Some(team) = Team::new("yesterday").await else { return };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/manifests-0.1.0");
    let mut files =
        fs::read_dir(folder).expect("a folder").map(|file| file.expect("readable").path()).collect::<Vec<_>>();
    files.sort();
    assert!(files.len() > 10, "{files:?}");
    for file in files {
        let text = fs::read_to_string(&file).expect("readable");
        let said: Value = serde_yaml::from_str(&text).expect("YAML");
        let accepted = send(&team, http::Method::POST, "", "application/json", &said).await;
        assert_eq!(accepted, Ok(()), "{}", file.display());
        // What is stored means what was written, and the operator can run it.
        let job: ParameterServerJob = serde_json::from_value(said.clone()).expect("a job");
        let stored = team.api().create(&PostParams::default(), &job).await.expect("it is stored");
        let means = serde_json::to_value(&stored.spec).expect("JSON");
        assert!(contains(&means, &said["spec"]), "{}: {means:#} instead of {said:#}", file.display());
        validate(stored.into()).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    }
}

/// Returns whether everything that `part` says is in `whole`.
fn contains(whole: &Value, part: &Value) -> bool {
    match (whole, part) {
        (Value::Object(whole), Value::Object(part)) => {
            part.iter().all(|(name, part)| whole.get(name).is_some_and(|whole| contains(whole, part)))
        }
        (Value::Array(whole), Value::Array(part)) => {
            whole.len() == part.len() && whole.iter().zip(part).all(|(whole, part)| contains(whole, part))
        }
        (Value::Number(whole), Value::Number(part)) => whole.as_f64() == part.as_f64(),
        (whole, part) => whole == part,
    }
}

#[test]
fn every_rule_has_a_row() {
    let text = include_str!("../../crds/parameterserverjobs.psjobs.dev.yaml");
    let definition: CustomResourceDefinition = serde_yaml::from_str(text).expect("crds/ holds a definition");
    let mut rules = Vec::new();
    messages(&serde_json::to_value(definition).expect("a definition is JSON"), &mut rules);
    assert!(rules.len() > 20, "rules are found: {rules:?}");
    let rows = RULES.iter().chain(CHANGES).chain(NEVER).map(|(_, sentence)| *sentence).collect::<Vec<_>>();
    let missing = rules.iter().filter(|rule| !rows.contains(&rule.as_str())).collect::<Vec<_>>();
    assert!(missing.is_empty(), "no row provokes {missing:#?}");
}

#[test]
fn every_field_of_the_spec_is_in_a_manifest_that_is_accepted() {
    let text = include_str!("../../crds/parameterserverjobs.psjobs.dev.yaml");
    let definition: Value = serde_yaml::from_str(text).expect("crds/ holds a definition");
    let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
    let (mut fields, mut written) = (BTreeSet::new(), BTreeSet::new());
    paths_of_schema(schema, "spec", &mut fields);
    for manifest in ACCEPTED.iter().chain([&GOOD]) {
        let manifest: Value = serde_yaml::from_str(manifest).expect("YAML");
        paths(&manifest["spec"], "spec", &mut written);
    }
    assert!(fields.len() > 70, "fields are found: {fields:?}");
    let missing = fields.difference(&written).collect::<Vec<_>>();
    assert!(missing.is_empty(), "no accepted manifest has {missing:#?}");
}

/// Collects the fields of a schema as paths; what a pod's template holds is Kubernetes' business.
fn paths_of_schema(schema: &Value, path: &str, found: &mut BTreeSet<String>) {
    if path != "spec" {
        found.insert(path.to_owned());
    }
    let below = [schema, &schema["items"]].map(|schema| schema["properties"].as_object());
    for (name, schema) in below.into_iter().flatten().flatten() {
        let path = format!("{path}.{name}");
        if name == "template" {
            found.insert(path);
        } else {
            paths_of_schema(schema, &path, found);
        }
    }
}

/// Collects the fields of a value as such paths.
fn paths(value: &Value, path: &str, found: &mut BTreeSet<String>) {
    found.insert(path.to_owned());
    match value {
        Value::Object(fields) => fields.iter().for_each(|(name, value)| paths(value, &format!("{path}.{name}"), found)),
        Value::Array(items) => items.iter().for_each(|item| paths(item, path, found)),
        _ => {}
    }
}

/// Collects what the rules of a definition say.
fn messages(schema: &Value, found: &mut Vec<String>) {
    if let Some(rules) = schema.get("x-kubernetes-validations").and_then(Value::as_array) {
        found.extend(rules.iter().filter_map(|rule| Some(rule.get("message")?.as_str()?.to_owned())));
    }
    match schema {
        Value::Object(fields) => fields.values().for_each(|field| messages(field, found)),
        Value::Array(items) => items.iter().for_each(|item| messages(item, found)),
        _ => {}
    }
}

fn expect_refusal(wrong: &mut String, change: &str, answer: Result<(), String>, sentence: &str) {
    match answer {
        Ok(()) => writeln!(wrong, "{change}\n  was accepted\n").expect("a String takes all text"),
        Err(said) if said.contains(sentence) => {}
        Err(said) => writeln!(wrong, "{change}\n  {said}\n").expect("a String takes all text"),
    }
}

/// Sends the changed manifest to the API server as a dry run; nothing is stored.
async fn create(team: &Team, change: &str) -> Result<(), String> {
    let mut job: Value = serde_yaml::from_str(GOOD).expect("the manifest is YAML");
    merge(&mut job, &serde_yaml::from_str(change).expect("the change is YAML"));
    send(team, http::Method::POST, "", "application/json", &job).await
}

/// Sends a change of the stored job `mnist` as a dry run; nothing is stored.
async fn update(team: &Team, change: &str) -> Result<(), String> {
    let change: Value = serde_yaml::from_str(change).expect("the change is YAML");
    send(team, http::Method::PATCH, "/mnist", "application/merge-patch+json", &change).await
}

async fn send(team: &Team, method: http::Method, name: &str, content: &str, body: &Value) -> Result<(), String> {
    let jobs = format!("/apis/psjobs.dev/v1alpha1/namespaces/{}/parameterserverjobs", team.namespace);
    let request = http::Request::builder()
        .method(method)
        .uri(format!("{jobs}{name}?dryRun=All&fieldValidation=Strict"))
        .header(http::header::CONTENT_TYPE, content)
        .body(body.to_string().into_bytes())
        .expect("a request");
    match team.client.request_text(request).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) => Err(status.message.clone()),
        Err(error) => panic!("the API server does not answer: {error}"),
    }
}

/// RFC 7396.
fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(changes) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    let fields = target.as_object_mut().expect("made one above");
    for (name, change) in changes {
        if change.is_null() {
            fields.remove(name);
        } else {
            merge(fields.entry(name).or_insert(Value::Null), change);
        }
    }
}
