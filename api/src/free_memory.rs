//! Returns free memory to the system: the C library keeps what was freed, so that a process stays as large as at its peak.

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
