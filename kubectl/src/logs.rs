//! `kubectl psjob logs`: the lines of all pods of a job, merged by time.

mod filter;
mod follow;
mod merge;
mod reader;

use std::io::{BufWriter, IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::ListParams;
use psjobs::BadInput;
use psjobs_api::Role;
use psjobs_api::crd::ParameterServerJob;

use crate::connection::{Cluster, ConnectionArgs};
use crate::programs::programs;
use filter::{Filter, Replica};
use merge::Merge;
use reader::{Line, Message, Outlet, Reader, State, Wanted};

/// How long a line that is followed waits for an earlier one of another pod.
const HOLD: Duration = Duration::from_millis(300);
/// Pods that are read at once, each over a connection of its own.
const MOST_PODS: usize = 500;

/// Print what a job's processes say, merged by time
///
/// Each line begins with its replica, as trainer-0 or ps-1. A pod that is replaced goes on as the same replica.
#[derive(Debug, Args)]
pub struct LogsArgs {
    /// Name of the job
    name: String,
    /// Go on with what is said from now on, until the job ends
    #[arg(long, short)]
    follow: bool,
    /// The last lines of the pod that failed first, which is gone by now
    #[arg(long, short, conflicts_with_all = ["follow", "tail", "since"])]
    previous: bool,
    /// Only the servers or the trainers
    #[arg(long)]
    role: Option<RoleName>,
    /// Only the replica with this index of its role
    #[arg(long, requires = "role")]
    index: Option<u32>,
    /// Only the replica with this rank: servers come first, then trainers
    #[arg(long, conflicts_with_all = ["role", "index"])]
    rank: Option<u32>,
    /// Only lines that are younger, for example 90s, 5m or 2h
    #[arg(long, value_name = "TIME", value_parser = seconds)]
    since: Option<i64>,
    /// Only so many of the last lines of each pod
    #[arg(long, value_name = "LINES")]
    tail: Option<u32>,
    /// Print the time of each line
    #[arg(long)]
    timestamps: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum RoleName {
    /// Parameter servers
    #[value(alias = "server")]
    Ps,
    /// Trainers
    Trainer,
}

impl LogsArgs {
    pub async fn run(self, connection: &ConnectionArgs) -> anyhow::Result<u8> {
        let cluster = connection.open().await?;
        let job = cluster.job(&self.name).await?;
        let filter = self.filter(&job);
        let mut out = Out::new(self.timestamps);
        if self.previous {
            return Ok(previous(&job, &filter, &mut out));
        }
        let pods = Api::<Pod>::namespaced(cluster.client.clone(), &cluster.namespace);
        let wanted = Wanted { follow: self.follow, since_seconds: self.since, tail_lines: self.tail };
        if self.follow {
            return follow::follow(&cluster, &self.name, &filter, &pods, &wanted, &mut out).await;
        }
        self.print_what_is_there(&cluster, &job, &filter, &pods, &wanted, &mut out).await
    }

    fn filter(&self, job: &ParameterServerJob) -> Filter {
        let role = self.role.map(|role| match role {
            RoleName::Ps => Role::Server,
            RoleName::Trainer => Role::Trainer,
        });
        Filter::new(role, self.index, self.rank, &job.spec)
    }

    async fn print_what_is_there(
        &self,
        cluster: &Cluster,
        job: &ParameterServerJob,
        filter: &Filter,
        pods: &Api<Pod>,
        wanted: &Wanted,
        out: &mut Out,
    ) -> anyhow::Result<u8> {
        let listed = pods.list(&ListParams::default().labels(&filter.selector(&self.name))).await;
        let listed = listed.map_err(|error| cluster.explain(error, &self.name))?.items;
        let listed: Vec<_> = listed.into_iter().flat_map(programs).collect();
        let mut found: Vec<_> = listed.iter().filter_map(|pod| Some((filter.accepts(pod)?, pod))).collect();
        if found.is_empty() {
            eprintln!("{} has no such pod now", self.name);
            return Ok(previous(job, filter, out));
        }
        found.retain(|(replica, pod)| {
            let waits = reader::state(pod) == State::Waits;
            if waits {
                eprintln!("{}-{} has not started, so it has no lines", replica.role, replica.index);
            }
            !waits
        });
        if found.len() > MOST_PODS {
            return Err(BadInput::new(format!(
                "{} pods are more than the {MOST_PODS} that are read at once; choose some with --role, --index or --rank",
                found.len()
            ))
            .into());
        }
        let (outlet, mut receiver) = Outlet::channel(false);
        let mut merge = Merge::new(None);
        for (source, (replica, pod)) in found.iter().enumerate() {
            merge.open(source);
            out.name(source, *replica);
            tokio::spawn(Reader::new(source, pod, pods.clone(), wanted.clone(), &outlet).run());
        }
        drop(outlet);
        while let Some(message) = receiver.recv().await {
            take(message, &mut merge);
            while let Some(line) = merge.next(Instant::now()) {
                if !out.line(&line) {
                    return Ok(0);
                }
            }
        }
        out.flush();
        Ok(0)
    }
}

/// Gives what a reader says to the merge, or to the person who waits.
fn take(message: Message, merge: &mut Merge<Line>) {
    match message {
        Message::Line(source, line) => merge.push(source, line.time, Instant::now(), line),
        Message::Note(text) => eprintln!("{text}"),
        Message::End(source) => merge.close(source),
    }
}

/// Prints the last lines of the pod that failed first; returns the exit code.
fn previous(job: &ParameterServerJob, filter: &Filter, out: &mut Out) -> u8 {
    let failure = job.status.as_ref().and_then(|status| status.last_failure.as_ref());
    let replica = failure.and_then(|failure| {
        let role = Role::parse(&failure.role)?;
        let index = failure.pod.rsplit('-').next()?.parse().ok()?;
        Some(Replica { role, index })
    });
    match (failure, replica) {
        (Some(failure), Some(replica)) if filter.has(replica) => {
            eprintln!("the last lines of {}, which failed first: {}", failure.pod, failure.message);
            out.name(0, replica);
            for text in failure.log_tail.lines() {
                let time = failure.time.as_ref().map_or(Timestamp::UNIX_EPOCH, |time| time.0);
                if !out.line(&Line::lone(0, time, text)) {
                    break;
                }
            }
            out.flush();
            0
        }
        _ => {
            eprintln!("no failure of such a pod is noted in the job's status");
            0
        }
    }
}

/// The lines on standard output.
struct Out {
    writer: BufWriter<std::io::Stdout>,
    timestamps: bool,
    colours: bool,
    names: Vec<String>,
}

impl Out {
    fn new(timestamps: bool) -> Self {
        let stdout = std::io::stdout();
        let colours = stdout.is_terminal() && std::env::var_os("NO_COLOR").is_none();
        Self { writer: BufWriter::with_capacity(1 << 16, stdout), timestamps, colours, names: Vec::new() }
    }

    /// Lines of this source begin with the replica's name.
    fn name(&mut self, source: usize, replica: Replica) {
        if self.names.len() <= source {
            self.names.resize(source + 1, String::new());
        }
        let name = format!("{}-{}", replica.role, replica.index);
        self.names[source] = if self.colours {
            // Cyan for servers; green, yellow, blue and magenta for trainers.
            let colour = if replica.role == Role::Server { 36 } else { 32 + replica.index % 4 };
            format!("\u{1b}[{colour}m{name}\u{1b}[0m")
        } else {
            name
        };
    }

    /// Writes a line; false if whoever reads has gone away.
    fn line(&mut self, line: &Line) -> bool {
        let name = self.names.get(line.source).map_or("", String::as_str);
        let written = if self.timestamps {
            writeln!(self.writer, "{name} {} {}", line.time, line.text)
        } else {
            writeln!(self.writer, "{name} {}", line.text)
        };
        written.is_ok()
    }

    /// Shows what was written; false if whoever reads has gone away.
    fn flush(&mut self) -> bool {
        self.writer.flush().is_ok()
    }
}

/// Reads `90s`, `5m`, `2h` or `1h30m`.
fn seconds(text: &str) -> Result<i64, String> {
    let span: Result<jiff::SignedDuration, _> = text.parse();
    match span {
        Ok(span) if span.is_positive() => Ok(span.as_secs().max(1)),
        _ => Err(format!("{text:?} is no time such as 90s, 5m or 2h")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_kubectl_has_them() {
        for (text, wanted) in [("90s", 90), ("5m", 300), ("2h", 7200), ("1h30m", 5400), ("100ms", 1)] {
            assert_eq!(seconds(text), Ok(wanted), "{text}");
        }
        for text in ["5", "-5m", "0s", "soon"] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }
}
