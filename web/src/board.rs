//! The jobs that the page shows, shared by those who know of them and those who show them.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Map, Value};
use tokio::sync::watch;

use crate::changes::Known;
use crate::curves::{Curves, Seen};
use crate::job::{Job, Line};

/// All jobs, by the name under which the page shows them.
#[derive(Debug)]
pub struct Board {
    jobs: Mutex<BTreeMap<String, Shown>>,
    /// By job: how many look at it.
    watched: Mutex<BTreeMap<String, usize>>,
    changed: watch::Sender<State>,
}

/// Tells readers to look again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Counts changes.
    changes: u64,
    /// Nothing changes any more.
    pub is_closed: bool,
}

#[derive(Debug, Default)]
struct Shown {
    job: Job,
    curves: Curves,
}

/// The part of one job, or of the list of all, that one reader has.
#[derive(Debug, Default)]
pub struct Reader {
    /// `None` reads the list.
    job: Option<String>,
    known: Known,
    seen: Seen,
}

impl Default for Board {
    fn default() -> Self {
        Self { jobs: Mutex::default(), watched: Mutex::default(), changed: watch::Sender::new(State::default()) }
    }
}

impl Board {
    /// Changes the job of this name, a new one if there is none.
    pub fn change(&self, name: &str, change: impl FnOnce(&mut Job, &mut Curves)) {
        {
            let mut jobs = self.jobs.lock();
            if !jobs.contains_key(name) {
                let job = Job { name: name.to_owned(), ..Job::default() };
                jobs.insert(name.to_owned(), Shown { job, ..Shown::default() });
            }
            if let Some(Shown { job, curves }) = jobs.get_mut(name) {
                change(job, curves);
            }
        }
        self.changed.send_modify(|state| state.changes += 1);
    }

    /// Removes the job of this name.
    pub fn remove(&self, name: &str) {
        self.jobs.lock().remove(name);
        self.changed.send_modify(|state| state.changes += 1);
    }

    /// Returns the job of this name as it is now.
    pub fn job(&self, name: &str) -> Option<(Job, Curves)> {
        self.jobs.lock().get(name).map(|shown| (shown.job.clone(), shown.curves.clone()))
    }

    /// Returns the names of all jobs, sorted.
    pub fn names(&self) -> Vec<String> {
        self.jobs.lock().keys().cloned().collect()
    }

    /// Notes that somebody looks at a job, until what this returns is dropped.
    pub fn look_at(self: &Arc<Self>, job: &str) -> Watching {
        *self.watched.lock().entry(job.to_owned()).or_default() += 1;
        Watching { board: self.clone(), job: job.to_owned() }
    }

    /// Returns the jobs that somebody looks at.
    pub fn watched(&self) -> Vec<String> {
        self.watched.lock().keys().cloned().collect()
    }

    /// Lets readers end when they have seen all.
    pub fn close(&self) {
        self.changed.send_modify(|state| state.is_closed = true);
    }

    /// Tells when something has changed.
    pub fn watch(&self) -> watch::Receiver<State> {
        self.changed.subscribe()
    }
}

/// A look at a job; it ends when this is dropped.
#[derive(Debug)]
pub struct Watching {
    board: Arc<Board>,
    job: String,
}

impl Drop for Watching {
    fn drop(&mut self) {
        let mut watched = self.board.watched.lock();
        if let Some(count) = watched.get_mut(&self.job) {
            *count -= 1;
            if *count == 0 {
                watched.remove(&self.job);
            }
        }
    }
}

impl Reader {
    /// A reader that has nothing yet: of the job of this name, or of the list of all.
    pub fn new(job: Option<String>) -> Self {
        Self { job, ..Self::default() }
    }

    /// Returns what has changed since the last time; of a job that is not there everything is null. The list has the jobs whose
    /// names `sees` lets pass.
    pub fn news(&mut self, board: &Board, sees: impl Fn(&str) -> bool) -> Map<String, Value> {
        let jobs = board.jobs.lock();
        let Some(name) = &self.job else {
            let line = |(name, shown): (&String, &Shown)| (name.clone(), value(&Line::from(&shown.job)));
            return self.known.changes(jobs.iter().filter(|(name, _)| sees(name)).map(line).collect());
        };
        let Some(Shown { job, curves }) = jobs.get(name) else { return self.known.changes(Map::new()) };
        let Value::Object(parts) = value(job) else { return Map::new() };
        let mut news = self.known.changes(parts);
        self.seen.read(curves, &mut news);
        news
    }
}

fn value(of: &impl serde::Serialize) -> Value {
    // These types have no map with other keys than strings, so that this cannot fail.
    serde_json::to_value(of).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_reader_sees_what_changes_of_its_job_alone() {
        let board = Board::default();
        let mut reader = Reader::new(Some("a".into()));
        assert_eq!(Value::Object(reader.news(&board, |_| true)), json!({}), "it is not there yet");
        board.change("a", |job, curves| {
            job.phase = "Running".into();
            curves.push("loss", None, 1, 2, 0.5);
        });
        let first = reader.news(&board, |_| true);
        assert_eq!((&first["name"], &first["phase"]), (&json!("a"), &json!("Running")));
        assert_eq!(first["curves"]["curves"][0]["points"], json!([1, 2, 0.5]));
        board.change("b", |job, _| job.phase = "Failed".into());
        assert_eq!(Value::Object(reader.news(&board, |_| true)), json!({}));
        board.change("a", |job, _| job.is_over = true);
        assert_eq!(Value::Object(reader.news(&board, |_| true)), json!({"isOver": true}));
        board.remove("a");
        let gone = reader.news(&board, |_| true);
        assert!(gone.len() > 10 && gone.values().all(Value::is_null), "{gone:?}");
        board.change("a", |_, curves| curves.push("loss", None, 9, 9, 0.1));
        assert_eq!(
            reader.news(&board, |_| true)["curves"]["curves"][0]["points"],
            json!([9, 9, 0.1]),
            "another job of the name"
        );
    }

    #[test]
    fn a_job_is_watched_as_long_as_somebody_looks_at_it() {
        let board = Arc::new(Board::default());
        let (first, second, other) = (board.look_at("a"), board.look_at("a"), board.look_at("b"));
        assert_eq!(board.watched(), ["a", "b"]);
        drop((first, other));
        assert_eq!(board.watched(), ["a"]);
        drop(second);
        assert!(board.watched().is_empty());
    }

    #[test]
    fn the_list_has_a_line_for_each_job() {
        let board = Board::default();
        let mut reader = Reader::new(None);
        board.change("a", |job, _| job.phase = "Running".into());
        board.change("b", |job, _| job.explanation.needs_help = true);
        let first = reader.news(&board, |_| true);
        assert_eq!((&first["a"]["phase"], &first["b"]["needsHelp"]), (&json!("Running"), &json!(true)));
        assert_eq!(Value::Object(reader.news(&board, |name| name == "b")), json!({"a": null}), "it sees no more");
        reader.news(&board, |_| true);
        board.remove("b");
        board.change("a", |job, _| job.manifest = "not in the list".into());
        assert_eq!(Value::Object(reader.news(&board, |_| true)), json!({"b": null}));
        assert_eq!(board.names(), ["a"]);
    }
}
