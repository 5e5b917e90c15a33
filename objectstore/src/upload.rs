//! Sends a file: at once, or in parts of which some are under way at the same time. Nobody sees it before it is complete.

use std::sync::Arc;

use futures::stream::{FuturesUnordered, StreamExt as _};
use object_store::path::Path;
use object_store::{MultipartUpload, ObjectStore, ObjectStoreExt as _, PutMode, PutOptions, PutPayload};

use crate::spool::Spool;

/// Bytes of a part. S3 takes at least 5 MiB.
const PART: u64 = 8 << 20;
/// The most parts; S3 takes 10,000.
const PARTS: u64 = 9_000;
/// Bytes that are under way at the same time, at most: so much memory an upload takes, or two parts.
const UNDER_WAY: u64 = 48 << 20;

/// Sends `spool`; with `new` only if there is no such object, which a file larger than a part cannot ask for.
pub async fn put(store: &dyn ObjectStore, key: &Path, spool: &Arc<Spool>, new: bool) -> object_store::Result<()> {
    let bytes = spool.bytes();
    if bytes > PART {
        if new {
            let source = "only a small object can be put on the condition that it is new".into();
            return Err(object_store::Error::NotSupported { source });
        }
        return put_parts(store, key, spool, part_bytes(bytes)).await;
    }
    let content = read(spool, 0, bytes)?;
    let mode = if new { PutMode::Create } else { PutMode::Overwrite };
    let options = PutOptions { mode, ..PutOptions::default() };
    match store.put_opts(key, PutPayload::from(content.clone()), options).await {
        // The answer to the first attempt may have been lost.
        Err(object_store::Error::AlreadyExists { path, source }) if new => {
            let found = store.get(key).await?.bytes().await?;
            if found == content { Ok(()) } else { Err(object_store::Error::AlreadyExists { path, source }) }
        }
        done => done.map(drop),
    }
}

async fn put_parts(store: &dyn ObjectStore, key: &Path, spool: &Arc<Spool>, part: u64) -> object_store::Result<()> {
    let mut upload = store.put_multipart(key).await?;
    let sent = send_parts(&mut *upload, spool, part).await;
    if let Err(error) = sent {
        // The store removes it at some later time, if a rule of the bucket says so.
        drop(upload.abort().await);
        return Err(error);
    }
    Ok(())
}

async fn send_parts(upload: &mut dyn MultipartUpload, spool: &Arc<Spool>, part: u64) -> object_store::Result<()> {
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
    upload.complete().await.map(drop)
}

/// Returns the size of the parts of a file of so many bytes.
fn part_bytes(bytes: u64) -> u64 {
    PART.max(bytes.div_ceil(PARTS))
}

fn read(spool: &Spool, offset: u64, length: u64) -> object_store::Result<bytes::Bytes> {
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
