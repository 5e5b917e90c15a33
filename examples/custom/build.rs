//! Lets the program find the libtorch that psjobs-worker was built against.
fn main() {
    let lib = std::env::var("DEP_PSJOBS_WORKER_LIBTORCH").expect("psjobs-worker sets it");
    println!("cargo::rustc-link-arg=-Wl,-rpath,{lib}");
    println!("cargo::rustc-link-arg=-Wl,-rpath,$ORIGIN/../lib");
}
