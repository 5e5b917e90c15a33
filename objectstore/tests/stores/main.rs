//! Checkpoints and data sets in real object stores: versitygw plays S3, Azurite Azure Blob Storage. Both are processes of this machine;
//! `scripts/object-stores.sh` makes them ready, and without them the tests say so and end well.

mod between;
mod checkpoints;
mod data;
mod faults;
mod jobs;
mod kills;
mod refusals;
mod store;
mod training;
