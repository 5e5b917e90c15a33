//! Servers as processes of this program, for benchmarks that kill them or look at their memory, and trainers that
//! compute nothing.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use anyhow::Context as _;
use psjobs_api::checkpoint::CheckpointPolicy;
use psjobs_api::env::Checkpoint;
use psjobs_api::{Environment, Role, Training};
use psjobs_ps::client::{SessionConfig, TensorSpec};
use psjobs_ps::server::{self, ServerConfig};
use tokio::runtime::Runtime;

/// The settings that the processes of a benchmark share.
#[derive(Debug)]
pub struct Job {
    pub environment: Environment,
    pub elements: usize,
}

/// A process; killed when it is dropped.
#[derive(Debug)]
pub struct Process(Child);

impl Job {
    /// A job on free ports, with f32 parameters of so many MB (10^6 bytes).
    pub fn new(name: &str, servers: u32, trainers: u32, megabytes: u32, training: Training) -> anyhow::Result<Self> {
        // Held together, so that they differ.
        let ports: Vec<_> = (0..servers).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<Result<_, _>>()?;
        let addresses = ports.iter().map(|port| port.local_addr().map(|address| address.to_string()));
        let uid = format!("{name}-{:016x}", rand::random::<u64>());
        let environment = Environment::new(name, &uid, addresses.collect::<Result<_, _>>()?, trainers, training);
        Ok(Self { environment, elements: megabytes as usize * 250_000 })
    }

    /// Makes the job keep one checkpoint, a new one each second, in `folder`.
    pub fn checkpointed(mut self, folder: &Path) -> Self {
        let policy = CheckpointPolicy { interval_seconds: 1, keep: 1, ..CheckpointPolicy::default() };
        self.environment.checkpoint = Some(Checkpoint { folder: folder.display().to_string(), policy });
        self
    }

    /// Starts the server of this index.
    pub fn server(&self, index: u32) -> anyhow::Result<Process> {
        let program: PathBuf = std::env::current_exe().context("cannot find this program")?;
        let place = Environment { index, ..self.environment.clone() };
        let mut command = Command::new(program);
        command.arg("server").envs(place.to_vars());
        Process::start(command.stdin(Stdio::null()).stdout(Stdio::null()))
    }

    /// Starts all servers.
    pub fn start(&self) -> anyhow::Result<Vec<Process>> {
        (0..self.environment.servers.len() as u32).map(|index| self.server(index)).collect()
    }

    /// Returns the settings that a trainer joins with.
    pub fn session(&self, trainer: u32) -> SessionConfig {
        let place = Environment { role: Role::Trainer, index: trainer, ..self.environment.clone() };
        let tensors = vec![TensorSpec { name: "weight".into(), shape: vec![self.elements as u64] }];
        SessionConfig::new(&place, tensors, 0)
    }
}

impl Process {
    pub fn start(command: &mut Command) -> anyhow::Result<Self> {
        Ok(Self(command.spawn().with_context(|| format!("cannot start {}", command.get_program().display()))?))
    }

    /// kill -9.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        self.0.kill().context("cannot kill a process")?;
        self.wait()?;
        Ok(())
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> anyhow::Result<ExitStatus> {
        self.0.wait().context("cannot wait for a process")
    }

    /// Bytes of its own memory, without what it shares with trainers.
    pub fn memory(&self) -> anyhow::Result<u64> {
        let file = format!("/proc/{}/status", self.0.id());
        let status = std::fs::read_to_string(&file).with_context(|| format!("cannot read {file}"))?;
        own_memory(&status).with_context(|| format!("{file} does not tell RssAnon"))
    }
}

/// The line `RssAnon: 123 kB` of /proc/PID/status, in bytes.
fn own_memory(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

impl Drop for Process {
    fn drop(&mut self) {
        // One that has ended needs no killing.
        let _ = self.kill();
    }
}

/// One server of the job that the environment tells of.
pub fn serve() -> anyhow::Result<()> {
    let environment = Environment::from_vars(|name| std::env::var(name).ok())?.context("no job in the environment")?;
    let runtime = Runtime::new().context("cannot start a runtime")?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind(&environment.servers[environment.index as usize]).await?;
        server::run(listener, ServerConfig::new(&environment), std::future::pending()).await?;
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_memory_is_read_from_the_status_of_a_process() {
        assert_eq!(own_memory("VmRSS:\t  900 kB\nRssAnon:\t     512 kB\nRssFile:\t 1 kB\n"), Some(524_288));
        assert_eq!(own_memory("VmRSS:\t 900 kB\n"), None);
        let own = std::fs::read_to_string("/proc/self/status").expect("this process has one");
        assert!(own_memory(&own).is_some_and(|bytes| bytes > 100_000), "{own}");
    }
}
