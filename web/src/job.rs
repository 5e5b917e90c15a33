//! The parts of a job that the page shows. The page's script reads these names in camel case.

use serde::{Deserialize, Serialize};

/// A job as it is now. Times are milliseconds since 1970.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Job {
    pub name: String,
    /// `Pending`, `Running` and so on, as in the status of a job on a cluster.
    pub phase: String,
    /// The phase is the last one.
    pub is_over: bool,
    pub began: u64,
    pub ended: Option<u64>,
    pub explanation: Explanation,
    pub progress: Progress,
    pub trainers: Vec<Trainer>,
    pub processes: Vec<Process>,
    pub events: Vec<Event>,
    pub checkpoint: Option<Checkpoint>,
    /// Updates of server 0 by staleness: 0, 1, 2, up to 4, up to 8 and so on by powers of two.
    pub staleness: Vec<u64>,
    /// The job as YAML.
    pub manifest: String,
}

/// Says what the job waits for, why it failed, or how it goes, and what to do.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    /// The most important first.
    pub sentences: Vec<String>,
    /// Commands to type.
    pub commands: Vec<Command>,
    /// Last lines of the process that failed first.
    pub log: Option<Tail>,
    /// Someone has to do something.
    pub needs_help: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Command {
    pub command: String,
    pub purpose: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Tail {
    pub process: String,
    pub text: String,
}

/// How far the job is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Progress {
    /// Steps of all trainers together; in an elastic job batches.
    pub step: u64,
    /// 0 while unknown.
    pub total_steps: u64,
    pub examples_per_second: f64,
    /// `None` while unknown.
    pub remaining_seconds: Option<u64>,
    /// Processes that were started again.
    pub restarts: u32,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Trainer {
    /// As of its process: `trainer-0`.
    pub name: String,
    /// `active`, `finished` and so on.
    pub state: String,
    pub step: u64,
    pub examples_per_second: f64,
    /// Where its time goes, if it reports that.
    pub time: Option<TimeShares>,
    /// Clearly slower than the others.
    pub is_slow: bool,
}

/// The parts of a trainer's time, 1 or less together: what is left is none of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct TimeShares {
    /// Waits for its next batch.
    pub data: f64,
    pub forward: f64,
    pub backward: f64,
    /// Forward and backward, if they are not told apart.
    pub compute: f64,
    /// Waits for servers, the network and other trainers.
    pub exchange: f64,
}

/// A server or trainer, with all processes or pods that were it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Process {
    /// `ps-0` or `trainer-0`.
    pub name: String,
    /// A word or two for people.
    pub state: String,
    pub is_well: bool,
    /// The machine that it is on, if there are several.
    pub node: Option<String>,
    pub runs: Vec<Run>,
}

/// The time from the start of a process or pod to its end.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Run {
    pub from: u64,
    /// `None` while it runs.
    pub to: Option<u64>,
    /// It ended otherwise than well.
    pub failed: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    pub time: u64,
    pub is_warning: bool,
    pub text: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Checkpoint {
    pub step: u64,
    pub path: String,
    pub time: u64,
}

/// A job in the list of jobs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Line {
    pub phase: String,
    pub is_over: bool,
    pub began: u64,
    pub ended: Option<u64>,
    pub needs_help: bool,
    pub progress: Progress,
}

impl From<&Job> for Line {
    fn from(job: &Job) -> Self {
        Self {
            phase: job.phase.clone(),
            is_over: job.is_over,
            began: job.began,
            ended: job.ended,
            needs_help: job.explanation.needs_help,
            progress: job.progress.clone(),
        }
    }
}

/// A job of which the list alone is known.
impl From<&Line> for Job {
    fn from(line: &Line) -> Self {
        Self {
            phase: line.phase.clone(),
            is_over: line.is_over,
            began: line.began,
            ended: line.ended,
            explanation: Explanation { needs_help: line.needs_help, ..Explanation::default() },
            progress: line.progress.clone(),
            ..Self::default()
        }
    }
}

/// Events that a job keeps; the oldest go first.
pub const EVENTS: usize = 200;
/// Runs that a process keeps.
pub const RUNS: usize = 100;

impl Job {
    /// Adds an event; one with the text of the last one replaces it.
    pub fn push_event(&mut self, event: Event) {
        if self.events.last().is_some_and(|last| last.text == event.text) {
            self.events.pop();
        }
        self.events.push(event);
        let surplus = self.events.len().saturating_sub(EVENTS);
        self.events.drain(..surplus);
    }

    /// Returns the process of this name, a new one behind the others if there is none.
    pub fn process(&mut self, name: &str) -> &mut Process {
        let at = self.processes.iter().position(|process| process.name == name).unwrap_or_else(|| {
            self.processes.push(Process { name: name.to_owned(), ..Process::default() });
            self.processes.len() - 1
        });
        &mut self.processes[at]
    }
}

impl Process {
    /// Records the start of a process.
    pub fn begin(&mut self, now: u64) {
        self.runs.push(Run { from: now, to: None, failed: false });
        let surplus = self.runs.len().saturating_sub(RUNS);
        self.runs.drain(..surplus);
    }

    /// Records the end of the process that was started last.
    pub fn end(&mut self, now: u64, failed: bool) {
        if let Some(run) = self.runs.last_mut().filter(|run| run.to.is_none()) {
            *run = Run { to: Some(now), failed, ..*run };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_survives_being_a_job_and_being_written() {
        let progress = Progress { step: 7, total_steps: 9, remaining_seconds: Some(3), ..Progress::default() };
        let line = Line { phase: "Failed".into(), is_over: true, began: 1, ended: Some(2), needs_help: true, progress };
        assert_eq!(Line::from(&Job::from(&line)), line);
        let written = serde_json::to_string(&line).expect("it can be written");
        assert_eq!(serde_json::from_str::<Line>(&written).expect("it can be read"), line);
    }

    #[test]
    fn what_a_job_keeps_is_bounded() {
        let mut job = Job::default();
        for time in 0..1_000 {
            job.push_event(Event { time, text: format!("event {}", time / 2), ..Event::default() });
            job.process("trainer-1").begin(time);
            job.process("trainer-1").end(time + 1, time == 999);
        }
        let times: Vec<u64> = job.events.iter().map(|event| event.time).collect();
        assert_eq!((times.len(), times[0], times[EVENTS - 1]), (EVENTS, 601, 999), "a repeated text is one event");
        let runs = &job.processes[0].runs;
        assert_eq!((job.processes.len(), runs.len()), (1, RUNS));
        assert_eq!(runs[RUNS - 1], Run { from: 999, to: Some(1_000), failed: true });
        assert!(!runs[0].failed);
    }
}
