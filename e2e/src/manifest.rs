//! Manifests of the tests: the example that users begin with, changed in a few fields.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Container;
use psjobs_api::crd::ParameterServerJob;

/// The example's manifest, from the repository's root.
pub const EXAMPLE: &str = "examples/mnist.yaml";

/// The example as an object.
///
/// # Errors
/// If the file cannot be read or is no ParameterServerJob.
pub fn example() -> Result<ParameterServerJob> {
    let text = std::fs::read_to_string(EXAMPLE).with_context(|| format!("cannot read {EXAMPLE}"))?;
    serde_yaml::from_str(&text).with_context(|| format!("{EXAMPLE} is not a ParameterServerJob"))
}

/// The example with `change` made to its trainers' container.
///
/// # Errors
/// As [`example`].
pub fn with_trainer(change: impl FnOnce(&mut Container)) -> Result<ParameterServerJob> {
    let mut job = example()?;
    let pod = job.spec.trainer.template.spec.as_mut().context("the example's template has a spec")?;
    change(pod.containers.first_mut().context("the example's template has a container")?);
    Ok(job)
}

/// The example with other arguments for its trainers.
///
/// # Errors
/// As [`example`].
pub fn training(arguments: &[&str]) -> Result<ParameterServerJob> {
    with_trainer(|trainer| trainer.args = Some(arguments.iter().map(|&argument| argument.to_owned()).collect()))
}
