//! `psjobs validate`: checks manifests without a cluster, and as a cluster would.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use psjobs_api::crd::ParameterServerJob;
use serde::Serialize;

use crate::bad_input::BadInput;
use crate::manifest::{self, Manifest, Problem};

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
    pub fn run(self) -> anyhow::Result<ExitCode> {
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
        Ok(if report.valid { ExitCode::SUCCESS } else { ExitCode::from(BadInput::EXIT_CODE) })
    }
}

/// The one valid job of a file.
///
/// # Errors
/// [`BadInput`] with every problem, or if the file holds several jobs.
pub fn only_job(file: &Path) -> anyhow::Result<ParameterServerJob> {
    let mut manifest = manifest::check(&read(file)?).map_err(|problems| {
        let lines: Vec<_> = problems.iter().map(|problem| line(file, problem)).collect();
        BadInput::new(lines.join("\n"))
    })?;
    match (manifest.jobs.pop(), manifest.jobs.as_slice()) {
        (Some(job), []) => Ok(job),
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
        let (servers, trainers) = (job.spec.ps.replicas, job.spec.trainer.replicas);
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
