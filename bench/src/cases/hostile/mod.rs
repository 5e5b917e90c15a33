//! Measures what callers cost a server that it does not know: each is a connection with streams that announce a long message
//! and send nothing of it. Without TLS, since with it they get no further than the handshake.

mod peer;

use anyhow::{Context as _, ensure};
use clap::Args;
use psjobs_api::Training;
use psjobs_ps::proto::StatusRequest;
use psjobs_ps::proto::coordination_client::CoordinationClient;
use tokio::runtime::Runtime;

use self::peer::Peer;
use crate::processes::{Job, Process};
use crate::report::{Case, LeftOut, Line, say};

/// Memory in MiB that unknown callers cost a server
///
/// `hostile-mib` is how much the resident memory of a server without TLS grows at most while so many peers are connected,
/// each with eight calls of `Replication/Greet` of which it sends the 5 bytes that announce 8 MiB (limit: 64 MiB). All are
/// refused, or their connections closed beyond the 512 of one address, and the server must answer others after it.
#[derive(Debug, Args)]
pub struct HostileArgs {
    /// Peers that are connected at the same time
    #[arg(long, default_value_t = 1200, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    peers: u32,
}

/// The method that the peers call.
const METHOD: &str = "/psjobs.v1.Replication/Greet";
/// Calls of each peer.
const STREAMS: u32 = 8;
/// The prefix of a message (uncompressed) of 8 MiB.
const LONG: [u8; 5] = [0, 0, 128, 0, 0];
/// The prefix of a message of 64 KiB, which a first message may have.
const ALLOWED: [u8; 5] = [0, 0, 1, 0, 0];
/// The limit in MiB.
const LIMIT: f64 = 64.0;
/// Files that a process has open besides the connections.
const OTHER_FILES: u64 = 100;

impl HostileArgs {
    pub fn measure(&self, runs: u32) -> anyhow::Result<Vec<Line>> {
        let (needed, allowed) = (u64::from(self.peers) + OTHER_FILES, open_files()?);
        if needed > allowed {
            let left_out = format!(
                "{} connections take more open files than the {allowed} that a process may have here; `ulimit -n \
                 {needed}` raises that",
                self.peers
            );
            return Ok(vec![Line::LeftOut(LeftOut { bench: "hostile", case: "hostile-mib", left_out })]);
        }
        let mut values = Vec::new();
        for run in 1..=runs {
            say(&format!("hostile: run {run} of {runs}"));
            values.push(self.cost()?);
        }
        Ok(vec![Case::new("hostile", "hostile-mib", "MiB", &values, &[LIMIT]).into()])
    }

    /// Growth of the server's resident memory in MiB.
    fn cost(&self) -> anyhow::Result<f64> {
        let job = Job::new("bench-hostile", 1, 1, 1, Training::default())?;
        let (server, address) = Process::listening(&mut job.command(0, &[])?)?;
        // A method that is not there would be answered at once, whatever it is sent.
        let first = Peer::connect(&address, METHOD, &[ALLOWED, LONG])?.next_end()?;
        ensure!(first == Some(peer::stream(1)), "the server has ended stream {first:?} of a caller that may send more");
        let before = server.resident()?.now;
        let peers = (0..self.peers).map(|_| Peer::connect(&address, METHOD, &[LONG; STREAMS as usize]));
        let mut peers = peers.collect::<anyhow::Result<Vec<_>>>()?;
        for peer in &mut peers {
            for _ in 0..STREAMS {
                if peer.next_end()?.is_none() {
                    break;
                }
            }
        }
        let most = server.resident()?.most;
        drop(peers);
        answers(&address)?;
        Ok(most.saturating_sub(before) as f64 / f64::from(1 << 20))
    }
}

/// Asks a server for its status.
fn answers(address: &str) -> anyhow::Result<()> {
    let runtime = Runtime::new().context("cannot start a runtime")?;
    runtime.block_on(async {
        let client = CoordinationClient::connect(format!("http://{address}")).await;
        let status = client.context("the server takes no more connections")?.status(StatusRequest {}).await;
        status.context("the server does not answer any more").map(drop)
    })
}

/// Returns how many files a process may have open.
fn open_files() -> anyhow::Result<u64> {
    let limits = std::fs::read_to_string("/proc/self/limits").context("cannot read /proc/self/limits")?;
    soft_limit(&limits).context("/proc/self/limits does not show how many files may be open")
}

/// The line `Max open files 1024 4096 files` of /proc/self/limits: the limit that counts is the first.
fn soft_limit(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_open_files_is_read_from_the_limits_of_a_process() {
        let limits = |files: &str| format!("Limit  Soft Limit  Hard Limit  Units\nMax open files  {files}  files\n");
        assert_eq!(soft_limit(&limits("1024  4096")), Some(1024));
        assert_eq!(soft_limit(&limits("unlimited  unlimited")), Some(u64::MAX));
        assert_eq!(soft_limit("Max processes  10  10  processes\n"), None);
        assert!(open_files().expect("Linux") > 0);
    }
}
