//! Signals that ask `psjobs` to end.

use std::fs;
use std::future;
use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGINT (Ctrl-C), SIGTERM and SIGHUP, from now on; not a SIGHUP that is ignored, as `nohup` has it.
#[derive(Debug)]
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Option<Signal>,
}

impl Signals {
    pub fn listen() -> io::Result<Self> {
        // A handler would take the place of what the caller has set.
        let ignored = is_ignored(&fs::read_to_string("/proc/self/status").unwrap_or_default(), SignalKind::hangup());
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hang_up: (!ignored).then(|| signal(SignalKind::hangup())).transpose()?,
        })
    }

    /// The number of the next signal. Cancel-safe.
    pub async fn next(&mut self) -> i32 {
        let kind = tokio::select! {
            _ = self.interrupt.recv() => SignalKind::interrupt(),
            _ = self.terminate.recv() => SignalKind::terminate(),
            () = heard(&mut self.hang_up) => SignalKind::hangup(),
        };
        kind.as_raw_value()
    }
}

/// Waits for a signal; for ever, if it is not listened to.
async fn heard(signal: &mut Option<Signal>) {
    match signal {
        Some(signal) => {
            signal.recv().await;
        }
        None => future::pending().await,
    }
}

/// Returns whether a process with this `/proc/PID/status` ignores a signal: bit N - 1 of the mask is that of signal N.
fn is_ignored(status: &str, kind: SignalKind) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    (mask >> (kind.as_raw_value() - 1)) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_that_are_ignored_are_found_in_the_status_of_the_process() {
        let status = |mask: &str| format!("Name:\tpsjobs\nSigBlk:\t0000000000000001\nSigIgn:\t{mask}\nSigCgt:\t1\n");
        let ignores = |mask: &str| is_ignored(&status(mask), SignalKind::hangup());
        assert!(ignores("0000000000001001") && !ignores("0000000000001000") && !ignores("nonsense"));
        assert!(!is_ignored("", SignalKind::hangup()));
        assert!(is_ignored(&status("0000000000004000"), SignalKind::terminate()));
    }
}
