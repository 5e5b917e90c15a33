//! Generates the gRPC code from `proto/` with a protoc that comes as a crate.

use std::env;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut config = tonic_prost_build::Config::new();
    config.protoc_executable(protoc_bin_vendored::protoc_bin_path()?);
    let descriptors = PathBuf::from(env::var("OUT_DIR")?).join("descriptors.bin");
    tonic_prost_build::configure()
        .bytes(".")
        .btree_map(".")
        .file_descriptor_set_path(descriptors)
        .compile_with_config(
            config,
            &["coordination", "exchange", "leadership", "recovery", "replication", "tables"]
                .map(|file| format!("proto/psjobs/v1/{file}.proto")),
            &["proto".to_owned()],
        )?;
    Ok(())
}
