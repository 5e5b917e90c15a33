//! Decides when the record of a job is made: its logs are read as soon as it is over, because its pods may go, and the record is
//! written a little later, when its last events are there, or when it is deleted. No I/O; the time is passed in.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kubectl_psjob::web::jobs::Id;
use serde_json::Value;

use crate::record::{Entry, Subject};

/// Time from the end of a job to its record, in which the cluster tells of its last events and pods.
const SETTLE: Duration = Duration::from_secs(3);
/// Jobs whose records are made at once, so that their logs have room in memory; and as many whose records are tried again.
const AT_ONCE: usize = 8;
/// Jobs whose records could not be written and whose logs are kept until they can; of more they are not.
const WITH_LOGS: usize = 32;
/// Jobs that were deleted before their records were written, and that are kept until then; of more there are no records.
const DELETED: usize = 256;
/// Time after which a record that could not be written is tried again; it doubles each time until the longest.
const RETRY: Duration = Duration::from_secs(5);
const LONGEST_RETRY: Duration = Duration::from_secs(300);

/// Last lines by process.
pub type Tails = BTreeMap<String, String>;

/// The specification and the status of a job, as the cluster has them.
pub type Object = (Value, Value);

/// The jobs that are over and have no record yet.
#[derive(Debug, Default)]
pub struct Recorder(BTreeMap<Id, Pending>);

#[derive(Debug)]
struct Pending {
    uid: String,
    since: Instant,
    stage: Stage,
    object: Object,
    /// The job as it was when it was deleted, or when its record could not be written.
    last: Option<(Entry, Subject)>,
    failures: u32,
    /// Its logs are kept though its record could not be written.
    keeps_logs: bool,
}

#[derive(Debug, PartialEq)]
enum Stage {
    /// Its logs have to be read.
    Unread,
    Reading,
    Read(Tails, Instant),
    Writing,
}

/// A record that has to be written now.
#[derive(Debug)]
pub struct Due {
    pub id: Id,
    pub uid: String,
    pub tails: Tails,
    pub object: Object,
    /// The job as it was, if it is not there any more.
    pub last: Option<(Entry, Subject)>,
}

impl Recorder {
    /// Records that a job is over, with its object as it is now.
    pub fn ended(&mut self, id: &Id, uid: &str, object: Object, now: Instant) {
        if let Some(pending) = self.0.get_mut(id).filter(|pending| pending.uid == uid) {
            pending.object = object;
            return;
        }
        let (uid, stage) = (uid.to_owned(), Stage::Unread);
        let pending = Pending { uid, since: now, stage, object, last: None, failures: 0, keeps_logs: false };
        self.0.insert(id.clone(), pending);
    }

    /// Forgets the jobs that have a record.
    pub fn forget(&mut self, has_record: impl Fn(&Id, &str) -> bool) {
        self.0.retain(|id, pending| !has_record(id, &pending.uid));
    }

    /// Returns the uid of a job whose record is not made yet.
    pub fn pending(&self, id: &Id) -> Option<&str> {
        self.0.get(id).map(|pending| pending.uid.as_str())
    }

    /// Records how a job was that is deleted before its record was made. Returns false if it gets none: there are too many.
    pub fn deleted(&mut self, id: &Id, last: (Entry, Subject)) -> bool {
        let deleted = self.0.values().filter(|pending| pending.last.is_some()).count();
        if let Some(pending) = self.0.get_mut(id)
            && pending.stage != Stage::Writing
            && pending.last.is_none()
        {
            if deleted >= DELETED {
                self.0.remove(id);
                return false;
            }
            pending.last = Some(last);
        }
        true
    }

    /// Returns the jobs whose logs have to be read now, with their uids.
    pub fn to_read(&mut self) -> Vec<(Id, String)> {
        // One that could not be written waits for long, and must not delay others, whose pods may go.
        let is_busy = |pending: &&Pending| pending.stage != Stage::Unread && pending.failures == 0;
        let busy = self.0.values().filter(is_busy).count();
        let unread = self.0.iter_mut().filter(|(_, pending)| pending.stage == Stage::Unread);
        unread
            .take(AT_ONCE.saturating_sub(busy))
            .map(|(id, pending)| {
                pending.stage = Stage::Reading;
                (id.clone(), pending.uid.clone())
            })
            .collect()
    }

    /// Takes the last lines of a job's processes.
    pub fn read(&mut self, id: &Id, uid: &str, tails: Tails) {
        if let Some(pending) = self.0.get_mut(id).filter(|pending| pending.uid == uid) {
            pending.stage = Stage::Read(tails, pending.since + SETTLE);
        }
    }

    /// Returns the records that have to be written now.
    pub fn due(&mut self, now: Instant) -> Vec<Due> {
        let mut due = Vec::new();
        let is_tried_again = |pending: &&Pending| pending.stage == Stage::Writing && pending.failures > 0;
        let mut again = self.0.values().filter(is_tried_again).count();
        for (id, pending) in &mut self.0 {
            let is_deleted = pending.last.is_some() && pending.failures == 0;
            if !matches!(&pending.stage, Stage::Read(_, from) if is_deleted || *from <= now) {
                continue;
            }
            if pending.failures > 0 {
                if again == AT_ONCE {
                    continue;
                }
                again += 1;
            }
            if let Stage::Read(tails, _) = std::mem::replace(&mut pending.stage, Stage::Writing) {
                let (uid, object, last) = (pending.uid.clone(), pending.object.clone(), pending.last.take());
                due.push(Due { id: id.clone(), uid, tails, object, last });
            }
        }
        due
    }

    /// Records that a record was written, or need not be.
    pub fn written(&mut self, id: &Id, uid: &str) {
        if self.pending(id) == Some(uid) {
            self.0.remove(id);
        }
    }

    /// Takes back a record that could not be written, until it is tried again. `last` is the job as it was, without its logs, if it
    /// is not there any more.
    pub fn failed(&mut self, id: &Id, uid: &str, tails: Tails, last: Option<(Entry, Subject)>, now: Instant) {
        let with_logs = self.0.values().filter(|pending| pending.keeps_logs).count();
        if let Some(pending) = self.0.get_mut(id).filter(|pending| pending.uid == uid) {
            let wait = RETRY.saturating_mul(1 << pending.failures.min(10)).min(LONGEST_RETRY);
            pending.failures += 1;
            pending.keeps_logs |= with_logs < WITH_LOGS;
            let tails = if pending.keeps_logs { tails } else { Tails::new() };
            pending.stage = Stage::Read(tails, now + wait);
            pending.last = last;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(name: &str) -> Id {
        Id { namespace: "team".into(), name: name.into() }
    }

    fn last() -> (Entry, Subject) {
        (Entry::default(), Subject { tails: tails(), ..Subject::default() })
    }

    fn object() -> Object {
        (Value::Bool(true), Value::Null)
    }

    fn tails() -> Tails {
        BTreeMap::from([("ps-0".to_owned(), "the end\n".to_owned())])
    }

    #[test]
    fn a_record_is_made_once_when_the_job_has_settled() {
        let (mut recorder, began) = (Recorder::default(), Instant::now());
        recorder.ended(&id("a"), "1", object(), began);
        assert!(recorder.due(began + SETTLE).is_empty(), "its logs are not read");
        assert_eq!(recorder.to_read(), [(id("a"), "1".to_owned())]);
        assert!(recorder.to_read().is_empty());
        recorder.ended(&id("a"), "1", object(), began + SETTLE);
        recorder.read(&id("a"), "0", tails());
        recorder.read(&id("a"), "1", tails());
        assert!(recorder.due(began).is_empty());
        let due = recorder.due(began + SETTLE);
        assert_eq!((due.len(), &due[0].id, &due[0].tails), (1, &id("a"), &tails()));
        assert_eq!(due[0].object, object());
        assert!(recorder.due(began + SETTLE * 2).is_empty(), "it is being written");
        recorder.written(&id("a"), "1");
        assert_eq!(recorder.pending(&id("a")), None);
    }

    #[test]
    fn the_record_of_a_job_that_is_deleted_has_its_last_state() {
        let (mut recorder, began) = (Recorder::default(), Instant::now());
        recorder.ended(&id("a"), "1", object(), began);
        recorder.to_read();
        recorder.deleted(&id("a"), last());
        assert!(recorder.due(began).is_empty(), "its logs are on their way");
        recorder.read(&id("a"), "1", tails());
        let due = recorder.due(began);
        assert!(due.len() == 1 && due[0].last.is_some());
    }

    #[test]
    fn a_record_that_cannot_be_written_is_tried_again_later_and_later() {
        let (mut recorder, mut now) = (Recorder::default(), Instant::now());
        recorder.ended(&id("a"), "1", object(), now);
        recorder.to_read();
        recorder.read(&id("a"), "1", tails());
        now += SETTLE;
        for wait in [5, 10, 20, 40, 80, 160, 300, 300] {
            assert_eq!(recorder.due(now).len(), 1, "before {wait} s");
            recorder.failed(&id("a"), "1", tails(), None, now);
            assert!(recorder.due(now + Duration::from_secs(wait - 1)).is_empty(), "{wait} s");
            now += Duration::from_secs(wait);
        }
        assert_eq!(recorder.due(now)[0].tails, tails());
    }

    #[test]
    fn few_records_are_made_at_once() {
        let (mut recorder, now) = (Recorder::default(), Instant::now());
        (0..20).for_each(|number| recorder.ended(&id(&format!("{number:02}")), "1", object(), now));
        let first = recorder.to_read();
        assert_eq!(first.len(), AT_ONCE);
        recorder.written(&first[0].0, "1");
        assert_eq!(recorder.to_read().len(), 1);
    }

    #[test]
    fn records_that_cannot_be_written_delay_no_others_and_are_bounded() {
        let (mut recorder, mut now) = (Recorder::default(), Instant::now());
        let many = WITH_LOGS + 8;
        (0..many).for_each(|number| recorder.ended(&id(&format!("{number:02}")), "1", object(), now));
        for round in 0..many / AT_ONCE {
            let read = recorder.to_read();
            assert_eq!(read.len(), AT_ONCE, "round {round}");
            read.iter().for_each(|(id, uid)| recorder.read(id, uid, tails()));
            now += SETTLE;
            // Those that failed before wait longer than that, or are tried again beside them.
            for Due { id, uid, tails, .. } in recorder.due(now) {
                recorder.failed(&id, &uid, tails, None, now);
            }
        }
        assert!(recorder.to_read().is_empty());
        now += LONGEST_RETRY;
        let mut kept = Vec::new();
        while kept.len() < many {
            let due = recorder.due(now);
            assert_eq!(due.len(), AT_ONCE, "few are tried again at once");
            kept.extend(due.iter().map(|due| due.tails.len()));
            due.iter().for_each(|due| recorder.failed(&due.id, "1", due.tails.clone(), None, now));
        }
        assert_eq!(kept.iter().sum::<usize>(), WITH_LOGS, "the logs of those that failed first");
    }

    #[test]
    fn deleted_jobs_that_wait_for_their_records_are_bounded() {
        let (mut recorder, now) = (Recorder::default(), Instant::now());
        let deleted = (0..DELETED + 2).filter(|number| {
            let id = id(&number.to_string());
            recorder.ended(&id, "1", object(), now);
            recorder.deleted(&id, last()) && recorder.pending(&id).is_some()
        });
        assert_eq!(deleted.count(), DELETED);
        recorder.forget(|_, uid| uid == "1");
        assert_eq!(recorder.pending(&id("0")), None);
    }
}
