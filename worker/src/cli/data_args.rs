//! The flags that say where the data is, and how much of it is kept on this machine.

use std::path::PathBuf;

use anyhow::Error;
use clap::Args;
use psjobs_data::{DataError, MEMORY, Settings};
use psjobs_process::Failure;

use crate::data::{DATA_VARIABLE, ReadError, url};

/// Where the data is.
#[derive(Clone, Debug, Args)]
pub struct DataArgs {
    /// Folder or file of the data set, or its URL: s3://BUCKET/FOLDER, gs://, az:// or file:///FOLDER, which are read a piece at
    /// a time [default: where `make mnist` and its like put it]
    #[arg(long, value_name = "PATH|URL", env = DATA_VARIABLE)]
    pub data: Option<PathBuf>,
    /// With a URL: bytes of the data that are kept on this machine's disk [default: 10 GiB, or half of the free space if that
    /// is less]
    #[arg(long, value_name = "BYTES")]
    data_cache: Option<u64>,
    /// With a URL: the folder of these bytes, which processes of one machine may share [default: psjobs/pieces in the user's
    /// cache folder]
    #[arg(long, value_name = "DIR")]
    data_cache_dir: Option<PathBuf>,
    /// With a URL: bytes of the data that are kept in memory, and that are fetched at the same time
    #[arg(long, value_name = "BYTES", default_value_t = MEMORY)]
    data_memory: u64,
}

impl DataArgs {
    /// The URL of a data set that is read a piece at a time.
    #[must_use]
    pub fn url(&self) -> Option<&str> {
        url(self.data.as_deref())
    }

    /// The bounds of what is kept.
    #[must_use]
    pub fn settings(&self) -> Settings {
        Settings { cache: self.data_cache, cache_dir: self.data_cache_dir.clone(), memory: self.data_memory }
    }
}

/// Sorts an error of opening a workload, as [`Failure::opening`]; a store that does not answer now may do so later.
pub fn opening(error: Error) -> Failure {
    let may_pass = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<DataError>().is_some_and(|error| !error.is_input())
            || cause.downcast_ref::<ReadError>().is_some_and(|error| !error.is_input)
    };
    let may_pass = error.chain().any(may_pass);
    if may_pass { Failure::work(error) } else { Failure::opening(error) }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn a_store_that_does_not_answer_is_no_bad_input() {
        let read = |kind| DataError::Read { file: "s3://b/x".into(), source: io::Error::new(kind, "no") };
        for (kind, is_input) in [(io::ErrorKind::Other, false), (io::ErrorKind::PermissionDenied, true)] {
            let plain = Error::new(ReadError::from(read(kind)));
            for error in [plain, Error::new(read(kind)), Error::new(read(kind)).context("the training set")] {
                assert_eq!(matches!(opening(error), Failure::Input(_)), is_input, "{kind:?}");
            }
        }
    }
}
