//! Sparse tables of a script that is alone.

use std::sync::{Mutex, PoisonError};

use psjobs_ps::sparse::Local;
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;

use super::environment::Environment;
use super::errors::InputError;
use super::session::{TableArguments, copied, table_spec, unsigned};

/// Sparse tables in this process, trained by the rule that a job's servers would have.
#[pyclass(frozen, module = "psjobs._native")]
pub struct LocalTables(Mutex<Local>);

#[pymethods]
impl LocalTables {
    #[new]
    fn new(environment: &Environment, tables: Vec<TableArguments>) -> PyResult<Self> {
        let specs = tables.into_iter().map(table_spec).collect();
        let local = Local::new(specs, &environment.training).map_err(|error| InputError::new_err(error.to_string()))?;
        Ok(Self(Mutex::new(local)))
    }

    /// Writes the rows of `keys` to `rows`, one behind the other.
    #[allow(clippy::needless_pass_by_value, reason = "as Python passes it")]
    fn pull(&self, py: Python<'_>, table: usize, keys: PyBuffer<i64>, rows: PyBuffer<f32>) -> PyResult<bool> {
        let keys = unsigned(keys.to_vec(py)?);
        let pulled = self.0.lock().unwrap_or_else(PoisonError::into_inner).pull(table, &keys);
        rows.copy_from_slice(py, &pulled)?;
        Ok(true)
    }

    /// Updates rows by their gradients in `step`.
    fn push(&self, py: Python<'_>, step: u64, rows: Vec<(usize, PyBuffer<i64>, PyBuffer<f32>)>) -> PyResult<()> {
        let rows = copied(py, rows)?;
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push_all(step, &rows);
        Ok(())
    }
}
