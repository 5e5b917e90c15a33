//! Objects that are read by ranges of bytes: the data sets of trainers. An object that changes between two requests is an
//! error, and no mixture.

use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::stream::TryStreamExt as _;
use object_store::path::Path as Key;
use object_store::{Error, GetOptions, ObjectMeta, ObjectStore, ObjectStoreExt as _};

use crate::runtime::Requests;

/// Requests for the same bytes. The client repeats what the store refuses for now; these are for replies that break off.
const ATTEMPTS: u32 = 5;
/// Time before the second request; it doubles with each.
const PAUSE: Duration = Duration::from_millis(200);

/// The objects of a folder in a bucket.
#[derive(Debug)]
pub struct Objects {
    store: Arc<dyn ObjectStore>,
    requests: Requests,
    folder: Key,
    url: String,
}

/// An object as it was listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// Its name below the folder.
    pub name: String,
    pub bytes: u64,
    /// The store's tag of this content, without quotes, where it gives one.
    pub tag: Option<String>,
    key: Key,
}

/// The bytes of an object could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    /// The object is another one than when it was listed, or gone.
    #[error("the object has changed")]
    Changed,
    #[error(transparent)]
    Store(#[from] io::Error),
}

impl Objects {
    /// Describes the folder of `store` at `url`. Sends no request.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn new(store: Arc<dyn ObjectStore>, folder: Key, url: String) -> io::Result<Self> {
        Ok(Self { store, requests: Requests::new()?, folder, url })
    }

    /// The URL of the folder.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Lists all objects below the folder, in no order; or the one object that the URL names.
    ///
    /// # Errors
    /// If the store does not answer or refuses.
    pub fn list(&self) -> io::Result<Vec<Object>> {
        let (store, folder) = (self.store.clone(), self.folder.clone());
        let found = self.requests.wait(async move {
            let below: Vec<ObjectMeta> = store.list(Some(&folder)).try_collect().await?;
            if !below.is_empty() || folder.as_ref().is_empty() {
                return Ok(below);
            }
            match store.head(&folder).await {
                Ok(one) => Ok(vec![one]),
                Err(Error::NotFound { .. }) => Ok(below),
                Err(error) => Err(error),
            }
        })?;
        Ok(found.into_iter().map(|object| self.object(object)).collect())
    }

    fn object(&self, object: ObjectMeta) -> Object {
        let (full, folder) = (object.location.as_ref(), self.folder.as_ref());
        let below = full.strip_prefix(folder).unwrap_or(full).trim_start_matches('/');
        // The URL may name the object itself.
        let name = if below.is_empty() { object.location.filename().unwrap_or(full) } else { below };
        Object { name: name.to_owned(), bytes: object.size, tag: tag(object.e_tag), key: object.location.clone() }
    }

    /// Reads bytes of an object that was listed. A reply that breaks off is asked for again.
    ///
    /// # Errors
    /// If the object has changed, or the store does not answer or refuses.
    pub fn read(&self, object: &Object, range: Range<u64>) -> Result<Bytes, ObjectError> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        let length = range.end - range.start;
        let (store, wanted) = (self.store.clone(), object.clone());
        let read = self.requests.wait(async move { get(&*store, &wanted, range).await });
        let (bytes, found) = match read {
            Ok(read) => read,
            Err(error) if error.kind() == ErrorKind::NotFound || self.has_changed(object) => {
                return Err(ObjectError::Changed);
            }
            Err(error) => return Err(error.into()),
        };
        if differs(object, &found) {
            return Err(ObjectError::Changed);
        }
        match bytes.len() as u64 == length {
            true => Ok(bytes),
            false => Err(io::Error::other(format!("the store has sent {} of {length} bytes", bytes.len())).into()),
        }
    }

    /// Returns true if the store says that the object is another one. A range beyond a shorter object is refused in words
    /// that differ between stores.
    fn has_changed(&self, object: &Object) -> bool {
        let (store, key) = (self.store.clone(), object.key.clone());
        let now = self.requests.wait(async move { store.head(&key).await });
        now.is_ok_and(|now| differs(object, &now))
    }
}

async fn get(store: &dyn ObjectStore, object: &Object, range: Range<u64>) -> object_store::Result<(Bytes, ObjectMeta)> {
    let mut pause = PAUSE;
    for _ in 1..ATTEMPTS {
        match get_once(store, &object.key, range.clone()).await {
            Err(error @ Error::Generic { .. }) => {
                // No attempt can read these bytes if the object is shorter now.
                if store.head(&object.key).await.is_ok_and(|now| differs(object, &now)) {
                    return Err(error);
                }
            }
            read => return read,
        }
        tokio::time::sleep(pause).await;
        pause *= 2;
    }
    get_once(store, &object.key, range).await
}

async fn get_once(store: &dyn ObjectStore, key: &Key, range: Range<u64>) -> object_store::Result<(Bytes, ObjectMeta)> {
    let options = GetOptions { range: Some(range.into()), ..GetOptions::default() };
    let reply = store.get_opts(key, options).await?;
    let object = reply.meta.clone();
    Ok((reply.bytes().await?, object))
}

/// Returns the tag as all replies have it: some stores quote it in one reply and not in another.
fn tag(tag: Option<String>) -> Option<String> {
    tag.map(|tag| tag.trim_start_matches("W/").trim_matches('"').to_owned())
}

fn differs(object: &Object, now: &ObjectMeta) -> bool {
    let tags = object.tag.as_ref().zip(tag(now.e_tag.clone()));
    object.bytes != now.size || tags.is_some_and(|(listed, now)| *listed != now)
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;

    use super::*;

    fn objects(url: &str, written: &[(&str, &'static str)]) -> Objects {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let folder = Key::parse(url.trim_start_matches("s3://b").trim_matches('/')).expect("a name");
        let objects = Objects::new(store, folder, url.to_owned()).expect("threads");
        for &(key, text) in written {
            write(&objects, key, text);
        }
        objects
    }

    fn write(objects: &Objects, key: &str, text: &'static str) {
        let (store, key) = (objects.store.clone(), Key::from(key));
        objects.requests.wait(async move { store.put(&key, text.into()).await }).expect("writes");
    }

    #[test]
    fn objects_are_listed_by_their_names_below_the_folder() {
        let written = [("d/a/1.png", "one"), ("d/b.csv", "two"), ("dd/c", "three")];
        let listed = |url: &str| {
            let mut names: Vec<_> =
                objects(url, &written).list().expect("lists").into_iter().map(|object| object.name).collect();
            names.sort();
            names
        };
        assert_eq!(listed("s3://b/d"), ["a/1.png", "b.csv"]);
        assert_eq!(listed("s3://b"), ["d/a/1.png", "d/b.csv", "dd/c"]);
        assert_eq!(listed("s3://b/dd/c"), ["c"]);
        assert!(listed("s3://b/none").is_empty());
    }

    #[test]
    fn ranges_are_read_until_the_object_changes() {
        let objects = objects("s3://b/d", &[("d/x", "0123456789")]);
        let listed = objects.list().expect("lists").remove(0);
        assert_eq!(objects.read(&listed, 2..5).expect("reads"), "234");
        assert_eq!(objects.read(&listed, 3..3).expect("reads"), "");
        for other in ["9876543210", "0"] {
            write(&objects, "d/x", other);
            let error = objects.read(&listed, 2..5).expect_err("it is another one");
            assert!(matches!(error, ObjectError::Changed), "{other}: {error}");
        }
    }
}
