//! Object stores as disks of the servers: checkpoints, the series of metrics and the trained model in a bucket of S3, Google
//! Cloud Storage or Azure Blob Storage, without a volume.
//!
//! [`location`] reads `s3://BUCKET/FOLDER` and the credentials of the environment, [`bucket`] does what the servers need of a disk
//! ([`Files`](psjobs_ps::checkpoint::disk::Files)), [`upload`] and [`download`] move large objects in parts, and [`spool`] holds
//! a file until it is sent. [`Objects`] are read by ranges: the data sets of trainers.

mod bucket;
mod download;
mod error;
mod location;
mod objects;
mod runtime;
mod spool;
mod upload;

#[cfg(test)]
mod tests;

pub use bucket::Bucket;
pub use location::{LocationError, folder, objects};
pub use objects::{Object, ObjectError, Objects};
