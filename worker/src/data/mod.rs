//! Reads data sets ahead of the trainer, in the order in which the trainers share them out.

pub mod loader;
mod reading_ahead;

use std::env;
use std::path::{Path, PathBuf};

pub use psjobs_data::{Column, DataError, DataSet, ExampleFile, Expected, Fields, Kind, Settings, Table, Values};
pub use psjobs_ps::batch::sampler;

pub(crate) use reading_ahead::ReadingAhead;

/// Names the folder or file of the data set.
pub const DATA_VARIABLE: &str = "PSJOB_DATA";

/// Training examples, read in batches on a thread of their own.
pub trait Dataset {
    /// The examples that one step reads, usually a pair of tensors.
    type Batch: Send + 'static;

    /// Number of examples.
    fn examples(&self) -> usize;

    /// Reads the examples named, in this order.
    fn batch(&self, examples: &[i64]) -> Self::Batch;

    /// As [`Dataset::batch`], for data whose reading may fail: an error ends the trainer with its words.
    ///
    /// # Errors
    /// If an example cannot be read.
    fn read(&self, examples: &[i64]) -> Result<Self::Batch, ReadError> {
        Ok(self.batch(examples))
    }

    /// Steps ahead of the one that is read whose examples are to be announced by [`Dataset::will_read`].
    fn ahead(&self) -> u64 {
        0
    }

    /// Announces examples of a later step, so that they can be fetched meanwhile. Returns at once.
    fn will_read(&self, examples: &[i64]) {
        let _ = examples;
    }
}

/// An example could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct ReadError {
    pub text: String,
    /// True if the data is wrong, so that reading it again cannot help.
    pub is_input: bool,
}

impl From<DataError> for ReadError {
    fn from(error: DataError) -> Self {
        Self { text: error.with_causes(), is_input: error.is_input() }
    }
}

/// There is no place to look for data.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoPlace {
    #[error("there is no place for the data: neither {DATA_VARIABLE} nor HOME is set; name one with --data")]
    Unset,
    #[error(
        "{0} is a URL, and this workload reads a folder or file, which --data names; URLs are for mnist, mlp and torchscript"
    )]
    Url(String),
}

/// Returns the URL of a data set that is read a piece at a time, and not whole into memory: `s3://`, `gs://`, `az://` or
/// `file://`.
#[must_use]
pub fn url(given: Option<&Path>) -> Option<&str> {
    given?.to_str().filter(|given| given.contains("://"))
}

/// Where the data set `name` lies. `given` names it, or a folder that holds it under its name; else it
/// is in the user's cache folder, where `make mnist` and its relatives put it.
///
/// # Errors
/// If nothing is given and there is no cache folder, or a URL is given.
pub fn locate(given: Option<&Path>, name: &str) -> Result<PathBuf, NoPlace> {
    if let Some(url) = url(given) {
        return Err(NoPlace::Url(url.to_owned()));
    }
    if let Some(given) = given {
        let below = given.join(name);
        return Ok(if below.exists() { below } else { given.to_owned() });
    }
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
    Ok(cache.ok_or(NoPlace::Unset)?.join("psjobs").join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_data_set_lies_in_the_folder_given_or_below_it_under_its_name() {
        let root = tempfile::tempdir().expect("temporary folder");
        assert_eq!(locate(Some(root.path()), "text").as_deref(), Ok(root.path()));
        std::fs::create_dir(root.path().join("text")).expect("made");
        assert_eq!(locate(Some(root.path()), "text"), Ok(root.path().join("text")));
    }

    #[test]
    fn a_url_is_no_folder() {
        for url in ["s3://bucket/text", "file:///text"] {
            let error = locate(Some(Path::new(url)), "text").expect_err(url).to_string();
            assert!(error.starts_with(url) && error.contains("URLs are for mnist"), "{error}");
        }
    }
}
