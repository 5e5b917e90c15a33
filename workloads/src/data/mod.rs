//! The data sets of the workloads, and readers of their file formats.

pub mod clicks;
pub mod csv;
mod example_file;
mod folder;
pub mod idx;
pub mod labelled;
pub mod mnist;
pub mod streamed;
pub mod streamed_images;
pub mod text;
