//! The flags of `train` that every workload has, and how they become a training.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::anyhow;
use clap::Args;
use psjobs_api::env::PSJOB_ROLE;
use psjobs_api::training::Local as LocalTraining;
use psjobs_api::{Environment, ReplicaResult, Role, Training};
use psjobs_ps::client::SessionConfig;
use psjobs_ps::network::Network;
use psjobs_ps::server::inelastic;
use tch::{Cuda, Device};
use tracing::info;

use super::data_args::{DataArgs, opening};
use super::training_length::TrainingLengthArgs;
use crate::data::{self, Dataset as _, Settings};
use crate::device::{self, DeviceChoice};
use crate::libtorch::{self, Libtorch};
use crate::train::flat::Flat;
use crate::train::local::Local;
use crate::train::precision;
use crate::train::remote::Remote;
use crate::train::{Outcome, Plan, TrainError, train};
use crate::workload::Workload;
use psjobs_process::identity::IdentityArgs;
use psjobs_process::optimizer::OptimizerArgs;
use psjobs_process::signals::{Signal, Signals};
use psjobs_process::{Failure, log_place, variable};

/// The inputs with which a workload is opened.
#[derive(Clone, Debug)]
pub struct Source {
    /// The folder, file or URL that --data or PSJOB_DATA names.
    pub data: Option<PathBuf>,
    /// The bounds of what a data set of a URL keeps on this machine.
    pub settings: Settings,
    /// Where the model computes; data that stays in memory is best there too.
    pub device: Device,
    /// The job's seed.
    pub seed: u64,
    /// The arguments after `--` on the command line of a program with a workload of its own.
    pub args: Vec<String>,
}

/// Flags that every workload has.
#[derive(Clone, Debug, Args)]
pub struct TrainArgs {
    #[command(flatten)]
    extent: TrainingLengthArgs,
    /// Seed of initial parameters, order of the data and dropout [default: the job's seed, 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=u64::from(u32::MAX)))]
    seed: Option<u64>,
    #[command(flatten)]
    data: DataArgs,
    /// auto (CUDA where there is a device), cpu, cuda, or cuda:N
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceChoice::Auto)]
    device: DeviceChoice,
    /// CUDA devices that the trainers on this machine share [default: all; 0: none]
    #[arg(long, value_name = "N")]
    num_gpus: Option<u32>,
    /// Threads for computing on the CPU [default: OMP_NUM_THREADS, or all cores]
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroUsize>,
    /// Seconds from one evaluation to the next while training goes on, by the first trainer; 0: only at the end
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    evaluate_every: u64,
    /// File that takes the trained model, from the first trainer; as safetensors if it ends so
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Seconds that a server may be away before this trainer gives up [default: 120; no limit where the operator or
    /// `psjobs run` has started it]
    #[arg(long, value_name = "SECONDS")]
    connect_timeout: Option<u64>,
    /// Read as many examples in a step as this trainer's measured speed allows, of those of all trainers; by hand
    /// server 0 needs this flag too [default: the job's batch.adaptive]
    #[arg(long)]
    adaptive_batch: bool,
    /// Compute the gradient of a step in so many micro-batches, one after the other, for less memory; it must divide the batch
    /// size [default: the job's batch.microBatches, 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    micro_batches: Option<u32>,
    /// Compute the loss under autocast to bf16 [default: the job's precision.autocast]
    #[arg(long)]
    autocast: bool,
    /// Let a GPU multiply and convolve f32 in TF32 [default: the job's precision.tf32]
    #[arg(long)]
    tf32: bool,
    /// Make so many steps alone between two exchanges with the servers, which need this flag too, with the optimizer of
    /// the flags below [default: the job's local.steps]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    local_steps: Option<u32>,
    /// Let gradients leave when all are computed, not while backward() computes the others, for a model that reads
    /// parameters behind detach()
    #[arg(long)]
    no_overlap: bool,
    /// Train in this process alone, without a server
    #[arg(
        long,
        conflicts_with_all = ["adaptive_batch", "local_steps", "no_overlap", "min_trainers", "world_size", "rank", "servers", "master_addr", "master_port", "server_addrs"]
    )]
    local: bool,
    #[command(flatten)]
    place: IdentityArgs,
    #[command(flatten, next_help_heading = "Optimizer, with --local or --local-steps")]
    optimizer: OptimizerArgs,
}

impl Source {
    /// The URL of a data set that is read a piece at a time, if --data is one.
    #[must_use]
    pub fn url(&self) -> Option<&str> {
        data::url(self.data.as_deref())
    }
}

impl TrainArgs {
    /// The URL of a data set that is read a piece at a time, if --data is one.
    #[must_use]
    pub fn url(&self) -> Option<&str> {
        self.data.url()
    }

    /// Trains what `open` gives.
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn run<W: Workload>(&self, open: impl FnOnce(&Source) -> anyhow::Result<W>) -> Result<ReplicaResult, Failure> {
        self.run_with(Vec::new(), open)
    }

    /// As [`TrainArgs::run`], with arguments that are the workload's own.
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn run_with<W: Workload>(
        &self,
        args: Vec<String>,
        open: impl FnOnce(&Source) -> anyhow::Result<W>,
    ) -> Result<ReplicaResult, Failure> {
        libtorch::wait_passively();
        let signals = Signals::listen().map_err(Failure::work)?;
        let environment = self.environment()?;
        let device = self.device(environment.as_ref())?;
        let plan = self.plan(environment.as_ref(), device);
        whole_micro_batches(&plan)?;
        if let Some(allowed) = self.allows_tf32(environment.as_ref()) {
            precision::allow_tf32(allowed);
        }
        let data = self.data.data.clone();
        let source = Source { data, settings: self.data.settings(), device, seed: plan.seed, args };
        let workload = open(&source).map_err(opening)?;
        self.train(&signals, environment, &plan, &workload)
    }

    fn train<W: Workload>(
        &self,
        signals: &Signals,
        environment: Option<Environment>,
        plan: &Plan,
        workload: &W,
    ) -> Result<ReplicaResult, Failure> {
        let (device, examples) = (plan.device, workload.training_set().examples());
        info!(?device, threads = tch::get_num_threads(), examples, "data is loaded");
        let ready = || signals.defer();
        let stop = || signals.heard().is_some();
        let outcome = match &environment {
            Some(environment) => {
                let network = Network::of(environment).map_err(Failure::input)?;
                let join = |flat: Flat, steps| {
                    let config = SessionConfig::new(environment, flat.specs(), plan.exchanges(steps));
                    let connect_timeout = self.connect_timeout.map_or(config.connect_timeout, Duration::from_secs);
                    let interrupt = signals.stop();
                    let config = SessionConfig { connect_timeout, network, interrupt, ..config };
                    let remote = Remote::join(config, flat, device, &environment.training, steps)?;
                    Ok(if self.no_overlap { remote.without_overlap() } else { remote })
                };
                train(workload, plan, join, ready, stop)
            }
            None => {
                let mut training = Training::default();
                self.optimizer.apply(&mut training.optimizer);
                training.validate().map_err(Failure::input)?;
                train(workload, plan, |flat, _| Ok(Local::new(flat, &training.optimizer)?), ready, stop)
            }
        };
        let supervised = environment.is_some_and(|environment| environment.supervised);
        match (outcome.map_err(|error| classify(error, supervised))?, signals.heard()) {
            (Outcome::Finished(result), _) => {
                info!(steps = result.steps, seconds = result.seconds, metrics = ?result.metrics, "finished");
                Ok(result)
            }
            (Outcome::Stopped, signal) => Err(Failure::Signal(signal.unwrap_or(Signal(15)))),
        }
    }

    fn plan(&self, environment: Option<&Environment>, device: Device) -> Plan {
        let plan = self.extent.plan(environment, device);
        Plan {
            micro_batches: self.micro_batches.map_or(plan.micro_batches, |count| count as usize),
            autocast: self.autocast || plan.autocast,
            adaptive: self.adaptive_batch || environment.is_some_and(|job| job.training.batch.adaptive),
            seed: self.seed.unwrap_or(plan.seed),
            evaluate_every: (self.evaluate_every > 0).then(|| Duration::from_secs(self.evaluate_every)),
            save: self.save.clone(),
            ..plan
        }
    }

    /// Returns if a GPU may compute in TF32; `None` if neither the job nor a flag says so.
    fn allows_tf32(&self, environment: Option<&Environment>) -> Option<bool> {
        let of_job = environment.and_then(|job| job.training.precision().tf32);
        if self.tf32 { Some(true) } else { of_job }
    }

    /// This trainer's place in its job; `None` where it trains alone.
    fn environment(&self) -> Result<Option<Environment>, Failure> {
        if !self.local {
            if self.optimizer.given() && self.local_steps.is_none() {
                return Err(Failure::Input(anyhow!(
                    "the optimizer runs on the servers: give its flags to `serve`, or write them in \
                     spec.training.optimizer; only with --local-steps trainers have one"
                )));
            }
            let mut environment = self.place.resolve(Role::Trainer, variable).map_err(Failure::input)?;
            if let Some(steps) = self.local_steps {
                environment.training.local = Some(LocalTraining::every(steps));
                self.optimizer.apply(&mut environment.training.optimizer);
                environment.training.validate().map_err(Failure::input)?;
            }
            let mut training = environment.training.clone();
            training.batch.adaptive |= self.adaptive_batch;
            if let Some(why) = inelastic(&training).filter(|_| environment.min_trainers.is_some()) {
                return Err(Failure::Input(anyhow!(why)));
            }
            log_place(&environment);
            return Ok(Some(environment));
        }
        if variable(PSJOB_ROLE).is_some() {
            return Err(Failure::Input(anyhow!(
                "--local trains alone, but this process is part of a job; leave it out"
            )));
        }
        Ok(None)
    }

    fn device(&self, environment: Option<&Environment>) -> Result<Device, Failure> {
        let Libtorch { without_cuda } = libtorch::load().map_err(Failure::input)?;
        let visible = Cuda::device_count().max(0) as u32;
        let (local_rank, given) = environment.map_or((0, 0), |environment| (environment.local_rank, environment.gpus));
        let device = device::choose(self.device, self.num_gpus, visible, local_rank, given);
        let device = device.map_err(|error| Failure::Input(with_reason(error.into(), without_cuda)))?;
        compute_threads(self.threads);
        Ok(device)
    }
}

/// Adds to an error about devices why libtorch has no CUDA, if it has none.
pub(super) fn with_reason(error: anyhow::Error, without_cuda: Option<String>) -> anyhow::Error {
    match without_cuda {
        Some(reason) => error.context(format!("libtorch has no CUDA ({reason})")),
        None => error,
    }
}

/// Refuses micro-batches of several sizes, which --batch-size may lead to.
fn whole_micro_batches(plan: &Plan) -> Result<(), Failure> {
    let &Plan { batch, micro_batches, .. } = plan;
    if batch.is_multiple_of(micro_batches) {
        return Ok(());
    }
    Err(Failure::Input(anyhow!(
        "a batch of {batch} examples has no {micro_batches} micro-batches of one size; give --micro-batches, or \
         spec.training.batch.microBatches, a number that divides it"
    )))
}

/// Computes on so many threads; without a number on as many as OMP_NUM_THREADS says, or there are cores.
pub fn compute_threads(given: Option<NonZeroUsize>) {
    let threads = match (given, variable("OMP_NUM_THREADS")) {
        (Some(threads), _) => Some(threads),
        (None, Some(_)) => None,
        (None, None) => thread::available_parallelism().ok(),
    };
    if let Some(threads) = threads {
        tch::set_num_threads(i32::try_from(threads.get()).unwrap_or(i32::MAX));
    }
}

/// Gives an error of the training the exit code 2 only if another start would end the same way, and 75 if other processes
/// alone are the cause: a server that is away, or, where somebody (`supervised`) starts processes again, a wrong one.
fn classify(error: TrainError, supervised: bool) -> Failure {
    match () {
        () if error.is_input() => Failure::input(error),
        () if error.is_caused_by_others(supervised) => Failure::peer_away(error),
        () => Failure::work(error),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io;

    use clap::Parser;
    use psjobs_api::env::PSJOB_TRAINING;
    use psjobs_api::exit_code::{PEER_AWAY, WRONG_INPUT};
    use psjobs_ps::client::ClientError;

    use super::*;
    use crate::train::UpdateError;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        train: TrainArgs,
    }

    /// The environment of a trainer, read from variables of which PSJOB_TRAINING is `training`.
    fn job(training: &str) -> Environment {
        let servers = vec!["localhost:29500".to_owned()];
        let plain = Environment::new("job", "uid", servers, 1, Training::default());
        let plain = Environment { role: Role::Trainer, ..plain };
        let mut variables: BTreeMap<&str, String> = plain.to_vars().into_iter().collect();
        variables.insert(PSJOB_TRAINING, training.to_owned());
        Environment::from_vars(|name| variables.get(name).cloned()).expect("variables").expect("a job")
    }

    #[test]
    fn micro_batches_and_types_of_the_job_reach_its_trainers_unless_a_flag_says_otherwise() {
        let rows = [
            ("{}", "", (1, false, None)),
            (r#"{"batch":{"base":8,"microBatches":4}}"#, "", (4, false, None)),
            (r#"{"precision":{"autocast":"BF16"}}"#, "", (1, true, None)),
            (r#"{"precision":{"tf32":true}}"#, "", (1, false, Some(true))),
            (r#"{"precision":{"tf32":false}}"#, "", (1, false, Some(false))),
            ("{}", "--micro-batches=2 --autocast --tf32", (2, true, Some(true))),
            (
                r#"{"batch":{"microBatches":4},"precision":{"autocast":"None","tf32":false}}"#,
                "--micro-batches=2 --autocast --tf32",
                (2, true, Some(true)),
            ),
        ];
        for (training, flags, want) in rows {
            let line = std::iter::once("train").chain(flags.split_whitespace());
            let (train, job) = (Flags::try_parse_from(line).expect("flags").train, job(training));
            let plan = train.plan(Some(&job), Device::Cpu);
            let found = (plan.micro_batches, plan.autocast, train.allows_tf32(Some(&job)));
            assert_eq!(found, want, "{training} {flags}");
        }
    }

    #[test]
    fn only_what_a_trainer_was_given_is_bad_input_and_only_other_processes_excuse_it() {
        let address = || String::from("ps-0:29500");
        let reason = || String::from("no");
        let begin = |error| TrainError::Begin(UpdateError::Servers(error));
        let away = || ClientError::Unreachable { address: address(), seconds: 120, reason: reason() };
        let conflict = || ClientError::Conflict { address: address(), reason: reason() };
        let misplaced = || ClientError::Misplaced { address: address(), found: 1, servers: 2, want: 0, ours: 2 };
        let later = |error| TrainError::Update { step: 3, source: UpdateError::Servers(error) };
        let (by_hand, supervised) = (false, true);
        let (input, work, peer) = (WRONG_INPUT as u8, 1, PEER_AWAY as u8);
        let rows = [
            (begin(ClientError::Refused { address: address(), reason: reason() }), supervised, input),
            (begin(ClientError::Address("ps-0".into())), supervised, input),
            (begin(conflict()), by_hand, work),
            (begin(conflict()), supervised, peer),
            (later(conflict()), by_hand, work),
            (later(conflict()), supervised, peer),
            (begin(misplaced()), by_hand, work),
            (begin(misplaced()), supervised, peer),
            (begin(away()), by_hand, peer),
            (begin(away()), supervised, peer),
            (later(away()), by_hand, peer),
            (TrainError::Leave(UpdateError::Servers(ClientError::TablesLost { address: address() })), by_hand, peer),
            (begin(ClientError::Memory { elements: 1, source: io::ErrorKind::OutOfMemory.into() }), supervised, work),
            (begin(ClientError::Interrupted), supervised, work),
            (begin(ClientError::Runtime(io::ErrorKind::WouldBlock.into())), supervised, work),
            (TrainError::Begin(UpdateError::Libtorch(tch::TchError::Torch("no memory".into()))), supervised, work),
            (TrainError::Diverged { step: 3, loss: f64::NAN }, supervised, work),
        ];
        for (error, supervised, want) in rows {
            let label = format!("{error:?}, supervised: {supervised}");
            assert_eq!(classify(error, supervised).exit_code(), want, "{label}");
        }
    }

    #[test]
    fn a_failure_to_read_that_may_pass_is_no_bad_input() {
        let opened = |code: i32| {
            Failure::opening(anyhow::Error::new(io::Error::from_raw_os_error(code)).context("cannot read the images"))
        };
        let lasting = [libc::ENOENT, libc::EACCES, libc::EISDIR];
        let passing = [libc::ETIMEDOUT, libc::ESTALE, libc::ENOMEM, libc::EIO, libc::EMFILE];
        for (code, input) in lasting.map(|code| (code, true)).into_iter().chain(passing.map(|code| (code, false))) {
            assert_eq!(matches!(opened(code), Failure::Input(_)), input, "{}", io::Error::from_raw_os_error(code));
        }
        assert!(matches!(Failure::opening(io::Error::other("line 3 has 2 columns")), Failure::Input(_)));
        assert!(matches!(Failure::opening(anyhow!("the vocabulary has 3 words")), Failure::Input(_)));
    }
}
