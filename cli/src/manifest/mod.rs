//! Reads and checks manifests. What passes here passes the API server, and the other way round: the
//! schema, the defaults and the rules are those of the CustomResourceDefinition. `validate` and `run`
//! both come this way.

mod locate;
mod parse;
mod path;
mod schema;
mod suggest;

use std::path::Path;
use std::sync::LazyLock;

use psjobs_api::crd::{self, ParameterServerJob};
use serde_json::Value;

use path::FieldPath;

/// Something in a manifest that must change; the text names the field and says what to write.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Problem {
    /// Line in the file, from 1.
    pub line: Option<usize>,
    /// Path of the field; empty if the file or document as a whole is meant.
    pub field: String,
    pub message: String,
}

/// The contents of a file.
#[derive(Debug, Default)]
pub struct Manifest {
    pub jobs: Vec<ParameterServerJob>,
    /// Kinds of documents that are not jobs, and so were not checked.
    pub skipped: Vec<String>,
}

/// A problem that has not been found in the text yet.
#[derive(Debug)]
struct Finding {
    path: FieldPath,
    message: String,
}

impl Finding {
    fn new(path: &FieldPath, message: String) -> Self {
        Self { path: path.clone(), message }
    }

    fn locate(self, text: &str, document: usize) -> Problem {
        let line = locate::line_of(text, document, &self.path);
        Problem { line, field: self.path.to_string(), message: self.message }
    }
}

/// Reads a file, or the standard input if the path is `-`.
pub fn read(file: &Path) -> std::io::Result<String> {
    if file == Path::new("-") { std::io::read_to_string(std::io::stdin()) } else { std::fs::read_to_string(file) }
}

/// Returns the documents of a text as values, without a check, up to the first that cannot be read.
pub fn documents(text: &str) -> (Vec<Value>, Option<Problem>) {
    let (documents, syntax) = parse::documents(text);
    (documents.into_iter().map(|document| document.value).collect(), syntax)
}

/// Checks all documents of a text.
///
/// # Errors
/// Everything that must change, in the order of the documents.
pub fn check(text: &str) -> Result<Manifest, Vec<Problem>> {
    let (documents, syntax) = parse::documents(text);
    let mut problems = Vec::new();
    let mut manifest = Manifest::default();
    for document in &documents {
        match check_document(&document.value) {
            Ok(Checked::Job(job)) => manifest.jobs.push(*job),
            Ok(Checked::Other(kind)) => manifest.skipped.push(kind),
            Err(findings) => {
                problems.extend(findings.into_iter().map(|finding| finding.locate(text, document.place)));
            }
        }
    }
    problems.extend(syntax);
    if problems.is_empty() && manifest.jobs.is_empty() {
        problems.push(no_job(&manifest.skipped));
    }
    if problems.is_empty() { Ok(manifest) } else { Err(problems) }
}

fn no_job(skipped: &[String]) -> Problem {
    let found = if skipped.is_empty() { "nothing".into() } else { skipped.join(", ") };
    let message = format!(
        "no {} found, only {found}; a job begins with apiVersion: {} and kind: {}",
        crd::KIND,
        *API_VERSION,
        crd::KIND
    );
    Problem { line: None, field: String::new(), message }
}

static API_VERSION: LazyLock<String> = LazyLock::new(|| format!("{}/{}", crd::GROUP, crd::VERSION));

/// The definition's schema. The API server adds `apiVersion`, `kind` and `metadata` to it; the last
/// is of the type that a pod template's metadata has, so that is where its schema is from.
static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
    let definition = serde_json::to_value(crd::definition()).expect("a definition is JSON");
    let mut schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone();
    let of_spec = &schema["properties"]["spec"]["properties"];
    let metadata = of_spec["trainer"]["properties"]["template"]["properties"]["metadata"].clone();
    schema["properties"]["metadata"] = metadata;
    for name in ["apiVersion", "kind"] {
        schema["properties"][name] = serde_json::json!({"type": "string"});
    }
    schema
});

enum Checked {
    Job(Box<ParameterServerJob>),
    Other(String),
}

fn check_document(document: &Value) -> Result<Checked, Vec<Finding>> {
    if let Some(kind) = other_kind(document) {
        return Ok(Checked::Other(kind));
    }
    check_type(document)?;
    let mut value = document.clone();
    schema::fill_defaults(&SCHEMA, &mut value);
    let mut findings = schema::check(&SCHEMA, &value);
    findings.extend(check_name(&mut value));
    if !findings.is_empty() {
        return Err(findings);
    }
    let job: ParameterServerJob = serde_path_to_error::deserialize(value).map_err(|error| {
        let path = FieldPath::parse(&error.path().to_string());
        vec![Finding::new(&path, format!("{path} cannot be read: {}", error.inner()))]
    })?;
    job.validate_cel()
        .map_err(|broken| broken.iter().map(|rule| broken_rule(&rule.message, &rule.field_path)).collect::<Vec<_>>())?;
    Ok(Checked::Job(Box::new(job)))
}

/// The kind of a document that belongs to somebody else, for instance a ConfigMap beside the job.
fn other_kind(document: &Value) -> Option<String> {
    let kind = document["kind"].as_str()?;
    let ours = document["apiVersion"].as_str().is_some_and(|version| version.starts_with(crd::GROUP));
    let alike = suggest::closest(kind, [crd::KIND]).is_some();
    (!ours && !alike).then(|| kind.to_owned())
}

fn check_type(document: &Value) -> Result<(), Vec<Finding>> {
    let root = FieldPath::default();
    if !document.is_object() {
        let message = format!("a job is a mapping of fields that begins with apiVersion: {}", *API_VERSION);
        return Err(vec![Finding::new(&root, message)]);
    }
    let wrong = [("apiVersion", API_VERSION.as_str()), ("kind", crd::KIND)].into_iter().filter_map(|(name, want)| {
        let message = match &document[name] {
            Value::Null => format!("{name} is missing; write {name}: {want}"),
            Value::String(found) if found == want => return None,
            found => format!("{name} is {found}; write {want}"),
        };
        Some(Finding::new(&root.key(name), message))
    });
    let wrong: Vec<_> = wrong.collect();
    if wrong.is_empty() { Ok(()) } else { Err(wrong) }
}

/// A job needs a name, or the start of one that `kubectl create` completes; then a name of the kind
/// that it will get stands in for it.
fn check_name(value: &mut Value) -> Option<Finding> {
    let path = FieldPath::parse("metadata.name");
    let metadata = &value["metadata"];
    if metadata["name"].as_str().is_some_and(|name| !name.is_empty()) {
        return None;
    }
    let Some(start) = metadata["generateName"].as_str() else {
        return Some(Finding::new(&path, format!("{path} is missing; write a name, for example mnist")));
    };
    value["metadata"]["name"] = format!("{start}local").into();
    None
}

/// The rule's message names the field; where it begins with the field's path, that is more exact than
/// the place of the rule.
fn broken_rule(message: &str, place: &str) -> Finding {
    let first_word = message.split([' ', ':']).next().unwrap_or_default();
    let named = ["spec.", "metadata."].iter().any(|start| first_word.starts_with(start));
    let path = FieldPath::parse(if named { first_word } else { place });
    Finding::new(&path, message.to_owned())
}
