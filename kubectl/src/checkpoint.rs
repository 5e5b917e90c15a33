//! `kubectl psjob checkpoint`: lists the checkpoints that a job keeps, and fetches one of them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use clap::{Args, Subcommand, ValueEnum};
use jiff::Timestamp;
use psjobs::BadInput;
use psjobs_api::crd::ParameterServerJob;
use serde_json::json;

use crate::connection::ConnectionArgs;
use crate::reader::{Checkpoint, Reader, with_reader};
use crate::source::SourceArgs;
use crate::text;

/// List the checkpoints of a job, or fetch one
///
/// A pod of the job's own image reads the volume or the object store, and is deleted afterwards. The job may be suspended or
/// have ended. Needs the rights to create, get, list, watch and delete pods, and to exec in them.
#[derive(Debug, Args)]
pub struct CheckpointArgs {
    #[command(subcommand)]
    command: CheckpointCommand,
}

#[derive(Debug, Subcommand)]
enum CheckpointCommand {
    List(ListArgs),
    Get(GetArgs),
}

/// List the complete checkpoints in a job's folder, the newest first
#[derive(Debug, Args)]
#[command(visible_alias = "ls")]
struct ListArgs {
    /// Name of the job
    name: String,
    /// Print another form than the table
    #[arg(long, short)]
    output: Option<Output>,
    #[command(flatten)]
    source: SourceArgs,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Output {
    /// An array of objects, sizes in bytes
    Json,
}

/// Fetch a checkpoint into a folder that `psjobs run --checkpoint-dir` goes on from
#[derive(Debug, Args)]
struct GetArgs {
    /// Name of the job
    name: String,
    /// Step of the checkpoint; by default the newest
    #[arg(long)]
    step: Option<u64>,
    /// Run of the checkpoint, as `checkpoint list` shows it; by default the job's newest
    #[arg(long)]
    run: Option<u32>,
    /// The folder to write; by default NAME-checkpoints
    #[arg(long, short, value_name = "FOLDER")]
    output: Option<PathBuf>,
    /// Replace the checkpoint if it is in the folder
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    source: SourceArgs,
}

impl CheckpointArgs {
    pub async fn run(self, connection: &ConnectionArgs) -> anyhow::Result<u8> {
        match self.command {
            CheckpointCommand::List(args) => args.run(connection).await,
            CheckpointCommand::Get(args) => args.run(connection).await,
        }
    }
}

impl ListArgs {
    async fn run(self, connection: &ConnectionArgs) -> anyhow::Result<u8> {
        let cluster = connection.open().await?;
        let job = self.source.job(&cluster, &self.name).await?;
        let folder = folder(&self.name, &job);
        let list = async |reader: &Reader<'_>| anyhow::Ok((reader.checkpoints(folder).await?, reader.kept_in()));
        let (found, place) = with_reader(connection, &cluster, &job, self.source.image(), list).await?;
        let now = Timestamp::now();
        match self.output {
            Some(Output::Json) => {
                let all: Vec<_> = found.iter().map(object).collect();
                text::print(serde_json::to_string_pretty(&all)?);
            }
            None if found.is_empty() => eprintln!("{} has no complete checkpoint in {folder} of {place}", self.name),
            None => {
                let rows: Vec<_> = found.iter().map(|checkpoint| row(checkpoint, now)).collect();
                text::print(text::table(&["RUN", "STEP", "JOB", "SERVERS", "SIZE", "AGE"], &rows));
            }
        }
        Ok(0)
    }
}

impl GetArgs {
    async fn run(self, connection: &ConnectionArgs) -> anyhow::Result<u8> {
        let cluster = connection.open().await?;
        let job = self.source.job(&cluster, &self.name).await?;
        let folder = folder(&self.name, &job);
        let output = self.output.clone().unwrap_or_else(|| PathBuf::from(format!("{}-checkpoints", self.name)));
        let fetch = async |reader: &Reader<'_>| {
            let found = reader.checkpoints(folder).await?;
            let chosen = self.choose(&found, job.metadata.uid.as_deref())?;
            self.fetch(reader, folder, chosen, &output).await?;
            anyhow::Ok((chosen.run, chosen.step, chosen.bytes()))
        };
        let (run, step, bytes) = with_reader(connection, &cluster, &job, self.source.image(), fetch).await?;
        let output = output.display();
        text::print(format_args!(
            "{output} has the checkpoint of step {step} (run {run}), {}; `psjobs run MANIFEST --checkpoint-dir {output}` \
             goes on from it",
            text::size(bytes)
        ));
        Ok(0)
    }

    /// Returns the checkpoint that is wanted: without a run the newest of the job `uid`, or of any job if that has none.
    fn choose<'a>(&self, found: &'a [Checkpoint], uid: Option<&str>) -> anyhow::Result<&'a Checkpoint> {
        let wanted = |checkpoint: &&Checkpoint| {
            self.run.is_none_or(|run| checkpoint.run == run) && self.step.is_none_or(|step| checkpoint.step == step)
        };
        let own = found.iter().filter(wanted).find(|checkpoint| uid.is_some_and(|uid| checkpoint.uid == uid));
        own.or_else(|| found.iter().find(wanted)).ok_or_else(|| {
            let which = match (self.run, self.step) {
                (None, None) => "has no complete checkpoint yet".to_owned(),
                (None, Some(step)) => format!("has no checkpoint of step {step}"),
                (Some(run), None) => format!("has no checkpoint of run {run}"),
                (Some(run), Some(step)) => format!("has no checkpoint of step {step} in run {run}"),
            };
            let hint = "`kubectl psjob checkpoint list` shows those that there are";
            BadInput::new(format!("{} {which}; {hint}", self.name)).into()
        })
    }

    /// Copies a checkpoint to `output`, its manifest last: that makes it complete.
    async fn fetch(
        &self,
        reader: &Reader<'_>,
        folder: &str,
        checkpoint: &Checkpoint,
        output: &Path,
    ) -> anyhow::Result<()> {
        // `psjobs run` keeps the checkpoints of a job in a folder of the same name as the volume or the store has.
        let place = output.join(folder).join(&checkpoint.folder);
        let manifest = place.join("manifest.json");
        if manifest.exists() && !self.force {
            return Err(BadInput::new(format!("{} is there already; --force replaces it", place.display())).into());
        }
        let run = place.parent().context("a checkpoint is in the folder of its run")?;
        let local_record = run.join("run.json");
        if local_record.exists() && !is_of(&local_record, &checkpoint.uid) {
            let run = run.display();
            return Err(
                BadInput::new(format!("{run} is the run of another job; fetch into a new folder by --output")).into()
            );
        }
        fs::create_dir_all(&place).with_context(|| format!("cannot create {}", place.display()))?;
        if manifest.exists() {
            fs::remove_file(&manifest).with_context(|| format!("cannot remove {}", manifest.display()))?;
        }
        let from = format!("{folder}/{}", checkpoint.folder);
        for (file, bytes) in &checkpoint.files {
            eprintln!("fetching {file}, {}", text::size(*bytes));
            let copied = reader.copy(&format!("{from}/{file}"), &place.join(file)).await.with_context(|| {
                format!("{file} cannot be fetched; a job that trains removes old checkpoints, the newest stays longest")
            })?;
            ensure!(
                copied == *bytes,
                "{file} has {copied} bytes, the manifest says {bytes}; the checkpoint is damaged"
            );
        }
        let record = format!("{folder}/{}/run.json", checkpoint.run_folder());
        reader.copy(&record, &local_record).await.context("the record of the run cannot be fetched")?;
        reader.copy(&format!("{from}/manifest.json"), &manifest).await.context("the manifest cannot be fetched")?;
        Ok(())
    }
}

/// Returns whether a record of a run is of the job `uid`.
fn is_of(record: &Path, uid: &str) -> bool {
    let text = fs::read(record).unwrap_or_default();
    serde_json::from_slice::<serde_json::Value>(&text).is_ok_and(|record| record["uid"] == uid)
}

/// Returns the job's folder in the volume, or in the object store's folder.
fn folder<'a>(name: &'a str, job: &'a ParameterServerJob) -> &'a str {
    job.spec.checkpoint.as_ref().map_or(name, |checkpoint| checkpoint.folder(name).trim_end_matches('/'))
}

fn row(checkpoint: &Checkpoint, now: Timestamp) -> Vec<String> {
    vec![
        checkpoint.run.to_string(),
        checkpoint.step.to_string(),
        checkpoint.job.clone(),
        checkpoint.servers.to_string(),
        text::size(checkpoint.bytes()),
        text::span(now.as_second().saturating_sub(checkpoint.written).max(0)),
    ]
}

fn object(checkpoint: &Checkpoint) -> serde_json::Value {
    json!({
        "run": checkpoint.run, "step": checkpoint.step, "job": checkpoint.job, "uid": checkpoint.uid,
        "servers": checkpoint.servers, "bytes": checkpoint.bytes(), "folder": checkpoint.folder,
        "written": Timestamp::from_second(checkpoint.written).map(|time| time.to_string()).ok(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoint(run: u32, step: u64, uid: &str) -> Checkpoint {
        Checkpoint { run, step, uid: uid.to_owned(), ..Checkpoint::default() }
    }

    fn chosen(run: Option<u32>, step: Option<u64>) -> Result<(u32, u64), String> {
        let source = SourceArgs::default();
        let args = GetArgs { name: "mnist".into(), step, run, output: None, force: false, source };
        let found = [checkpoint(3, 9, "other"), checkpoint(2, 20, "ours"), checkpoint(2, 10, "ours")];
        let chosen = args.choose(&found, Some("ours"));
        chosen.map(|chosen| (chosen.run, chosen.step)).map_err(|error| error.to_string())
    }

    #[test]
    fn the_newest_checkpoint_of_the_job_itself_is_fetched_unless_another_is_named() {
        for (run, step, want) in
            [(None, None, (2, 20)), (None, Some(10), (2, 10)), (None, Some(9), (3, 9)), (Some(3), None, (3, 9))]
        {
            assert_eq!(chosen(run, step), Ok(want), "run {run:?}, step {step:?}");
        }
        let missing = chosen(Some(2), Some(9)).expect_err("there is none");
        assert!(missing.starts_with("mnist has no checkpoint of step 9 in run 2; "), "{missing}");
    }
}
