//! Prints the result of `psjobs estimate`.

use std::fmt;

use serde::Serialize;

use super::model::{Estimate, Limit};

/// An estimate, and the number of servers that is enough.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    #[serde(flatten)]
    pub estimate: Estimate,
    /// With more of them a step gets shorter by less than 5 %.
    pub enough_servers: u32,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { estimate, enough_servers } = self;
        let Estimate { step_seconds, waiting_seconds, exchange_seconds, hidden_seconds, .. } = *estimate;
        let computing = step_seconds - waiting_seconds - exchange_seconds + hidden_seconds;
        let (trainers, servers) = (estimate.trainers, estimate.servers);
        writeln!(
            f,
            "step        {}: {} computing, {} waiting for the slowest trainer, {} exchange, of which {} hidden",
            seconds(step_seconds),
            seconds(computing),
            seconds(waiting_seconds),
            seconds(exchange_seconds),
            seconds(hidden_seconds),
        )?;
        writeln!(f, "steps/s     {:.2} of each trainer", estimate.steps_per_second)?;
        writeln!(f, "examples/s  {:.0} of all {trainers} trainers", estimate.examples_per_second)?;
        writeln!(f, "efficiency  {:.0} % of as many trainers that exchange nothing", 100.0 * estimate.efficiency)?;
        let share = 100.0 * estimate.limit_share;
        writeln!(f, "limit       {}, {share:.0} % of the step", limit(estimate.limit))?;
        let (up, down) = (megabytes(estimate.bytes_up), megabytes(estimate.bytes_down));
        writeln!(f, "exchange    {up} up and {down} down for each trainer")?;
        writeln!(f, "memory      {} on each server, beside its program", megabytes(estimate.server_bytes))?;
        write!(f, "servers     {servers} here; more than {enough_servers} make a step shorter by less than 5 %")
    }
}

/// Returns a time in words of the unit that suits it.
fn seconds(time: f64) -> String {
    match time {
        _ if time < 0.000_5 => format!("{:.2} ms", 1e3 * time),
        _ if time < 0.1 => format!("{:.1} ms", 1e3 * time),
        _ => format!("{time:.3} s"),
    }
}

fn megabytes(bytes: f64) -> String {
    match bytes {
        _ if bytes < 1e5 => format!("{:.1} kB", bytes / 1e3),
        _ if bytes < 1e9 => format!("{:.1} MB", bytes / 1e6),
        _ => format!("{:.1} GB", bytes / 1e9),
    }
}

/// Names a limit, and says what moves it.
fn limit(limit: Limit) -> &'static str {
    match limit {
        Limit::Compute => "the computing of gradients: the servers keep up",
        Limit::TrainerLinks => "the trainers' links: a codec, local steps or faster links help, more servers do not",
        Limit::TrainerCores => "the trainers' cores that exchange: more connections help (spec.ps.connections)",
        Limit::ServerLinks => "the servers' links: more servers, a codec or local steps help",
        Limit::ServerMemory => "the servers' memory bandwidth and cores: more servers or cores help",
        Limit::Latency => "the time of messages on their way: local steps or fewer, larger servers help",
        Limit::Coordination => "the heartbeats of all trainers on each server: more cores for each server help",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_sizes_have_a_unit_that_suits_them() {
        for (time, want) in [(0.0, "0.00 ms"), (0.000_05, "0.05 ms"), (0.025, "25.0 ms"), (0.25, "0.250 s")] {
            assert_eq!(seconds(time), want);
        }
        for (size, want) in [(4e3, "4.0 kB"), (4.4e8, "440.0 MB"), (2.8e10, "28.0 GB")] {
            assert_eq!(megabytes(size), want);
        }
    }

    #[test]
    fn both_reports_say_what_limits_a_step() {
        let estimate = Estimate {
            step_seconds: 0.5,
            steps_per_second: 2.0,
            examples_per_second: 512.0,
            efficiency: 0.5,
            limit: Limit::ServerLinks,
            limit_share: 0.8,
            waiting_seconds: 0.05,
            exchange_seconds: 0.3,
            hidden_seconds: 0.1,
            bytes_up: 4.4e8,
            bytes_down: 4.4e8,
            server_bytes: 1e9,
            servers: 2,
            trainers: 8,
        };
        let report = Report { estimate, enough_servers: 6 };
        let text = report.to_string();
        assert!(text.starts_with("step        0.500 s: 0.250 s computing, 50.0 ms waiting"), "{text}");
        assert!(text.contains("efficiency  50 %") && text.contains("the servers' links"), "{text}");
        assert!(text.ends_with("2 here; more than 6 make a step shorter by less than 5 %"), "{text}");
        let json = serde_json::to_value(&report).expect("plain fields");
        assert_eq!(json["limit"], "server_links");
        assert_eq!(json["enough_servers"], 6);
        assert_eq!(json["step_seconds"], 0.5);
    }
}
