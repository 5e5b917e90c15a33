//! Messages and services, generated from `proto/psjobs/v1`.
#![allow(missing_docs, clippy::all)]

tonic::include_proto!("psjobs.v1");

/// The encoded descriptors of all files, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
