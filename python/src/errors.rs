//! The package's exceptions, and which of them an error of the client is.

use psjobs_ps::client::ClientError;
use pyo3::exceptions::PyRuntimeError;
use pyo3::{PyErr, create_exception};

create_exception!(psjobs, Error, PyRuntimeError, "A trainer cannot go on.");
create_exception!(
    psjobs,
    InputError,
    Error,
    "The trainer was given what cannot work: starting it again cannot help. A script that it ends has exit code 2."
);
create_exception!(
    psjobs,
    PeerAway,
    Error,
    "A server is away, or was, and nothing else is wrong. A script that it ends has exit code 75, and is started again."
);
create_exception!(
    psjobs,
    Conflict,
    Error,
    "Another process has taken this trainer's place, or a server's. A script that it ends has exit code 75 where somebody \
     starts it again."
);
create_exception!(psjobs, Over, Error, "The job is done, and its servers are about to end.");
create_exception!(psjobs, Interrupted, Error, "The trainer was asked to stop while it waited for servers.");

/// Returns the exception for an error of the client, with the causes in its text.
pub fn exception(error: &ClientError) -> PyErr {
    let causes = std::iter::successors(Some(error as &dyn std::error::Error), |error| error.source());
    let text = causes.map(ToString::to_string).collect::<Vec<_>>().join(": ");
    match error {
        _ if error.is_input() => InputError::new_err(text),
        _ if error.is_peer_away() => PeerAway::new_err(text),
        ClientError::Interrupted => Interrupted::new_err(text),
        ClientError::Over { .. } => Over::new_err(text),
        _ if error.is_own() => Error::new_err(text),
        _ => Conflict::new_err(text),
    }
}
