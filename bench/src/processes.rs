//! Servers as processes of this program, for benchmarks that kill them or look at their memory, and trainers that
//! compute nothing.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use anyhow::{Context as _, bail};
use psjobs_api::checkpoint::CheckpointPolicy;
use psjobs_api::env::Checkpoint;
use psjobs_api::{Environment, Role, Training};
use psjobs_ps::client::{SessionConfig, TensorSpec};
use rustix::process::{Pid, Signal, kill_process};
use tokio::runtime::Builder;
use tokio::task::LocalSet;

/// The settings that the processes of a benchmark share.
#[derive(Debug)]
pub struct Job {
    pub environment: Environment,
    pub elements: usize,
}

/// A process; killed when it is dropped.
#[derive(Debug)]
pub struct Process(Child);

/// The resident memory of a process, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Resident {
    pub now: u64,
    /// The most since its start, or since [`Process::forget_most`].
    pub most: u64,
}

impl Job {
    /// A job on free ports, with f32 parameters of so many MB (10^6 bytes).
    pub fn new(name: &str, servers: u32, trainers: u32, megabytes: u32, training: Training) -> anyhow::Result<Self> {
        Ok(Self::at(name, free_addresses("127.0.0.1", servers)?, trainers, megabytes, training))
    }

    /// As [`Job::new`], with servers at these addresses.
    pub fn at(name: &str, servers: Vec<String>, trainers: u32, megabytes: u32, training: Training) -> Self {
        let uid = format!("{name}-{:016x}", rand::random::<u64>());
        let environment = Environment::new(name, &uid, servers, trainers, training);
        Self { environment, elements: megabytes as usize * 250_000 }
    }

    /// Makes the job keep one checkpoint, a new one each second, in `folder`.
    pub fn checkpointed(self, folder: &Path) -> Self {
        self.kept_in(&folder.display().to_string(), 1)
    }

    /// Makes the job keep one checkpoint, a new one after so many seconds, in a folder or the URL of one in an object store.
    pub fn kept_in(mut self, folder: &str, interval_seconds: u64) -> Self {
        let policy = CheckpointPolicy { interval_seconds, keep: 1, ..CheckpointPolicy::default() };
        self.environment.checkpoint = Some(Checkpoint { folder: folder.to_owned(), policy });
        self
    }

    /// Returns the command that runs the server of this index. The words of `through`, if there are any, are a program that
    /// starts it and its arguments.
    pub fn command(&self, index: u32, through: &[&str]) -> anyhow::Result<Command> {
        let program: PathBuf = std::env::current_exe().context("cannot find this program")?;
        let place = Environment { index, ..self.environment.clone() };
        let own = [program.as_os_str(), OsStr::new("server")];
        let words: Vec<&OsStr> = through.iter().map(OsStr::new).chain(own).collect();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).envs(place.to_vars()).stdin(Stdio::null()).stdout(Stdio::null());
        Ok(command)
    }

    /// Starts the server of this index.
    pub fn server(&self, index: u32) -> anyhow::Result<Process> {
        Process::start(&mut self.command(index, &[])?)
    }

    /// Starts all servers.
    pub fn start(&self) -> anyhow::Result<Vec<Process>> {
        (0..self.environment.servers.len() as u32).map(|index| self.server(index)).collect()
    }

    /// Returns the settings that a trainer joins with.
    pub fn session(&self, trainer: u32) -> SessionConfig {
        let place = Environment { role: Role::Trainer, index: trainer, ..self.environment.clone() };
        let tensors = vec![TensorSpec::new("weight", vec![self.elements as u64])];
        SessionConfig::new(&place, tensors, 0)
    }
}

impl Process {
    pub fn start(command: &mut Command) -> anyhow::Result<Self> {
        Ok(Self(command.spawn().with_context(|| format!("cannot start {}", command.get_program().display()))?))
    }

    /// Starts a server; returns it and its address when it listens.
    pub fn listening(command: &mut Command) -> anyhow::Result<(Self, String)> {
        let mut process = Self::start(command.stdout(Stdio::piped()))?;
        let said = process.0.stdout.take().context("the output of a server is not piped")?;
        let mut address = String::new();
        BufReader::new(said).read_line(&mut address).context("cannot read the address of a server")?;
        if address.is_empty() {
            bail!("a server ended before it listened: {}", process.wait()?);
        }
        Ok((process, address.trim_end().to_owned()))
    }

    /// kill -9.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        self.0.kill().context("cannot kill a process")?;
        self.wait()?;
        Ok(())
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) -> anyhow::Result<()> {
        kill_process(Pid::from_child(&self.0), Signal::TERM).context("cannot send SIGTERM to a process")
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> anyhow::Result<ExitStatus> {
        self.0.wait().context("cannot wait for a process")
    }

    /// Returns whether it has ended.
    pub fn has_ended(&mut self) -> anyhow::Result<bool> {
        Ok(self.0.try_wait().context("cannot ask for the state of a process")?.is_some())
    }

    /// Bytes of its own memory, without what it shares with trainers.
    pub fn memory(&self) -> anyhow::Result<u64> {
        let [own] = self.status(["RssAnon"])?;
        Ok(own)
    }

    /// Returns its resident memory.
    pub fn resident(&self) -> anyhow::Result<Resident> {
        let [now, most] = self.status(["VmRSS", "VmHWM"])?;
        Ok(Resident { now, most })
    }

    /// Returns the seconds that all its threads have had a core, in the system too. Of a process that has ended and was not
    /// waited for, all of them.
    pub fn cpu(&self) -> anyhow::Result<f64> {
        cpu_of(&format!("/proc/{}/stat", self.0.id()))
    }

    /// Makes [`Resident::most`] the most from now on.
    pub fn forget_most(&self) -> anyhow::Result<()> {
        let file = format!("/proc/{}/clear_refs", self.0.id());
        std::fs::write(&file, "5").with_context(|| format!("cannot write to {file}"))
    }

    /// Returns fields of /proc/PID/status, in bytes.
    fn status<const N: usize>(&self, names: [&str; N]) -> anyhow::Result<[u64; N]> {
        let file = format!("/proc/{}/status", self.0.id());
        let status = std::fs::read_to_string(&file).with_context(|| format!("cannot read {file}"))?;
        let mut values = [0; N];
        for (value, name) in values.iter_mut().zip(names) {
            *value = field(&status, name).with_context(|| format!("{file} does not show {name}"))?;
        }
        Ok(values)
    }
}

/// Returns the seconds that all threads of this process have had a core.
pub fn own_cpu() -> anyhow::Result<f64> {
    cpu_of("/proc/self/stat")
}

fn cpu_of(file: &str) -> anyhow::Result<f64> {
    let stat = std::fs::read_to_string(file).with_context(|| format!("cannot read {file}"))?;
    cpu_seconds(&stat).with_context(|| format!("{file} does not show the time of a process"))
}

/// Ticks of a second in /proc/PID/stat, on every architecture (`USER_HZ`).
const TICKS: f64 = 100.0;

/// The fields `utime` and `stime` of /proc/PID/stat, in seconds. They are the 14th and 15th; the second is the name in
/// parentheses, which may hold anything.
fn cpu_seconds(stat: &str) -> Option<f64> {
    let (_, behind_name) = stat.rsplit_once(')')?;
    let mut times = behind_name.split_whitespace().skip(11).take(2).map(str::parse::<u64>);
    let (user, system) = (times.next()?.ok()?, times.next()?.ok()?);
    Some((user + system) as f64 / TICKS)
}

/// The value of a line `RssAnon: 123 kB` of /proc/PID/status, in bytes.
fn field(status: &str, name: &str) -> Option<u64> {
    let value = |line: &str| line.strip_prefix(name)?.strip_prefix(':').map(|value| value.trim().to_owned());
    let kib = status.lines().find_map(value)?;
    kib.strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Returns addresses of `host` at which nothing listens, all different.
pub fn free_addresses(host: &str, count: u32) -> anyhow::Result<Vec<String>> {
    // Held together, so that they differ.
    let ports: Vec<_> = (0..count).map(|_| TcpListener::bind((host, 0))).collect::<Result<_, _>>()?;
    let addresses = ports.iter().map(|port| port.local_addr().map(|address| address.to_string()));
    addresses.collect::<Result<_, _>>().context("no free port")
}

impl Drop for Process {
    fn drop(&mut self) {
        // One that has ended needs no killing.
        let _ = self.kill();
    }
}

/// Runs trainers on this thread, so that the server has the other cores.
pub fn alone<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = Builder::new_current_thread().enable_all().build().context("cannot start a runtime")?;
    LocalSet::new().block_on(&runtime, work)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_from_the_status_of_a_process() {
        let status = "VmRSS:\t  900 kB\nRssAnon:\t     512 kB\nRssFile:\t 1 kB\n";
        assert_eq!([field(status, "RssAnon"), field(status, "VmRSS")], [Some(524_288), Some(921_600)]);
        assert_eq!([field(status, "VmHWM"), field(status, "Rss")], [None, None]);
        let own = std::fs::read_to_string("/proc/self/status").expect("this process has one");
        assert!(field(&own, "RssAnon").is_some_and(|bytes| bytes > 100_000), "{own}");
    }

    #[test]
    fn the_time_of_a_process_is_read_behind_its_name() {
        let stat = "42 (a (b) 1 2) S 1 42 42 0 -1 4194304 100 0 0 0 250 50 0 0 20 0 4 0 123";
        assert_eq!(cpu_seconds(stat), Some(3.0));
        assert_eq!(cpu_seconds("42 (a) S 1"), None);
        let own = std::fs::read_to_string("/proc/self/stat").expect("this process has one");
        assert!(cpu_seconds(&own).is_some(), "{own}");
    }

    #[test]
    fn free_addresses_differ() {
        let addresses = free_addresses("127.0.0.1", 3).expect("ports");
        let differ: std::collections::BTreeSet<_> = addresses.iter().collect();
        assert_eq!(differ.len(), 3, "{addresses:?}");
    }
}
