//! The common part of the workloads that call other processes: their flags, how they begin and how they end.

use std::num::NonZeroUsize;
use std::time::Duration;

use anyhow::anyhow;
use clap::Args;
use psjobs_api::env::PSJOB_ROLE;
use psjobs_api::training::{NonFinite, Precision, ScheduleKind};
use psjobs_api::{Environment, ReplicaResult, Role, Training};
use tracing::info;

use psjobs_process::identity::IdentityArgs;
use psjobs_process::optimizer::OptimizerArgs;
use psjobs_process::signals::{Signal, Signals};
use psjobs_process::{Failure, log_place, variable};
use psjobs_ps::client::SessionConfig;
use psjobs_worker::cli::train::compute_threads;
use psjobs_worker::libtorch;
use psjobs_worker::train::modules::ModulesError;

/// Flags of every workload whose model lives in other processes.
#[derive(Clone, Debug, Args)]
pub struct RemoteArgs {
    /// Seed of initial parameters, order of the data and dropout [default: the job's seed, 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=u64::from(u32::MAX)))]
    pub seed: Option<u64>,
    /// Threads for computing on the CPU [default: OMP_NUM_THREADS, or all cores]
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroUsize>,
    /// Seconds that a server may be away before this trainer gives up [default: 120; no limit where the operator or
    /// `psjobs run` has started it]
    #[arg(long, value_name = "SECONDS")]
    connect_timeout: Option<u64>,
    #[command(flatten)]
    place: IdentityArgs,
    #[command(flatten, next_help_heading = "Optimizer, over spec.training.optimizer")]
    optimizer: OptimizerArgs,
}

impl RemoteArgs {
    /// This trainer's job, with the flags' values over the job's, and its signals; libtorch is ready after it. For a
    /// workload whose optimizer has one learning rate.
    pub fn begin(&self) -> Result<(Environment, Signals), Failure> {
        self.begin_unless(|training| unfit(training).or_else(|| without_effect(training)))
    }

    /// As [`RemoteArgs::begin`]; `unfit` says why the workload cannot train as the job says.
    fn begin_unless(
        &self,
        unfit: impl FnOnce(&Training) -> Option<&'static str>,
    ) -> Result<(Environment, Signals), Failure> {
        libtorch::wait_passively();
        let signals = Signals::listen().map_err(Failure::work)?;
        let mut environment = self.place.resolve(Role::Trainer, variable).map_err(Failure::input)?;
        self.override_training(&mut environment.training)?;
        if let Some(why) = unfit(&environment.training) {
            return Err(Failure::Input(anyhow!(why)));
        }
        if let Some(why) = idle_gpus(environment.gpus) {
            return Err(Failure::Input(anyhow!(why)));
        }
        if environment.min_trainers.is_some() {
            return Err(Failure::Input(anyhow!(
                "this workload's trainers are not dealt batches, so that none may come or go; remove spec.elasticPolicy, \
                 or --min-trainers"
            )));
        }
        log_place(&environment);
        libtorch::load().map_err(Failure::input)?;
        compute_threads(self.threads);
        Ok((environment, signals))
    }

    /// As [`RemoteArgs::begin`] if not `alone`, for a workload that follows schedule and groups; else no job, and the
    /// flags' values over the defaults.
    pub fn begin_or_alone(&self, alone: bool) -> Result<(Option<Environment>, Training, Signals), Failure> {
        if !alone {
            let (environment, signals) = self.begin_unless(unfit)?;
            let training = environment.training.clone();
            return Ok((Some(environment), training, signals));
        }
        if variable(PSJOB_ROLE).is_some() {
            return Err(Failure::Input(anyhow!(
                "--local trains alone, but this process is part of a job; leave it out"
            )));
        }
        libtorch::wait_passively();
        let signals = Signals::listen().map_err(Failure::work)?;
        let mut training = Training::default();
        self.override_training(&mut training)?;
        libtorch::load().map_err(Failure::input)?;
        compute_threads(self.threads);
        Ok((None, training, signals))
    }

    fn override_training(&self, training: &mut Training) -> Result<(), Failure> {
        self.optimizer.apply(&mut training.optimizer);
        training.seed = self.seed.unwrap_or(training.seed);
        training.validate().map_err(Failure::input)
    }

    /// How long a server or another trainer may be away; without an environment the process is alone.
    pub fn connect_timeout(&self, environment: Option<&Environment>) -> Duration {
        let supervised = environment.is_some_and(|environment| environment.supervised);
        self.connect_timeout.map_or(SessionConfig::waiting_time(supervised), Duration::from_secs)
    }
}

/// Returns why trainers that call other processes cannot train as the job says, and what to remove.
fn unfit(training: &Training) -> Option<&'static str> {
    if training.batch.adaptive {
        return Some(
            "this workload's trainers do not push gradients of batches to the servers, which weigh them by their size; \
             remove spec.training.batch.adaptive",
        );
    }
    if training.batch.micro_batches() > 1 {
        return Some(
            "this workload's trainers compute each batch as a whole, with other processes; remove \
             spec.training.batch.microBatches, and lower spec.training.batch.base for less memory",
        );
    }
    if training.precision() != Precision::default() {
        return Some("this workload computes in f32, in several processes; remove spec.training.precision");
    }
    if training.local.is_some() {
        return Some(
            "this workload's trainers do not have the whole model, so that they make no step alone; remove \
             spec.training.local",
        );
    }
    if training.consistency.overlaps_exchanges() {
        return Some(
            "this workload's trainers do not exchange gradients of the whole model, so that nothing overlaps; remove \
             spec.training.consistency.overlap",
        );
    }
    None
}

/// Returns why trainers whose optimizer has one learning rate cannot train as the job says, and what to remove.
fn without_effect(training: &Training) -> Option<&'static str> {
    if training.schedule.kind != ScheduleKind::Constant || training.schedule.warmup_steps > 0 {
        return Some(
            "this workload's optimizer has the same learning rate in every step; remove spec.training.schedule, and \
             write that rate in spec.training.optimizer.learningRate",
        );
    }
    if !training.optimizer.groups.is_empty() {
        return Some(
            "this workload's optimizer has the same learning rate for all parameters; remove \
             spec.training.optimizer.groups",
        );
    }
    if training.non_finite != NonFinite::Refuse {
        return Some(
            "this workload's gradients are not pushed to the servers, which therefore leave none out; remove \
             spec.training.nonFinite",
        );
    }
    None
}

/// How a trainer of the job in `environment` ends: with a result, because a signal asked for it, or badly.
pub fn finish(
    outcome: Result<Option<ReplicaResult>, ModulesError>,
    environment: &Environment,
    signals: &Signals,
) -> Result<ReplicaResult, Failure> {
    match outcome.map_err(|error| classify(error, environment.supervised))? {
        Some(result) => {
            info!(steps = result.steps, seconds = result.seconds, metrics = ?result.metrics, "finished");
            Ok(result)
        }
        None => Err(Failure::Signal(signals.heard().unwrap_or(Signal(15)))),
    }
}

/// Gives an error of the training the exit code 2 only if another start would end the same way, and 75 if other processes
/// alone are the cause: one that is away, or, where somebody (`supervised`) starts processes again, a wrong one.
fn classify(error: ModulesError, supervised: bool) -> Failure {
    match error {
        ModulesError::TooFewExamples(_) => Failure::input(error),
        ModulesError::Join(ref why) if why.is_input() => Failure::input(error),
        ModulesError::Connect(ref why) if !why.is_retryable() => Failure::input(error),
        _ if error.is_caused_by_others(supervised) => Failure::peer_away(error),
        _ => Failure::work(error),
    }
}

/// Why a trainer cannot be given GPUs, if it is given some.
fn idle_gpus(given: u32) -> Option<&'static str> {
    (given > 0).then_some(
        "this workload's trainers compute on CPUs, and would leave their GPUs idle; remove spec.trainer.gpus, or give \
         `psjobs run` --gpus 0",
    )
}

#[cfg(test)]
mod tests {
    use psjobs_api::exit_code::{PEER_AWAY, WRONG_INPUT};
    use psjobs_api::training::{Autocast, Batch, Consistency, Local, Optimizer, OptimizerGroup, Schedule};
    use psjobs_ps::client::ClientError;
    use psjobs_rpc::RemoteError;

    use super::*;

    #[test]
    fn fields_that_mean_nothing_to_such_a_workload_are_refused_by_name() {
        let default = Training::default;
        let batch = |batch| Training { batch, ..default() };
        let precision = |precision| Training { precision: Some(precision), ..default() };
        let overlap = Consistency { overlap: Some(true), ..Consistency::default() };
        for (training, field) in [
            (batch(Batch { adaptive: true, ..Batch::default() }), Some("batch.adaptive")),
            (batch(Batch { micro_batches: Some(4), ..Batch::default() }), Some("batch.microBatches")),
            (batch(Batch { micro_batches: Some(1), ..Batch::default() }), None),
            (precision(Precision { autocast: Autocast::BF16, tf32: None }), Some("precision")),
            (precision(Precision { autocast: Autocast::None, tf32: Some(false) }), Some("precision")),
            (precision(Precision::default()), None),
            (Training { local: Some(Local::every(8)), ..default() }, Some("local")),
            (Training { consistency: overlap, ..default() }, Some("consistency.overlap")),
            (default(), None),
        ] {
            assert_refusal(&training, unfit(&training), field);
        }
    }

    #[test]
    fn gpus_that_would_be_idle_are_refused() {
        assert_eq!(idle_gpus(0), None);
        assert!(idle_gpus(1).is_some_and(|why| why.contains("spec.trainer.gpus")));
    }

    #[test]
    fn fields_that_an_optimizer_with_one_rate_does_not_follow_are_refused_by_name() {
        let default = Training::default;
        let schedule = |schedule| Training { schedule, ..default() };
        let group = OptimizerGroup { parameters: "*.bias".into(), learning_rate_factor: 0.5, weight_decay: None };
        let groups = Optimizer { groups: vec![group], ..Optimizer::default() };
        for (training, field) in [
            (schedule(Schedule { kind: ScheduleKind::Step, ..Schedule::default() }), Some("schedule")),
            (schedule(Schedule { warmup_steps: 10, ..Schedule::default() }), Some("schedule")),
            (Training { optimizer: groups, ..default() }, Some("optimizer.groups")),
            (Training { non_finite: NonFinite::Skip, ..default() }, Some("nonFinite")),
            (default(), None),
        ] {
            assert_eq!(unfit(&training), None, "other workloads follow {field:?}");
            assert_refusal(&training, without_effect(&training), field);
        }
    }

    /// Checks that `why` names the field to remove, if there is one.
    fn assert_refusal(training: &Training, why: Option<&str>, field: Option<&str>) {
        let named = field.map(|field| format!("remove spec.training.{field}"));
        let is_right = why.zip(named).map_or(why.is_none() == field.is_none(), |(why, named)| why.contains(&named));
        assert!(is_right, "{field:?}: {why:?} of {training:?}");
    }

    #[test]
    fn only_what_a_trainer_was_given_is_bad_input_and_only_other_processes_excuse_it() {
        let text = || String::from("no");
        let away = || ClientError::Unreachable { address: text(), seconds: 120, reason: text() };
        let conflict = || ClientError::Conflict { address: text(), reason: text() };
        let misplaced = || ClientError::Misplaced { address: text(), found: 1, servers: 2, want: 0, ours: 2 };
        let lost = || RemoteError::Lost { peer: text(), call: text(), reason: text() };
        let failed = || RemoteError::Failed { peer: text(), call: text(), message: text() };
        let step = |source| ModulesError::Step { step: 3, source };
        let (by_hand, supervised) = (false, true);
        let (input, work, peer) = (WRONG_INPUT as u8, 1, PEER_AWAY as u8);
        let rows = [
            (ModulesError::Join(ClientError::Refused { address: text(), reason: text() }), supervised, input),
            (ModulesError::Join(away()), by_hand, peer),
            (ModulesError::Join(away()), supervised, peer),
            (ModulesError::Join(conflict()), by_hand, work),
            (ModulesError::Join(conflict()), supervised, peer),
            (ModulesError::Join(misplaced()), by_hand, work),
            (ModulesError::Join(misplaced()), supervised, peer),
            (ModulesError::Join(ClientError::Interrupted), supervised, work),
            (ModulesError::Leave(conflict()), by_hand, work),
            (ModulesError::Leave(conflict()), supervised, peer),
            (ModulesError::Connect(RemoteError::new("no")), supervised, input),
            (ModulesError::Connect(lost()), by_hand, peer),
            (step(lost()), by_hand, peer),
            (step(lost()), supervised, peer),
            (step(failed()), supervised, work),
            (ModulesError::Evaluate(failed()), supervised, work),
            (ModulesError::Diverged { step: 3, loss: f64::NAN }, supervised, work),
        ];
        for (error, supervised, want) in rows {
            let label = format!("{error:?}, supervised: {supervised}");
            assert_eq!(classify(error, supervised).exit_code(), want, "{label}");
        }
    }
}
