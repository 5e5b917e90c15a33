//! The only server is killed, and its successor goes on from a checkpoint.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use psjobs_ps::checkpoint::{CheckpointId, Runs};

use super::running::{Running, job};
use super::{Figure, TIMEOUT};
use crate::processes::free_addresses;

/// Seconds from the start of a server's successor to the next step done, and of reading as many bytes.
pub fn measure(megabytes: u32) -> anyhow::Result<Figure> {
    let folder = tempfile::tempdir().context("no temporary folder")?;
    let job = job(free_addresses("127.0.0.1", 1)?, megabytes).checkpointed(folder.path());
    let servers = job.start()?;
    let mut running = Running::new(job, servers)?;
    let mut session = running.join(running.job.session(0))?;
    let mut step = 0;
    let started = Instant::now();
    let kept = loop {
        running.steps(&mut session, step, step + 1)?;
        step = session.next_step();
        if let Some(kept) = newest(folder.path())? {
            break kept;
        }
        ensure!(started.elapsed() < TIMEOUT, "no checkpoint was written");
    };
    let part = Runs::new(folder.path()).path(kept).join("ps-00000-of-00001.safetensors");
    let reading = Instant::now();
    let bytes = std::fs::read(&part).with_context(|| format!("cannot read {}", part.display()))?.len();
    let limit = reading.elapsed().as_secs_f64();
    ensure!(bytes >= megabytes as usize * 1_000_000, "the checkpoint holds {bytes} bytes only");
    running.servers[0].kill()?;
    let start = Instant::now();
    running.servers[0] = running.job.server(0)?;
    let until = session.next_step() + 2;
    // Back at the checkpoint, then a step.
    let at = session.exchange(session.next_step())?;
    session.exchange(at)?;
    let seconds = start.elapsed().as_secs_f64();
    running.steps(&mut session, at + 1, until)?;
    running.finish(session, until)?;
    Ok((seconds, limit))
}

/// Returns the newest complete checkpoint of the newest run in a folder.
fn newest(folder: &Path) -> anyhow::Result<Option<CheckpointId>> {
    let runs = Runs::new(folder);
    let Some(run) = runs.list()?.last().map(|record| record.run) else { return Ok(None) };
    let newest = runs.catalog(run).complete()?.last().copied();
    Ok(newest.map(|step| CheckpointId { run, step }))
}
