//! The lock of a checkpoint folder: a file that server 0 renews while it writes there. No clock of another machine is
//! compared; a lock that is not renewed for a while is stale.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;

use serde::{Deserialize, Serialize};

use super::disk::{Folder, names, read};
use super::write::{WriteError, put_file, remove_file};

/// Name of the lock.
pub const LOCK: &str = "lock.json";
/// Renewals that another job waits for before it takes a lock to be stale.
pub const STALE_AFTER: u32 = 3;

/// The lock, as it is in the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lock {
    /// Name of the job that holds it.
    pub job: String,
    /// Unique id of that job.
    pub uid: String,
    /// Drawn at random by the process that holds it.
    pub holder: u64,
    /// Incarnation of that process; 0 where no process counts them.
    #[serde(default)]
    pub incarnation: u32,
    /// Grows with each renewal.
    pub counter: u64,
}

/// The next step of a process that wants the lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Claim {
    /// It writes its own.
    Take,
    /// It looks again after the time of a renewal.
    Wait,
    /// It gives up: another job is at work.
    Refused,
}

/// Decides what a process of the job `uid` does that found `first` at its first look, and finds `now` after it has
/// waited for some renewals. A process of the job itself takes the place of one before.
#[must_use]
pub fn claim(uid: &str, first: Option<&Lock>, now: Option<&Lock>, waited: u32) -> Claim {
    match now {
        None => Claim::Take,
        Some(lock) if lock.uid == uid => Claim::Take,
        Some(lock) if first != Some(lock) => Claim::Refused,
        Some(_) if waited >= STALE_AFTER => Claim::Take,
        Some(_) => Claim::Wait,
    }
}

/// Decides whether a process still has the lock that it took, which is `own`, in place of the one `before`: another one's
/// in its place means that it has not. A lock that is missing is written again. The one before says nothing, as its own
/// could not be written yet; of a process of the same job also if it was renewed. A process that was replaced may write
/// its lock late, on a slow disk: it takes nothing from its successor.
#[must_use]
pub fn is_held(own: &Lock, before: Option<&Lock>, found: Option<&Lock>) -> bool {
    let is_before = |lock: &Lock| {
        before.is_some_and(|before| before == lock || (before.holder == lock.holder && lock.uid == own.uid))
    };
    let is_replaced = |lock: &Lock| lock.uid == own.uid && lock.incarnation < own.incarnation;
    found.is_none_or(|lock| lock.holder == own.holder || is_before(lock) || is_replaced(lock))
}

/// The lock file of a folder.
#[derive(Clone, Debug)]
pub struct LockFile {
    folder: Folder,
}

impl LockFile {
    /// Describes the lock of `folder`.
    #[must_use]
    pub fn new(folder: impl Into<Folder>) -> Self {
        Self { folder: folder.into() }
    }

    /// Reads the lock, `None` if there is none. A file that is no lock counts as none: no process renews it.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn read(&self) -> io::Result<Option<Lock>> {
        let json = read(self.folder.disk(), &self.folder.join(LOCK))?;
        Ok(json.and_then(|json| serde_json::from_slice(&json).ok()))
    }

    /// Writes the lock, in place of the one that is there.
    ///
    /// # Errors
    /// If it cannot be written.
    ///
    /// # Panics
    /// Never: a lock is JSON.
    pub fn write(&self, lock: &Lock) -> Result<(), WriteError> {
        self.folder.disk().create_folders(&self.folder).map_err(WriteError::at(&self.folder))?;
        put_file(&self.folder, LOCK, &serde_json::to_vec(lock).expect("a lock is JSON"))
    }

    /// Removes the lock if the process of `own` has it, and its mark.
    ///
    /// # Errors
    /// If it cannot be read or removed.
    pub fn release(&self, own: &Lock) -> Result<(), WriteError> {
        let path = self.folder.join(LOCK);
        match self.read().map_err(WriteError::at(&path))? {
            Some(lock) if lock.holder == own.holder => {
                self.remove_marks(|incarnation| incarnation <= own.incarnation)?;
                remove_file(&self.folder, LOCK)
            }
            _ => Ok(()),
        }
    }

    /// Marks the processes of the job of `own` with a lower incarnation as replaced, in a file that only this process
    /// writes: a late write of theirs to the lock does not hide it. Marks before it are removed.
    ///
    /// # Errors
    /// If it cannot be written.
    ///
    /// # Panics
    /// Never: a lock is JSON.
    pub fn mark(&self, own: &Lock) -> Result<(), WriteError> {
        self.folder.disk().create_folders(&self.folder).map_err(WriteError::at(&self.folder))?;
        put_file(&self.folder, &mark(own.incarnation), &serde_json::to_vec(own).expect("a lock is JSON"))?;
        self.remove_marks(|incarnation| incarnation < own.incarnation)
    }

    /// Returns the greatest incarnation that has left a mark, 0 if none has.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn newest_mark(&self) -> io::Result<u32> {
        Ok(self.marks()?.last().copied().unwrap_or(0))
    }

    /// Returns what a process of the same job has marked whose incarnation is greater than that of `own` and than that of
    /// `found`, the newest mark that was there before: a job by hand may count from 0 again.
    ///
    /// # Errors
    /// If the folder or a mark cannot be read.
    pub fn successor(&self, own: &Lock, found: u32) -> io::Result<Option<Lock>> {
        for incarnation in self.marks()?.into_iter().filter(|mark| *mark > own.incarnation.max(found)) {
            let json = read(self.folder.disk(), &self.folder.join(mark(incarnation)))?;
            let lock = json.and_then(|json| serde_json::from_slice::<Lock>(&json).ok());
            if let Some(lock) = lock.filter(|lock| lock.uid == own.uid) {
                return Ok(Some(lock));
            }
        }
        Ok(None)
    }

    fn remove_marks(&self, which: impl Fn(u32) -> bool) -> Result<(), WriteError> {
        let marks = self.marks().map_err(WriteError::at(&self.folder))?;
        let mut which = marks.into_iter().filter(|incarnation| which(*incarnation));
        which.try_for_each(|incarnation| remove_file(&self.folder, &mark(incarnation)))
    }

    /// Returns the incarnations of all marks.
    fn marks(&self) -> io::Result<BTreeSet<u32>> {
        let incarnation = |name: &OsString| {
            let incarnation = name.to_str()?.strip_prefix("lock-")?.strip_suffix(".json")?.parse().ok()?;
            // Other spellings of the number are not ours.
            (mark(incarnation) == *name.to_str()?).then_some(incarnation)
        };
        Ok(names(self.folder.disk(), &self.folder)?.iter().filter_map(incarnation).collect())
    }
}

/// Returns the name of the mark of a process of server 0.
fn mark(incarnation: u32) -> String {
    format!("lock-{incarnation:05}.json")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lock(uid: &str, holder: u64, counter: u64) -> Lock {
        Lock { job: "mnist".into(), uid: uid.into(), holder, incarnation: 0, counter }
    }

    #[test]
    fn a_lock_is_taken_from_a_process_of_the_same_job_and_from_one_that_is_gone() {
        let (own, other, renewed) = (lock("a", 1, 5), lock("b", 2, 5), lock("b", 2, 6));
        for (label, first, now, waited, want) in [
            ("free", None, None, 0, Claim::Take),
            ("of a process before", Some(&own), Some(&own), 0, Claim::Take),
            ("of another job", Some(&other), Some(&other), 0, Claim::Wait),
            ("not renewed yet", Some(&other), Some(&other), 2, Claim::Wait),
            ("stale", Some(&other), Some(&other), 3, Claim::Take),
            ("renewed", Some(&other), Some(&renewed), 1, Claim::Refused),
            ("renewed at last", Some(&other), Some(&renewed), 3, Claim::Refused),
            ("given back meanwhile", Some(&other), None, 1, Claim::Take),
            ("taken by a third job", None, Some(&other), 1, Claim::Refused),
            ("taken by a process of this job", Some(&other), Some(&own), 1, Claim::Take),
        ] {
            assert_eq!(claim("a", first, now, waited), want, "{label}");
        }
    }

    #[test]
    fn a_holder_loses_the_lock_to_whoever_writes_its_own() {
        for (label, before, found, want) in [
            ("its own", None, Some(lock("a", 1, 5)), true),
            ("removed by somebody", None, None, true),
            ("of a successor", None, Some(lock("a", 3, 0)), false),
            ("of another job", None, Some(lock("b", 2, 0)), false),
            ("of the process before", Some(lock("a", 9, 6)), Some(lock("a", 9, 6)), true),
            ("of the process before, which lives on", Some(lock("a", 9, 6)), Some(lock("a", 9, 7)), true),
            ("of a successor of both", Some(lock("a", 9, 6)), Some(lock("a", 3, 0)), false),
            ("of a stale job", Some(lock("b", 9, 6)), Some(lock("b", 9, 6)), true),
            ("of a job that was not stale after all", Some(lock("b", 9, 6)), Some(lock("b", 9, 7)), false),
        ] {
            assert_eq!(is_held(&lock("a", 1, 0), before.as_ref(), found.as_ref()), want, "{label}");
        }
        let own = Lock { incarnation: 3, ..lock("a", 1, 0) };
        for (label, uid, incarnation, want) in [
            ("of a process that was replaced, which writes late", "a", 2, true),
            ("of a process of the same incarnation", "a", 3, false),
            ("of a successor", "a", 4, false),
            ("of another job", "b", 2, false),
        ] {
            assert_eq!(is_held(&own, None, Some(&Lock { incarnation, ..lock(uid, 9, 6) })), want, "{label}");
        }
    }

    #[test]
    fn a_replaced_process_sees_its_successor_also_if_it_writes_the_lock_last() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = LockFile::new(folder.path().join("new"));
        let process = |uid, incarnation| Lock { incarnation, ..lock(uid, incarnation.into(), 0) };
        for incarnation in [1, 3] {
            file.mark(&process("a", incarnation)).expect("writes");
        }
        file.write(&process("a", 2)).expect("writes");
        assert_eq!((file.marks().expect("reads"), file.newest_mark().expect("reads")), ([3].into(), 3), "the newest");
        for (uid, incarnation, found, want) in [
            ("a", 0, 0, Some(3)),
            ("a", 2, 1, Some(3)),
            ("a", 3, 0, None),
            ("a", 4, 3, None),
            ("a", 0, 3, None),
            ("b", 0, 0, None),
            ("a", u32::MAX, u32::MAX, None),
        ] {
            let successor = file.successor(&process(uid, incarnation), found).expect("reads");
            let label = format!("job {uid}, incarnation {incarnation}, after {found}");
            assert_eq!(successor.map(|lock| lock.incarnation), want, "{label}");
        }
        file.write(&process("a", 3)).expect("writes");
        file.release(&process("a", 3)).expect("removes");
        assert_eq!(std::fs::read_dir(folder.path().join("new")).expect("reads").count(), 0);
    }

    #[test]
    fn only_the_holder_removes_a_lock() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = LockFile::new(folder.path().join("new"));
        assert_eq!(file.read().expect("reads"), None);
        file.release(&lock("a", 1, 0)).expect("there is none");
        file.write(&lock("a", 1, 5)).expect("writes");
        file.release(&lock("a", 2, 0)).expect("it is another's");
        assert_eq!(file.read().expect("reads"), Some(lock("a", 1, 5)));
        file.release(&lock("a", 1, 0)).expect("removes");
        assert_eq!(file.read().expect("reads"), None);
        std::fs::write(folder.path().join("new").join(LOCK), "{").expect("writes");
        assert_eq!(file.read().expect("reads"), None, "no process renews what is no lock");
    }
}
