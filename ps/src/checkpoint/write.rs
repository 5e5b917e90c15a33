//! Writing a checkpoint so that a crash at any moment leaves the one before it untouched: each file
//! goes to a temporary name, is flushed and renamed, its folder is flushed; the manifest comes last.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::BlockState;
use super::disk::{Disk, Folder, OpenFile, names};
use super::format::{Description, HeaderError, MANIFEST, Manifest, PartEntry, PartPlan, part_name};

/// End of the name that a file has while it is written.
const TEMPORARY: &str = ".tmp";

/// A file of a checkpoint could not be written. What was there before is untouched.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The volume is full.
    #[error("no space left for {}; enlarge the volume or keep fewer checkpoints", file.display())]
    Full {
        /// The file that was being written.
        file: PathBuf,
        /// The system's words.
        source: io::Error,
    },
    /// Another process has written the file.
    #[error("{} is there already, written by another process", file.display())]
    Exists {
        /// The file.
        file: PathBuf,
    },
    /// Anything else.
    #[error("cannot write {} ({source}); check that the checkpoint folder is there and may be written", file.display())]
    Io {
        /// The file that was being written.
        file: PathBuf,
        /// The system's words.
        source: io::Error,
    },
    /// The description cannot be written.
    #[error(transparent)]
    Description(#[from] HeaderError),
}

impl WriteError {
    /// Gives an I/O error the file's name.
    pub(crate) fn at(file: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        move |source| match source.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
                Self::Full { file: file.to_owned(), source }
            }
            _ => Self::Io { file: file.to_owned(), source },
        }
    }
}

/// Writes one server's part, block by block. Dropped before [`PartWriter::finish`] it leaves nothing.
#[derive(Debug)]
pub struct PartWriter {
    plan: PartPlan,
    name: String,
    target: Temporary,
    tables: Tables,
    scratch: Vec<u8>,
}

/// The small parts, which are written when all blocks are there.
#[derive(Debug, Default)]
struct Tables {
    versions: Vec<u64>,
    updates: Vec<u64>,
    next_steps: Vec<u64>,
    checksums: Vec<u32>,
}

impl PartWriter {
    /// Begins the part of `description.server` in `folder`, which is made if need be.
    ///
    /// # Errors
    /// If the file cannot be made.
    pub fn create(folder: impl Into<Folder>, description: &Description) -> Result<Self, WriteError> {
        let (folder, plan) = (folder.into(), PartPlan::new(description)?);
        create_folder(&folder)?;
        let name = part_name(description.server, description.servers);
        let target = Temporary::create(&folder, &name)?;
        target.write_at(plan.header(), 0)?;
        Ok(Self { plan, name, target, tables: Tables::default(), scratch: Vec::new() })
    }

    /// The blocks to put, in this order.
    #[must_use]
    pub fn blocks(&self) -> &[u32] {
        self.plan.blocks()
    }

    /// Writes the next block.
    ///
    /// # Errors
    /// If the file cannot be written.
    ///
    /// # Panics
    /// If there are more blocks than the part has, or the state has not the lengths that the
    /// description gives.
    pub fn put(&mut self, state: &BlockState) -> Result<(), WriteError> {
        let Self { plan, target, tables, scratch, .. } = self;
        let position = tables.versions.len();
        assert!(plan.fits(position, state), "block {} matches the description", plan.blocks()[position]);
        let previous = Some(&state.previous).filter(|previous| !previous.is_empty());
        for (column, values) in std::iter::once(&state.values).chain(&state.slots).chain(previous).enumerate() {
            scratch.resize(values.len() * 4, 0);
            for (bytes, value) in scratch.as_chunks_mut::<4>().0.iter_mut().zip(values) {
                *bytes = value.to_le_bytes();
            }
            tables.checksums.push(crc32fast::hash(scratch));
            target.write_at(scratch, plan.data_at(position, column))?;
        }
        tables.versions.push(state.version);
        tables.updates.push(state.updates);
        tables.next_steps.extend(&state.next_steps);
        Ok(())
    }

    /// Makes the part durable, under its own name.
    ///
    /// # Errors
    /// If the file cannot be written.
    ///
    /// # Panics
    /// If blocks are missing.
    pub fn finish(self) -> Result<PartEntry, WriteError> {
        let Self { plan, name, target, tables, .. } = self;
        assert_eq!(tables.versions.len(), plan.blocks().len(), "every block of the part was put");
        let [versions, updates, next_steps] = [&tables.versions, &tables.updates, &tables.next_steps];
        let steps: Vec<u8> =
            [versions, updates, next_steps].into_iter().flatten().flat_map(|n| n.to_le_bytes()).collect();
        let checksums: Vec<u8> = tables.checksums.iter().flat_map(|n| n.to_le_bytes()).collect();
        target.write_at(&steps, plan.tables_at())?;
        target.write_at(&checksums, plan.checksums_at())?;
        target.keep_part()?;
        Ok(PartEntry { file: name, bytes: plan.file_bytes(), crc32: table_checksum(plan.header(), &steps, &checksums) })
    }
}

/// The checksum in a part's [`PartEntry`].
pub(super) fn table_checksum(header: &[u8], tables: &[u8], checksums: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    [header, tables, checksums].into_iter().for_each(|bytes| hasher.update(bytes));
    hasher.finalize()
}

/// Marks the checkpoint in `folder` as complete: its parts are durable. Of two processes that do so one succeeds, where the
/// disk can tell.
///
/// # Errors
/// If the manifest cannot be written, and [`WriteError::Exists`] if there is one.
///
/// # Panics
/// Never: a manifest is JSON.
pub fn commit(folder: impl Into<Folder>, manifest: &Manifest) -> Result<(), WriteError> {
    let target = Temporary::create(&folder.into(), MANIFEST)?;
    target.write_at(&json_of(manifest), 0)?;
    target.keep_new()
}

/// Replaces the manifest of a complete checkpoint, whose parts stay.
///
/// # Errors
/// If the manifest cannot be written; the one before stays.
///
/// # Panics
/// Never: a manifest is JSON.
pub fn amend(folder: impl Into<Folder>, manifest: &Manifest) -> Result<(), WriteError> {
    put_file(&folder.into(), MANIFEST, &json_of(manifest))
}

fn json_of(manifest: &Manifest) -> Vec<u8> {
    let mut json = serde_json::to_vec_pretty(manifest).expect("a manifest is JSON");
    json.push(b'\n');
    json
}

/// Makes it durable that the files of `folder` have their names. The manifest of a checkpoint that is found may be there although its
/// [`commit`] failed, or the process ended before that was done.
///
/// # Errors
/// If the folder cannot be flushed.
pub fn flush_folder(folder: impl Into<Folder>) -> Result<(), WriteError> {
    let folder = folder.into();
    flush(folder.disk(), &folder)
}

/// Takes back a [`commit`] that failed: its manifest may be there although no process was notified.
///
/// # Errors
/// If there is a manifest that cannot be removed.
pub fn revoke(folder: impl Into<Folder>) -> Result<(), WriteError> {
    remove_file(&folder.into(), MANIFEST)
}

/// Writes a small file, durably, in place of the one that is there.
pub(super) fn put_file(folder: &Folder, name: &str, bytes: &[u8]) -> Result<(), WriteError> {
    let target = Temporary::create(folder, name)?;
    target.write_at(bytes, 0)?;
    target.keep()
}

/// Removes a file, durably, if it is there.
pub(super) fn remove_file(folder: &Folder, name: &str) -> Result<(), WriteError> {
    let file = folder.join(name);
    match folder.disk().remove_file(&file) {
        Ok(()) => flush(folder.disk(), folder),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(WriteError::at(&file)(error)),
    }
}

/// Renames a file within its folder, durably, if it is there.
pub(super) fn rename(folder: &Folder, from: &str, to: &str) -> Result<(), WriteError> {
    let file = folder.join(to);
    match folder.disk().rename(&folder.join(from), &file) {
        Ok(()) => flush(folder.disk(), folder),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(WriteError::at(&file)(error)),
    }
}

/// Makes it durable that `path` is in its folder.
pub(super) fn flush_parent(path: &Folder) -> Result<(), WriteError> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    parent.map_or(Ok(()), |parent| flush(path.disk(), parent))
}

/// A file that appears under its name when it is complete and durable, or never. Its temporary name is its own: another
/// process that writes a file of the same name does not write into it.
#[derive(Debug)]
pub(super) struct Temporary {
    file: Box<dyn OpenFile>,
    /// Where it is until it is kept.
    path: PathBuf,
    folder: Folder,
    name: String,
    kept: bool,
}

impl Temporary {
    pub fn create(folder: &Folder, name: &str) -> Result<Self, WriteError> {
        let path = folder.join(format!("{name}.{:016x}{TEMPORARY}", rand::random::<u64>()));
        let file = folder.disk().create_unnamed(&path).map_err(WriteError::at(&folder.join(name)))?;
        Ok(Self { file, path, folder: folder.clone(), name: name.to_owned(), kept: false })
    }

    pub fn write_at(&self, bytes: &[u8], offset: u64) -> Result<(), WriteError> {
        self.file.write_at(bytes, offset).map_err(|error| WriteError::at(&self.folder.join(&self.name))(error))
    }

    /// Flushes the file, gives it its name, and flushes that.
    pub fn keep(self) -> Result<(), WriteError> {
        self.keep_by(|disk, from, to| disk.rename(from, to).map_err(WriteError::at(to)))
    }

    /// As [`Temporary::keep`], of a file that no process has written before.
    pub fn keep_new(self) -> Result<(), WriteError> {
        self.keep_by(|disk, from, to| match disk.rename_new(from, to) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Err(WriteError::Exists { file: to.to_owned() }),
            named => named.map_err(WriteError::at(to)),
        })
    }

    fn keep_by(mut self, name: impl FnOnce(&Disk, &Path, &Path) -> Result<(), WriteError>) -> Result<(), WriteError> {
        let path = self.folder.join(&self.name);
        self.file.flush().map_err(WriteError::at(&path))?;
        name(self.folder.disk(), &self.path, &path)?;
        self.kept = true;
        flush(self.folder.disk(), &self.folder)
    }

    /// As [`Temporary::keep`], of a part: a process that was replaced while it wrote does not put it into a checkpoint that
    /// is complete by now.
    pub fn keep_part(self) -> Result<(), WriteError> {
        let manifest = self.folder.join(MANIFEST);
        self.keep_by(|disk, from, to| disk.rename_without(from, to, &manifest).map_err(WriteError::at(to)))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.kept {
            // Left behind it would only take space until server 0 starts again.
            drop(self.folder.disk().remove_file(&self.path));
        }
    }
}

/// Removes the files in `folder` that processes have begun to write and not kept, of the names that `goes` accepts. One
/// that still runs gets an error when it keeps its file.
///
/// # Errors
/// If the folder cannot be read or a file cannot be removed.
pub(super) fn remove_left_overs(folder: &Folder, goes: impl Fn(&str) -> bool) -> io::Result<()> {
    let left_over = |name: &str| is_temporary(name) && goes(name);
    for name in names(folder.disk(), folder)?.iter().filter(|name| name.to_str().is_some_and(left_over)) {
        match folder.disk().remove_file(&folder.join(name)) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => tracing::debug!(?name, folder = %folder.display(), "removed a file that was never completed"),
        }
    }
    Ok(())
}

/// Returns whether a file has the name of a [`Temporary`].
fn is_temporary(name: &str) -> bool {
    let token = name.strip_suffix(TEMPORARY).and_then(|name| name.rsplit_once('.')).map(|(_, token)| token);
    token.is_some_and(|token| token.len() == 16 && token.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// Makes `folder`, durably.
pub(super) fn create_folder(folder: &Folder) -> Result<(), WriteError> {
    folder.disk().create_folders(folder).map_err(WriteError::at(folder))?;
    flush_parent(folder)
}

fn flush(disk: &Disk, folder: &Path) -> Result<(), WriteError> {
    disk.flush_folder(folder).map_err(WriteError::at(folder))
}
