//! The disk that checkpoints are on. Every file operation of checkpoints goes through a [`Disk`]: to the system's file
//! systems, or to [`Files`] that the caller provides, as the simulation of whole jobs does.

use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::future::ready;
use std::io::{self, ErrorKind};
use std::ops::Deref;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::SystemTime;

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::oneshot;

/// Work that waits for the disk.
pub type Work = Box<dyn FnOnce() + Send>;
/// Resolves when a piece of work is done.
pub type Working = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The file operations that checkpoints need. Each fails with the error of the system's call.
#[expect(clippy::missing_errors_doc, reason = "the trait says it of all")]
pub trait Files: Send + Sync {
    /// Makes a file that does not exist yet, to be written.
    fn create(&self, path: &Path) -> io::Result<Box<dyn OpenFile>>;
    /// Makes a file as [`Files::create`] does, that is complete when [`Files::rename`], [`Files::rename_new`] or
    /// [`Files::rename_without`] gives it its name. Nothing else needs to see it before.
    fn create_unnamed(&self, path: &Path) -> io::Result<Box<dyn OpenFile>> {
        self.create(path)
    }
    /// Opens a file to be read.
    fn open(&self, path: &Path) -> io::Result<Box<dyn OpenFile>>;
    /// Gives a file another name in its folder, in place of the file that has that name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Gives a file a name in its folder that no file has; else it fails with [`ErrorKind::AlreadyExists`], where the disk can
    /// tell. Others replace the file, as [`Files::rename`] does.
    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.rename(from, to)
    }
    /// Gives a file its name, unless there is the file `other` just before it appears: then it fails with
    /// [`ErrorKind::AlreadyExists`].
    fn rename_without(&self, from: &Path, to: &Path, other: &Path) -> io::Result<()> {
        if self.exists(other)? {
            return Err(io::Error::new(ErrorKind::AlreadyExists, "the checkpoint is complete"));
        }
        self.rename(from, to)
    }
    /// Removes a file.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Makes a folder that does not exist yet.
    fn create_folder(&self, path: &Path) -> io::Result<()>;
    /// Makes a folder and those that it is in, if need be.
    fn create_folders(&self, path: &Path) -> io::Result<()>;
    /// Removes a folder with all that is in it.
    fn remove_folder(&self, path: &Path) -> io::Result<()>;
    /// Returns the names in a folder.
    fn names(&self, folder: &Path) -> io::Result<Vec<OsString>>;
    /// Returns whether there is a file.
    fn exists(&self, path: &Path) -> io::Result<bool>;
    /// Makes the names in a folder durable.
    fn flush_folder(&self, folder: &Path) -> io::Result<()>;
    /// Returns when a file was written.
    fn modified(&self, path: &Path) -> io::Result<SystemTime>;
    /// Returns the time that a file would get that is written now. It may jump, in either direction.
    fn now(&self) -> SystemTime;
    /// Returns true if a file that grows is written anew as a whole whenever it is flushed, so that it had better be small.
    fn grows_by_rewriting(&self) -> bool {
        false
    }
    /// Does `work` where waiting for the disk delays no task, to the end even if no caller waits for it any more, as long as
    /// the process runs.
    fn carry_out(&self, work: Work) -> Working;
}

/// An open file.
#[expect(clippy::missing_errors_doc, reason = "the trait says it of all")]
pub trait OpenFile: fmt::Debug + Send + Sync {
    /// Writes all of `bytes`.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Fills `buffer`. A disk whose requests take long may ask for what follows ahead of its time.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
    /// Fills `buffers`, one behind the other, with what begins at `offset`. A disk whose requests take long reads all by one request
    /// and nothing ahead.
    fn read_all_at(&self, buffers: &mut [&mut [u8]], mut offset: u64) -> io::Result<()> {
        for buffer in buffers {
            self.read_at(buffer, offset)?;
            offset += buffer.len() as u64;
        }
        Ok(())
    }

    /// Makes the contents durable.
    fn flush(&self) -> io::Result<()>;
    /// Returns the length.
    fn bytes(&self) -> io::Result<u64>;
}

/// The disk that files are on.
#[derive(Clone, Default)]
pub enum Disk {
    /// The system's file systems.
    #[default]
    System,
    /// Something else.
    Other(Arc<dyn Files>),
}

impl Disk {
    /// Runs `work` where waiting for the disk delays no task, to the end even if the future is dropped. On a
    /// single-threaded runtime, that of a test, the system's disk works at once, so that the order of events does not
    /// depend on it.
    ///
    /// # Panics
    /// If the work panics.
    pub async fn work<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, result) = oneshot::channel();
        // The caller may have stopped waiting for the result.
        self.carry_out(Box::new(move || drop(done.send(work())))).await;
        result.await.expect("disk work does not panic and is not cancelled")
    }
}

impl Deref for Disk {
    type Target = dyn Files;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::System => &System,
            Self::Other(files) => &**files,
        }
    }
}

impl PartialEq for Disk {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::System, Self::System) => true,
            (Self::Other(one), Self::Other(other)) => std::ptr::addr_eq(Arc::as_ptr(one), Arc::as_ptr(other)),
            _ => false,
        }
    }
}

impl Eq for Disk {}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::System => "System",
            Self::Other(_) => "Other",
        })
    }
}

/// A folder on a disk. As a path alone it is on the system's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Folder {
    disk: Disk,
    path: PathBuf,
}

impl Folder {
    /// Names a folder, which need not exist.
    #[must_use]
    pub fn new(disk: Disk, path: impl Into<PathBuf>) -> Self {
        Self { disk, path: path.into() }
    }

    /// Returns the folder `name` in this one.
    #[must_use]
    pub fn folder(&self, name: &str) -> Self {
        Self::new(self.disk.clone(), self.path.join(name))
    }

    /// Returns the disk that it is on.
    #[must_use]
    pub fn disk(&self) -> &Disk {
        &self.disk
    }
}

impl Deref for Folder {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.path
    }
}

impl AsRef<Path> for Folder {
    fn as_ref(&self) -> &Path {
        &self.path
    }
}

impl From<&Self> for Folder {
    fn from(folder: &Self) -> Self {
        folder.clone()
    }
}

impl From<PathBuf> for Folder {
    fn from(path: PathBuf) -> Self {
        Self::new(Disk::System, path)
    }
}

impl From<&Path> for Folder {
    fn from(path: &Path) -> Self {
        path.to_owned().into()
    }
}

impl From<&PathBuf> for Folder {
    fn from(path: &PathBuf) -> Self {
        path.clone().into()
    }
}

/// The system's file systems.
struct System;

impl Files for System {
    fn create(&self, path: &Path) -> io::Result<Box<dyn OpenFile>> {
        Ok(Box::new(OpenOptions::new().write(true).create_new(true).open(path)?))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn OpenFile>> {
        Ok(Box::new(File::open(path)?))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn create_folders(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir_all(path)
    }

    fn names(&self, folder: &Path) -> io::Result<Vec<OsString>> {
        fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name())).collect()
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        path.try_exists()
    }

    fn flush_folder(&self, folder: &Path) -> io::Result<()> {
        File::open(folder)?.sync_all()
    }

    fn modified(&self, path: &Path) -> io::Result<SystemTime> {
        fs::metadata(path)?.modified()
    }

    #[expect(clippy::disallowed_methods, reason = "others ask this one")]
    fn now(&self) -> SystemTime {
        SystemTime::now()
    }

    fn carry_out(&self, work: Work) -> Working {
        if Handle::current().runtime_flavor() == RuntimeFlavor::CurrentThread {
            work();
            return Box::pin(ready(()));
        }
        let working = tokio::task::spawn_blocking(work);
        Box::pin(async move { working.await.expect("disk work does not panic and is not cancelled") })
    }
}

impl OpenFile for File {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(bytes, offset)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_exact_at(buffer, offset)
    }

    fn flush(&self) -> io::Result<()> {
        self.sync_all()
    }

    fn bytes(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }
}

/// Returns the names in a folder, none if it does not exist.
pub(crate) fn names(disk: &Disk, folder: &Path) -> io::Result<Vec<OsString>> {
    match disk.names(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        names => names,
    }
}

/// Returns the contents of a small file, `None` if it does not exist.
pub(crate) fn read(disk: &Disk, path: &Path) -> io::Result<Option<Vec<u8>>> {
    let file = match disk.open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = vec![0; file.bytes()? as usize];
    file.read_at(&mut bytes, 0)?;
    Ok(Some(bytes))
}
