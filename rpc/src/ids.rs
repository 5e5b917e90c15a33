//! Numbers by which processes name each other and what they hold.

/// Names a process; drawn at random when it starts, so that a restarted process is another one.
pub type Session = u64;
/// Names a hosted object, uniquely in its process.
pub type ObjectId = u64;
/// Names an autograd context; drawn at random by the process that opens it.
pub type ContextId = u64;
