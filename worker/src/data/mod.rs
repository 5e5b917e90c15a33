//! Reads data sets ahead of the trainer, in the order in which the trainers share them out.

pub mod loader;

use std::env;
use std::path::{Path, PathBuf};

pub use psjobs_ps::batch::sampler;

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
}

/// There is no place to look for data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no place for the data: neither {DATA_VARIABLE} nor HOME is set; name one with --data")]
pub struct NoPlace;

/// Where the data set `name` lies. `given` names it, or a folder that holds it under its name; else it
/// is in the user's cache folder, where `make mnist` and its relatives put it.
///
/// # Errors
/// If nothing is given and there is no cache folder.
pub fn locate(given: Option<&Path>, name: &str) -> Result<PathBuf, NoPlace> {
    if let Some(given) = given {
        let below = given.join(name);
        return Ok(if below.exists() { below } else { given.to_owned() });
    }
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
    Ok(cache.ok_or(NoPlace)?.join("psjobs").join(name))
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
}
