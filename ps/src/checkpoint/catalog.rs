//! The checkpoints of one run, by step: which are complete, which were set aside as damaged, which folders are left
//! over from checkpoints that were never completed.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::{self, ErrorKind};

use super::disk::{Folder, names};
use super::format::MANIFEST;
use super::write::{WriteError, rename};

/// Name that the manifest of a damaged checkpoint gets.
pub const DAMAGED: &str = "manifest.damaged.json";

/// The folder of a run, with a folder for each checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Catalog {
    folder: Folder,
}

impl Catalog {
    /// Describes the checkpoints in `folder`, which need not exist yet.
    #[must_use]
    pub fn new(folder: impl Into<Folder>) -> Self {
        Self { folder: folder.into() }
    }

    /// Returns the folder of the run.
    #[must_use]
    pub fn folder(&self) -> &Folder {
        &self.folder
    }

    /// Returns the folder of the checkpoint of `step`, whether it exists or not.
    #[must_use]
    pub fn path(&self, step: u64) -> Folder {
        self.folder.folder(&format!("step-{step:012}"))
    }

    /// Returns the steps of the complete checkpoints, ascending. A damaged one is among them until it was read.
    ///
    /// # Errors
    /// If the folder cannot be read; one that does not exist holds none.
    pub fn complete(&self) -> io::Result<BTreeSet<u64>> {
        self.with(MANIFEST)
    }

    /// Returns the steps of the checkpoints that were set aside as damaged and not written again since.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn damaged(&self) -> io::Result<BTreeSet<u64>> {
        let complete = self.complete()?;
        Ok(self.with(DAMAGED)?.difference(&complete).copied().collect())
    }

    /// Sets a damaged checkpoint aside, durably: it is not complete any more, and its files stay for who wants to look.
    ///
    /// # Errors
    /// If its manifest cannot be renamed.
    pub fn set_aside(&self, step: u64) -> Result<(), WriteError> {
        rename(&self.path(step), MANIFEST, DAMAGED)
    }

    /// Removes the checkpoint of `step`; the manifest first, so that what a crash leaves is not taken for complete.
    ///
    /// # Errors
    /// If something cannot be removed.
    pub fn remove(&self, step: u64) -> io::Result<()> {
        let folder = self.path(step);
        match folder.disk().remove_file(&folder.join(MANIFEST)) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        folder.disk().remove_folder(&folder)
    }

    /// Returns the steps of all checkpoints, complete or not.
    ///
    /// # Errors
    /// If the folder cannot be read; one that does not exist holds none.
    pub fn steps(&self) -> io::Result<BTreeSet<u64>> {
        let step = |name: &OsString| {
            let step = name.to_str()?.strip_prefix("step-")?.parse().ok()?;
            // Other spellings of the number are not ours.
            (self.path(step).file_name() == Some(name)).then_some(step)
        };
        Ok(names(self.folder.disk(), &self.folder)?.iter().filter_map(step).collect())
    }

    /// Returns the steps whose folder holds `file`.
    fn with(&self, file: &str) -> io::Result<BTreeSet<u64>> {
        let mut found = BTreeSet::new();
        for step in self.steps()? {
            if self.folder.disk().exists(&self.path(step).join(file))? {
                found.insert(step);
            }
        }
        Ok(found)
    }
}
