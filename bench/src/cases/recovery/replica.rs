//! One of two servers that hold all parameters is killed: its connections are closed at once.

use super::running::{Running, job};
use super::{AFTER, BEFORE, Figure};
use crate::processes::free_addresses;
use crate::report::median;

/// Seconds from the kill of server `victim` to the next step done, and of an undisturbed step.
pub fn measure(megabytes: u32, victim: usize) -> anyhow::Result<Figure> {
    let job = job(free_addresses("127.0.0.1", 2)?, megabytes);
    let servers = job.start()?;
    let mut running = Running::new(job, servers)?;
    let mut session = running.join(running.job.session(0))?;
    running.steps(&mut session, 0, BEFORE)?;
    running.wait_for_copies(&running.job.environment.servers[1 - victim])?;
    let undisturbed = running.steps(&mut session, BEFORE, 2 * BEFORE)?;
    running.servers[victim].kill()?;
    let disturbed = running.steps(&mut session, 2 * BEFORE, 2 * BEFORE + 1)?;
    running.steps(&mut session, 2 * BEFORE + 1, 2 * BEFORE + AFTER)?;
    running.finish(session, 2 * BEFORE + AFTER)?;
    Ok((disturbed[0], median(&undisturbed)))
}
