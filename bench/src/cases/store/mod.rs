//! How fast checkpoints get into an object store and back, and what that costs a server: against a client of the same library
//! that puts and gets the same bytes in the same parts, and does nothing else.

mod kept;
mod plain;

use std::fs;

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use clap::Args;

use self::kept::Kept;
use self::plain::Plain;
use crate::report::{Case, LeftOut, Line, say};
use crate::store::{self, Store};

/// MB/s of checkpoints in an object store, over a plain put and get
///
/// The store is versitygw, which plays S3, as a process of this machine. In `put` a server that was told to stop uploads its
/// part of the last checkpoint, and the time is from the begin of the upload until the object is there (limit: a plain put of
/// the same bytes in parts of the same size, as many of them at once). In `get` a server goes on from it, and the time is from
/// when it listens until it has the state (limit: a plain get of the same bytes). `memory` is how much more resident memory the
/// server has at most after SIGTERM than with its checkpoints on a volume (limit: 64 MiB), `sigterm` the time from SIGTERM until
/// the checkpoint is complete in the bucket (limit: 10 s for each GB), and `end` the time until the server ends, which has put the
/// model into the bucket, too, because all trainers have left (the same limit).
///
/// PSJOBS_OBJECT_STORES names the folder with versitygw, which scripts/object-stores.sh prints. Without it all cases are left out.
#[derive(Debug, Args)]
pub struct StoreArgs {
    /// Size of the parameters in MB (10^6 bytes of f32)
    #[arg(long, value_name = "MB", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(50..=10_000))]
    megabytes: u32,
}

/// The cases.
const PUT: &str = "put";
const GET: &str = "get";
const MEMORY: &str = "memory";
const SIGTERM: &str = "sigterm";
const END: &str = "end";
/// More memory that an upload may take, in MiB.
const MORE_MEMORY: f64 = 64.0;
/// Seconds from SIGTERM until a server with 1 GB has done what it has to do.
const TO_THE_END: f64 = 10.0;

/// The measurements of a run.
#[derive(Debug)]
struct Seen {
    /// MB/s of a server and of a plain client.
    put: [f64; 2],
    get: [f64; 2],
    /// MiB.
    memory: f64,
    /// Seconds.
    sigterm: f64,
    end: f64,
}

impl StoreArgs {
    pub fn measure(&self, runs: u32) -> anyhow::Result<Vec<Line>> {
        if let Err(left_out) = store::program() {
            let line = |case| Line::LeftOut(LeftOut { bench: "store", case, left_out: left_out.clone() });
            return Ok([PUT, GET, MEMORY, SIGTERM, END].map(line).into());
        }
        let mut all = Vec::new();
        for run in 1..=runs {
            say(&format!("store: run {run} of {runs}"));
            all.push(self.run()?);
        }
        let values = |value: fn(&Seen) -> f64| all.iter().map(value).collect::<Vec<_>>();
        let case =
            |name, unit, values: &[f64], limits: &[f64]| Line::from(Case::new("store", name, unit, values, limits));
        let to_the_end = TO_THE_END * f64::from(self.megabytes) / 1e3;
        Ok(vec![
            case(PUT, "MB/s", &values(|seen| seen.put[0]), &values(|seen| seen.put[1])),
            case(GET, "MB/s", &values(|seen| seen.get[0]), &values(|seen| seen.get[1])),
            case(MEMORY, "MiB", &values(|seen| seen.memory), &[MORE_MEMORY]),
            case(SIGTERM, "s", &values(|seen| seen.sigterm), &[to_the_end]),
            case(END, "s", &values(|seen| seen.end), &[to_the_end]),
        ])
    }

    /// Each run has a store of its own, so that none finds what an earlier one has left.
    fn run(&self) -> anyhow::Result<Seen> {
        let store = Store::start()?;
        let kept = Kept::in_bucket(&store, self.megabytes)?;
        let stopped = kept.stop()?;
        let part = kept.part()?;
        let content = Bytes::from(fs::read(&part).with_context(|| format!("cannot read {}", part.display()))?);
        let bytes = content.len() as u64;
        ensure!(bytes >= u64::from(self.megabytes) * 1_000_000, "the checkpoint holds {bytes} bytes only");
        let upload = stopped.upload.context("the upload was over before it was seen; give more --megabytes")?;
        let plain = Plain::new(&store)?;
        let plain_put = plain.put(&content)?;
        drop(content);
        let resumed = kept.resume()?;
        let plain_get = plain.get(bytes)?;
        let folder = tempfile::tempdir().context("no temporary folder")?;
        let on_volume = Kept::on_volume(folder.path(), self.megabytes)?.stop()?;
        let rate = |seconds: f64| bytes as f64 / 1e6 / seconds;
        Ok(Seen {
            put: [rate(upload), rate(plain_put)],
            get: [rate(resumed), rate(plain_get)],
            memory: (stopped.most as f64 - on_volume.most as f64) / f64::from(1 << 20),
            sigterm: stopped.durable.context("no manifest of a new checkpoint was seen")?,
            end: stopped.seconds,
        })
    }
}
