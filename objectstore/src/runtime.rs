//! Threads for requests, which others wait for: the operations of a disk return when they are done.

use std::io;
use std::sync::mpsc;

use tokio::runtime::{Builder, Runtime};

/// Threads that encrypt and copy what is sent and received.
const THREADS: usize = 2;

/// A runtime of its own. The tasks of the servers' runtime are not delayed by requests, and may be what waits for them.
#[derive(Debug)]
pub struct Requests(Option<Runtime>);

impl Requests {
    pub fn new() -> io::Result<Self> {
        let runtime =
            Builder::new_multi_thread().worker_threads(THREADS).thread_name("psjobs-store").enable_all().build();
        Ok(Self(Some(runtime?)))
    }

    /// Begins `work`.
    pub fn begin(&self, work: impl Future<Output = ()> + Send + 'static) {
        if let Some(runtime) = &self.0 {
            runtime.spawn(work);
        }
    }

    /// Waits for `work`.
    pub fn wait<T: Send + 'static>(
        &self,
        work: impl Future<Output = object_store::Result<T>> + Send + 'static,
    ) -> io::Result<T> {
        let (done, result) = mpsc::sync_channel(1);
        self.begin(async move {
            // The caller waits for it.
            drop(done.send(work.await));
        });
        let ended = result.recv().map_err(|_| io::Error::other("the thread for requests to the store has ended"))?;
        ended.map_err(crate::error::of_disk)
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        // Dropping the runtime would block, which a task of another runtime must not do.
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}
