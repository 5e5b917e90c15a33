//! Sets the run path of the tests to the libtorch that `psjobs-rpc` found, and passes it on: programs with a
//! workload of their own link libtorch too, and their build scripts get it from here.

use std::env;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let from_rpc = |name: &str| env::var(format!("DEP_PSJOBS_RPC_{name}")).expect("psjobs-rpc passes it on");
    let (lib, version) = (from_rpc("LIBTORCH"), from_rpc("VERSION"));
    println!("cargo::rustc-env=PSJOBS_LIBTORCH_VERSION={version}");
    println!("cargo::metadata=libtorch={lib}");
    println!("cargo::rustc-link-arg=-Wl,-rpath,{lib}");
}
