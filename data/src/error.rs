//! Why a data set cannot be read.

use std::error::Error;
use std::io::{self, ErrorKind};
use std::iter;
use std::path::PathBuf;

use psjobs_object_store::LocationError;

/// A data set, or a part of it, cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    #[error(transparent)]
    Location(#[from] LocationError),
    #[error(
        "{place} is no place of a data set; give a folder, file:///FOLDER, s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or az://CONTAINER/FOLDER"
    )]
    Place { place: String },
    #[error("cannot read {file}")]
    Read { file: String, source: io::Error },
    #[error(
        "{file} has changed since this process looked at it first; leave the files of a data set as they are while a job reads them, and begin the job again"
    )]
    Changed { file: String },
    #[error("{file}: {problem}")]
    Unfit { file: String, problem: String },
    #[error(
        "{file}: column {column}: expected {expected}, found {found}; write the file anew, or take it out of the folder"
    )]
    Column { file: String, column: String, expected: String, found: String },
    #[error("the cache {} cannot be used; name another folder with --data-cache-dir", folder.display())]
    Cache { folder: PathBuf, source: io::Error },
}

impl DataError {
    /// Returns true if reading again cannot help: the data itself, or its place, is wrong.
    #[must_use]
    pub fn is_input(&self) -> bool {
        match self {
            Self::Read { source, .. } | Self::Cache { source, .. } => {
                matches!(source.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied)
            }
            Self::Location(LocationError::Thread { .. }) => false,
            Self::Location(_)
            | Self::Place { .. }
            | Self::Changed { .. }
            | Self::Unfit { .. }
            | Self::Column { .. } => true,
        }
    }

    /// Returns the error with its causes, in one line.
    #[must_use]
    pub fn with_causes(&self) -> String {
        let causes = iter::successors(Some(self as &dyn Error), |error| (*error).source());
        causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
    }

    pub(crate) fn unfit(file: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Unfit { file: file.into(), problem: problem.into() }
    }
}
