//! The target of a call, and its form on the wire.

use crate::ids::ObjectId;
use crate::proto;

/// Names what a call runs on the process that receives it.
#[derive(Debug)]
pub(crate) enum Target {
    Construct { name: String, singleton: bool },
    Function { name: String },
    Method { object: ObjectId, name: String },
    Backward { piece: u64 },
}

impl Target {
    /// Returns the call's name for errors; `what` is the name of the object.
    pub fn describe(&self, what: &str) -> String {
        match self {
            Self::Construct { name, .. } => format!("construction of `{name}`"),
            Self::Function { name } => format!("function `{name}`"),
            Self::Method { name, .. } => format!("`{what}.{name}`"),
            Self::Backward { piece } => format!("backward of call {piece} of `{what}`"),
        }
    }
}

impl From<Target> for proto::call::Target {
    fn from(target: Target) -> Self {
        match target {
            Target::Construct { name, singleton } => Self::Construct(proto::Construct { name, singleton }),
            Target::Function { name } => Self::Function(name),
            Target::Method { object, name } => Self::Method(proto::Method { object, name }),
            Target::Backward { piece } => Self::Backward(proto::Backward { piece }),
        }
    }
}

impl From<proto::call::Target> for Target {
    fn from(target: proto::call::Target) -> Self {
        match target {
            proto::call::Target::Construct(c) => Self::Construct { name: c.name, singleton: c.singleton },
            proto::call::Target::Function(name) => Self::Function { name },
            proto::call::Target::Method(m) => Self::Method { object: m.object, name: m.name },
            proto::call::Target::Backward(b) => Self::Backward { piece: b.piece },
        }
    }
}
