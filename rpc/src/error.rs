//! The errors of calls; each names the call, the peer and the cause.

use std::any::Any;
use std::time::Duration;

/// A call that did not give a result.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RemoteError {
    #[error("{call} cannot reach {peer}: {reason}")]
    Unreachable { peer: String, call: String, reason: String },
    #[error("the connection to {peer} broke during {call} ({reason}); whether the call ran is unknown")]
    Lost { peer: String, call: String, reason: String },
    #[error("{call} on {peer} gave no answer within {timeout:?}; raise the timeout if it needs longer")]
    Deadline { peer: String, call: String, timeout: Duration },
    #[error("{call} on {peer} failed: {message}")]
    Failed { peer: String, call: String, message: String },
    /// The message of a method, a constructor or an argument; [`RemoteError::Failed`] carries it to the caller.
    #[error("{0}")]
    Message(String),
}

impl RemoteError {
    pub fn new(message: impl Into<String>) -> Self {
        Self::Message(message.into())
    }

    /// True where the same call may succeed later: the peer did not answer, or was not there.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Lost { .. } | Self::Deadline { .. })
    }

    /// True where the peer is away or was lost during the call, so that it, and not the caller, is the cause.
    #[must_use]
    pub fn is_peer_away(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Lost { .. })
    }

    /// Turns what a panic left into an error.
    pub(crate) fn from_panic(payload: &(dyn Any + Send)) -> Self {
        let text = payload
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| payload.downcast_ref::<&str>().copied())
            .unwrap_or("no message");
        Self::Message(format!("panicked: {}", without_stack(text)))
    }
}

impl From<tch::TchError> for RemoteError {
    fn from(error: tch::TchError) -> Self {
        Self::Message(without_stack(&error.to_string()).to_owned())
    }
}

/// libtorch appends its C++ stack to each message, as lines or (inside a debug string) as `\n`.
fn without_stack(text: &str) -> &str {
    let text = text.split_once("Torch(\"").map_or(text, |(_, inner)| inner);
    let end = [text.find('\n'), text.find("\\n")].into_iter().flatten().min().unwrap_or(text.len());
    text[..end].trim_end()
}

/// Returns the error for a name that is not registered; it lists the names that are.
pub(crate) fn unknown<'a>(what: &str, name: &str, known: impl Iterator<Item = &'a str>) -> RemoteError {
    let known = known.collect::<Vec<_>>().join(", ");
    RemoteError::new(format!("no {what} is called `{name}`; there are: {known}"))
}

/// Returns the error for a method that modules do not have.
pub(crate) fn unknown_module_method(name: &str) -> RemoteError {
    unknown("method of modules", name, ["forward", "parameters", "gradients", "version"].into_iter())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_libtorch_panic_keeps_its_first_sentence() {
        let payload = std::panic::catch_unwind(|| {
            let a = tch::Tensor::zeros([2, 3], tch::kind::FLOAT_CPU);
            a.matmul(&a)
        })
        .expect_err("shapes do not fit");
        let text = RemoteError::from_panic(&*payload).to_string();
        assert_eq!(text, "panicked: mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)");
    }

    #[test]
    fn a_peer_that_is_away_or_lost_excuses_the_caller() {
        let (peer, call, text) = (|| "ps-0".to_owned(), || "forward".to_owned(), || "no".to_owned());
        let rows = [
            (RemoteError::Unreachable { peer: peer(), call: call(), reason: text() }, true),
            (RemoteError::Lost { peer: peer(), call: call(), reason: text() }, true),
            (RemoteError::Deadline { peer: peer(), call: call(), timeout: Duration::from_secs(60) }, false),
            (RemoteError::Failed { peer: peer(), call: call(), message: text() }, false),
            (RemoteError::Message(text()), false),
        ];
        for (error, want) in rows {
            assert_eq!(error.is_peer_away(), want, "{error}");
        }
    }
}
