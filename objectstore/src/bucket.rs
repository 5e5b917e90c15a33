//! A bucket as a disk. An object appears as a whole, under its name: so a file lies in a [`Spool`] while it is written, and is
//! sent when it gets its name.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use futures::stream::{StreamExt as _, TryStreamExt as _};
use object_store::path::Path as Key;
use object_store::{Error, ObjectMeta, ObjectStore, ObjectStoreExt as _};
use parking_lot::Mutex;
use psjobs_ps::checkpoint::disk::{Files, OpenFile, Work, Working};

use crate::download::{Budget, Reading};
use crate::runtime::Requests;
use crate::spool::Spool;
use crate::upload::{self, Condition};

/// An object that says that a folder was begun. Folders are prefixes of names otherwise.
const BEGUN: &str = ".begun";

/// A bucket. Its paths begin with its URL, as `s3://bucket/folder/file`.
#[derive(Debug)]
pub struct Bucket {
    store: Arc<dyn ObjectStore>,
    /// The URL of the bucket, without a slash at its end.
    root: String,
    requests: Arc<Requests>,
    budget: Budget,
    /// Files that have no lasting name yet.
    unnamed: Mutex<BTreeMap<PathBuf, Arc<Spool>>>,
}

/// A file that gets its name later.
#[derive(Debug)]
struct Unnamed(Arc<Spool>);

/// A file that has its name, and grows: it is sent again when it is flushed.
#[derive(Debug)]
struct Growing {
    store: Arc<dyn ObjectStore>,
    requests: Arc<Requests>,
    key: Key,
    spool: Arc<Spool>,
}

impl Bucket {
    /// Describes the bucket of `store`, whose URL is `root`. Sends no request.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn new(store: Arc<dyn ObjectStore>, root: impl Into<String>) -> io::Result<Self> {
        Ok(Self {
            store,
            root: root.into(),
            requests: Arc::new(Requests::new()?),
            budget: Budget::default(),
            unnamed: Mutex::default(),
        })
    }

    fn key(&self, path: &Path) -> io::Result<Key> {
        let below = path.to_str().and_then(|path| path.strip_prefix(&self.root));
        let below = below.filter(|below| below.is_empty() || below.starts_with('/'));
        let wrong = |why: &str| io::Error::new(ErrorKind::InvalidInput, format!("{} {why}", path.display()));
        let below = below.ok_or_else(|| wrong(&format!("is not in {}", self.root)))?;
        Key::parse(below.trim_matches('/')).map_err(|error| wrong(&format!("is no name of an object: {error}")))
    }

    fn head(&self, path: &Path) -> io::Result<ObjectMeta> {
        let (store, key) = (self.store.clone(), self.key(path)?);
        self.requests.wait(async move {
            match store.head(&key).await {
                // A reply to HEAD has no body, so it does not say if the bucket or the object is missing.
                Err(Error::NotFound { .. }) => store.get(&key).await.map(|found| found.meta),
                found => found,
            }
        })
    }

    fn put(&self, path: &Path, spool: Arc<Spool>, condition: Condition) -> io::Result<()> {
        let (store, key) = (self.store.clone(), self.key(path)?);
        self.requests.wait(async move { upload::put(&*store, &key, &spool, &condition).await })
    }

    /// Gives a file that was made under no lasting name its name.
    fn name(&self, from: &Path, to: &Path, condition: Condition) -> io::Result<()> {
        let unnamed = self.unnamed.lock().remove(from);
        let missing = || io::Error::new(ErrorKind::NotFound, format!("{} was not made here", from.display()));
        self.put(to, unnamed.ok_or_else(missing)?, condition)
    }
}

impl Files for Bucket {
    fn create(&self, path: &Path) -> io::Result<Box<dyn OpenFile>> {
        let (spool, key) = (Arc::<Spool>::default(), self.key(path)?);
        self.put(path, spool.clone(), Condition::New)?;
        Ok(Box::new(Growing { store: self.store.clone(), requests: self.requests.clone(), key, spool }))
    }

    fn create_unnamed(&self, path: &Path) -> io::Result<Box<dyn OpenFile>> {
        self.key(path)?;
        let spool = Arc::<Spool>::default();
        self.unnamed.lock().insert(path.to_owned(), spool.clone());
        Ok(Box::new(Unnamed(spool)))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn OpenFile>> {
        let object = self.head(path)?;
        Ok(Box::new(Reading::new(self.store.clone(), self.requests.clone(), object, self.budget.clone())))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        if self.unnamed.lock().contains_key(from) {
            return self.name(from, to, Condition::Always);
        }
        let (store, from, to) = (self.store.clone(), self.key(from)?, self.key(to)?);
        self.requests.wait(async move {
            store.copy(&from, &to).await?;
            delete(&*store, &from).await
        })
    }

    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.name(from, to, Condition::New)
    }

    fn rename_without(&self, from: &Path, to: &Path, other: &Path) -> io::Result<()> {
        self.name(from, to, Condition::Without(self.key(other)?))
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        // One without a lasting name is in no store.
        if self.unnamed.lock().remove(path).is_some() || path.extension().is_some_and(|end| end == "tmp") {
            return Ok(());
        }
        let (store, key) = (self.store.clone(), self.key(path)?);
        self.requests.wait(async move { delete(&*store, &key).await })
    }

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        // Two processes that begin the same folder differ in what they write.
        let spool = Spool::default();
        spool.write_at(format!("{:?} {:?}\n", std::process::id(), SystemTime::now()).as_bytes(), 0)?;
        self.put(&path.join(BEGUN), spool.into(), Condition::New)
    }

    fn create_folders(&self, _: &Path) -> io::Result<()> {
        // A folder is there as soon as something is in it.
        Ok(())
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        let (store, key) = (self.store.clone(), self.key(path)?);
        self.requests.wait(async move {
            let objects = store.list(Some(&key)).map_ok(|object| object.location).boxed();
            let mut deleted = store.delete_stream(objects);
            while let Some(one) = deleted.next().await {
                match one {
                    // Another attempt, or another process, was before.
                    Err(Error::NotFound { .. }) => {}
                    one => drop(one?),
                }
            }
            // A store with folders, as Azure's with hierarchical names, has one left, which is empty.
            drop(store.delete(&key).await);
            Ok(())
        })
    }

    fn names(&self, folder: &Path) -> io::Result<Vec<OsString>> {
        let (store, key) = (self.store.clone(), self.key(folder)?);
        let found = self.requests.wait(async move { store.list_with_delimiter(Some(&key)).await });
        let found = found.map_err(|error| match error.kind() {
            // An empty folder has no names. What is missing is the bucket, which this store says in other words.
            ErrorKind::NotFound => io::Error::other(format!("{} is not there: {error}; create the bucket", self.root)),
            _ => error,
        })?;
        let objects = found.objects.iter().map(|object| &object.location);
        let paths = found.common_prefixes.iter().chain(objects);
        Ok(paths.filter_map(|path| path.filename().map(OsString::from)).collect())
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        match self.head(path) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn flush_folder(&self, _: &Path) -> io::Result<()> {
        // An object that was put is durable, with its name.
        Ok(())
    }

    fn modified(&self, path: &Path) -> io::Result<SystemTime> {
        self.head(path).map(|object| object.last_modified.into())
    }

    fn now(&self) -> SystemTime {
        SystemTime::now()
    }

    fn grows_by_rewriting(&self) -> bool {
        true
    }

    fn carry_out(&self, work: Work) -> Working {
        let working = tokio::task::spawn_blocking(work);
        Box::pin(async move { working.await.expect("work on the store does not panic and is not cancelled") })
    }
}

impl OpenFile for Unnamed {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_at(bytes, offset)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        read(&self.0, buffer, offset)
    }

    fn flush(&self) -> io::Result<()> {
        // It is sent when it gets its name.
        Ok(())
    }

    fn bytes(&self) -> io::Result<u64> {
        Ok(self.0.bytes())
    }
}

impl OpenFile for Growing {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.spool.write_at(bytes, offset)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        read(&self.spool, buffer, offset)
    }

    fn flush(&self) -> io::Result<()> {
        let (store, key, spool) = (self.store.clone(), self.key.clone(), self.spool.clone());
        self.requests.wait(async move { upload::put(&*store, &key, &spool, &Condition::Always).await })
    }

    fn bytes(&self) -> io::Result<u64> {
        Ok(self.spool.bytes())
    }
}

/// Deletes an object, which need not be there.
async fn delete(store: &dyn ObjectStore, key: &Key) -> object_store::Result<()> {
    match store.delete(key).await {
        Err(Error::NotFound { .. }) => Ok(()),
        deleted => deleted,
    }
}

fn read(spool: &Spool, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    let found = spool.read(offset, buffer.len() as u64)?;
    if found.len() < buffer.len() {
        return Err(io::Error::new(ErrorKind::UnexpectedEof, "the file ends before"));
    }
    buffer.copy_from_slice(&found);
    Ok(())
}
