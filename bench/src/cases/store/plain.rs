//! A client of the library that the servers have, which puts and gets one object in parts and does nothing else.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path;
use object_store::{GetOptions, ObjectStore as _, ObjectStoreExt as _};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

use crate::store::{BUCKET, KEY, REGION, SECRET, Store};

/// Bytes of a part, and how many of them are under way at once: those of the servers (`objectstore/src/upload.rs`).
const PART: u64 = 8 << 20;
const AT_ONCE: usize = 6;
/// Threads, as many as a server has for its requests.
const THREADS: usize = 2;
/// The object.
const NAME: &str = "plain";

#[derive(Debug)]
pub struct Plain {
    store: Arc<AmazonS3>,
    runtime: Runtime,
}

impl Plain {
    pub fn new(store: &Store) -> anyhow::Result<Self> {
        // The client asks for a cryptography, also where it encrypts nothing. One may have been chosen.
        drop(psjobs_ps::tls::cryptography());
        let builder = AmazonS3Builder::new().with_endpoint(store.endpoint()).with_allow_http(true).with_region(REGION);
        let builder = builder.with_access_key_id(KEY).with_secret_access_key(SECRET).with_bucket_name(BUCKET);
        let runtime = Builder::new_multi_thread().worker_threads(THREADS).enable_all().build();
        Ok(Self {
            store: Arc::new(builder.build().context("cannot make a client of the store")?),
            runtime: runtime.context("cannot start a runtime")?,
        })
    }

    /// Returns the seconds that a put in parts takes.
    pub fn put(&self, content: &Bytes) -> anyhow::Result<f64> {
        // This waits for earlier writes, which would slow it down.
        rustix::fs::sync();
        let start = Instant::now();
        let put: anyhow::Result<()> = self.runtime.block_on(async {
            let mut upload = self.store.put_multipart(&Path::from(NAME)).await?;
            let mut under_way: JoinSet<object_store::Result<()>> = JoinSet::new();
            for range in ranges(content.len() as u64) {
                if under_way.len() >= AT_ONCE
                    && let Some(sent) = under_way.join_next().await
                {
                    sent??;
                }
                let part = content.slice(range.start as usize..range.end as usize);
                under_way.spawn(upload.put_part(part.into()));
            }
            while let Some(sent) = under_way.join_next().await {
                sent??;
            }
            upload.complete().await?;
            Ok(())
        });
        put.context("a plain put failed")?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Returns the seconds that a get of the object, which has so many bytes, takes.
    pub fn get(&self, bytes: u64) -> anyhow::Result<f64> {
        rustix::fs::sync();
        let start = Instant::now();
        let got: anyhow::Result<u64> = self.runtime.block_on(async {
            let mut received = 0;
            let mut under_way: JoinSet<object_store::Result<u64>> = JoinSet::new();
            for range in ranges(bytes) {
                if under_way.len() >= AT_ONCE
                    && let Some(came) = under_way.join_next().await
                {
                    received += came??;
                }
                let store = self.store.clone();
                under_way.spawn(async move {
                    let options = GetOptions { range: Some(range.into()), ..GetOptions::default() };
                    let part = store.get_opts(&Path::from(NAME), options).await?.bytes().await?;
                    Ok(part.len() as u64)
                });
            }
            while let Some(came) = under_way.join_next().await {
                received += came??;
            }
            Ok(received)
        });
        let received = got.context("a plain get failed")?;
        ensure!(received == bytes, "the store has sent {received} of {bytes} bytes");
        Ok(start.elapsed().as_secs_f64())
    }
}

/// Returns the ranges of the parts of so many bytes.
fn ranges(bytes: u64) -> impl Iterator<Item = std::ops::Range<u64>> {
    (0..bytes.div_ceil(PART)).map(move |part| part * PART..bytes.min((part + 1) * PART))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_all_bytes_once() {
        for bytes in [0, 1, PART, PART + 1, 3 * PART] {
            let all: Vec<_> = ranges(bytes).collect();
            assert_eq!(all.iter().map(|range| range.end - range.start).sum::<u64>(), bytes);
            assert!(all.windows(2).all(|pair| pair[0].end == pair[1].start), "{all:?}");
            assert!(all.iter().all(|range| range.end - range.start <= PART));
        }
    }
}
