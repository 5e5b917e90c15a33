//! The web page of a run: what the view shows, as a browser sees it, and as a file when the job is over.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use psjobs_api::crd::ParameterServerJob;
use psjobs_api::{Replica, TrainersReport};
use psjobs_ps::proto::{JobPhase, StatusReply};
use psjobs_web::curves::EXAMPLES;
use psjobs_web::job::{Checkpoint, Event, Explanation, Job, Progress, Tail};
use psjobs_web::trainers::Trainers;
use psjobs_web::{Board, Door, Logs, Site, now, record};

use super::exit::Exit;
use super::log::log_file;
use super::plan::Plan;
use super::summary::{State, Summary};
use super::view::words::{self, Pace};

/// Bytes at the end of a log that the page shows.
const TAIL: u64 = 64 << 10;
/// Time in which browsers get the last state.
const FAREWELL: Duration = Duration::from_secs(5);

/// The page of one run.
#[derive(Debug)]
pub struct Page {
    board: Arc<Board>,
    name: String,
    processes: Vec<Replica>,
    logs: PathBuf,
    pace: Pace,
    trainers: Trainers,
}

/// The logs of a run, in the folder that has them.
struct Files {
    logs: PathBuf,
    processes: Vec<Replica>,
}

impl Page {
    pub fn new(job: &ParameterServerJob, plan: &Plan, logs: &Path) -> Self {
        let page = Self {
            board: Arc::default(),
            name: plan.name.clone(),
            processes: plan.replicas().collect(),
            logs: logs.to_owned(),
            pace: Pace::default(),
            trainers: Trainers::default(),
        };
        let manifest = serde_yaml::to_string(job).unwrap_or_default();
        page.change(|job| {
            (job.phase, job.began, job.manifest) = ("Pending".into(), now(), manifest);
            for &replica in &page.processes {
                job.process(&name_of(replica)).state = "not started".into();
            }
        });
        for text in plan.notes.iter().chain(&plan.warnings) {
            page.event(text, plan.warnings.contains(text));
        }
        page
    }

    /// Serves the page until [`Page::conclude`]; needs a runtime.
    pub fn serve(&self, door: Door) -> io::Result<tokio::task::JoinHandle<io::Result<()>>> {
        let logs = Files { logs: self.logs.clone(), processes: self.processes.clone() };
        let (listener, token) = door.into_parts()?;
        let site = Site { board: self.board.clone(), logs: Arc::new(logs), token };
        Ok(tokio::spawn(psjobs_web::serve(listener, site)))
    }

    pub fn started(&self, replica: Replica) {
        self.change(|job| {
            let process = job.process(&name_of(replica));
            let again = !process.runs.is_empty();
            process.begin(now());
            (process.state, process.is_well) = ("running".into(), true);
            job.progress.restarts += u32::from(again);
        });
    }

    pub fn ended(&self, replica: Replica, exit: Exit) {
        self.change(|job| {
            let process = job.process(&name_of(replica));
            process.end(now(), !exit.is_good());
            process.is_well = exit.is_good();
            process.state = if exit.is_good() { "done".into() } else { exit.to_string() };
        });
    }

    /// Adds an event.
    pub fn event(&self, text: &str, is_warning: bool) {
        self.change(|job| job.push_event(Event { time: now(), is_warning, text: text.to_owned() }));
    }

    /// Takes what server 0 says.
    pub fn progress(&mut self, status: &StatusReply) {
        let remaining = self.pace.remaining(status, Instant::now());
        let now = now();
        self.board.change(&self.name, |job, curves| {
            job.phase = match status.phase() {
                JobPhase::Waiting | JobPhase::Unspecified => "Pending".into(),
                JobPhase::Training => "Running".into(),
                JobPhase::Done => "Completing".into(),
            };
            job.progress = Progress {
                step: status.step,
                total_steps: status.total_steps,
                examples_per_second: status.examples_per_second,
                remaining_seconds: remaining.map(|seconds| seconds.round() as u64),
                restarts: job.progress.restarts,
            };
            self.trainers.show(&TrainersReport::from(status), job, curves, now);
            job.explanation = Explanation {
                sentences: status.warnings.clone(),
                needs_help: !status.warnings.is_empty(),
                ..Explanation::default()
            };
            job.checkpoint = status.checkpoint.as_ref().map(|checkpoint| Checkpoint {
                step: checkpoint.step,
                path: checkpoint.path.clone(),
                time: checkpoint.unix_seconds * 1000,
            });
            // Figures of trainers that have ended say nothing of the job.
            if status.step == 0 || status.phase() == JobPhase::Done {
                return;
            }
            for (name, value) in &status.metrics {
                curves.push(name, None, status.step, now, *value);
            }
            if status.examples_per_second > 0.0 {
                curves.push(EXAMPLES, None, status.step, now, status.examples_per_second);
            }
        });
    }

    /// The trainers are done.
    pub fn draining(&self) {
        self.change(|job| job.phase = "Completing".into());
    }

    /// Shows how the run ended, and writes the page to `record`.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn conclude(&self, summary: &Summary, record: Option<&Path>) -> io::Result<()> {
        self.change(|job| {
            job.phase = format!("{:?}", summary.state);
            (job.is_over, job.ended) = (true, Some(now()));
            // The result of a trainer that was started again has the steps of its last process alone.
            job.progress.step = job.progress.step.max(summary.steps.unwrap_or_default());
            job.explanation = explain(summary);
        });
        self.board.close();
        let (Some(file), Some((job, curves))) = (record, self.board.job(&self.name)) else { return Ok(()) };
        let tail = |replica: &Replica| Some((name_of(*replica), read_tail(&log_file(&self.logs, *replica)).ok()?));
        let tails: BTreeMap<String, String> = self.processes.iter().filter_map(tail).collect();
        fs::write(file, record::html(&job, &curves, &tails, now()))
    }

    fn change(&self, change: impl FnOnce(&mut Job)) {
        self.board.change(&self.name, |job, _| change(job));
    }
}

/// Waits until browsers have the last state, but not for one that does not read.
pub async fn farewell(server: tokio::task::JoinHandle<io::Result<()>>) {
    tokio::time::timeout(FAREWELL, server).await.ok();
}

/// The name of a process, as of its log and of its pod: `trainer-0`.
fn name_of(Replica { role, index }: Replica) -> String {
    format!("{role}-{index}")
}

fn explain(summary: &Summary) -> Explanation {
    let Some(failure) = &summary.failure else {
        let took = format!("It took {}.", words::duration(summary.total_seconds));
        let model = summary.model.iter().map(|model| format!("Its model is {model}."));
        let resume = (summary.checkpoints.iter().filter(|_| summary.state == State::Interrupted))
            .map(|folder| format!("Run it again to go on from the newest checkpoint in {folder}."));
        return Explanation {
            sentences: [took].into_iter().chain(model).chain(resume).collect(),
            ..Explanation::default()
        };
    };
    let process = failure.role.as_ref().zip(failure.index).map(|(role, index)| format!("{role}-{index}"));
    let first = process.as_ref().map(|process| format!("The first to fail was {process}."));
    let log = process.filter(|_| !failure.log_tail.is_empty());
    Explanation {
        sentences: [format!("{}.", failure.reason.trim_end_matches('.'))].into_iter().chain(first).collect(),
        log: log.map(|process| Tail { process, text: failure.log_tail.join("\n") }),
        needs_help: true,
        ..Explanation::default()
    }
}

impl Logs for Files {
    fn tail<'a>(
        &'a self,
        _job: &'a str,
        process: &'a str,
    ) -> Pin<Box<dyn Future<Output = Result<String, String>> + Send + 'a>> {
        let replica = self.processes.iter().find(|replica| name_of(**replica) == process).copied();
        Box::pin(async move {
            let replica = replica.ok_or_else(|| format!("this job has no process {process}"))?;
            let file = log_file(&self.logs, replica);
            match read_tail(&file) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
                read => read.map_err(|error| format!("cannot read {}: {error}", file.display())),
            }
        })
    }
}

/// Returns the last lines of a file, [`TAIL`] bytes at most.
fn read_tail(file: &Path) -> io::Result<String> {
    let mut file = fs::File::open(file)?;
    let length = file.metadata()?.len();
    let from = length.saturating_sub(TAIL);
    file.seek(SeekFrom::Start(from))?;
    let mut bytes = Vec::new();
    file.take(TAIL).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    // The first line of a part may be cut.
    Ok(record::last(&text, text.len() - usize::from(from > 0)).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_shown_from_a_whole_line_on() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("trainer-0.log");
        assert!(read_tail(&file).is_err_and(|error| error.kind() == io::ErrorKind::NotFound));
        fs::write(&file, "one\ntwo\n").expect("written");
        assert_eq!(read_tail(&file).expect("read"), "one\ntwo\n");
        fs::write(&file, "a line of text\n".repeat(10_000)).expect("written");
        let tail = read_tail(&file).expect("read");
        assert!(tail.len() as u64 <= TAIL && tail.len() as u64 > TAIL - 30, "{}", tail.len());
        assert!(tail.lines().all(|line| line == "a line of text"));
    }
}
