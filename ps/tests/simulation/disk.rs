//! A disk in memory that the servers of a job share. It is full, slow or out of order for a while, and when a machine
//! dies it forgets what that machine has not flushed: changes of names are undone from the last one back, contents are
//! cut short or are zeros. What is random is drawn for each process by itself, from the seed.

mod mount;
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use psjobs_ps::checkpoint::format::MANIFEST;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use tokio::sync::mpsc;
use tokio::time::Instant;

pub use mount::Mount;

use super::network::Host;

/// The folder that exists from the beginning.
pub const FOLDER: &str = "/checkpoints";
/// When the clock that stamps files begins, in seconds since 1970.
const BEGINNING: u64 = 1_700_000_000;

const NO_ENTRY: i32 = 2;
const IO: i32 = 5;
const DENIED: i32 = 13;
const EXISTS: i32 = 17;
const NO_FOLDER: i32 = 20;
const FULL: i32 = 28;
const STALE: i32 = 116;

/// A fault of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskFault {
    /// It has no space left: of each write a half is taken.
    Full,
    /// Writes fail.
    Write,
    /// Contents and names cannot be flushed; they may be durable or not.
    Flush,
    /// Files cannot be renamed.
    Rename,
    /// Nothing can be read or opened to be read.
    Read,
    /// Nothing in the folder can be reached by its name.
    Denied,
    /// As `Denied`, and files that were open cannot be used either, as on a network file system whose server is gone.
    Stale,
    /// Every piece of work takes up to so long.
    Slow(Duration),
}

impl DiskFault {
    /// Returns the error that an operation fails with, if it does.
    fn error(self, operation: Operation) -> Option<i32> {
        match (self, operation) {
            (Self::Write, Operation::Write)
            | (Self::Flush, Operation::Flush | Operation::FlushFolder)
            | (Self::Rename, Operation::Rename)
            | (Self::Read, Operation::Read | Operation::Open) => Some(IO),
            (Self::Denied, Operation::Read | Operation::Write | Operation::Flush) => None,
            (Self::Denied, _) => Some(DENIED),
            (Self::Stale, _) => Some(STALE),
            _ => None,
        }
    }

    /// Its name in summaries.
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "disk full",
            Self::Write => "disk refuses writes",
            Self::Flush => "disk refuses to flush",
            Self::Rename => "disk refuses to rename",
            Self::Read => "disk cannot be read",
            Self::Denied => "folder not permitted",
            Self::Stale => "folder stale",
            Self::Slow(_) => "disk slow",
        }
    }
}

/// An operation, as far as faults distinguish them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Read,
    Write,
    Flush,
    /// Everything below goes by names.
    Open,
    Rename,
    FlushFolder,
    Look,
    Change,
}

/// The disk. Clones are the same one.
#[derive(Clone)]
pub struct Disk(Arc<Mutex<Volume>>);

/// The contents of the disk, and its faults.
pub struct Volume {
    seed: u64,
    begun: Instant,
    /// By path, in memory: what processes see.
    nodes: BTreeMap<PathBuf, Node>,
    /// Changes of names that are not flushed, in order.
    changes: Vec<Change>,
    /// The faults, each of one server or of all.
    faults: Vec<(Option<u32>, DiskFault)>,
    /// Processes that are gone: nothing that they still do has an effect.
    dead: BTreeSet<Host>,
    /// Machines that die: operations until then, and how long they are away.
    dying: BTreeMap<Host, (u32, Duration)>,
    deaths: mpsc::UnboundedSender<(Host, Duration)>,
    /// By process: files made, and pieces of work done.
    made: BTreeMap<Host, u64>,
    worked: BTreeMap<Host, u64>,
    /// Seconds by which the clock that stamps files is ahead, or behind.
    ahead: i64,
    violation: Option<String>,
}

#[derive(Clone)]
enum Node {
    Folder,
    File(Arc<Mutex<Content>>),
}

struct Content {
    bytes: Vec<u8>,
    /// The process that has written what is not flushed.
    unflushed: Option<Host>,
    /// Bytes at its beginning that are flushed, and were not written since.
    flushed: usize,
    /// Its number among those that its process has made.
    number: u64,
    written: SystemTime,
}

/// A change of names in one folder.
struct Change {
    host: Host,
    folder: PathBuf,
    /// The names, and what they named before.
    before: Vec<(PathBuf, Option<Node>)>,
}

impl Disk {
    /// Creates an empty disk. The receiver gets the machines that die while they use it.
    pub fn new(seed: u64) -> (Self, mpsc::UnboundedReceiver<(Host, Duration)>) {
        let (deaths, died) = mpsc::unbounded_channel();
        let volume = Volume {
            seed,
            begun: Instant::now(),
            nodes: BTreeMap::from([(PathBuf::from(FOLDER), Node::Folder)]),
            changes: Vec::new(),
            faults: Vec::new(),
            dead: BTreeSet::new(),
            dying: BTreeMap::new(),
            deaths,
            made: BTreeMap::new(),
            worked: BTreeMap::new(),
            ahead: 0,
            violation: None,
        };
        (Self(Arc::new(Mutex::new(volume))), died)
    }

    pub fn volume(&self) -> MutexGuard<'_, Volume> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Volume {
    /// Gives the disk of `server`, or of all, a fault.
    pub fn break_disk(&mut self, server: Option<u32>, fault: DiskFault) {
        self.faults.push((server, fault));
    }

    /// Ends all faults.
    pub fn mend_all(&mut self) {
        self.faults.clear();
    }

    /// Takes one such fault away.
    pub fn mend(&mut self, server: Option<u32>, fault: DiskFault) {
        if let Some(place) = self.faults.iter().position(|broken| *broken == (server, fault)) {
            self.faults.remove(place);
        }
    }

    /// The machine of `host` dies in the operation after the next `operations`, and is `away` for a while.
    pub fn die_after(&mut self, host: Host, operations: u32, away: Duration) {
        self.dying.insert(host, (operations, away));
    }

    /// The clock that stamps files jumps.
    pub fn jump(&mut self, seconds: i64) {
        self.ahead += seconds;
    }

    /// A process has ended: what it has not flushed stays, as long as the machine lives.
    pub fn end(&mut self, host: Host) {
        self.dead.insert(host);
    }

    /// A process ends with its machine: what it has not flushed is lost, or half there.
    pub fn kill(&mut self, host: Host) {
        self.dead.insert(host);
        let mut chance = self.chance(host, [0, self.worked.get(&host).copied().unwrap_or(0)]);
        let (own, others): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.changes).into_iter().partition(|change| change.host == host);
        self.changes = others;
        let kept = chance.random_range(0..=own.len());
        for change in own.into_iter().skip(kept).rev() {
            self.undo(change);
        }
        for node in self.nodes.values() {
            let Node::File(content) = node else { continue };
            let mut content = lock(content);
            if content.unflushed == Some(host) {
                let mut chance = self.chance(host, [1, content.number]);
                let kept = chance.random_range(content.flushed..=content.bytes.len());
                if chance.random_bool(0.5) {
                    content.bytes.truncate(kept);
                } else {
                    content.bytes[kept..].fill(0);
                }
                content.unflushed = None;
            }
        }
    }

    /// All machines die. Returns the file at `path` as it is then.
    pub fn read_when_all_are_dead(&mut self, path: &Path) -> io::Result<Vec<u8>> {
        let hosts: BTreeSet<Host> = self.made.keys().copied().collect();
        hosts.into_iter().for_each(|host| self.kill(host));
        match self.nodes.get(path) {
            Some(Node::File(content)) => Ok(lock(content).bytes.clone()),
            _ => Err(error(NO_ENTRY)),
        }
    }

    /// Names the first thing that was done and must never be done.
    pub fn violation(&mut self) -> Result<(), String> {
        self.violation.take().map_or(Ok(()), Err)
    }

    fn undo(&mut self, change: Change) {
        for (path, node) in change.before.into_iter().rev() {
            // The contents of a folder go with it.
            if !matches!(path.parent().and_then(|parent| self.nodes.get(parent)), Some(Node::Folder)) {
                continue;
            }
            match node {
                Some(node) => drop(self.nodes.insert(path, node)),
                None => self.nodes.retain(|other, _| !other.starts_with(&path)),
            }
        }
    }

    /// Begins an operation of `host`.
    fn begin(&mut self, host: Host, operation: Operation) -> io::Result<()> {
        if self.dead.contains(&host) {
            return Err(error(IO));
        }
        if let Some((left, away)) = self.dying.get_mut(&host) {
            if *left == 0 {
                let away = *away;
                self.kill(host);
                // The job may be over.
                let _ = self.deaths.send((host, away));
                return Err(error(IO));
            }
            *left -= 1;
        }
        let failed = self.faults_of(host).find_map(|fault| fault.error(operation));
        failed.map_or(Ok(()), |number| Err(error(number)))
    }

    fn faults_of(&self, host: Host) -> impl Iterator<Item = DiskFault> {
        let own = move |server: &Option<u32>| match (server, host) {
            (Some(server), Host::Server(index, _)) => *server == index,
            _ => true,
        };
        self.faults.iter().filter(move |(server, _)| own(server)).map(|(_, fault)| *fault)
    }

    /// Draws how long the next piece of work of `host` waits before it is done, and before that is known.
    fn delays(&mut self, host: Host) -> [Duration; 2] {
        let most = self.faults_of(host).filter_map(|fault| match fault {
            DiskFault::Slow(most) => Some(most),
            _ => None,
        });
        let most = most.max().unwrap_or_default();
        let worked = self.worked.entry(host).or_default();
        *worked += 1;
        if most.is_zero() {
            return [most; 2];
        }
        let mut chance = self.chance(host, [2, self.worked[&host]]);
        [(); 2].map(|()| most.mul_f64(chance.random_range(0.0..0.5)))
    }

    fn now(&self) -> SystemTime {
        let seconds = (BEGINNING + self.begun.elapsed().as_secs()).saturating_add_signed(self.ahead);
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    /// Replaces what names of one folder name.
    fn change(&mut self, host: Host, after: Vec<(PathBuf, Option<Node>)>) {
        let Some(folder) = after[0].0.parent().map(Path::to_owned) else { return };
        let mut before = Vec::new();
        for (path, node) in after {
            let old = match node {
                Some(node) => self.nodes.insert(path.clone(), node),
                None => self.nodes.remove(&path),
            };
            before.push((path, old));
        }
        self.changes.push(Change { host, folder, before });
    }

    /// Checks that the parent of a new name is a folder.
    fn place(&self, path: &Path) -> io::Result<()> {
        match path.parent().and_then(|parent| self.nodes.get(parent)) {
            Some(Node::Folder) => Ok(()),
            Some(Node::File(_)) => Err(error(NO_FOLDER)),
            None => Err(error(NO_ENTRY)),
        }
    }

    fn file(&self, path: &Path) -> io::Result<Arc<Mutex<Content>>> {
        match self.nodes.get(path) {
            Some(Node::File(content)) => Ok(content.clone()),
            Some(Node::Folder) => Err(error(IO)),
            None => Err(error(NO_ENTRY)),
        }
    }

    /// Returns the names directly in a folder.
    fn children(&self, folder: &Path) -> Vec<PathBuf> {
        let below = self.nodes.keys().filter(|path| path.parent() == Some(folder));
        below.cloned().collect()
    }

    /// Checks that a manifest which goes is not that of the last durable checkpoint.
    fn look_at_removal(&mut self, path: &Path) {
        let is_manifest = |path: &&PathBuf| path.ends_with(MANIFEST);
        if !path.ends_with(MANIFEST) || !self.is_durable(path) {
            return;
        }
        let others = self.nodes.keys().filter(is_manifest).filter(|other| *other != path);
        let whole = others.filter(|manifest| {
            let folder = manifest.parent().unwrap_or(manifest);
            self.is_durable(folder) && self.children(folder).iter().all(|file| temporary(file) || self.is_durable(file))
        });
        if whole.count() == 0 {
            self.violation.get_or_insert(format!("the last durable checkpoint was removed: {}", path.display()));
        }
    }

    /// Checks that no part of a complete checkpoint is replaced: its manifest holds the checksum of the one that was there.
    fn look_at_replacement(&mut self, path: &Path) {
        let folder = path.parent().unwrap_or(path);
        let is_complete = self.nodes.contains_key(&folder.join(MANIFEST));
        if is_complete && !path.ends_with(MANIFEST) && self.nodes.contains_key(path) {
            self.violation.get_or_insert(format!("a part of a complete checkpoint was replaced: {}", path.display()));
        }
    }

    /// Returns whether a file is there after all machines have died.
    fn is_durable(&self, path: &Path) -> bool {
        let flushed = match self.nodes.get(path) {
            Some(Node::File(content)) => lock(content).unflushed.is_none(),
            Some(Node::Folder) => true,
            None => false,
        };
        let names = self.changes.iter().flat_map(|change| &change.before);
        flushed && !names.into_iter().any(|(changed, before)| changed == path && before.is_none())
    }

    fn chance(&self, host: Host, draw: [u64; 2]) -> ChaCha8Rng {
        let (Host::Server(index, life) | Host::Trainer(index, life)) = host;
        let parts = [u64::from(index) << 32 | u64::from(life), draw[0], draw[1]];
        let mixed = parts.iter().fold(self.seed ^ 0xd15c, |mixed, part| {
            let mixed = (mixed ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            mixed ^ (mixed >> 29)
        });
        ChaCha8Rng::seed_from_u64(mixed)
    }
}

fn lock(content: &Mutex<Content>) -> MutexGuard<'_, Content> {
    content.lock().unwrap_or_else(PoisonError::into_inner)
}

fn error(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

/// Returns whether a file has not got its name yet.
fn temporary(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "tmp")
}
