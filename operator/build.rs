//! Generates the client of the servers' Coordination service, with a protoc that Cargo brings along.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let mut config = tonic_prost_build::Config::new();
    config.protoc_executable(protoc_bin_vendored::protoc_bin_path()?);
    tonic_prost_build::configure().build_server(false).compile_with_config(
        config,
        &["../ps/proto/psjobs/v1/coordination.proto"],
        &["../ps/proto"],
    )?;
    Ok(())
}
