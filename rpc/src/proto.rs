//! The messages of `proto/psjobs/v1/remote.proto`.

#![allow(clippy::all, missing_docs)]

tonic::include_proto!("psjobs.v1");
