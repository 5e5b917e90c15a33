//! The record of a job that is over, as text of at most 1 MiB. No I/O.
//!
//! The first line is the [`Entry`] by which records are listed, the second one all that the page shows. Both are JSON.

use std::collections::BTreeMap;

use psjobs_web::curves::{Curves, Seen};
use psjobs_web::job::{EVENTS, Job, Line, RUNS};
use psjobs_web::record::{fitting, last};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Bytes of a record.
pub const MOST: usize = 1 << 20;
/// Bytes of the first line; an entry has a few hundred.
pub const HEAD: usize = 8 << 10;

/// Bytes of all logs, points of all curves, bytes of the manifest, and processes, before anything is cut. The specification and
/// status of the job together have at most the bytes of the manifest.
const LOGS: usize = 384 << 10;
const POINTS: usize = 8_000;
const MANIFEST: usize = 192 << 10;
const PROCESSES: usize = 2_000;
/// Steps of cutting; each halves all of that.
const CUTS: u32 = 14;

/// A record in the list of records.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    /// Milliseconds since 1970.
    pub ended: u64,
    pub line: Line,
}

/// All that is kept of a job.
#[derive(Clone, Debug, Default)]
pub struct Subject {
    pub job: Job,
    pub curves: Curves,
    /// The specification and the status as the cluster had them.
    pub spec: Value,
    pub status: Value,
    /// The last lines of each process that left any.
    pub tails: BTreeMap<String, String>,
}

/// The second line of a record, as far as the page needs it.
#[derive(Debug, Deserialize)]
pub struct Page {
    job: Map<String, Value>,
    #[serde(default)]
    curves: Value,
    pub tails: BTreeMap<String, String>,
}

impl Entry {
    /// Returns the name under which the page shows the job.
    pub fn key(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Returns the name of the file in the folder of the namespace. No name of a job has an underscore.
    pub fn file(&self) -> String {
        format!("{}_{}.json", self.name, self.uid)
    }
}

impl Page {
    /// Reads the second line of a record.
    ///
    /// # Errors
    /// If the text is no record.
    pub fn parse(record: &str) -> serde_json::Result<Self> {
        serde_json::from_str(record.split_once('\n').map_or("", |(_, page)| page))
    }

    /// Returns what a browser gets that has nothing of the job yet.
    pub fn into_news(self) -> Map<String, Value> {
        let mut news = self.job;
        if !self.curves.is_null() {
            news.insert("curves".into(), self.curves);
        }
        news
    }
}

/// Reads the first line of a record out of its first bytes.
pub fn entry(head: &[u8]) -> serde_json::Result<Entry> {
    serde_json::from_slice(head.split(|&byte| byte == b'\n').next().unwrap_or_default())
}

/// Returns the record of a job. What has no room is cut by halves until all fits: the older lines of each log, points of curves,
/// the older events, runs of a process, processes that are well, the end of the manifest. A specification and a status that are
/// long are left out.
pub fn text(entry: &Entry, subject: &Subject) -> String {
    let head = json!(entry).to_string();
    let mut page = String::new();
    for cut in 0..CUTS {
        page = cut_by(subject, cut).to_string();
        if head.len() + page.len() + 2 <= MOST {
            break;
        }
    }
    format!("{head}\n{page}\n")
}

fn cut_by(subject: &Subject, cut: u32) -> Value {
    let Subject { job, curves, spec, status, tails } = subject;
    let share = (LOGS >> cut) / tails.len().max(1);
    let tails = tails.iter().map(|(process, text)| (process, fitting(text, share)));
    let tails: BTreeMap<&String, &str> = tails.filter(|(_, text)| !text.is_empty()).collect();
    let curves = curves.thinned(POINTS >> cut).news(&mut Seen::default());
    let mut record = json!({"job": cut_job(job, cut), "curves": curves, "tails": tails});
    if spec.to_string().len() + status.to_string().len() <= MANIFEST >> cut {
        record["spec"] = spec.clone();
        record["status"] = status.clone();
    }
    record
}

fn cut_job(job: &Job, cut: u32) -> Job {
    let mut job = job.clone();
    keep_last(&mut job.events, EVENTS >> cut);
    // Those that are not well say more.
    job.processes.sort_by_key(|process| process.is_well);
    job.processes.truncate((PROCESSES >> cut).max(1));
    job.processes.sort_by(|a, b| order(&a.name).cmp(&order(&b.name)));
    job.processes.iter_mut().for_each(|process| keep_last(&mut process.runs, (RUNS >> cut).max(1)));
    if job.manifest.len() > MANIFEST >> cut {
        job.manifest.truncate(job.manifest.floor_char_boundary(MANIFEST >> cut));
        job.manifest.push_str("\n# The rest had no room in the record.\n");
    }
    if let Some(log) = &mut job.explanation.log {
        log.text = last(&log.text, MANIFEST >> cut).to_owned();
    }
    job.explanation.sentences.truncate((EVENTS >> cut).max(1));
    for sentence in &mut job.explanation.sentences {
        sentence.truncate(sentence.floor_char_boundary(MANIFEST >> cut));
    }
    job
}

/// Returns the role and the index of a process, by which processes are ordered.
fn order(process: &str) -> (&str, u32) {
    let (role, index) = process.rsplit_once('-').unwrap_or((process, ""));
    (role, index.parse().unwrap_or_default())
}

fn keep_last<T>(list: &mut Vec<T>, most: usize) {
    let surplus = list.len().saturating_sub(most);
    list.drain(..surplus);
}

#[cfg(test)]
mod tests {
    use psjobs_web::job::{Event, Run};

    use super::*;

    fn entry_of(name: &str) -> Entry {
        Entry { namespace: "team".into(), name: name.into(), uid: "7".into(), ended: 9, ..Entry::default() }
    }

    fn subject() -> Subject {
        let mut subject = Subject { spec: json!({"a": 1}), status: json!({"phase": "Failed"}), ..Subject::default() };
        (subject.job.phase, subject.job.is_over) = ("Failed".into(), true);
        subject.job.manifest = "kind: ParameterServerJob\n".into();
        subject.job.process("ps-0").begin(1);
        subject.job.push_event(Event { time: 2, text: "it failed".into(), is_warning: true });
        subject.curves.push("loss", None, 1, 2, 0.5);
        subject.tails.insert("ps-0".into(), "<b>\n".into());
        subject
    }

    #[test]
    fn a_record_says_what_the_page_showed() {
        let (subject, wanted) = (subject(), entry_of("mnist"));
        let text = text(&wanted, &subject);
        assert_eq!(entry(&text.as_bytes()[..HEAD.min(text.len())]).expect("an entry"), wanted);
        let page = Page::parse(&text).expect("a page");
        assert_eq!(page.tails, subject.tails);
        let news = page.into_news();
        assert_eq!(news["curves"]["curves"][0]["points"], json!([1, 2, 0.5]));
        let Value::Object(job) = json!(subject.job) else { panic!("an object") };
        assert!(job.iter().all(|(part, value)| news[part] == *value), "{news:?}");
        assert!(text.contains(r#""spec":{"a":1}"#) && text.contains(r#""status":{"phase":"Failed"}"#), "{text}");
    }

    #[test]
    fn a_record_is_bounded_whatever_is_long() {
        let long = "\u{1}é<\n".repeat(300_000);
        let mut many = subject();
        for number in 0..5_000 {
            many.tails.insert(format!("trainer-{number}"), "a line\n".repeat(20));
            let process = many.job.process("new");
            (process.name, process.is_well) = (format!("trainer-{number}"), number != 7);
            process.runs = vec![Run { from: 1, to: Some(2), failed: true }; RUNS];
        }
        let mut events = subject();
        for time in 0..EVENTS as u64 {
            let text = format!("{time} {}", &long[..20_000]);
            events.job.push_event(Event { time, text, is_warning: false });
        }
        let mut points = subject();
        for step in 1..100_000 {
            points.curves.push(&format!("metric-{}", step % 60), None, step, step, 1.0 / step as f64);
        }
        let mut words = subject();
        (words.job.manifest, words.job.explanation.sentences) = (long.clone(), vec![long.clone(); 9]);
        let mut objects = subject();
        (objects.spec, objects.status) = (json!(long), json!(long));
        let mut logs = subject();
        logs.tails = (0..9).map(|number| (format!("trainer-{number}"), long.clone())).collect();
        for (label, subject) in [
            ("processes", many),
            ("events", events),
            ("points", points),
            ("words", words),
            ("objects", objects),
            ("logs", logs),
        ] {
            let text = text(&entry_of(label), &subject);
            assert!(text.len() <= MOST, "{label}: {} bytes", text.len());
            let page = Page::parse(&text).expect("a page").into_news();
            assert_eq!(page["phase"], "Failed", "{label}");
            if label == "processes" {
                let kept: Vec<&Value> = page["processes"].as_array().expect("a list").iter().collect();
                assert!(kept.iter().any(|process| process["name"] == "trainer-7"), "the one that is not well");
            }
        }
    }

    #[test]
    fn a_text_that_is_no_record_is_refused() {
        for wrong in ["", "{}", "{\"namespace\": 1}\n", "<html>\n"] {
            assert!(entry(wrong.as_bytes()).is_err() && Page::parse(wrong).is_err(), "{wrong}");
        }
    }
}
