//! Compiles the C++ halves of `train/gradient_hooks.rs` and `train/precision.rs`. Sets the run path of the tests to the libtorch
//! that `psjobs-rpc` found, and passes it on: programs with a workload of their own link libtorch too, and their build scripts get
//! it from here.

use std::env;
use std::path::PathBuf;

const SOURCES: [&str; 2] = ["src/train/gradient_hooks.cpp", "src/train/precision.cpp"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    SOURCES.iter().for_each(|source| println!("cargo::rerun-if-changed={source}"));
    let from_rpc = |name: &str| env::var(format!("DEP_PSJOBS_RPC_{name}")).expect("psjobs-rpc passes it on");
    let (lib, version, include) = (from_rpc("LIBTORCH"), from_rpc("VERSION"), PathBuf::from(from_rpc("INCLUDE")));
    println!("cargo::rustc-env=PSJOBS_LIBTORCH_VERSION={version}");
    println!("cargo::metadata=libtorch={lib}");
    println!("cargo::rustc-link-arg=-Wl,-rpath,{lib}");
    // As torch-sys compiles its own; libtorch's headers have warnings.
    let mut build = cc::Build::new();
    build.cpp(true).pic(true).warnings(false).std("c++17");
    build.includes([include.join("torch/csrc/api/include"), include]);
    build.files(SOURCES).compile("psjobs_libtorch");
}
