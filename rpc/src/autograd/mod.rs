//! Autograd over several processes.
//!
//! A [`Context`] records calls of modules, wherever they live, and takes them backwards. Modules are
//! functions of parameters and inputs; a step of an optimizer makes a new version of the parameters,
//! and a context keeps the version it first met. So contexts side by side do not disturb each other.

mod backward;
mod context;
mod hosted_module;
mod memory;
mod module;
mod module_ref;
mod optimizer;
mod parameters;
mod tensor_optimizer;

pub use context::Context;
pub use module::{Module, Pass};
pub use module_ref::{ModuleRef, ParameterRef};
pub use optimizer::DistributedOptimizer;
pub use parameters::Parameters;
pub use tensor_optimizer::{TensorOptimizer, TensorState};

pub(crate) use optimizer::register;
