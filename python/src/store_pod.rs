//! The pod through which a script reads the object store of a job on a cluster.

use psjobs_api::crd::{ParameterServerJob, store_pod as reader};
use pyo3::prelude::*;

use crate::errors::InputError;

/// The manifest of the pod `name` as JSON, and the words of the program in it that reads the store. `job` is the job as the API
/// server has it, `running` the image of one of its servers, if that is known.
#[pyfunction]
pub fn store_pod(job: String, name: String, running: Option<String>) -> PyResult<(String, Vec<String>)> {
    let job: ParameterServerJob = serde_json::from_str(&job)
        .map_err(|error| InputError::new_err(format!("this package cannot read the job: {error}; update psjobs")))?;
    let mut pod = reader::pod(&job, &reader::image(&job, running));
    pod["metadata"]["name"] = name.into();
    Ok((pod.to_string(), reader::program(&job)))
}
