//! Measures a step over a link between two machines, whose rate is limited: all gradients go up, are applied by SGD, and all
//! parameters come back. The limit is raw TCP over the same link that sends and receives as many bytes of f32 at once.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use clap::Args;
use psjobs::certificates;
use psjobs_api::training::Codec;
use psjobs_api::{DEFAULT_PORT, Environment, Role};

use super::wire::{WARM_UP, train_all, training};
use crate::namespace::OtherMachine;
use crate::processes::{Job, Process};
use crate::report::{Case, LeftOut, Line, say};

/// Steps/s of a model without its computing over a link of a limited rate, over raw TCP both ways at once
///
/// The servers run in a network namespace, which takes root and the programs ip and tc (iproute2).
#[derive(Debug, Args)]
pub struct LinkArgs {
    /// Size of the parameters in MB (10^6 bytes of f32)
    #[arg(long, value_name = "MB", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    megabytes: u32,
    /// Steps of each run
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Rate of the link, each way
    #[arg(long, value_name = "GBIT/S", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    gigabits: u32,
}

/// The far end of raw TCP
#[derive(Debug, Args)]
pub struct PeerArgs {
    /// Bytes of a step, each way
    #[arg(long)]
    bytes: usize,
    /// Steps after those that warm up
    #[arg(long)]
    steps: u32,
    /// Where it listens
    #[arg(long)]
    address: String,
}

/// One way to exchange.
#[derive(Clone, Copy)]
struct Way {
    case: &'static str,
    trainers: u32,
    servers: u16,
    codec: Codec,
    tls: bool,
    connections: u32,
}

/// One trainer and one server, over one connection.
const PLAIN: Way = Way { case: "f32", trainers: 1, servers: 1, codec: Codec::F32, tls: false, connections: 1 };

const WAYS: [Way; 6] = [
    PLAIN,
    Way { case: "tls-f32", tls: true, ..PLAIN },
    Way { case: "tls-f32-2-connections", tls: true, connections: 2, ..PLAIN },
    Way { case: "bf16", codec: Codec::BF16, ..PLAIN },
    Way { case: "int8", codec: Codec::INT8, ..PLAIN },
    Way { case: "f32-2-by-2", trainers: 2, servers: 2, ..PLAIN },
];

impl LinkArgs {
    pub fn measure(&self, runs: u32) -> anyhow::Result<Vec<Line>> {
        let rate = u64::from(self.gigabits) * 1_000_000_000;
        let machine = match OtherMachine::make().and_then(|machine| machine.limit(rate).map(|()| machine)) {
            Ok(machine) => machine,
            Err(error) => {
                let left_out = |way: &Way| LeftOut { bench: "link", case: way.case, left_out: format!("{error:#}") };
                return Ok(WAYS.iter().map(|way| Line::LeftOut(left_out(way))).collect());
            }
        };
        WAYS.iter().map(|way| self.case(&machine, *way, runs).map(Line::Measured)).collect()
    }

    fn case(&self, machine: &OtherMachine, way: Way, runs: u32) -> anyhow::Result<Case> {
        let (mut values, mut limits) = (Vec::new(), Vec::new());
        for run in 1..=runs {
            say(&format!("link {}: run {run} of {runs}", way.case));
            limits.push(self.raw(machine)?);
            values.push(self.exchange(machine, way)?);
        }
        Ok(Case::new("link", way.case, "steps/s", &values, &limits))
    }

    /// Steps/s of all trainers together.
    fn exchange(&self, machine: &OtherMachine, way: Way) -> anyhow::Result<f64> {
        let certificates = tempfile::tempdir().context("no temporary folder")?;
        let folder = |role: Role| certificates.path().join(role.as_str()).display().to_string();
        if way.tls {
            certificates::write(certificates.path())?;
        }
        let servers = (0..way.servers).map(|index| format!("{}:{}", machine.there(), DEFAULT_PORT + index)).collect();
        let mut job = Job::at("bench-link", servers, way.trainers, self.megabytes, training(way.codec));
        job.environment.connections = Some(way.connections);
        job.environment.tls_folder = way.tls.then(|| folder(Role::Server));
        let start = |index| Ok(Process::listening(&mut job.command(index, &machine.enter())?)?.0);
        let mut servers = (0..way.servers.into()).map(start).collect::<anyhow::Result<Vec<_>>>()?;
        // Different machines share no memory.
        let trainers = Environment { tls_folder: way.tls.then(|| folder(Role::Trainer)), ..job.environment.clone() };
        let slowest = train_all(&trainers, job.elements, self.steps, false)?;
        for server in &mut servers {
            server.wait()?;
        }
        Ok(f64::from(self.steps * way.trainers) / slowest.as_secs_f64())
    }

    /// Steps/s of plain sockets.
    fn raw(&self, machine: &OtherMachine) -> anyhow::Result<f64> {
        let bytes = self.megabytes as usize * 1_000_000;
        let program = std::env::current_exe().context("cannot find this program")?;
        let [enter, arguments @ ..] = machine.enter();
        let mut command = Command::new(enter);
        let address = format!("{}:0", machine.there());
        command.args(arguments).arg(program).args(["peer", "--address", &address]);
        command.args(["--bytes", &bytes.to_string(), "--steps", &self.steps.to_string()]);
        let (mut peer, address) = Process::listening(&mut command)?;
        let stream = TcpStream::connect(address).context("cannot reach the other machine")?;
        let seconds = both_ways(&stream, bytes, self.steps)?.as_secs_f64();
        peer.wait()?;
        Ok(f64::from(self.steps) / seconds)
    }
}

impl PeerArgs {
    pub fn serve(&self) -> anyhow::Result<()> {
        let listener =
            TcpListener::bind(&self.address).with_context(|| format!("cannot listen at {}", self.address))?;
        writeln!(std::io::stdout(), "{}", listener.local_addr()?)?;
        let (stream, _) = listener.accept()?;
        both_ways(&stream, self.bytes, self.steps).map(drop)
    }
}

/// Sends and receives `bytes` for each step at the same time, after some that warm up. Returns how long it took.
fn both_ways(stream: &TcpStream, bytes: usize, steps: u32) -> anyhow::Result<Duration> {
    stream.set_nodelay(true)?;
    let mut sent = vec![1; bytes];
    let mut received = vec![0; bytes];
    let mut elapsed = Duration::ZERO;
    for count in [WARM_UP, steps] {
        let start = Instant::now();
        thread::scope(|scope| {
            let receiving = scope.spawn(|| (0..count).try_for_each(|_| { stream }.read_exact(&mut received)));
            (0..count).try_for_each(|_| { stream }.write_all(&sent))?;
            receiving.join().map_err(|_| anyhow!("a thread panicked"))?.context("the other end of raw TCP has ended")
        })?;
        elapsed = start.elapsed();
        std::mem::swap(&mut sent, &mut received);
    }
    Ok(elapsed)
}
