//! Prepares the first call into libtorch: checks that the library found at start is the version this binary was built
//! against, loads its CUDA half where there is one, and keeps the memory of freed tensors.

// The dynamic linker and the C library can only be asked through unsafe calls; each says why it is sound.
#![allow(unsafe_code)]

use std::env;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

/// The libtorch this binary was compiled against, `MAJOR.MINOR.PATCH`.
pub const BUILT_AGAINST: &str = env!("PSJOBS_LIBTORCH_VERSION");

/// libtorch, ready for use.
#[derive(Clone, Debug)]
pub struct Libtorch {
    /// Why there is no CUDA; `None` where its library was loaded.
    pub without_cuda: Option<String>,
}

/// The libtorch that was found cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "this psjobs-worker needs libtorch {BUILT_AGAINST} but found {found}; put the right one first on LD_LIBRARY_PATH, \
     or build again with LIBTORCH set to the one you have"
)]
pub struct WrongVersion {
    found: String,
}

/// Checks the version and loads CUDA support; once, however often it is called. Call it before anything of `tch`:
/// libtorch looks for CUDA at its first call and remembers the answer.
///
/// # Errors
/// [`WrongVersion`] if the library is not of the release this binary was built against.
pub fn load() -> Result<Libtorch, WrongVersion> {
    static LOADED: OnceLock<Result<Libtorch, WrongVersion>> = OnceLock::new();
    LOADED.get_or_init(prepare).clone()
}

fn prepare() -> Result<Libtorch, WrongVersion> {
    let found = abi_version();
    match &found {
        Some(version) if version == BUILT_AGAINST => {}
        _ => return Err(WrongVersion { found: found.unwrap_or_else(|| "one before 2.9".into()) }),
    }
    keep_memory();
    // SAFETY: loading runs the library's initializers. libtorch_cuda is part of the libtorch checked
    // above; registering its kernels is all that its initializers do, and no thread uses libtorch yet.
    match unsafe { Library::open(Some("libtorch_cuda.so"), RTLD_NOW | RTLD_GLOBAL) } {
        Ok(cuda) => {
            // Registered kernels point into the library: it must stay until the process ends.
            std::mem::forget(cuda);
            Ok(Libtorch { without_cuda: None })
        }
        Err(error) => Ok(Libtorch { without_cuda: Some(error.to_string()) }),
    }
}

/// Makes threads of libtorch that have nothing to do sleep instead of spin. On cores that are shared with
/// servers and other trainers, spinning takes the time that those would work in: a trainer with two
/// threads is several times slower. libgomp reads the variable when it is loaded, before `main`, so
/// the process starts itself once more, as the same process.
pub fn wait_passively() {
    const VARIABLE: &str = "OMP_WAIT_POLICY";
    if env::var_os(VARIABLE).is_some() {
        return;
    }
    let Ok(program) = env::current_exe() else { return };
    // Comes back only if it fails; then threads spin.
    let error = Command::new(program).args(env::args_os().skip(1)).env(VARIABLE, "passive").exec();
    tracing::debug!(%error, "cannot set {VARIABLE}");
}

/// Keeps the memory of tensors that are gone for those of the next step. Elsewhere than on the first thread the C
/// library would give much of it back after each call, and take it page by page in the next: about a fifteenth of
/// the time of a network on a server.
#[cfg(target_env = "gnu")]
fn keep_memory() {
    /// The largest piece that is kept; the C library takes no larger number (mallopt(3)).
    const LARGEST: libc::c_int = 32 << 20;
    const KEPT: libc::c_int = 1 << 30;
    // SAFETY: sets two numbers while it holds the allocator's lock. Another thread that reads one meanwhile finds
    // the old or the new one, and each is right.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGEST);
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT);
    }
}

#[cfg(not(target_env = "gnu"))]
fn keep_memory() {}

/// `aoti_torch_abi_version` is a plain C function, so it can be asked in any libtorch that has it.
fn abi_version() -> Option<String> {
    let process = Library::this();
    // SAFETY: libtorch declares it as `uint64_t aoti_torch_abi_version()`, without side effects.
    let packed = unsafe {
        let version = process.get::<unsafe extern "C" fn() -> u64>(b"aoti_torch_abi_version\0").ok()?;
        version()
    };
    let [major, minor, patch, ..] = packed.to_be_bytes();
    Some(format!("{major}.{minor}.{patch}"))
}
