//! Lets the program find libtorch when it starts: the run path names the folder that it was built against, and
//! `../lib` beside it for images.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let lib = std::env::var("DEP_PSJOBS_WORKER_LIBTORCH").expect("psjobs-worker passes it on");
    println!("cargo::rustc-link-arg=-Wl,-rpath,{lib}");
    println!("cargo::rustc-link-arg=-Wl,-rpath,$ORIGIN/../lib");
    // Functions are bound at their first call: with a libtorch of another version, in which some are
    // missing, the binary still comes as far as saying so.
    println!("cargo::rustc-link-arg=-Wl,-z,lazy");
}
