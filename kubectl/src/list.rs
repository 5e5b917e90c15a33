//! `kubectl psjob list`: all jobs, each in a row.

use clap::{Args, ValueEnum};
use jiff::Timestamp;
use kube::Api;
use kube::api::ListParams;
use psjobs_api::crd::{ParameterServerJob, Phase};

use crate::connection::ConnectionArgs;
use crate::text;

/// List jobs: how far each is, and what it waits for
#[derive(Debug, Args)]
#[command(visible_alias = "ls")]
pub struct ListArgs {
    /// The jobs of all namespaces
    #[arg(long, short = 'A')]
    all_namespaces: bool,
    /// Only jobs with these labels, for example team=vision
    #[arg(long, short = 'l')]
    selector: Option<String>,
    /// Only jobs that have not ended
    #[arg(long)]
    active: bool,
    /// Print another form than the table
    #[arg(long, short)]
    output: Option<Output>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Output {
    /// A list of the objects as JSON
    Json,
    /// A list of the objects as YAML
    Yaml,
    /// Names alone
    Name,
}

impl ListArgs {
    pub async fn run(self, connection: &ConnectionArgs) -> anyhow::Result<u8> {
        let cluster = connection.open().await?;
        let jobs = if self.all_namespaces { Api::all(cluster.client.clone()) } else { cluster.jobs() };
        let wanted = ListParams { label_selector: self.selector, ..ListParams::default() };
        let mut jobs = jobs.list(&wanted).await.map_err(|error| cluster.explain(error, "\0"))?.items;
        if self.active {
            jobs.retain(|job| !text::phase(job).is_some_and(Phase::is_final));
        }
        jobs.sort_by_cached_key(|job| (job.metadata.namespace.clone(), job.metadata.name.clone()));
        let output = match self.output {
            Some(Output::Json) => serde_json::to_string_pretty(&list(&jobs))?,
            Some(Output::Yaml) => serde_yaml::to_string(&list(&jobs))?.trim_end().to_owned(),
            Some(Output::Name) => jobs.iter().map(name).collect::<Vec<_>>().join("\n"),
            None if jobs.is_empty() => {
                let place =
                    if self.all_namespaces { "the cluster".into() } else { format!("namespace {}", cluster.namespace) };
                eprintln!("there are no jobs in {place}");
                return Ok(0);
            }
            None => table(&jobs, self.all_namespaces, Timestamp::now()),
        };
        text::print(output);
        Ok(0)
    }
}

fn list(jobs: &[ParameterServerJob]) -> serde_json::Value {
    serde_json::json!({"apiVersion": "v1", "kind": "List", "items": jobs})
}

fn name(job: &ParameterServerJob) -> String {
    job.metadata.name.clone().unwrap_or_default()
}

/// The table of the jobs; `namespaces` adds the column with theirs.
fn table(jobs: &[ParameterServerJob], namespaces: bool, now: Timestamp) -> String {
    let mut header = vec![
        "NAME",
        "STATE",
        "SERVERS",
        "TRAINERS",
        "PROGRESS",
        "STEP",
        "LOSS",
        "EXAMPLES/S",
        "RESTARTS",
        "AGE",
        "REASON",
    ];
    if namespaces {
        header.insert(0, "NAMESPACE");
    }
    let rows: Vec<_> = jobs
        .iter()
        .map(|job| {
            let mut row = row(job, now);
            if namespaces {
                row.insert(0, job.metadata.namespace.clone().unwrap_or_default());
            }
            row
        })
        .collect();
    text::table(&header, &rows)
}

fn row(job: &ParameterServerJob, now: Timestamp) -> Vec<String> {
    let status = job.status.clone().unwrap_or_default();
    let progress = status.progress.as_ref();
    let loss = progress.and_then(|progress| progress.metrics.iter().find(|metric| metric.name == "loss"));
    vec![
        name(job),
        status.phase.map_or_else(|| "Unseen".to_owned(), |phase| format!("{phase:?}")),
        status.ps.map(|role| role.summary).unwrap_or_default(),
        status.trainer.map(|role| role.summary).unwrap_or_default(),
        progress.map(|progress| progress.summary.clone()).unwrap_or_default(),
        progress.map(|progress| progress.step.to_string()).unwrap_or_default(),
        loss.map(|metric| text::number(metric.value)).unwrap_or_default(),
        progress.and_then(|progress| progress.examples_per_second).map(text::number).unwrap_or_default(),
        status.restarts.to_string(),
        text::age(job.metadata.creation_timestamp.as_ref(), now),
        status.reason.unwrap_or_default(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_job_has_a_row_also_one_that_no_operator_has_seen() {
        let job = |value: serde_json::Value| serde_json::from_value::<ParameterServerJob>(value).expect("a job");
        let spec = serde_json::json!({"trainer": {"template": {"spec": {"containers": [{"name": "trainer"}]}}}});
        let jobs = [
            job(serde_json::json!({
                "apiVersion": "psjobs.dev/v1alpha1", "kind": "ParameterServerJob", "spec": spec,
                "metadata": {"name": "mnist", "namespace": "a", "creationTimestamp": "2026-01-01T00:00:00Z"},
                "status": {
                    "phase": "Running", "reason": "Running", "restarts": 1, "restartsCountTowardsMax": 0,
                    "progress": {"step": 788, "totalSteps": 1500, "percent": 52, "summary": "52%",
                        "examplesPerSecond": 641.53, "metrics": [{"name": "loss", "value": 0.143_965}]},
                },
            })),
            job(serde_json::json!({
                "apiVersion": "psjobs.dev/v1alpha1", "kind": "ParameterServerJob", "spec": spec,
                "metadata": {"name": "new", "namespace": "b"},
            })),
        ];
        let shown = table(&jobs, true, "2026-01-01T00:07:05Z".parse().expect("a time"));
        let words: Vec<Vec<&str>> = shown.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(words[0], ["a", "mnist", "Running", "52%", "788", "0.144", "641.5", "1", "7m5s", "Running"]);
        assert_eq!(words[1], ["b", "new", "Unseen", "0", "<unknown>"]);
    }
}
