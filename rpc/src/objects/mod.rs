//! Hosted objects, references to them, and the values that calls carry.

mod contexts;
mod convert;
mod encoding;
mod execution;
mod hosted_value;
mod object;
mod object_table;
mod peer;
mod pending;
mod registry;
mod reply;
mod rref;
mod state;
mod target;
mod tensor_message;
mod value;

pub use convert::{FromValue, FromValues, IntoValues, Values};
pub use object::{Methods, RemoteObject};
pub use peer::Peer;
pub use pending::Pending;
pub use state::{Call, Endpoint, Registry};
pub use value::{RRef, Value};

pub(crate) use contexts::{ContextState, Contexts, Piece, RemoteCall, Tape, Version};
pub(crate) use encoding::{decode, encode};
pub(crate) use execution::on_pool;
pub(crate) use object_table::ObjectTable;
pub(crate) use reply::Responder;
pub(crate) use state::{Hosted, Job, Shared};
pub(crate) use target::Target;
pub(crate) use value::{Answer, Caller, Destination};
