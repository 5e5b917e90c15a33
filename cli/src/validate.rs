//! `psjobs validate`: checks manifests without a cluster, and as a cluster would.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use clap::Args;
use psjobs_api::crd::{self, ParameterServerJob};
use serde::Serialize;
use serde_json::Value;

use crate::bad_input::BadInput;
use crate::manifest::{self, Manifest, Problem};
use crate::setting::Setting;

/// Check manifests, as `kubectl apply` would
///
/// Finds unknown fields, wrong types, values out of range and contradictions, and says for each what to
/// write. Needs no cluster: the rules are those of the CustomResourceDefinition.
///
/// Exit code: 0 all are valid, 2 something must change.
#[derive(Debug, Args)]
pub struct ValidateArgs {
    /// Manifests, each with one or more documents; - reads standard input
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Print one JSON object with all problems
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    valid: bool,
    jobs: Vec<String>,
    problems: Vec<Located>,
}

#[derive(Debug, Serialize)]
struct Located {
    file: String,
    #[serde(flatten)]
    problem: Problem,
}

impl ValidateArgs {
    pub fn run(self) -> anyhow::Result<u8> {
        let mut report = Report { valid: true, jobs: Vec::new(), problems: Vec::new() };
        let mut lines = Vec::new();
        for file in &self.files {
            match manifest::check(&read(file)?) {
                Ok(manifest) => {
                    lines.push(format!("{}: valid: {}", file.display(), describe(&manifest)));
                    report.jobs.extend(manifest.jobs.iter().filter_map(|job| job.metadata.name.clone()));
                }
                Err(problems) => {
                    lines.extend(problems.iter().map(|problem| line(file, problem)));
                    let file = file.display().to_string();
                    report.problems.extend(problems.into_iter().map(|problem| Located { file: file.clone(), problem }));
                }
            }
        }
        report.valid = report.problems.is_empty();
        let text = if self.json { serde_json::to_string(&report)? } else { lines.join("\n") };
        // A reader that has gone away wants no report.
        writeln!(std::io::stdout(), "{text}").ok();
        Ok(if report.valid { 0 } else { BadInput::EXIT_CODE })
    }
}

/// Returns the one valid job of a file, with fields set that flags name.
///
/// # Errors
/// [`BadInput`] with every problem, or if the file holds several jobs.
pub fn only_job(file: &Path, settings: &[Setting]) -> anyhow::Result<ParameterServerJob> {
    Ok(job_and_others(file, settings)?.0)
}

/// Returns the one valid job of a file, with fields set that flags name, and the kinds of the file's other documents.
///
/// # Errors
/// As [`only_job`].
pub fn job_and_others(file: &Path, settings: &[Setting]) -> anyhow::Result<(ParameterServerJob, Vec<String>)> {
    let text = read(file)?;
    if settings.is_empty() {
        return only_one(manifest::check(&text), file);
    }
    let (documents, problem) = manifest::documents(&text);
    match problem {
        Some(problem) => Err(BadInput::new(line(file, &problem)).into()),
        None => only_one(with_settings(documents, settings), file),
    }
}

/// Returns the one valid job of documents, with `settings` applied; `what` names the documents in problems.
///
/// # Errors
/// As [`only_job`].
pub fn job_of(documents: Vec<Value>, settings: &[Setting], what: &Path) -> anyhow::Result<ParameterServerJob> {
    Ok(only_one(with_settings(documents, settings), what)?.0)
}

/// Checks documents with `settings` applied to the jobs among them.
fn with_settings(documents: Vec<Value>, settings: &[Setting]) -> Result<Manifest, Vec<Problem>> {
    let set = documents.into_iter().map(|mut document| {
        if document["kind"] == crd::KIND {
            settings.iter().for_each(|setting| setting.apply(&mut document));
        }
        document.to_string()
    });
    // JSON is YAML. Its lines are not those of a file, so problems name fields only.
    let checked = manifest::check(&set.collect::<Vec<_>>().join("\n---\n"));
    let without_line = |problem| Problem { line: None, ..problem };
    checked.map_err(|problems| problems.into_iter().map(without_line).collect())
}

fn only_one(found: Result<Manifest, Vec<Problem>>, file: &Path) -> anyhow::Result<(ParameterServerJob, Vec<String>)> {
    let mut manifest = found.map_err(|problems| {
        let lines: Vec<_> = problems.iter().map(|problem| line(file, problem)).collect();
        BadInput::new(lines.join("\n"))
    })?;
    match (manifest.jobs.pop(), manifest.jobs.as_slice()) {
        (Some(job), []) => Ok((job, manifest.skipped)),
        (_, others) => {
            let message =
                format!("{} holds {} jobs; put each into a file of its own", file.display(), others.len() + 1);
            Err(BadInput::new(message).into())
        }
    }
}

fn read(file: &Path) -> anyhow::Result<String> {
    manifest::read(file).map_err(|error| BadInput::new(format!("cannot read {}: {error}", file.display())).into())
}

fn line(file: &Path, problem: &Problem) -> String {
    match problem.line {
        Some(line) => format!("{}:{line}: {}", file.display(), problem.message),
        None => format!("{}: {}", file.display(), problem.message),
    }
}

/// `job mnist (1 server, 2 trainers); not checked: ConfigMap`.
fn describe(manifest: &Manifest) -> String {
    let job = |job: &ParameterServerJob| {
        let (servers, trainers) = (job.spec.servers(), job.spec.trainer.replicas);
        let name = job.metadata.name.as_deref().unwrap_or_default();
        let plural = |count: i32| if count == 1 { "" } else { "s" };
        format!("job {name} ({servers} server{}, {trainers} trainer{})", plural(servers), plural(trainers))
    };
    let mut text = manifest.jobs.iter().map(job).collect::<Vec<_>>().join(", ");
    if !manifest.skipped.is_empty() {
        text += &format!("; not checked: {}", manifest.skipped.join(", "));
    }
    text
}
