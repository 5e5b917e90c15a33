//! The native half of the Python package `psjobs`: a trainer's place in its job ([`environment`]), its session with the
//! servers ([`session`]) and the memory that both share with the model ([`memory`]), the split of the data
//! ([`sampler`]), sparse tables of a script that is alone ([`tables`]), the programs that run a job on one machine
//! ([`command`]), and the pod that reads the object store of a job on a cluster ([`store_pod`]). What concerns PyTorch is written in Python,
//! in `psjobs/`; nothing here links libtorch.

mod command;
mod environment;
mod errors;
mod memory;
mod result;
mod sampler;
mod session;
mod store_pod;
mod tables;
mod waiting;

use pyo3::prelude::*;

/// The module `psjobs._native`; `psjobs/_native.pyi` has its types.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::command::{psjobs, worker};
    #[pymodule_export]
    use super::environment::Environment;
    #[pymodule_export]
    use super::errors::{Conflict, Error, InputError, Interrupted, Over, PeerAway};
    #[pymodule_export]
    use super::memory::Memory;
    #[pymodule_export]
    use super::result::result;
    #[pymodule_export]
    use super::sampler::Sampler;
    #[pymodule_export]
    use super::session::Session;
    #[pymodule_export]
    use super::store_pod::store_pod;
    #[pymodule_export]
    use super::tables::LocalTables;
    #[pymodule_export]
    use super::waiting::Interrupt;

    /// Image of trainers on a cluster: that of a release if the package is from one, else what `make image-torch` builds.
    #[pymodule_export]
    const IMAGE: &str = match option_env!("PSJOBS_TORCH_IMAGE") {
        Some(published) => published,
        None => concat!("psjobs-torch:", env!("CARGO_PKG_VERSION")),
    };
}
