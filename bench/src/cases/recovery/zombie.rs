//! One of two servers that hold all parameters is replaced and lives on, as where a node loses its kubelet: its name leads
//! to the successor, and the old process keeps all its connections, those of the trainer among them.

use std::fs::{self, File};
use std::time::Instant;

use anyhow::{Context as _, ensure};
use psjobs_api::env::PSJOB_INCARNATION;
use psjobs_ps::client::SessionConfig;
use psjobs_ps::network::Network;

use super::running::{Running, job};
use super::{AFTER, BEFORE, Figure, SILENT, TIMEOUT};
use crate::names::Names;
use crate::processes::{Job, Process};

/// The names that the job's processes know its servers by.
const NAMES: [&str; 2] = ["ps-0:29500", "ps-1:29500"];

/// Seconds from the moment at which the successor of server `victim` listens until the old process has stood down and
/// the next step is done without it, and the limit.
pub fn measure(megabytes: u32, victim: usize) -> anyhow::Result<Figure> {
    let folder = tempfile::tempdir().context("no temporary folder")?;
    let names = Names::new(folder.path());
    let job = job(NAMES.map(str::to_owned).to_vec(), megabytes);
    let log = folder.path().join("log");
    let start = |job: &Job, index: usize, incarnation: u32| {
        let mut command = job.command(index as u32, &[])?;
        command.arg("--names").arg(folder.path()).env(PSJOB_INCARNATION, incarnation.to_string());
        if index == victim && incarnation == 0 {
            command.stderr(File::create(&log).context("cannot write to a temporary folder")?);
        }
        Process::listening(&mut command)
    };
    let (mut servers, mut addresses) = (Vec::new(), Vec::new());
    for (index, name) in NAMES.into_iter().enumerate() {
        let (server, address) = start(&job, index, 0)?;
        names.lead(name, &address)?;
        servers.push(server);
        addresses.push(address);
    }
    let mut running = Running::new(job, servers)?;
    let network = Network::Other(std::sync::Arc::new(names.clone()));
    // Different machines share no memory.
    let mut session = running.join(SessionConfig { network, shared_memory: false, ..running.job.session(0) })?;
    running.steps(&mut session, 0, BEFORE)?;
    running.wait_for_copies(&addresses[1 - victim])?;

    let (successor, address) = start(&running.job, victim, 1)?;
    let listened = Instant::now();
    names.lead(NAMES[victim], &address)?;
    let mut old = std::mem::replace(&mut running.servers[victim], successor);
    let mut step = BEFORE;
    let seconds = loop {
        let had_ended = old.has_ended()?;
        running.steps(&mut session, step, step + 1)?;
        step += 1;
        if had_ended {
            break listened.elapsed().as_secs_f64();
        }
        ensure!(
            listened.elapsed() < TIMEOUT,
            "server {victim} was replaced {} s ago and still runs",
            TIMEOUT.as_secs()
        );
    };
    let said = fs::read_to_string(&log).context("cannot read the log of a server")?;
    ensure!(said.contains("was replaced by incarnation 1"), "server {victim} ended otherwise: {}", said.trim());
    running.steps(&mut session, step, step + AFTER)?;
    running.finish(session, step + AFTER)?;
    Ok((seconds, SILENT))
}
