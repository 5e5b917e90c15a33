//! The errors after which a reconcile is tried again.

use psjobs_api::certificates::MakeError;

/// Why a reconcile has to be tried again.
#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    #[error("cannot {what}")]
    Api { what: String, source: Box<kube::Error> },
    #[error("the job changed while it was looked at")]
    OutOfDate,
    #[error("the lease could not be renewed in time; nothing is written, because another operator may lead")]
    NotLeading,
    #[error("{child} is another shard's")]
    Disputed { child: String },
    #[error(transparent)]
    Certificates(#[from] MakeError),
    #[error("an object does not fit JSON")]
    Json(#[source] serde_json::Error),
}
