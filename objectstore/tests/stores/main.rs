//! Checkpoints and data sets in object stores: versitygw plays S3, fake-gcs-server Google Cloud Storage (behind `tests/gcs`), Azurite
//! Azure Blob Storage. All are processes of this machine; `scripts/object-stores.sh` makes them ready, and without them the tests say
//! so and end well.

mod between;
mod checkpoints;
mod data;
mod faults;
mod jobs;
mod kills;
mod refusals;
mod store;
mod training;
