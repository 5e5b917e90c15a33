//! An object store as a process of this machine: versitygw, which plays S3 and keeps objects as files.

use std::collections::BTreeSet;
use std::fs;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use psjobs_ps::checkpoint::Folder;
use psjobs_ps::checkpoint::format::MANIFEST;
use tempfile::TempDir;

use crate::processes::{Process, free_addresses};

/// A store with an empty bucket; ends when it is dropped, and its objects go with it.
#[derive(Debug)]
pub struct Store {
    address: String,
    /// Before the folder, so that it has ended when that is removed.
    _process: Process,
    /// The folder of the store, with a folder for the bucket.
    root: TempDir,
}

pub const BUCKET: &str = "bucket";
pub const KEY: &str = "key";
pub const SECRET: &str = "secretsecret";
pub const REGION: &str = "us-east-1";
/// Time for the store to start.
const START: Duration = Duration::from_secs(30);
/// Pause between two attempts to reach it.
const PAUSE: Duration = Duration::from_millis(20);

/// Returns the program.
///
/// # Errors
/// The reason why it is not there, and what to do.
pub fn program() -> Result<PathBuf, String> {
    let folder = std::env::var_os("PSJOBS_OBJECT_STORES");
    let program = folder.map(|folder| Path::new(&folder).join("versitygw")).filter(|program| program.exists());
    program.ok_or_else(|| {
        "the program versitygw, which plays S3, is missing; set PSJOBS_OBJECT_STORES to the folder that \
         scripts/object-stores.sh prints"
            .to_owned()
    })
}

impl Store {
    /// Starts one.
    ///
    /// # Errors
    /// If the program is missing or does not listen.
    pub fn start() -> anyhow::Result<Self> {
        let program = program().map_err(anyhow::Error::msg)?;
        let root = tempfile::tempdir().context("no temporary folder")?;
        fs::create_dir(root.path().join(BUCKET)).context("cannot make the folder of a bucket")?;
        let address = free_addresses("127.0.0.1", 1)?.remove(0);
        let mut command = Command::new(program);
        command.args(["--port", &address, "--access", KEY, "--secret", SECRET, "--quiet", "posix"]).arg(root.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).current_dir(root.path());
        let mut process = Process::start(&mut command)?;
        let start = Instant::now();
        while TcpStream::connect(&address).is_err() {
            ensure!(!process.has_ended()?, "versitygw ended before it listened");
            ensure!(start.elapsed() < START, "versitygw does not listen at {address}");
            thread::sleep(PAUSE);
        }
        Ok(Self { address, _process: process, root })
    }

    /// Returns where it listens, as `http://HOST:PORT`.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the variables of a process that uses it.
    pub fn variables(&self) -> Vec<(String, String)> {
        let variables = [
            ("AWS_ACCESS_KEY_ID", KEY.to_owned()),
            ("AWS_SECRET_ACCESS_KEY", SECRET.to_owned()),
            ("AWS_REGION", REGION.to_owned()),
            ("AWS_ENDPOINT", self.endpoint()),
        ];
        variables.map(|(name, value)| (name.to_owned(), value)).into()
    }

    /// Returns the URL of a folder in the bucket.
    pub fn url(&self, folder: &str) -> String {
        format!("s3://{BUCKET}/{folder}")
    }

    /// Returns a folder in the bucket.
    ///
    /// # Errors
    /// If there is no thread for its requests.
    pub fn folder(&self, folder: &str) -> anyhow::Result<Folder> {
        Ok(psjobs_object_store::folder(&self.url(folder), self.variables())?)
    }

    /// Returns the uploads in parts that are under way: versitygw has a folder for each.
    pub fn uploads(&self) -> BTreeSet<PathBuf> {
        below(&self.root.path().join(BUCKET).join(".sgwtmp/multipart"), 2)
    }

    /// Returns the files of the servers' parts of checkpoints in a folder of the bucket.
    pub fn parts(&self, folder: &str) -> BTreeSet<PathBuf> {
        self.of_checkpoints(folder, |name| name.starts_with("ps-"))
    }

    /// Returns the manifests of the checkpoints in a folder of the bucket that are complete.
    pub fn manifests(&self, folder: &str) -> BTreeSet<PathBuf> {
        self.of_checkpoints(folder, |name| name == MANIFEST)
    }

    fn of_checkpoints(&self, folder: &str, wanted: fn(&str) -> bool) -> BTreeSet<PathBuf> {
        let mut files = below(&self.root.path().join(BUCKET).join(folder), 3);
        files.retain(|file| file.file_name().and_then(|name| name.to_str()).is_some_and(wanted));
        files
    }
}

/// Returns what is so many levels below a folder; nothing if it is not there.
fn below(folder: &Path, levels: u32) -> BTreeSet<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return BTreeSet::new() };
    let paths = entries.filter_map(Result::ok).map(|entry| entry.path());
    if levels <= 1 { paths.collect() } else { paths.flat_map(|path| below(&path, levels - 1)).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_found_at_one_level_only() {
        let folder = tempfile::tempdir().expect("a folder");
        let run = folder.path().join("run-00001");
        fs::create_dir_all(run.join("step-1")).expect("folders");
        fs::write(run.join("step-1/ps-0"), "").expect("a file");
        fs::write(run.join("run.json"), "").expect("a file");
        assert_eq!(below(folder.path(), 3), [run.join("step-1/ps-0")].into());
        assert_eq!(below(folder.path(), 2), [run.join("step-1"), run.join("run.json")].into());
        assert!(below(&folder.path().join("missing"), 2).is_empty());
    }
}
