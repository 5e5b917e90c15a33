//! Runs blocking work on the disk.

use tokio::runtime::{Handle, RuntimeFlavor};

/// Runs `work` on a thread where waiting for the disk delays no task. On a single-threaded runtime, that of a
/// simulation or a test, the work runs at once, so that the order of events does not depend on the disk.
pub(crate) async fn on_disk<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    if Handle::current().runtime_flavor() == RuntimeFlavor::CurrentThread {
        return work();
    }
    tokio::task::spawn_blocking(work).await.expect("disk work does not panic and is not cancelled")
}
