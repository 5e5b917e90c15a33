//! The files that this process may have open. A server has one for each connection of a trainer, and server 0 one more for the
//! series of each: the 1,024 that a process may have by default end a job of a thousand trainers.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Files that a server has open besides its connections: blocks' checkpoints, the log, the runtime's own.
const OTHERS: u64 = 100;
/// Pause after a connection that could not be accepted for lack of files. Without one the attempt would be repeated at once, for
/// as long as no file is closed.
const PAUSE: Duration = Duration::from_millis(100);

/// Raises the number of files that this process may have open as far as it may do so by itself. Returns the number; `None` if
/// there is no limit.
pub fn raise_limit() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return limit.current;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        Ok(()) => limit.maximum,
        Err(error) => {
            tracing::debug!(%error, "the limit of open files stays as it is");
            limit.current
        }
    }
}

/// Returns the files that so many trainers take, one connection each; of the server that writes the series of metrics a file
/// each beside it.
#[must_use]
pub fn of_trainers(trainers: u32, writes_series: bool) -> u32 {
    trainers.saturating_mul(1 + u32::from(writes_series))
}

/// Returns the warning about a limit that is too low for so many files of trainers.
#[must_use]
pub fn too_few(allowed: Option<u64>, files: u32) -> Option<String> {
    let needed = u64::from(files) + OTHERS;
    allowed.filter(|allowed| *allowed < needed).map(|allowed| {
        format!(
            "this process may have {allowed} files open and needs {needed}, {files} of them for its trainers: a connection each, \
             or as many as spec.ps.connections says, and where it writes the series of metrics one for each; the last trainers \
             will wait for ever; raise the limit (`ulimit -n`, LimitNOFILE of the container runtime)"
        )
    })
}

/// Waits after a connection that could not be accepted because this process or the machine has no file left, and counts it in
/// `failures`; the trainer's connection waits meanwhile. The log names the first, the second, the fourth and so on.
pub(crate) async fn pause_without_files<S>(accepted: io::Result<S>, failures: Arc<AtomicU64>) -> io::Result<S> {
    if accepted.as_ref().is_err_and(has_no_file) {
        let failures = failures.fetch_add(1, Relaxed) + 1;
        if failures.is_power_of_two() {
            tracing::warn!(
                failures,
                "a connection waits, because this process or the machine has as many files open as it may; raise the limit \
                 (`ulimit -n`, LimitNOFILE of the container runtime, fs.file-max of the machine)"
            );
        }
        tokio::time::sleep(PAUSE).await;
    }
    accepted
}

/// Returns whether a call failed because this process or the machine has as many files open as it may.
fn has_no_file(error: &io::Error) -> bool {
    let code = error.raw_os_error();
    [rustix::io::Errno::MFILE, rustix::io::Errno::NFILE].iter().any(|errno| code == Some(errno.raw_os_error()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_too_low_for_trainers_that_take_more_files_than_it_allows() {
        for (allowed, trainers, writes_series, warns) in [
            (Some(1024), 8, false, false),
            (Some(1024), 924, false, false),
            (Some(1024), 925, false, true),
            (Some(1024), 462, true, false),
            (Some(1024), 463, true, true),
            (Some(1_048_576), 4096, true, false),
            (Some(1_048_576), u32::MAX, true, true),
            (None, 4096, true, false),
        ] {
            let warning = too_few(allowed, of_trainers(trainers, writes_series));
            assert_eq!(warning.is_some(), warns, "{allowed:?}, {trainers} trainers, series: {writes_series}");
        }
    }

    #[test]
    fn the_limit_is_the_highest_that_this_process_may_set() {
        let allowed = raise_limit();
        assert_eq!(getrlimit(Resource::Nofile).current, allowed);
        assert_eq!(getrlimit(Resource::Nofile).maximum, allowed);
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_lack_of_files_makes_a_server_wait() {
        let errno = |errno: rustix::io::Errno| Err(io::Error::from(errno));
        let failures = Arc::<AtomicU64>::default();
        for (label, accepted, waits) in [
            ("a connection", Ok(()), false),
            ("a connection that was ended", errno(rustix::io::Errno::CONNABORTED), false),
            ("too many files of this process", errno(rustix::io::Errno::MFILE), true),
            ("too many files of the machine", errno(rustix::io::Errno::NFILE), true),
            ("another error", Err(io::Error::other("no number")), false),
        ] {
            let (began, failed) = (tokio::time::Instant::now(), accepted.is_err());
            assert_eq!(pause_without_files(accepted, failures.clone()).await.is_err(), failed, "{label}");
            assert_eq!(began.elapsed() >= PAUSE, waits, "{label}");
        }
        assert_eq!(failures.load(Relaxed), 2, "those that waited");
    }
}
