//! Pieces on the disk of this machine, as many as fit into a limit; those go first that were not used for longest. Several
//! processes may share a folder: a piece appears as a whole under its name, and one that another process has removed is
//! fetched again.

use std::fs;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};

/// The end of a piece's name; others in the folder are not touched.
const END: &str = "piece";
/// The end of the name of one that is being written.
const UNFINISHED: &str = "piece-tmp";
/// One that is unfinished for longer was left by a process that was killed.
const ABANDONED: Duration = Duration::from_secs(3600);
/// A use is noted if the last one was noted longer ago.
const NOTED: Duration = Duration::from_secs(60);
/// Part of the limit that is written until the folder is looked through again, because others write, too; and that is made
/// free when it is full.
const SHARE: u64 = 16;

/// The cache of a process.
#[derive(Debug)]
pub struct DiskCache {
    folder: PathBuf,
    limit: u64,
    usage: Mutex<Usage>,
    /// Tells unfinished pieces of this process from those of others. The id of a process does not: each pod counts its own.
    token: u64,
    /// Numbers unfinished pieces of this process.
    number: AtomicU64,
}

#[derive(Clone, Copy, Debug)]
struct Usage {
    /// Bytes of all pieces when the folder was looked through.
    found: u64,
    /// Bytes that this process has written since.
    written: u64,
}

/// A piece in the folder.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
}

impl Usage {
    /// Returns true if the folder must be looked through before so many bytes are written.
    fn is_due(self, bytes: u64, limit: u64) -> bool {
        self.written + bytes > limit / SHARE || self.found + self.written + bytes > limit
    }
}

/// Chooses the pieces that go, so that so many more bytes fit, with some room beside them if any must go. The others are
/// the ones used last.
fn victims(mut entries: Vec<Entry>, more: u64, limit: u64) -> Vec<Entry> {
    let mut bytes: u64 = entries.iter().map(|entry| entry.bytes).sum();
    if bytes + more <= limit {
        return Vec::new();
    }
    let wanted = (limit - limit / SHARE).saturating_sub(more);
    entries.sort_by(|one, other| (one.used, &one.path).cmp(&(other.used, &other.path)));
    let mut gone = Vec::new();
    for entry in entries {
        if bytes <= wanted {
            break;
        }
        bytes -= entry.bytes;
        gone.push(entry);
    }
    gone
}

impl DiskCache {
    /// Opens the cache in a folder, which is made if it is missing. Without a `limit` it takes 10 GiB, or half of the space
    /// that is free or its own if that is less.
    ///
    /// # Errors
    /// If the folder cannot be made or listed.
    pub fn open(folder: PathBuf, limit: Option<u64>) -> io::Result<Self> {
        fs::create_dir_all(&folder)?;
        let found = entries(&folder)?.iter().map(|entry| entry.bytes).sum();
        let limit = match limit {
            Some(limit) => limit,
            None => default_limit(&folder, found)?,
        };
        tracing::info!(folder = %folder.display(), limit, used = found, "pieces of the data are cached on disk");
        let (usage, token) = (Mutex::new(Usage { found, written: 0 }), RandomState::new().build_hasher().finish());
        Ok(Self { folder, limit, usage, token, number: AtomicU64::new(0) })
    }

    #[must_use]
    pub fn limit(&self) -> u64 {
        self.limit
    }

    fn path(&self, key: &str) -> PathBuf {
        let digest = Sha256::digest(key.as_bytes());
        let name: String = digest.iter().take(20).map(|byte| format!("{byte:02x}")).collect();
        self.folder.join(format!("{name}.{END}"))
    }

    /// Returns true if there is a piece.
    #[must_use]
    pub fn contains(&self, key: &str) -> bool {
        self.path(key).exists()
    }

    /// Opens a piece; `None` if it is missing, or not of so many bytes. It can be read until it is closed, also if it is
    /// removed meanwhile.
    pub fn get(&self, key: &str, bytes: Option<u64>) -> Option<fs::File> {
        let path = self.path(key);
        let file = fs::File::open(&path).ok()?;
        let found = file.metadata().ok()?;
        if bytes.is_some_and(|bytes| bytes != found.len()) {
            // A machine that went down has lost the rest.
            drop(fs::remove_file(&path));
            return None;
        }
        note(&file, &found);
        Some(file)
    }

    /// Keeps a piece; others go until there is room. One that is larger than the limit is not kept. Returns true if the folder
    /// was looked through for it: then files that are open may be removed.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn put(&self, key: &str, piece: &[u8]) -> io::Result<bool> {
        let bytes = piece.len() as u64;
        if bytes > self.limit {
            return Ok(false);
        }
        let is_looked_through = self.make_room(bytes)?;
        let unfinished = self.unfinished();
        let mut file = fs::File::create_new(&unfinished)?;
        let written = file.write_all(piece).and_then(|()| fs::rename(&unfinished, self.path(key)));
        if written.is_err() {
            drop(fs::remove_file(&unfinished));
        }
        written.map(|()| is_looked_through)
    }

    /// Returns a name for a piece that is being written, which no other process and no other piece has.
    fn unfinished(&self) -> PathBuf {
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        self.folder.join(format!("{:016x}-{number}.{UNFINISHED}", self.token))
    }

    /// Counts bytes that will be written, and removes pieces for them. One at a time looks through the folder; returns true if
    /// this one did.
    fn make_room(&self, bytes: u64) -> io::Result<bool> {
        let mut usage = self.usage.lock();
        let is_due = usage.is_due(bytes, self.limit);
        if is_due {
            let all = entries(&self.folder)?;
            let mut found: u64 = all.iter().map(|entry| entry.bytes).sum();
            for entry in victims(all, bytes, self.limit) {
                // Another process may have removed it.
                drop(fs::remove_file(&entry.path));
                found -= entry.bytes;
            }
            *usage = Usage { found, written: 0 };
        }
        usage.written += bytes;
        Ok(is_due)
    }
}

/// Returns false if an open piece was removed: its bytes stay on the disk until it is closed.
#[must_use]
pub fn is_linked(file: &fs::File) -> bool {
    // One that cannot be looked at is better opened again.
    file.metadata().is_ok_and(|found| found.nlink() > 0)
}

/// Notes that an open piece is used now, and returns the same as [`is_linked`].
pub fn note_use(file: &fs::File) -> bool {
    file.metadata().is_ok_and(|found| {
        note(file, &found);
        found.nlink() > 0
    })
}

/// Notes that a piece is used now, if that was noted long ago.
fn note(file: &fs::File, found: &fs::Metadata) {
    let now = SystemTime::now();
    let ago = found.modified().ok().and_then(|used| now.duration_since(used).ok());
    if ago.is_some_and(|ago| ago > NOTED) {
        // A file of another user keeps its time.
        drop(file.set_modified(now));
    }
}

/// Lists the pieces in a folder, and removes abandoned ones.
fn entries(folder: &Path) -> io::Result<Vec<Entry>> {
    let now = SystemTime::now();
    let mut entries = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let end = path.extension().unwrap_or_default();
        if end != END && end != UNFINISHED {
            continue;
        }
        // It may be gone by now.
        let Ok(found) = fs::metadata(&path) else { continue };
        let used = found.modified()?;
        if end == END {
            entries.push(Entry { path, bytes: found.len(), used });
        } else if now.duration_since(used).is_ok_and(|ago| ago > ABANDONED) {
            drop(fs::remove_file(&path));
        }
    }
    Ok(entries)
}

fn default_limit(folder: &Path, used: u64) -> io::Result<u64> {
    /// The most that is taken without being asked.
    const MOST: u64 = 10 << 30;
    let disk = rustix::fs::statvfs(folder)?;
    Ok(MOST.min((disk.f_bavail * disk.f_frsize + used) / 2))
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    fn entry(name: &str, bytes: u64, used: u64) -> Entry {
        Entry { path: name.into(), bytes, used: SystemTime::UNIX_EPOCH + Duration::from_secs(used) }
    }

    #[test]
    fn pieces_go_that_were_not_used_for_longest() {
        let all = || vec![entry("a", 40, 3), entry("b", 40, 1), entry("c", 40, 2)];
        for (more, limit, want) in [
            (40, 160, vec![]),
            (41, 160, vec!["b"]),
            (40, 120, vec!["b", "c"]),
            (0, 60, vec!["b", "c"]),
            (160, 160, vec!["b", "c", "a"]),
        ] {
            let gone: Vec<_> = victims(all(), more, limit).into_iter().map(|entry| entry.path).collect();
            assert_eq!(gone, want.into_iter().map(PathBuf::from).collect::<Vec<_>>(), "{more} more of {limit}");
        }
    }

    #[test]
    fn the_folder_is_looked_through_after_a_part_of_the_limit_and_when_it_is_full() {
        for (found, written, bytes, want) in
            [(0, 0, 100, false), (0, 0, 101, true), (0, 60, 41, true), (1580, 0, 20, false), (1580, 0, 21, true)]
        {
            assert_eq!(Usage { found, written }.is_due(bytes, 1600), want, "{found}, {written}, {bytes}");
        }
    }

    #[test]
    fn a_piece_is_there_as_a_whole_or_not_at_all() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = DiskCache::open(folder.path().join("new"), Some(100)).expect("opens");
        cache.put("one", &[1; 60]).expect("writes");
        let other = DiskCache::open(folder.path().join("new"), Some(100)).expect("opens");
        let mut found = Vec::new();
        other.get("one", Some(60)).expect("another process sees it").read_to_end(&mut found).expect("reads");
        assert_eq!(found, [1; 60]);
        assert!(other.get("one", Some(61)).is_none() && !other.contains("one"), "a damaged one goes");
        let mut open = None;
        for number in 0..10 {
            cache.put(&number.to_string(), &[2; 40]).expect("writes");
            open = open.or(cache.get("0", Some(40)));
        }
        let bytes: u64 = entries(&cache.folder).expect("lists").iter().map(|entry| entry.bytes).sum();
        assert!(bytes <= 100, "{bytes}");
        found.clear();
        open.expect("it was there").read_to_end(&mut found).expect("it can still be read");
        assert_eq!(found, [2; 40]);
        cache.put("large", &[0; 101]).expect("is left out");
        assert!(!cache.contains("large"));
    }

    #[test]
    fn processes_that_share_a_folder_write_under_names_of_their_own() {
        let folder = tempfile::tempdir().expect("a folder");
        let open = || DiskCache::open(folder.path().to_owned(), Some(100)).expect("opens");
        let (one, other) = (open(), open());
        // A pod counts its processes from 1, so both may have the same id and the same number.
        let names = [one.unfinished(), one.unfinished(), other.unfinished(), other.unfinished()];
        let distinct: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(distinct.len(), names.len(), "{names:?}");
    }

    #[test]
    fn a_piece_that_is_open_is_noted_when_it_is_used_and_known_when_it_is_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = DiskCache::open(folder.path().to_owned(), Some(100)).expect("opens");
        cache.put("a", &[1; 60]).expect("writes");
        let file = cache.get("a", Some(60)).expect("it is there");
        let long_ago = SystemTime::now() - 2 * NOTED;
        file.set_modified(long_ago).expect("it is this process' file");
        assert!(note_use(&file));
        let noted = file.metadata().and_then(|found| found.modified()).expect("it has a time");
        assert!(noted > long_ago + NOTED, "it is used now");
        assert!(cache.put("b", &[2; 60]).expect("writes"), "the folder is looked through");
        assert!(!is_linked(&file) && !note_use(&file), "it went for the other one");
        assert!(is_linked(&cache.get("b", Some(60)).expect("it is there")));
    }
}
