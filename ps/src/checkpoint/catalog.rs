//! The checkpoints in a folder, by step: which are complete, which is the newest, which can go.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::format::MANIFEST;

/// A folder of checkpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Catalog {
    folder: PathBuf,
}

impl Catalog {
    /// The checkpoints in `folder`, which need not exist yet.
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// Where the checkpoints are.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where the checkpoint of `step` is, or is to be.
    #[must_use]
    pub fn path(&self, step: u64) -> PathBuf {
        self.folder.join(format!("step-{step:012}"))
    }

    /// Steps of the complete checkpoints, ascending. Whether they are undamaged shows when they are read.
    ///
    /// # Errors
    /// If the folder cannot be read; one that does not exist holds none.
    pub fn complete(&self) -> io::Result<BTreeSet<u64>> {
        Ok(self.steps()?.into_iter().filter(|step| self.path(*step).join(MANIFEST).exists()).collect())
    }

    /// Removes all complete checkpoints but the `keep` newest, and what is older than the newest
    /// and was never completed. Returns what went.
    ///
    /// # Errors
    /// If something cannot be removed; what it belongs to counts as incomplete then.
    pub fn prune(&self, keep: usize) -> io::Result<BTreeSet<u64>> {
        let complete = self.complete()?;
        let kept: BTreeSet<u64> = complete.iter().rev().take(keep.max(1)).copied().collect();
        let Some(newest) = kept.last() else { return Ok(BTreeSet::new()) };
        let gone: BTreeSet<u64> = self.steps()?.range(..newest).filter(|step| !kept.contains(step)).copied().collect();
        for step in &gone {
            remove(&self.path(*step))?;
        }
        Ok(gone)
    }

    /// Steps of all checkpoints, complete or not.
    fn steps(&self) -> io::Result<BTreeSet<u64>> {
        let entries = match fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(BTreeSet::new()),
            Err(error) => return Err(error),
        };
        let names = entries.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()?;
        let step = |name: &OsString| {
            let step = name.to_str()?.strip_prefix("step-")?.parse().ok()?;
            // Other spellings of the number are not ours.
            (self.path(step).file_name() == Some(name)).then_some(step)
        };
        Ok(names.iter().filter_map(step).collect())
    }
}

/// Removes a checkpoint; the manifest first, so that what a crash leaves is not taken for complete.
fn remove(folder: &Path) -> io::Result<()> {
    match fs::remove_file(folder.join(MANIFEST)) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    fs::remove_dir_all(folder)
}
