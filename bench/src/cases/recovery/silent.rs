//! The machine of one of two servers that hold all parameters vanishes without a word: nothing closes its connections,
//! nothing refuses new ones, and no successor starts.

use std::time::Instant;

use psjobs_api::DEFAULT_PORT;
use psjobs_ps::client::SessionConfig;

use super::running::{Running, job};
use super::{AFTER, BEFORE, Figure, SILENT};
use crate::namespace::OtherMachine;
use crate::processes::{Process, free_addresses};
use crate::report::median;

/// Seconds from the end of the machine of server `victim` to the next step done, and the limit: 10 s and an undisturbed
/// step.
pub fn measure(megabytes: u32, victim: usize) -> anyhow::Result<Figure> {
    let machine = OtherMachine::make()?;
    // The trainer and the other server are on this machine.
    let mut addresses = free_addresses(&machine.here().to_string(), 1)?;
    addresses.insert(victim, format!("{}:{DEFAULT_PORT}", machine.there()));
    let job = job(addresses, megabytes);
    let enter = machine.enter();
    let start = |index: u32| {
        let through = if index as usize == victim { &enter[..] } else { &[] };
        Process::start(&mut job.command(index, through)?)
    };
    let servers = vec![start(0)?, start(1)?];
    let mut running = Running::new(job, servers)?;
    // Different machines share no memory.
    let config = SessionConfig { shared_memory: false, ..running.job.session(0) };
    let mut session = running.join(config)?;
    running.steps(&mut session, 0, BEFORE)?;
    running.wait_for_copies(&running.job.environment.servers[1 - victim])?;
    let undisturbed = running.steps(&mut session, BEFORE, 2 * BEFORE)?;
    let vanished = Instant::now();
    machine.vanish()?;
    // Its process is gone, too, and its kernel cannot report that.
    running.servers[victim].kill()?;
    running.steps(&mut session, 2 * BEFORE, 2 * BEFORE + 1)?;
    let seconds = vanished.elapsed().as_secs_f64();
    running.steps(&mut session, 2 * BEFORE + 1, 2 * BEFORE + AFTER)?;
    running.finish(session, 2 * BEFORE + AFTER)?;
    Ok((seconds, SILENT + median(&undisturbed)))
}
