//! Autograd over several processes.
//!
//! A [`Context`] records calls of modules, wherever they live, and takes them backwards. Modules are
//! functions of parameters and inputs; a step of an optimizer makes a new version of the parameters,
//! and a context keeps the version it first met. So contexts side by side do not disturb each other.

mod context;
mod contexts;
mod memory;
mod module;
mod module_ref;
mod optimizer;
mod tape;

pub use context::Context;
pub use module::{Module, Parameters, Pass};
pub use module_ref::{ModuleRef, ParameterRef};
pub use optimizer::DistributedOptimizer;

pub(crate) use contexts::{ContextState, Contexts};
pub(crate) use module::HostedModule;

/// What every process offers besides what its registry says.
pub(crate) fn register(registry: &mut super::Registry) {
    optimizer::register(registry);
}
