//! Manifests of the tests: the first example of the README, with a few fields changed.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Container;
use psjobs_api::crd::ParameterServerJob;

/// Path of the example's manifest, from the repository's root.
pub const EXAMPLE: &str = "examples/mnist.yaml";

/// Reads the example.
///
/// # Errors
/// If the file cannot be read or is no ParameterServerJob.
pub fn example() -> Result<ParameterServerJob> {
    from_file(EXAMPLE)
}

/// Reads the job of a file; the path is relative to the repository's root.
///
/// # Errors
/// If the file cannot be read or is no ParameterServerJob.
pub fn from_file(path: &str) -> Result<ParameterServerJob> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    serde_yaml::from_str(&text).with_context(|| format!("{path} is not a ParameterServerJob"))
}

/// Returns the main container of a job's trainers.
///
/// # Errors
/// If their template has none.
pub fn main_container(job: &mut ParameterServerJob) -> Result<&mut Container> {
    let pod = job.spec.trainer.template.spec.as_mut().context("the template has a spec")?;
    pod.containers.first_mut().context("the template has a container")
}

/// Returns the example with `change` applied to its trainers' container.
///
/// # Errors
/// As [`example`].
pub fn with_trainer(change: impl FnOnce(&mut Container)) -> Result<ParameterServerJob> {
    let mut job = example()?;
    change(main_container(&mut job)?);
    Ok(job)
}

/// Returns the example with other arguments for its trainers.
///
/// # Errors
/// As [`example`].
pub fn training(arguments: &[&str]) -> Result<ParameterServerJob> {
    with_trainer(|trainer| trainer.args = Some(arguments.iter().map(|&argument| argument.to_owned()).collect()))
}

/// Arguments of trainers that take 32 ms for a step, most of which they sleep, and 30 s in all: jobs of several tests at the
/// same time share two cores. Half an epoch for each of two trainers is enough for [`PACED_ACCURACY`].
pub const PACED: [&str; 6] = ["train", "mlp", "--max-steps", "900", "--example-ms", "1"];

/// Lowest accuracy of a job with [`PACED`] trainers; below it the model did not learn.
pub const PACED_ACCURACY: f64 = 0.9;

/// Returns the example with [`PACED`] trainers.
///
/// # Errors
/// As [`example`].
pub fn paced() -> Result<ParameterServerJob> {
    training(&PACED)
}
