//! How many small calls one process answers another: bare calls, and the calls of cartpole's two
//! protocols, in steps of the environment. The limit is a ping-pong of as many bytes over a TCP connection
//! between two threads of this process.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::thread;
use std::time::Instant;

use anyhow::Context as _;
use clap::Args;
use serde_json::json;

use crate::job;
use crate::report::{Case, say};

/// Calls/s between an agent and one observer, over a TCP ping-pong of as many bytes
#[derive(Debug, Args)]
pub struct RlArgs {
    /// Rounds of one episode each in each run
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Bare calls in each run
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(1..))]
    calls: u32,
    /// The psjobs-worker to measure [default: the one beside psjobs, or on PATH]
    #[arg(long, value_name = "PATH", env = "PSJOBS_WORKER")]
    worker: Option<PathBuf>,
}

/// Bytes on the wire of the largest of the calls, with its frame, and of its reply.
const REQUEST: usize = 100;
const REPLY: usize = 24;

impl RlArgs {
    pub fn measure(&self, runs: u32) -> anyhow::Result<Vec<Case>> {
        let worker = job::worker(self.worker.as_deref())?;
        let [mut bare, mut pair, mut packed, mut limit] = [const { Vec::new() }; 4];
        for run in 1..=runs {
            say(&format!("rl: run {run} of {runs}"));
            limit.push(ping_pong(self.calls).context("the TCP ping-pong failed")?);
            for (protocol, rates) in [("pair", &mut pair), ("packed", &mut packed)] {
                let (rounds, calls) = (self.rounds.to_string(), self.calls.to_string());
                let args = ["train", "cartpole", "--protocol", protocol, "--max-rounds", &rounds];
                let args: Vec<&str> = args.into_iter().chain(["--measure-calls", &calls]).collect();
                let job = job::job("bench-rl", json!({"optimizer": {"type": "Adam", "learningRate": 0.01}}), 2, &args)?;
                let metrics = job::run(&job, &worker)?.metrics;
                let metric = |name: &str| metrics.get(name).copied().with_context(|| format!("no metric {name}"));
                rates.push(metric("steps_per_second")?);
                bare.push(metric("bare_calls_per_second")?);
            }
        }
        // A pair is two calls one after the other.
        let half: Vec<f64> = limit.iter().map(|rate| rate / 2.0).collect();
        Ok(vec![
            Case::new("rl", "bare-call", "calls/s", &bare, &limit),
            Case::new("rl", "pair", "calls/s", &pair, &half),
            Case::new("rl", "packed", "calls/s", &packed, &limit),
        ])
    }
}

/// Round trips a second over the loopback.
fn ping_pong(count: u32) -> io::Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut stream = TcpStream::connect(listener.local_addr()?)?;
    stream.set_nodelay(true)?;
    let echo = thread::spawn(move || -> io::Result<()> {
        let (mut stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        let mut request = [0; REQUEST];
        for _ in 0..count {
            stream.read_exact(&mut request)?;
            stream.write_all(&request[..REPLY])?;
        }
        Ok(())
    });
    let mut reply = [0; REPLY];
    let start = Instant::now();
    for _ in 0..count {
        stream.write_all(&[1; REQUEST])?;
        stream.read_exact(&mut reply)?;
    }
    let seconds = start.elapsed().as_secs_f64();
    echo.join().map_err(|_| io::Error::other("the echoing thread ended"))??;
    Ok(f64::from(count) / seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ping_pong_is_counted() {
        let rate = ping_pong(200).expect("a loopback");
        assert!(rate > 0.0 && rate.is_finite(), "{rate} round trips/s");
    }
}
