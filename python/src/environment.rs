//! A trainer's place in its job, as its environment describes it.

use std::env;

use psjobs_api::env::{PSJOB_ROLE, PSJOB_TRAINING};
use psjobs_api::training::{ConsistencyMode, Precision};
use psjobs_api::{Role, Training};
use psjobs_ps::network::Network;
use psjobs_ps::schedule::Schedule;
use pyo3::prelude::*;

use super::errors::InputError;

/// The place in a job that the environment gives this process, or the settings of a trainer that is alone.
#[pyclass(frozen, module = "psjobs._native")]
pub struct Environment {
    /// The place in the job; none of a trainer that is alone.
    pub job: Option<psjobs_api::Environment>,
    pub network: Network,
    pub training: Training,
}

#[pymethods]
impl Environment {
    /// Reads the environment of this process.
    #[staticmethod]
    fn read() -> PyResult<Self> {
        let lookup = |name: &str| env::var(name).ok();
        let wrong = |error: &dyn std::error::Error| InputError::new_err(error.to_string());
        let Some(job) = psjobs_api::Environment::from_vars(lookup).map_err(|error| wrong(&error))? else {
            let training = alone(lookup(PSJOB_TRAINING))?;
            refuse_of_workloads(&training)?;
            return Ok(Self { job: None, network: Network::default(), training });
        };
        if job.role != Role::Trainer {
            let text = format!("this process is a server of job {} ({PSJOB_ROLE} says so), not a trainer", job.name);
            return Err(InputError::new_err(text));
        }
        refuse_of_workloads(&job.training)?;
        let network = Network::of(&job).map_err(|error| wrong(&error))?;
        Ok(Self { training: job.training.clone(), job: Some(job), network })
    }

    /// Name of the job; none of a trainer that is alone.
    #[getter]
    fn name(&self) -> Option<&str> {
        self.job.as_ref().map(|job| job.name.as_str())
    }

    /// Index of this trainer.
    #[getter]
    fn trainer(&self) -> u32 {
        self.job.as_ref().map_or(0, |job| job.index)
    }

    /// Number of trainers; of an elastic job the most.
    #[getter]
    fn trainers(&self) -> u32 {
        self.job.as_ref().map_or(1, |job| job.trainers)
    }

    /// Somebody starts this trainer again.
    #[getter]
    fn supervised(&self) -> bool {
        self.job.as_ref().is_some_and(|job| job.supervised)
    }

    /// GPUs that the job gives to this trainer alone.
    #[getter]
    fn gpus(&self) -> u32 {
        self.job.as_ref().map_or(0, |job| job.gpus)
    }

    /// Trainers come and go.
    #[getter]
    fn elastic(&self) -> bool {
        self.job.as_ref().is_some_and(|job| job.min_trainers.is_some())
    }

    /// The fastest trainers make a step without as many others.
    #[getter]
    fn backup_trainers(&self) -> u32 {
        self.training.consistency.backup_trainers
    }

    /// Trainers make steps alone between two exchanges.
    #[getter]
    fn is_local(&self) -> bool {
        self.job.is_some() && self.training.local.is_some()
    }

    /// Trainers train on while they exchange gradients, or what local steps have changed.
    #[getter]
    fn overlaps_exchanges(&self) -> bool {
        self.training.overlaps_exchanges()
    }

    /// Steps that a trainer makes for one exchange with the servers.
    #[getter]
    fn steps_per_exchange(&self) -> u64 {
        self.job.as_ref().map_or(1, |job| job.training.steps_per_exchange())
    }

    /// Takes the result.
    #[getter]
    fn result_file(&self) -> Option<&str> {
        self.job.as_ref().and_then(|job| job.result_file.as_deref())
    }

    /// Seed of the data's order.
    #[getter]
    fn seed(&self) -> u64 {
        self.training.seed
    }

    /// Examples of a batch, unless the script says otherwise.
    #[getter]
    fn batch_size(&self) -> u32 {
        self.training.batch.base
    }

    /// The examples of a step are dealt out by the trainers' speed.
    #[getter]
    fn adaptive(&self) -> bool {
        self.training.batch.adaptive
    }

    /// Each step takes a gradient of every trainer.
    #[getter]
    fn sync(&self) -> bool {
        self.training.consistency.mode == ConsistencyMode::Sync
    }

    /// `spec.training.optimizer` as JSON.
    #[getter]
    fn optimizer(&self) -> PyResult<String> {
        serde_json::to_string(&self.training.optimizer).map_err(|error| InputError::new_err(error.to_string()))
    }

    /// Factor on the learning rate, and weight decay where it is not the optimizer's, of the parameter of this name.
    fn parameter_group(&self, name: &str) -> (f64, Option<f64>) {
        let group = self.training.optimizer.groups.iter().find(|group| group.matches(name));
        group.map_or((1.0, None), |group| (group.learning_rate_factor, group.weight_decay))
    }

    /// The learning rate of a step.
    fn learning_rate(&self, step: u64) -> f64 {
        self.training.optimizer.learning_rate * Schedule::from(&self.training.schedule).factor(step)
    }
}

/// Refuses fields that say how a workload in Rust computes: a script says that itself, and they would be ignored.
fn refuse_of_workloads(training: &Training) -> PyResult<()> {
    if training.batch.micro_batches() > 1 {
        return Err(InputError::new_err(
            "spec.training.batch.microBatches is for workloads in Rust; remove it, and call backward() for each part of a \
             batch before opt.step()",
        ));
    }
    if training.precision() != Precision::default() {
        return Err(InputError::new_err(
            "spec.training.precision is for workloads in Rust; remove it, and use torch.autocast and \
             torch.backends.cuda.matmul.allow_tf32 in the script",
        ));
    }
    Ok(())
}

/// The settings of a trainer that is alone: `spec.training` as JSON, or the defaults.
fn alone(json: Option<String>) -> PyResult<Training> {
    let Some(json) = json else { return Ok(Training::default()) };
    let wrong = |error: String| InputError::new_err(format!("{PSJOB_TRAINING} is not spec.training as JSON: {error}"));
    let training: Training = serde_json::from_str(&json).map_err(|error| wrong(error.to_string()))?;
    training.validate().map_err(|error| wrong(error.to_string()))?;
    Ok(training)
}
