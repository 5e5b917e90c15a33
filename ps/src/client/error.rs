//! Why a trainer cannot go on, and which answers of servers are worth another attempt.

use tonic::Status;

use crate::layout::LayoutError;

/// First words of the refusal by a server of another job, `Refusal::OtherJob`. Its status code does not distinguish it from the
/// refusal of a trainer that was replaced.
const OTHER_JOB: &str = "this server belongs to another job than ";

/// Words of a server to a process whose place another one has taken.
const REPLACED: &str = "was replaced by incarnation ";

/// Why a trainer cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The model has no parameters, or too many.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The initial values do not fit the tensors.
    #[error("the model has {tensors} parameters, {values} initial values were given")]
    InitialValues {
        /// Elements of all tensors.
        tensors: usize,
        /// Values given.
        values: usize,
    },
    /// An address that is none.
    #[error("{0:?} is not the address of a server; write host:port")]
    Address(String),
    /// A server did not answer in time.
    #[error("server {address} did not answer for {seconds} s ({reason}); see whether it runs and its port is open")]
    Unreachable {
        /// The server.
        address: String,
        /// How long it was tried.
        seconds: u64,
        /// The reason of the last attempt's failure.
        reason: String,
    },
    /// A server said no, and would say so again.
    #[error("server {address} refused: {reason}")]
    Refused {
        /// The server.
        address: String,
        /// Its words.
        reason: String,
    },
    /// A server refused because of another process: one that has taken this trainer's place, or a server of another
    /// job that has this address now. The trainer may be let in when it is started again.
    #[error("server {address} refused: {reason}")]
    Conflict {
        /// The server.
        address: String,
        /// Its words.
        reason: String,
    },
    /// A server computes another layout; one of the two is of another version or has other settings.
    #[error(
        "server {address} is server {found} of a job with {servers} servers, expected server {want} of {ours}; check the order and number of server addresses"
    )]
    Misplaced {
        /// The server.
        address: String,
        /// Its index.
        found: u32,
        /// Its count of servers.
        servers: u32,
        /// Index expected.
        want: u32,
        /// Count expected.
        ours: u32,
    },
    /// A server has been started again, and has lost its rows or gone to a checkpoint with all others.
    #[error(
        "server {address} was started anew, or has gone to a checkpoint, and has other rows of the sparse tables than \
         before; let the trainers start again, they go on with those"
    )]
    TablesLost {
        /// The server.
        address: String,
    },
    /// The trainers have finished the job's work, the process before this one among them or in an elastic job the others, and
    /// the servers are about to end: this trainer can end, too, and well.
    #[error("{reason}")]
    Over {
        /// The server's words.
        reason: String,
    },
    /// No memory for parameters and gradients.
    #[error("cannot get memory for {elements} parameters and their gradients; give this process more memory")]
    Memory {
        /// Number of parameters.
        elements: usize,
        /// The system's error.
        source: std::io::Error,
    },
    /// [`SessionConfig::interrupt`] was set.
    #[error("asked to stop while waiting for the servers")]
    Interrupted,
    /// An exchange panicked, and the session is gone with it.
    #[error("an exchange panicked, and this trainer's session is gone with it; see its log, and start it again")]
    Panicked,
    /// No thread or runtime could be had.
    #[error("cannot start the network thread; raise the process limits of this machine")]
    Runtime(#[source] std::io::Error),
}

impl ClientError {
    /// Returns the error of a trainer that `address` refused with a status that is not retryable.
    pub(crate) fn refused(address: &str, status: &Status) -> Self {
        let (address, reason) = (address.to_owned(), status.message().to_owned());
        match status.code() {
            tonic::Code::FailedPrecondition => Self::Conflict { address, reason },
            _ => Self::Refused { address, reason },
        }
    }

    /// Returns true if the trainer was given something that cannot work, so that starting it again cannot help: its
    /// model, flags or environment. A server that is away, another process in its place and a lack of memory are not.
    #[must_use]
    pub fn is_input(&self) -> bool {
        match self {
            Self::Layout(_) | Self::InitialValues { .. } | Self::Address(_) | Self::Refused { .. } => true,
            // The addresses of a job are its operator's; a wrong server at one of them is an old one.
            Self::Misplaced { .. }
            | Self::Conflict { .. }
            | Self::Unreachable { .. }
            | Self::TablesLost { .. }
            | Self::Over { .. }
            | Self::Memory { .. }
            | Self::Interrupted
            | Self::Panicked
            | Self::Runtime(_) => false,
        }
    }

    /// Returns true if the trainer ends only because a server is away, or was and has lost what it held: it is not to
    /// blame, and goes on when it is started again.
    #[must_use]
    pub fn is_peer_away(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::TablesLost { .. })
    }

    /// Returns true if other processes alone end the trainer, so that its exit is not to count as its failure. Where
    /// somebody (`supervised`) starts processes again, this includes another process at a server's address or in this
    /// trainer's place, because processes replace each other there. By hand that is a mistake of the person.
    #[must_use]
    pub fn is_caused_by_others(&self, supervised: bool) -> bool {
        self.is_peer_away() || supervised && self.is_wrong_process()
    }

    /// Returns true if the cause lies in this trainer, so that the servers should know of it; false if a server, another
    /// process or a signal ended it.
    #[must_use]
    pub fn is_own(&self) -> bool {
        let by_another = self.is_wrong_process() || matches!(self, Self::Over { .. } | Self::Interrupted);
        !(by_another || self.is_peer_away())
    }

    /// Returns true if another process has a server's address or this trainer's place.
    fn is_wrong_process(&self) -> bool {
        matches!(self, Self::Misplaced { .. } | Self::Conflict { .. })
    }
}

/// Returns whether a server of another job has answered.
pub(crate) fn is_of_another_job(status: &Status) -> bool {
    let is_refusal = matches!(status.code(), tonic::Code::FailedPrecondition | tonic::Code::InvalidArgument);
    is_refusal && status.message().starts_with(OTHER_JOB)
}

/// Returns whether a server has let another process in for this trainer.
pub(crate) fn is_replaced(status: &Status) -> bool {
    status.code() == tonic::Code::FailedPrecondition && status.message().contains(REPLACED)
}

/// Returns whether another attempt may succeed.
pub(crate) fn is_retryable(status: &Status) -> bool {
    !matches!(
        status.code(),
        tonic::Code::InvalidArgument | tonic::Code::FailedPrecondition | tonic::Code::Unimplemented
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_process_excuses_the_trainer_only_where_somebody_starts_processes_again() {
        let (address, reason) = (|| "ps-0:29500".to_owned(), || "no".to_owned());
        let misplaced = ClientError::Misplaced { address: address(), found: 1, servers: 2, want: 0, ours: 2 };
        // The error, if it is caused by others by hand and where it is supervised, and if servers should know of it.
        let rows = [
            (ClientError::Unreachable { address: address(), seconds: 120, reason: reason() }, (true, true), false),
            (ClientError::TablesLost { address: address() }, (true, true), false),
            (misplaced, (false, true), false),
            (ClientError::Conflict { address: address(), reason: reason() }, (false, true), false),
            (ClientError::Refused { address: address(), reason: reason() }, (false, false), true),
            (ClientError::InitialValues { tensors: 2, values: 3 }, (false, false), true),
            (ClientError::Address(address()), (false, false), true),
            (ClientError::Over { reason: reason() }, (false, false), false),
            (ClientError::Interrupted, (false, false), false),
            (ClientError::Panicked, (false, false), true),
            (ClientError::Runtime(std::io::ErrorKind::WouldBlock.into()), (false, false), true),
        ];
        for (error, by_others, own) in rows {
            let found = (error.is_caused_by_others(false), error.is_caused_by_others(true));
            assert_eq!((found, error.is_own()), (by_others, own), "{error}");
        }
    }

    #[test]
    fn a_server_of_another_job_is_distinguished_from_a_successor() {
        let other = "this server belongs to another job than job-2, the trainer's; check the address and start both from \
                     one job";
        let rows = [
            (Status::failed_precondition(other), true),
            (Status::failed_precondition("trainer 0 incarnation 0 was replaced by incarnation 1"), false),
            (Status::unavailable(other), false),
        ];
        for (status, want) in rows {
            assert_eq!(is_of_another_job(&status), want, "{status}");
        }
        let replaced = Status::failed_precondition("trainer 0 incarnation 0 was replaced by incarnation 1");
        assert!(is_replaced(&replaced) && !is_replaced(&Status::failed_precondition(other)));
    }
}
