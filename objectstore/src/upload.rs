//! Sends a file: at once, or in parts of which some are under way at the same time. No reader sees it before it is complete.

use std::sync::Arc;
use std::time::Duration;

use futures::stream::{FuturesUnordered, StreamExt as _};
use object_store::path::Path;
use object_store::{MultipartUpload, ObjectStore, ObjectStoreExt as _, PutMode, PutOptions, PutPayload, Result};

use crate::spool::Spool;

/// Bytes of a part. S3 takes at least 5 MiB.
const PART: u64 = 8 << 20;
/// The most parts; S3 takes 10,000.
const PARTS: u64 = 9_000;
/// Bytes that are under way at the same time, at most: so much memory an upload takes, or two parts.
const UNDER_WAY: u64 = 48 << 20;

/// Attempts to put a new object, and the pause after the first one; later ones are longer.
const ATTEMPTS: u32 = 5;
const PAUSE: Duration = Duration::from_millis(200);

/// The condition under which a file is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// None: an object of the name is replaced.
    Always,
    /// No object has the name. A file larger than a part cannot ask for it.
    New,
    /// There is no object of this other name just before the file appears.
    Without(Path),
}

/// Sends `spool`.
///
/// # Errors
/// The store may fail; [`object_store::Error::AlreadyExists`] says that the condition does not hold.
pub async fn put(store: &dyn ObjectStore, key: &Path, spool: &Arc<Spool>, condition: &Condition) -> Result<()> {
    let bytes = spool.bytes();
    match condition {
        Condition::New if bytes > PART => {
            let source = "only a small object can be put on the condition that it is new".into();
            Err(object_store::Error::NotSupported { source })
        }
        Condition::New => put_new(store, key, read(spool, 0, bytes)?).await,
        _ if bytes > PART => put_parts(store, key, spool, condition).await,
        _ => {
            check(store, condition).await?;
            store.put(key, PutPayload::from(read(spool, 0, bytes)?)).await.map(drop)
        }
    }
}

/// Says if the other object of a condition is not there.
async fn check(store: &dyn ObjectStore, condition: &Condition) -> Result<()> {
    let Condition::Without(other) = condition else { return Ok(()) };
    match store.head(other).await {
        Ok(_) => Err(object_store::Error::AlreadyExists { path: other.to_string(), source: "it is complete".into() }),
        Err(object_store::Error::NotFound { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

async fn put_new(store: &dyn ObjectStore, key: &Path, content: bytes::Bytes) -> Result<()> {
    let mut attempts = 0;
    loop {
        attempts += 1;
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        let error = match store.put_opts(key, PutPayload::from(content.clone()), options).await {
            // The client sends such a request once: after a broken connection it does not know if the store has it.
            Err(error @ (object_store::Error::AlreadyExists { .. } | object_store::Error::Generic { .. })) => error,
            done => return done.map(drop),
        };
        let found = async { store.get(key).await?.bytes().await };
        match found.await {
            Ok(found) if found == content => return Ok(()),
            Err(object_store::Error::NotFound { .. }) if attempts < ATTEMPTS => {
                tokio::time::sleep(PAUSE * attempts).await;
            }
            _ => return Err(error),
        }
    }
}

async fn put_parts(store: &dyn ObjectStore, key: &Path, spool: &Arc<Spool>, condition: &Condition) -> Result<()> {
    let before = tag(store, key).await;
    let mut upload = store.put_multipart(key).await?;
    let sent = match send_parts(&mut *upload, spool, part_bytes(spool.bytes())).await {
        Ok(()) => check(store, condition).await,
        failed => failed,
    };
    if let Err(error) = sent {
        // The store removes it at some later time, if a rule of the bucket says so.
        drop(upload.abort().await);
        return Err(error);
    }
    let Err(error) = upload.complete().await else { return Ok(()) };
    // The reply to the first attempt may have been lost: then another attempt finds no upload, and the object is there.
    match store.head(key).await {
        Ok(found) if found.size == spool.bytes() && found.e_tag.is_some() && found.e_tag != before => Ok(()),
        _ => {
            drop(upload.abort().await);
            Err(error)
        }
    }
}

/// Returns the version of an object, if there is one.
async fn tag(store: &dyn ObjectStore, key: &Path) -> Option<String> {
    store.head(key).await.ok()?.e_tag
}

async fn send_parts(upload: &mut dyn MultipartUpload, spool: &Arc<Spool>, part: u64) -> Result<()> {
    let bytes = spool.bytes();
    let mut under_way = FuturesUnordered::new();
    let mut offset = 0;
    while offset < bytes {
        if under_way.len() as u64 >= (UNDER_WAY / part).max(2)
            && let Some(sent) = under_way.next().await
        {
            let () = sent?;
        }
        let content = read(spool, offset, part)?;
        offset += content.len() as u64;
        under_way.push(upload.put_part(PutPayload::from(content)));
    }
    while let Some(sent) = under_way.next().await {
        let () = sent?;
    }
    Ok(())
}

/// Returns the size of the parts of a file of so many bytes.
fn part_bytes(bytes: u64) -> u64 {
    PART.max(bytes.div_ceil(PARTS))
}

fn read(spool: &Spool, offset: u64, length: u64) -> Result<bytes::Bytes> {
    spool
        .read(offset, length)
        .map_err(|error| object_store::Error::Generic { store: "temporary file", source: error.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_any_size_has_as_many_parts_as_a_store_takes() {
        for (bytes, part) in [(PART + 1, PART), (1 << 30, PART), (1 << 40, (1_u64 << 40).div_ceil(PARTS))] {
            assert_eq!(part_bytes(bytes), part);
            assert!(bytes.div_ceil(part_bytes(bytes)) <= PARTS);
        }
    }
}
