//! Returns free memory to the system. The C library keeps what was freed: a server with 1 GB of parameters stayed at 1.3 to 2.9 GB
//! after a checkpoint, and has 1.04 GB with this (docs/performance.md has the command). The operator has its own in `trim.rs`.

/// Returns the memory that this process has freed to the system. A GB takes some 60 ms, in which threads that allocate may wait.
#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "the C library offers no other way")]
pub fn return_free_memory() {
    // SAFETY: it takes the allocator's own locks, touches free memory alone, and may be called from any thread.
    unsafe { libc::malloc_trim(0) };
}

/// Does nothing: other C libraries return it by themselves, or offer no call for it.
#[cfg(not(target_env = "gnu"))]
pub fn return_free_memory() {}
