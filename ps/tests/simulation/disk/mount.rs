//! The disk as one process sees it.

use std::ffi::OsString;
use std::fmt;
use std::future::ready;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::SystemTime;

use psjobs_ps::checkpoint::disk::{Files, OpenFile, Work, Working};

use super::{
    Content, Disk, DiskFault, EXISTS, FULL, Host, NO_ENTRY, NO_FOLDER, Node, Operation, Volume, error, lock, temporary,
};

/// The disk of one process.
pub struct Mount {
    pub disk: Disk,
    pub host: Host,
}

impl Mount {
    fn begin(&self, operation: Operation) -> io::Result<MutexGuard<'_, Volume>> {
        let mut volume = self.disk.volume();
        volume.begin(self.host, operation)?;
        Ok(volume)
    }

    fn opened(&self, content: Arc<Mutex<Content>>) -> Box<dyn OpenFile> {
        Box::new(Opened { mount: Self { disk: self.disk.clone(), host: self.host }, content })
    }
}

impl Files for Mount {
    fn create(&self, path: &Path) -> io::Result<Box<dyn OpenFile>> {
        let mut volume = self.begin(Operation::Change)?;
        volume.place(path)?;
        if volume.nodes.contains_key(path) {
            return Err(error(EXISTS));
        }
        let made = volume.made.entry(self.host).or_default();
        *made += 1;
        let (bytes, number, written) = (Vec::new(), *made, volume.now());
        let content = Arc::new(Mutex::new(Content { bytes, unflushed: Some(self.host), flushed: 0, number, written }));
        volume.change(self.host, vec![(path.to_owned(), Some(Node::File(content.clone())))]);
        Ok(self.opened(content))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn OpenFile>> {
        let content = self.begin(Operation::Open)?.file(path)?;
        Ok(self.opened(content))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut volume = self.begin(Operation::Rename)?;
        let content = volume.file(from)?;
        volume.place(to)?;
        volume.look_at_replacement(to);
        volume.change(self.host, vec![(from.to_owned(), None), (to.to_owned(), Some(Node::File(content)))]);
        Ok(())
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        let mut volume = self.begin(Operation::Change)?;
        volume.file(path)?;
        volume.look_at_removal(path);
        volume.change(self.host, vec![(path.to_owned(), None)]);
        Ok(())
    }

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        let mut volume = self.begin(Operation::Change)?;
        volume.place(path)?;
        if volume.nodes.contains_key(path) {
            return Err(error(EXISTS));
        }
        volume.change(self.host, vec![(path.to_owned(), Some(Node::Folder))]);
        Ok(())
    }

    fn create_folders(&self, path: &Path) -> io::Result<()> {
        let missing: Vec<PathBuf> = {
            let volume = self.begin(Operation::Look)?;
            path.ancestors().take_while(|path| !volume.nodes.contains_key(*path)).map(Path::to_owned).collect()
        };
        missing.iter().rev().try_for_each(|path| self.create_folder(path))
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        let names = self.names(path)?;
        for name in names {
            let path = path.join(name);
            let is_folder = matches!(self.disk.volume().nodes.get(&path), Some(Node::Folder));
            if is_folder { self.remove_folder(&path)? } else { self.remove_file(&path)? }
        }
        self.begin(Operation::Change)?.change(self.host, vec![(path.to_owned(), None)]);
        Ok(())
    }

    fn names(&self, folder: &Path) -> io::Result<Vec<OsString>> {
        let volume = self.begin(Operation::Look)?;
        match volume.nodes.get(folder) {
            Some(Node::Folder) => {}
            Some(Node::File(_)) => return Err(error(NO_FOLDER)),
            None => return Err(error(NO_ENTRY)),
        }
        let mut children = volume.children(folder);
        // The names of temporary files are random, and the order must be the same in every run.
        children.sort_by_key(|path| temporary(path));
        Ok(children.iter().filter_map(|path| path.file_name()).map(OsString::from).collect())
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        Ok(self.begin(Operation::Look)?.nodes.contains_key(path))
    }

    fn flush_folder(&self, folder: &Path) -> io::Result<()> {
        let mut volume = self.begin(Operation::FlushFolder)?;
        if !volume.nodes.contains_key(folder) {
            return Err(error(NO_ENTRY));
        }
        volume.changes.retain(|change| change.folder != folder);
        Ok(())
    }

    fn modified(&self, path: &Path) -> io::Result<SystemTime> {
        let content = self.begin(Operation::Look)?.file(path)?;
        let content = lock(&content);
        Ok(content.written)
    }

    fn now(&self) -> SystemTime {
        self.disk.volume().now()
    }

    fn carry_out(&self, work: Work) -> Working {
        let [before, after] = self.disk.volume().delays(self.host);
        if before.is_zero() {
            work();
            return Box::pin(ready(()));
        }
        let working = tokio::spawn(async move {
            tokio::time::sleep(before).await;
            work();
            tokio::time::sleep(after).await;
        });
        Box::pin(async move { working.await.expect("disk work does not panic") })
    }
}

/// A file that a process has open.
struct Opened {
    mount: Mount,
    content: Arc<Mutex<Content>>,
}

impl OpenFile for Opened {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let volume = self.mount.begin(Operation::Write)?;
        let full = volume.faults_of(self.mount.host).any(|fault| fault == DiskFault::Full);
        let taken = if full { &bytes[..bytes.len() / 2] } else { bytes };
        let (mut content, offset) = (lock(&self.content), offset as usize);
        let length = content.bytes.len().max(offset + taken.len());
        content.bytes.resize(length, 0);
        content.bytes[offset..][..taken.len()].copy_from_slice(taken);
        content.unflushed = Some(self.mount.host);
        content.flushed = content.flushed.min(offset);
        if full { Err(error(FULL)) } else { Ok(()) }
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        drop(self.mount.begin(Operation::Read)?);
        let (content, offset) = (lock(&self.content), offset as usize);
        let found = content.bytes.get(offset..offset + buffer.len());
        buffer.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        drop(self.mount.begin(Operation::Flush)?);
        let mut content = lock(&self.content);
        (content.unflushed, content.flushed) = (None, content.bytes.len());
        Ok(())
    }

    fn bytes(&self) -> io::Result<u64> {
        drop(self.mount.begin(Operation::Read)?);
        Ok(lock(&self.content).bytes.len() as u64)
    }
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Opened")
    }
}
