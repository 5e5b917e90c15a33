//! How fast `kubectl psjob logs` is with 100 pods, and how fast the program starts: the release binary against an API
//! server that this program plays. Prints one JSON object a line. `make bench-kubectl` runs it; the first argument that
//! is a case's name runs only the scenario of that case.

mod help;
mod plain;
mod program;
mod report;
mod server;
mod speech;

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::program::Program;
use crate::report::{print, quantile};
use crate::server::{JOB, Server};
use crate::speech::{LINES, due};

const HELP: [&str; 2] = ["help-ms", "true-ms"];
const LOGS: [&str; 2] = ["logs-lines-s", "logs-peak-mib"];
const FOLLOW: [&str; 5] =
    ["follow-lag-median-ms", "follow-lag-p99-ms", "follow-lag-last-ms", "follow-late-lines", "follow-peak-mib"];

/// Runs of each scenario of logs.
const RUNS: usize = 3;
/// Longer than any run takes on a machine that can run it at all.
const DEADLINE: Duration = Duration::from_secs(120);
/// How long a followed line waits for earlier ones of silent pods, in ms; lines that come later have piled up.
const HOLD_MS: f64 = 300.0;

fn main() -> Result<()> {
    let only = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let wanted = |cases: &[&str]| only.as_deref().is_none_or(|only| cases.contains(&only));
    if wanted(&HELP) {
        let (help, floor) = help::times()?;
        print(HELP[0], "ms", &help, &[30.0]);
        print(HELP[1], "ms", &floor, &[]);
    }
    if wanted(&LOGS) {
        logs(&Server::start()?)?;
    }
    if wanted(&FOLLOW) {
        follow(&Server::start()?)?;
    }
    Ok(())
}

/// All lines are there already, and the server sends them as fast as they are read.
fn logs(server: &Server) -> Result<()> {
    let (mut rates, mut limits, mut peaks) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..RUNS {
        limits.push(LINES as f64 / plain::seconds(server)?);
        let begin = Instant::now();
        let printed = Program::start(server, &["logs", JOB])?.printed()?;
        rates.push(LINES as f64 / printed.end.duration_since(begin).as_secs_f64());
        ensure!(printed.late == 0, "{} lines were printed behind a line of a later time", printed.late);
        peaks.push(printed.peak_mib);
    }
    print(LOGS[0], "lines/s", &rates, &limits);
    print(LOGS[1], "MiB", &peaks, &[]);
    Ok(())
}

/// The pods say 50,000 lines/s together while they are followed, and the job ends with the last line.
fn follow(server: &Server) -> Result<()> {
    let [mut medians, mut p99s, mut lasts, mut late, mut peaks] = <[Vec<f64>; 5]>::default();
    for _ in 0..RUNS {
        server.forget();
        let program = Program::start(server, &["logs", JOB, "--follow"])?;
        let begin = server.speak()?;
        let printed = program.printed()?;
        let lag = |(number, at): (usize, &Instant)| at.duration_since(begin + due(number)).as_secs_f64() * 1000.0;
        let lags: Vec<f64> = printed.arrivals.iter().enumerate().map(lag).collect();
        medians.push(quantile(&lags, 0.5));
        p99s.push(quantile(&lags, 0.99));
        lasts.push(lags[LINES - 1]);
        late.push(printed.late as f64);
        peaks.push(printed.peak_mib);
    }
    for (case, lags) in FOLLOW.into_iter().zip([medians, p99s, lasts]) {
        print(case, "ms", &lags, &[HOLD_MS]);
    }
    print(FOLLOW[3], "lines", &late, &[]);
    print(FOLLOW[4], "MiB", &peaks, &[]);
    Ok(())
}
