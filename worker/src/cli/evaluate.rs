//! `psjobs-worker serve evaluate`: server 0 measures the model while the others train it. It computes on the
//! process's first thread, at the lowest priority; the server has threads of its own.

use std::num::NonZeroUsize;
use std::panic::{self, AssertUnwindSafe};
use std::thread;
use std::time::Duration;

use clap::{Args, Subcommand};
use psjobs_api::ReplicaResult;
use psjobs_process::Failure;
use psjobs_process::serve::{IDLE_GPUS, ServeArgs, refuse_gpus};
use psjobs_ps::server::{Evaluation, Measurement};
use psjobs_rpc::{Registry, server_integration};
use tch::{Cuda, Device};
use tokio::sync::mpsc::Receiver;
use tracing::{info, warn};

use super::data_args::{DataArgs, opening};
use super::train::{Source, with_reason};
use crate::device;
use crate::libtorch::{self, Libtorch};
use crate::train::evaluator::Evaluator;
use crate::workload::Workload;

/// `serve`, and what may follow it: an evaluation as `E` describes.
#[derive(Clone, Debug, Args)]
pub struct ServeCommand<E: Args> {
    #[command(flatten)]
    serve: ServeArgs,
    #[command(subcommand)]
    then: Option<Then<E>>,
}

#[derive(Clone, Debug, Subcommand)]
enum Then<E: Args> {
    /// Server 0 measures the model every so often, while training goes on
    Evaluate(E),
}

/// How often it is measured, and on what.
#[derive(Clone, Debug, Args)]
pub struct EvaluateArgs {
    /// Seconds from one evaluation to the next
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    every: u64,
    #[command(flatten)]
    data: DataArgs,
    /// Threads for computing
    #[arg(long, value_name = "N", default_value = "1")]
    threads: NonZeroUsize,
}

impl<E: Args> ServeCommand<E> {
    /// Serves, hosting what `registry` offers to a server with so many GPUs of its own; `evaluate` is what serves where
    /// evaluations are asked for.
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn run(
        &self,
        registry: impl FnOnce(u32) -> Result<Registry, Failure>,
        evaluate: impl FnOnce(&ServeArgs, Registry, &E) -> Result<ReplicaResult, Failure>,
    ) -> Result<ReplicaResult, Failure> {
        // Models of remote modules compute here, and of evaluations.
        libtorch::wait_passively();
        match &self.then {
            None => {
                let (environment, signals) = self.serve.begin()?;
                let gpus = environment.gpus;
                let registry = registry(gpus)?;
                if gpus > 0 {
                    find_gpus(gpus)?;
                }
                self.serve.until_over(&environment, &signals, None, |config| {
                    // Parameters are updated on CPUs.
                    config.refuses_parameters = (gpus > 0).then_some(IDLE_GPUS);
                    server_integration::host(config, registry)
                })
            }
            Some(Then::Evaluate(args)) => evaluate(&self.serve, registry(0)?, args),
        }
    }
}

impl EvaluateArgs {
    /// Serves, and on server 0 evaluates what `open` gives.
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn run<W: Workload>(
        &self,
        serve: &ServeArgs,
        registry: Registry,
        args: Vec<String>,
        open: impl FnOnce(&Source) -> anyhow::Result<W>,
    ) -> Result<ReplicaResult, Failure> {
        let (environment, signals) = serve.begin()?;
        // Evaluations are on the CPU, too.
        refuse_gpus(environment.gpus)?;
        if environment.index > 0 {
            return serve.until_over(&environment, &signals, None, |config| server_integration::host(config, registry));
        }
        libtorch::load().map_err(Failure::input)?;
        let (data, settings, seed) = (self.data.data.clone(), self.data.settings(), environment.training.seed);
        let source = Source { data, settings, device: Device::Cpu, seed, args };
        let workload = open(&source).map_err(opening)?;
        let mut evaluator = Evaluator::new(&workload);
        if let [first, ..] = evaluator.buffers() {
            warn!("the model has buffers, {first} for one, which only trainers know; they are evaluated as they began");
        }
        let every = Duration::from_secs(self.every);
        let (evaluation, measurements) = Evaluation::new(&environment, evaluator.tensors(), every);
        info!(every = self.every, threads = self.threads, "the model will be evaluated while it trains");
        thread::scope(|scope| {
            let host = |config: &mut _| server_integration::host(config, registry);
            let serving = scope.spawn(|| serve.until_over(&environment, &signals, Some(evaluation), host));
            give_way(self.threads);
            answer(measurements, &mut evaluator);
            serving.join().unwrap_or_else(|panic| panic::resume_unwind(panic))
        })
    }
}

/// Loads what GPUs need, for a server that was `given` some.
fn find_gpus(given: u32) -> Result<(), Failure> {
    let Libtorch { without_cuda } = libtorch::load().map_err(Failure::input)?;
    let visible = Cuda::device_count().max(0) as u32;
    device::check_server(given, visible).map_err(|error| Failure::Input(with_reason(error.into(), without_cuda)))
}

/// From now on this thread, and those that libtorch starts for it, compute when no other thread needs the core.
fn give_way(threads: NonZeroUsize) {
    const LOWEST: i32 = 19;
    // Of a thread, not of the process: Linux has priorities so.
    if let Err(error) = rustix::process::setpriority_process(None, LOWEST) {
        warn!(%error, "evaluations have no lower priority than the server");
    }
    tch::set_num_threads(i32::try_from(threads.get()).unwrap_or(i32::MAX));
}

/// Measures what comes until the server ends, or libtorch gives up; then training goes on without.
fn answer<W: Workload>(mut measurements: Receiver<Measurement>, evaluator: &mut Evaluator<'_, W>) {
    while let Some(Measurement { parameters, reply }) = measurements.blocking_recv() {
        let measured = panic::catch_unwind(AssertUnwindSafe(|| evaluator.measure(&parameters)));
        // The panic is in the log already.
        let Ok(metrics) = measured else { return };
        // A server that has ended meanwhile wants no answer.
        let _ = reply.send(metrics);
    }
}
