//! The records of jobs that are over: one file each, `NAMESPACE/NAME_UID.json`, in a folder of a volume or a bucket.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use futures::future::join_all;
use parking_lot::Mutex;
use psjobs_ps::checkpoint::Folder;
use psjobs_ps::checkpoint::disk::Files;
use tracing::warn;

use crate::record::{Entry, HEAD, MOST, Page, entry};

/// Files that are read at once when the records are loaded.
const AT_ONCE: usize = 32;

/// The records that [`Records::load`] has read.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    /// The names of their jobs.
    pub keys: Vec<String>,
    /// Files that could not be read for now.
    pub unread: usize,
}

/// A file that may be a record, `NAMESPACE/NAME_UID.json`.
#[derive(Debug)]
struct File {
    namespace: String,
    name: String,
}

/// All records, and which of them stand for a job.
pub struct Records {
    /// `None` keeps none.
    folder: Option<Folder>,
    index: Mutex<Index>,
}

/// The records that there are, by the name under which the page shows the job. No I/O.
#[derive(Debug, Default)]
struct Index {
    /// By uid of the job.
    records: BTreeMap<String, BTreeMap<String, Entry>>,
    /// Uid of the job that the cluster has under a name.
    live: BTreeMap<String, String>,
    /// Uids of the jobs whose records are there and could not be read.
    unread: BTreeSet<String>,
}

impl Index {
    fn insert(&mut self, entry: Entry) {
        self.records.entry(entry.key()).or_default().insert(entry.uid.clone(), entry);
    }

    /// Returns the record that stands for a job: its own if the cluster has it, else the newest of the name.
    fn find(&self, key: &str) -> Option<&Entry> {
        let all = self.records.get(key)?;
        match self.live.get(key) {
            Some(uid) => all.get(uid),
            None => all.values().max_by_key(|entry| entry.ended),
        }
    }

    /// Takes out the records of jobs that ended before a time. That of a job that the cluster has stays: it would be made again.
    fn take_older(&mut self, than: u64) -> Vec<Entry> {
        let mut taken = Vec::new();
        for (key, all) in &mut self.records {
            let live = self.live.get(key);
            let old = |uid: &String, entry: &mut Entry| entry.ended < than && live != Some(uid);
            taken.extend(all.extract_if(.., old).map(|(_, entry)| entry));
        }
        self.records.retain(|_, all| !all.is_empty());
        taken
    }
}

impl File {
    /// Returns the uid of the job, if the name is as that of a record.
    fn uid(&self) -> Option<&str> {
        Some(self.name.strip_suffix(".json")?.split_once('_')?.1)
    }

    /// Says if a record belongs in this file. One that says otherwise would be read and removed elsewhere.
    fn is_of(&self, entry: &Entry) -> bool {
        entry.namespace == self.namespace && entry.file() == self.name
    }
}

impl Records {
    /// Records in a folder, or none.
    pub fn new(folder: Option<Folder>) -> Self {
        Self { folder, index: Mutex::default() }
    }

    /// Says if records are kept.
    pub fn are_kept(&self) -> bool {
        self.folder.is_some()
    }

    /// Reads the records that are not known yet. A file that is no record is left alone, one that cannot be read is read by the
    /// next call.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub async fn load(&self) -> io::Result<Loaded> {
        let mut files = self.work(list).await?.unwrap_or_default();
        {
            let index = self.index.lock();
            let known: BTreeSet<&str> = index.records.values().flat_map(BTreeMap::keys).map(String::as_str).collect();
            files.retain(|file| file.uid().is_none_or(|uid| !known.contains(uid)));
        }
        let (mut loaded, mut unread) = (Loaded::default(), BTreeSet::new());
        for some in files.chunks(AT_ONCE) {
            let read = join_all(some.iter().map(|file| self.head(file))).await;
            for (file, read) in some.iter().zip(read) {
                let File { namespace, name } = file;
                match read {
                    Ok(entry) if file.is_of(&entry) => {
                        loaded.keys.push(entry.key());
                        self.index.lock().insert(entry);
                    }
                    Ok(entry) => warn!("{namespace}/{name} is left alone: it says that it is of {:?}", entry.key()),
                    // It was removed meanwhile.
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    Err(error) if matches!(error.kind(), ErrorKind::InvalidData | ErrorKind::UnexpectedEof) => {
                        warn!("{namespace}/{name} is no record that can be read: {error}");
                    }
                    Err(error) => {
                        warn!("the record {namespace}/{name} cannot be read, and is tried again: {error}");
                        loaded.unread += 1;
                        unread.extend(file.uid().map(str::to_owned));
                    }
                }
            }
        }
        self.index.lock().unread = unread;
        Ok(loaded)
    }

    /// Reads the first line of a record.
    async fn head(&self, file: &File) -> io::Result<Entry> {
        let place = Path::new(&file.namespace).join(&file.name);
        let read = self.work(move |folder| head(&**folder.disk(), &folder.join(place))).await?;
        read.ok_or_else(|| ErrorKind::NotFound.into())
    }

    /// Returns the record that stands for a job, if one does.
    pub fn find(&self, key: &str) -> Option<Entry> {
        self.index.lock().find(key).cloned()
    }

    /// Says if there is a record of this very job, also one that could not be read.
    pub fn has(&self, key: &str, uid: &str) -> bool {
        let index = self.index.lock();
        index.unread.contains(uid) || index.records.get(key).is_some_and(|all| all.contains_key(uid))
    }

    /// Records that the cluster has a job of this uid, or none, under a name.
    pub fn see(&self, key: &str, uid: Option<&str>) {
        let mut index = self.index.lock();
        match uid {
            Some(uid) => drop(index.live.insert(key.to_owned(), uid.to_owned())),
            None => drop(index.live.remove(key)),
        }
    }

    /// Writes a record: afterwards all of it is there, or nothing.
    ///
    /// # Errors
    /// If the disk or the store fails.
    pub async fn write(&self, entry: &Entry, text: String) -> io::Result<()> {
        let written = entry.clone();
        self.work(move |folder| write(folder, &written, &text)).await?;
        self.index.lock().insert(entry.clone());
        Ok(())
    }

    /// Reads the page of a record.
    ///
    /// # Errors
    /// If the disk or the store fails, or the file is no record.
    pub async fn page(&self, entry: &Entry) -> io::Result<Page> {
        let place = entry.clone();
        let text = self.work(move |folder| read(folder, &place)).await?.unwrap_or_default();
        Page::parse(&text).map_err(io::Error::from)
    }

    /// Removes the records of jobs that ended before a time, in milliseconds since 1970, and that the cluster does not have, and
    /// returns the names of the jobs. One that cannot be removed is found again at the next start. Must not run beside
    /// [`Records::load`], which would find again those that are being removed.
    pub async fn remove_older(&self, than: u64) -> Vec<String> {
        let old = self.index.lock().take_older(than);
        let names = old.iter().map(Entry::key).collect();
        let removed = self.work(move |folder| {
            for entry in &old {
                let file = place(folder, entry);
                if let Err(error) = folder.disk().remove_file(&file) {
                    warn!("the record {} cannot be removed: {error}", file.display());
                }
            }
            Ok(())
        });
        if let Err(error) = removed.await {
            warn!("old records cannot be removed: {error}");
        }
        names
    }

    /// Does something in the folder where waiting delays no task; `None` if no records are kept.
    async fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Folder) -> io::Result<T> + Send + 'static,
    ) -> io::Result<Option<T>> {
        let Some(folder) = self.folder.clone() else { return Ok(None) };
        let done = tokio::task::spawn_blocking(move || work(&folder)).await;
        done.map_err(io::Error::other)?.map(Some)
    }
}

fn place(folder: &Folder, entry: &Entry) -> PathBuf {
    folder.join(&entry.namespace).join(entry.file())
}

/// Returns the files of the folder that may be records.
fn list(folder: &Folder) -> io::Result<Vec<File>> {
    folder.disk().create_folders(folder)?;
    let mut found = Vec::new();
    for namespace in folder.disk().names(folder)? {
        // A volume may have other folders, as `lost+found`.
        let is_namespace = |name: &str| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        let Some(namespace) = namespace.to_str().filter(|name| is_namespace(name)) else { continue };
        let names = match folder.disk().names(&folder.join(namespace)) {
            Err(error) if error.kind() == ErrorKind::NotADirectory => continue,
            names => names?,
        };
        let names = names.into_iter().filter_map(|name| name.into_string().ok());
        let records = names.filter(|name| name.ends_with(".json"));
        found.extend(records.map(|name| File { namespace: namespace.to_owned(), name }));
    }
    Ok(found)
}

fn head(disk: &dyn Files, file: &Path) -> io::Result<Entry> {
    let opened = disk.open(file)?;
    let mut bytes = vec![0; (opened.bytes()? as usize).min(HEAD)];
    opened.read_at(&mut bytes, 0)?;
    entry(&bytes).map_err(io::Error::from)
}

fn read(folder: &Folder, entry: &Entry) -> io::Result<String> {
    let opened = folder.disk().open(&place(folder, entry))?;
    let mut bytes = vec![0; (opened.bytes()? as usize).min(MOST)];
    opened.read_at(&mut bytes, 0)?;
    String::from_utf8(bytes).map_err(|error| io::Error::new(ErrorKind::InvalidData, error))
}

fn write(folder: &Folder, entry: &Entry, text: &str) -> io::Result<()> {
    let (disk, place) = (folder.disk(), folder.folder(&entry.namespace));
    disk.create_folders(&place)?;
    let (file, temporary) = (place.join(entry.file()), place.join(format!("{}.tmp", entry.file())));
    // One may be left of a process that was killed.
    drop(disk.remove_file(&temporary));
    let opened = disk.create_unnamed(&temporary)?;
    opened.write_at(text.as_bytes(), 0)?;
    opened.flush()?;
    disk.rename(&temporary, &file)?;
    disk.flush_folder(&place)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Subject, text};

    fn record(name: &str, uid: &str, ended: u64) -> Entry {
        Entry { namespace: "team".into(), name: name.into(), uid: uid.into(), ended, ..Entry::default() }
    }

    #[test]
    fn a_record_stands_for_its_own_job_and_the_newest_for_a_name_without_one() {
        let mut index = Index::default();
        [record("a", "1", 10), record("a", "2", 20), record("b", "3", 5)].into_iter().for_each(|one| index.insert(one));
        for (live, wanted) in [(None, Some("2")), (Some("1"), Some("1")), (Some("9"), None)] {
            index.live = live.map(|uid: &str| ("team/a".to_owned(), uid.to_owned())).into_iter().collect();
            assert_eq!(index.find("team/a").map(|entry| entry.uid.as_str()), wanted, "{live:?}");
        }
        assert_eq!(index.find("team/c"), None);
        index.live = [("team/a", "2"), ("team/b", "3")].map(|(key, uid)| (key.to_owned(), uid.to_owned())).into();
        let taken: Vec<_> = index.take_older(30).into_iter().map(|entry| entry.uid).collect();
        assert_eq!(taken, ["1"], "the records of jobs that the cluster has stay");
        index.insert(record("a", "1", 10));
        index.live.clear();
        let mut taken: Vec<_> = index.take_older(20).into_iter().map(|entry| entry.uid).collect();
        taken.sort();
        assert_eq!((taken, index.records.len()), (vec!["1".to_owned(), "3".to_owned()], 1));
    }

    #[tokio::test]
    async fn records_are_found_again_by_the_next_process() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(folder.path().join("lost+found")).expect("a folder");
        std::fs::create_dir(folder.path().join("team")).expect("a folder");
        for name in ["a_1.json.tmp", "b_2.json"] {
            std::fs::write(folder.path().join("team").join(name), "half").expect("written");
        }
        let kept = || Records::new(Some(folder.path().into()));
        let loaded = async |records: &Records| records.load().await.expect("it can be read").keys;
        let first = kept();
        assert!(loaded(&first).await.is_empty());
        let wanted = record("a", "1", 10);
        let subject = Subject { tails: BTreeMap::from([("ps-0".into(), "the end\n".into())]), ..Subject::default() };
        first.write(&wanted, text(&wanted, &subject)).await.expect("written");
        assert!(first.has("team/a", "1") && !first.has("team/a", "2"));

        let second = kept();
        assert_eq!(loaded(&second).await, ["team/a"]);
        assert!(loaded(&second).await.is_empty(), "it is known");
        assert_eq!(second.find("team/a"), Some(wanted.clone()));
        assert_eq!(second.page(&wanted).await.expect("it can be read").tails, subject.tails);
        assert!(second.remove_older(10).await.is_empty());
        assert_eq!(second.remove_older(11).await, ["team/a"]);
        assert!(loaded(&kept()).await.is_empty(), "the file is gone");
    }

    #[tokio::test]
    async fn a_record_counts_in_its_own_place_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let place = folder.path().join("team");
        std::fs::create_dir(&place).expect("a folder");
        let (own, other) = (record("a", "1", 10), Entry { namespace: "..".into(), ..record("b", "2", 10) });
        for (file, entry) in [("a_1.json", &own), ("b_2.json", &other), ("c_1.json", &own), ("a_3.json", &own)] {
            std::fs::write(place.join(file), text(entry, &Subject::default())).expect("written");
        }
        let records = Records::new(Some(folder.path().into()));
        let wanted = Loaded { keys: vec!["team/a".into()], unread: 0 };
        assert_eq!(records.load().await.expect("it can be read"), wanted);
        assert_eq!(records.remove_older(11).await, ["team/a"]);
        assert!(!place.join("a_1.json").exists() && place.join("c_1.json").exists());
    }

    #[tokio::test]
    async fn a_record_that_cannot_be_read_is_tried_again_and_is_there_meanwhile() {
        let folder = tempfile::tempdir().expect("a folder");
        let place = folder.path().join("team").join("a_1.json");
        std::fs::create_dir(folder.path().join("team")).expect("a folder");
        // A link to itself cannot be opened.
        std::os::unix::fs::symlink("a_1.json", &place).expect("a link");
        let records = Records::new(Some(folder.path().into()));
        assert_eq!(records.load().await.expect("the rest can be read"), Loaded { keys: Vec::new(), unread: 1 });
        assert!(records.has("team/a", "1") && records.find("team/a").is_none());
        std::fs::remove_file(&place).expect("it is there");
        std::fs::write(&place, text(&record("a", "1", 10), &Subject::default())).expect("written");
        let wanted = Loaded { keys: vec!["team/a".into()], unread: 0 };
        assert_eq!(records.load().await.expect("it can be read"), wanted);
        assert!(records.find("team/a").is_some());
    }

    #[tokio::test]
    async fn without_a_folder_there_are_no_records() {
        let records = Records::new(None);
        assert_eq!((records.are_kept(), records.load().await.expect("nothing to read")), (false, Loaded::default()));
        assert_eq!(records.find("team/a"), None);
    }
}
