//! The constants of the model from the time that a server has the cores. Jobs differ in one thing each, so that what they cost
//! more is the price of that.

use anyhow::Context as _;
use psjobs::certificates;
use psjobs::estimate::Constants;
use psjobs_api::training::{Codec, ConsistencyMode};
use psjobs_api::{Environment, Role};
use psjobs_ps::layout::{Layout, TensorSpec};

use super::super::wire::{train_all, training};
use super::ScalingArgs;
use crate::processes::{Job, Process};

/// A job that is measured.
#[derive(Clone, Copy)]
struct Way {
    trainers: u32,
    shares_memory: bool,
    codec: Codec,
    has_tls: bool,
}

/// One trainer over TCP.
const PLAIN: Way = Way { trainers: 1, shares_memory: false, codec: Codec::F32, has_tls: false };

/// Seconds of a server's cores for a step of one trainer.
#[derive(Clone, Copy, Debug)]
struct Costs {
    /// Without the bytes: through shared memory, of one trainer, and of each of two.
    alone: f64,
    of_two: f64,
    /// Over TCP.
    plain: f64,
    bf16: f64,
    tls: f64,
    /// One block of one parameter.
    tiny: f64,
}

/// Measures the constants once.
pub fn measure(args: &ScalingArgs) -> anyhow::Result<Constants> {
    let elements = args.megabytes as usize * 250_000;
    let cost = |way| step_cost(way, elements, args.steps);
    let costs = Costs {
        alone: cost(Way { shares_memory: true, ..PLAIN })?,
        of_two: cost(Way { shares_memory: true, trainers: 2, ..PLAIN })?,
        plain: cost(PLAIN)?,
        bf16: cost(Way { codec: Codec::BF16, ..PLAIN })?,
        tls: cost(Way { has_tls: true, ..PLAIN })?,
        tiny: step_cost(PLAIN, 1, args.messages)?,
    };
    let layout = Layout::new(&[TensorSpec::new("weight", vec![elements as u64])], 1)?;
    Ok(solve(costs, elements as f64, layout.blocks().into()))
}

/// Returns the constants that these costs have for a model of so many elements and blocks; the others are the defaults.
fn solve(costs: Costs, elements: f64, blocks: f64) -> Constants {
    let Costs { alone, of_two, plain, bf16, tls, tiny } = costs;
    let message = tiny / 2.0;
    // Two trainers share one update.
    let update = (2.0 * (alone - of_two) / elements).max(0.0);
    let element = ((alone - 2.0 * blocks * message) / elements - update).max(0.0);
    let work = elements * (element + update) + 2.0 * blocks * message;
    let byte = ((plain - work) / (8.0 * elements)).max(0.0);
    // Half of the bytes, and each element is decoded once and coded once.
    let coding = ((bf16 - work - 4.0 * elements * byte) / (2.0 * elements)).max(0.0);
    Constants {
        byte_ns: 1e9 * byte,
        tls_ns: (1e9 * (tls - plain) / (8.0 * elements)).max(0.0),
        element_ns: 1e9 * element,
        update_ns: 1e9 * update,
        coding_ns: 1e9 * coding,
        message_us: 1e6 * message,
        ..Constants::default()
    }
}

/// The constants that are measured here, by the names of their flags.
pub fn list(constants: &Constants) -> [(&'static str, f64); 6] {
    [
        ("byte-ns", constants.byte_ns),
        ("tls-ns", constants.tls_ns),
        ("element-ns", constants.element_ns),
        ("update-ns", constants.update_ns),
        ("coding-ns", constants.coding_ns),
        ("message-us", constants.message_us),
    ]
}

/// Returns the constants that such a list names; the others are the defaults.
pub fn of(list: &[(&'static str, f64)]) -> Constants {
    let mut constants = Constants::default();
    for (name, value) in list {
        let place = match *name {
            "byte-ns" => &mut constants.byte_ns,
            "tls-ns" => &mut constants.tls_ns,
            "element-ns" => &mut constants.element_ns,
            "update-ns" => &mut constants.update_ns,
            "coding-ns" => &mut constants.coding_ns,
            "message-us" => &mut constants.message_us,
            _ => continue,
        };
        *place = *value;
    }
    constants
}

/// Seconds of the server's cores for a step of one trainer: of three times as many steps, less those of the steps once, so that
/// the beginning and the end do not count.
fn step_cost(way: Way, elements: usize, steps: u32) -> anyhow::Result<f64> {
    let [once, thrice] = [cpu(way, elements, steps)?, cpu(way, elements, 3 * steps)?];
    Ok((thrice - once).max(0.0) / f64::from(2 * steps * way.trainers))
}

/// Seconds of the server's cores until all trainers have made so many steps.
fn cpu(way: Way, elements: usize, steps: u32) -> anyhow::Result<f64> {
    let certificates = tempfile::tempdir().context("no temporary folder")?;
    let folder = |role: Role| certificates.path().join(role.as_str()).display().to_string();
    if way.has_tls {
        certificates::write(certificates.path())?;
    }
    let mut training = training(way.codec);
    training.consistency.mode = ConsistencyMode::Sync;
    training.consistency.exact_recovery = Some(false);
    let mut job = Job::new("bench-scaling", 1, way.trainers, 1, training)?;
    job.elements = elements;
    job.environment.connections = Some(1);
    job.environment.tls_folder = way.has_tls.then(|| folder(Role::Server));
    let (mut server, _) = Process::listening(&mut job.command(0, &[])?)?;
    let tls_folder = way.has_tls.then(|| folder(Role::Trainer));
    let trainers = Environment { tls_folder, ..job.environment.clone() };
    train_all(&trainers, elements, steps, way.shares_memory)?;
    let cpu = server.cpu()?;
    server.wait()?;
    Ok(cpu)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_are_found_again_in_what_they_cost() {
        let want = Constants {
            byte_ns: 0.5,
            tls_ns: 0.25,
            element_ns: 0.75,
            update_ns: 1.5,
            coding_ns: 0.125,
            message_us: 20.0,
            ..Constants::default()
        };
        let (elements, blocks) = (1e6, 4.0);
        let seconds = |ns: f64| 1e-9 * ns;
        let messages = 2.0 * blocks * 1e-6 * want.message_us;
        let work = |updates: f64| seconds(elements * (want.element_ns + updates * want.update_ns)) + messages;
        let plain = work(1.0) + seconds(8.0 * elements * want.byte_ns);
        let costs = Costs {
            alone: work(1.0),
            of_two: work(0.5),
            plain,
            bf16: work(1.0) + seconds(elements * (4.0 * want.byte_ns + 2.0 * want.coding_ns)),
            tls: plain + seconds(8.0 * elements * want.tls_ns),
            tiny: 2e-6 * want.message_us,
        };
        let found = solve(costs, elements, blocks);
        for ((name, found), (_, want)) in list(&found).into_iter().zip(list(&want)) {
            assert!((found - want).abs() < 1e-6, "{name}: {found}, not {want}");
        }
        assert_eq!(of(&list(&want)), want);
        // A cost that noise makes negative counts as zero.
        let none = solve(Costs { of_two: 2.0 * costs.alone, tls: 0.0, ..costs }, elements, blocks);
        assert_eq!((none.update_ns, none.tls_ns), (0.0, 0.0));
    }
}
