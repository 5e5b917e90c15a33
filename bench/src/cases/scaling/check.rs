//! Compares the model with jobs whose servers are behind links of a limited rate, one each.

use psjobs::estimate::Constants;
use psjobs::estimate::model::{Setup, estimate};
use psjobs_api::DEFAULT_PORT;
use psjobs_api::training::{Codec, Compression, ConsistencyMode};

use super::super::wire::{train_all, training};
use super::{BENCH, ScalingArgs};
use crate::namespace::OtherMachine;
use crate::processes::{Job, Process};
use crate::report::{Case, LeftOut, Line, say};

/// A size of a job.
#[derive(Clone, Copy)]
struct Size {
    case: &'static str,
    trainers: u32,
    servers: u32,
    codec: Codec,
}

const SIZES: [Size; 6] = [
    Size { case: "1-by-1", trainers: 1, servers: 1, codec: Codec::F32 },
    Size { case: "4-by-1", trainers: 4, servers: 1, codec: Codec::F32 },
    Size { case: "4-by-1-bf16", trainers: 4, servers: 1, codec: Codec::BF16 },
    Size { case: "2-by-2", trainers: 2, servers: 2, codec: Codec::F32 },
    Size { case: "4-by-2", trainers: 4, servers: 2, codec: Codec::F32 },
    Size { case: "8-by-4", trainers: 8, servers: 4, codec: Codec::F32 },
];

/// Servers of the largest size.
const MOST_SERVERS: u32 = 4;
/// Seconds from one end of a link to the other and back, where both are on this machine.
const ROUND_TRIP: f64 = 2e-4;
/// The trainers have no link of their own here: bytes a second of memory.
const NO_LIMIT: f64 = 1e11;

/// Measures each size and what the model says about it, in milliseconds of a step.
pub fn measure(args: &ScalingArgs, constants: &Constants, runs: u32) -> anyhow::Result<Vec<Line>> {
    let machines = match machines(args.mbit) {
        Ok(machines) => machines,
        Err(error) => {
            let left_out = |size: Size| LeftOut { bench: BENCH, case: size.case, left_out: format!("{error:#}") };
            return Ok(SIZES.map(left_out).map(Line::LeftOut).into());
        }
    };
    let mut steps = SIZES.map(|_| Vec::new());
    for run in 1..=runs {
        for (size, steps) in SIZES.iter().zip(&mut steps) {
            say(&format!("scaling {}: run {run} of {runs}", size.case));
            steps.push(1e3 * step(args, *size, &machines)?);
        }
    }
    let case = |(size, steps): (Size, Vec<f64>)| {
        let said = 1e3 * estimate(&setup(args, size), constants)?.step_seconds;
        Ok(Line::Measured(Case::new(BENCH, size.case, "ms", &steps, &[said])))
    };
    SIZES.into_iter().zip(steps).map(case).collect()
}

/// Makes a machine for each server, behind a link of its own.
fn machines(mbit: u32) -> anyhow::Result<Vec<OtherMachine>> {
    let make = |number| {
        let machine = OtherMachine::make_number(number)?;
        machine.limit(u64::from(mbit) * 1_000_000)?;
        Ok(machine)
    };
    (0..MOST_SERVERS).map(make).collect()
}

/// Seconds of a step of all trainers.
fn step(args: &ScalingArgs, size: Size, machines: &[OtherMachine]) -> anyhow::Result<f64> {
    let machines = &machines[..size.servers as usize];
    let addresses = machines.iter().map(|machine| format!("{}:{DEFAULT_PORT}", machine.there())).collect();
    let mut training = training(size.codec);
    training.consistency.mode = ConsistencyMode::Sync;
    training.consistency.exact_recovery = Some(false);
    let mut job = Job::at("bench-scaling", addresses, size.trainers, args.link_megabytes, training);
    job.environment.connections = Some(1);
    let start =
        |(index, machine): (u32, &OtherMachine)| Ok(Process::listening(&mut job.command(index, &machine.enter())?)?.0);
    let mut servers = (0..).zip(machines).map(start).collect::<anyhow::Result<Vec<_>>>()?;
    let slowest = train_all(&job.environment, job.elements, args.link_steps, false)?;
    for server in &mut servers {
        server.wait()?;
    }
    Ok(slowest.as_secs_f64() / f64::from(args.link_steps))
}

/// The job of a case, for the model. All processes share the cores of this machine.
fn setup(args: &ScalingArgs, size: Size) -> Setup {
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as f64;
    let processes = f64::from(size.trainers + size.servers);
    let each = (cores / processes).min(1.0);
    Setup {
        parameters: u64::from(args.link_megabytes) * 250_000,
        compute: 0.0,
        examples: 1.0,
        trainers: size.trainers,
        servers: size.servers,
        trainer_link: NO_LIMIT,
        server_link: f64::from(args.mbit) * 1e6 / 8.0,
        round_trip: ROUND_TRIP,
        compression: Compression { codec: size.codec, ..Compression::default() },
        mode: ConsistencyMode::Sync,
        backup_trainers: 0,
        local: None,
        is_replicated: false,
        has_tls: false,
        overlap: 0.0,
        spread: 0.0,
        server_cores: each,
        trainer_cores: each,
        slots: 0.0,
        keeps_previous: false,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::namespace::MACHINES;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        scaling: ScalingArgs,
    }

    #[test]
    fn the_links_are_what_takes_the_time_of_each_size() {
        let args = Flags::parse_from(["bench"]).scaling;
        for size in SIZES {
            assert!(size.servers <= MOST_SERVERS && MOST_SERVERS <= MACHINES, "{}", size.case);
            let setup = Setup { server_cores: 4.0, trainer_cores: 1.0, ..setup(&args, size) };
            let seconds = estimate(&setup, &Constants::default()).expect("a model").step_seconds;
            // The bytes of one direction, of all trainers, over the links of all servers.
            let width = if size.codec == Codec::F32 { 4.0 } else { 2.0 };
            let bytes = 5e6 * width * f64::from(size.trainers) / f64::from(size.servers);
            let least = bytes / 125e6;
            assert!((least..2.5 * least).contains(&seconds), "{}: {seconds} s of {least} s", size.case);
        }
    }
}
