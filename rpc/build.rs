//! Finds libtorch as torch-sys does, and passes its folders and version on to the build scripts of the crates
//! above, so that every program finds it when it starts. Generates the gRPC code from `proto/`, with a protoc
//! that comes as a crate.

use std::path::{Path, PathBuf};
use std::process::{Command, exit};
use std::{env, fs};

const PYTORCH_FOLDER: &str = "import os, torch; print(os.path.dirname(torch.__file__))";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=proto");
    for variable in ["LIBTORCH", "LIBTORCH_LIB", "LIBTORCH_INCLUDE", "LIBTORCH_USE_PYTORCH"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    let done = build().and_then(|()| generate().map_err(|error| format!("cannot generate the gRPC code: {error}")));
    if let Err(message) = done {
        println!("cargo::error={message}");
        exit(1);
    }
}

fn generate() -> Result<(), Box<dyn std::error::Error>> {
    let mut config = tonic_prost_build::Config::new();
    config.protoc_executable(protoc_bin_vendored::protoc_bin_path()?);
    let descriptors = PathBuf::from(env::var("OUT_DIR")?).join("descriptors.bin");
    tonic_prost_build::configure().bytes(".").file_descriptor_set_path(descriptors).compile_with_config(
        config,
        &["proto/psjobs/v1/remote.proto"],
        &["proto"],
    )?;
    Ok(())
}

fn build() -> Result<(), String> {
    let root = libtorch()?;
    let folder = |variable| env::var_os(variable).map_or_else(|| root.clone(), PathBuf::from);
    let lib = folder("LIBTORCH_LIB").join("lib");
    if !lib.join("libtorch_cpu.so").exists() {
        return Err(format!("{} has no libtorch_cpu.so; {ADVICE}", lib.display()));
    }
    let include = folder("LIBTORCH_INCLUDE").join("include");
    let version = abi_version(&include.join("torch/headeronly/version.h"))?;
    println!("cargo::metadata=version={version}");
    println!("cargo::metadata=libtorch={}", lib.display());
    println!("cargo::metadata=include={}", include.display());
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", lib.display());
    Ok(())
}

const ADVICE: &str = "run `make libtorch` and set LIBTORCH to the folder that it prints, \
    or set LIBTORCH_USE_PYTORCH=1 to use an installed PyTorch";

/// The folder that holds `include/` and `lib/`.
fn libtorch() -> Result<PathBuf, String> {
    if env::var_os("LIBTORCH_USE_PYTORCH").is_some() {
        let python = if env::var_os("VIRTUAL_ENV").is_some() { "python" } else { "python3" };
        let output = Command::new(python).args(["-c", PYTORCH_FOLDER]).output();
        let output = output.map_err(|e| format!("LIBTORCH_USE_PYTORCH is set, but {python} does not start: {e}"))?;
        if !output.status.success() {
            return Err(format!(
                "LIBTORCH_USE_PYTORCH is set, but {python} cannot import torch; install it, or {ADVICE}"
            ));
        }
        return Ok(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()));
    }
    match env::var_os("LIBTORCH") {
        Some(folder) => Ok(folder.into()),
        None if Path::new("/usr/lib/libtorch.so").exists() => Ok("/usr".into()),
        None => Err(format!("LIBTORCH is not set; {ADVICE}")),
    }
}

/// `MAJOR.MINOR.PATCH` from libtorch's own header.
fn abi_version(header: &Path) -> Result<String, String> {
    let text = fs::read_to_string(header).map_err(|e| format!("{}: {e}; {ADVICE}", header.display()))?;
    let number = |name: &str| {
        let mut words = text
            .lines()
            .map(str::split_whitespace)
            .find_map(|mut words| (words.next() == Some("#define") && words.next() == Some(name)).then_some(words))?;
        words.next().map(str::to_owned)
    };
    let parts: Option<Vec<String>> =
        ["TORCH_VERSION_MAJOR", "TORCH_VERSION_MINOR", "TORCH_VERSION_PATCH"].into_iter().map(number).collect();
    parts.map(|parts| parts.join(".")).ok_or_else(|| format!("{} defines no TORCH_VERSION_MAJOR", header.display()))
}
