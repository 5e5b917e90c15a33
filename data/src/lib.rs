//! Data sets that need not fit into memory: safetensors, CSV, Parquet and folders of images, in a folder or in a bucket of S3,
//! Google Cloud Storage or Azure. Examples are read by their numbers, in any order, so that the sampler of a job deals each
//! out once an epoch.
//!
//! [`DataSet`] is what workloads use. Below it, the index is made once at the start, the formats have a file each, pieces of
//! the files are kept in memory and on disk up to a limit, and a fetcher brings those that will be needed.

mod csv;
mod dataset;
mod disk_cache;
mod error;
mod fetcher;
mod index;
mod lru;
mod parquet;
mod place;
mod safetensors;
mod schema;

pub use dataset::{DataSet, ExampleFile, MEMORY, Settings};
pub use error::DataError;
pub use schema::{Column, Expected, Fields, Kind, Table, Values};
