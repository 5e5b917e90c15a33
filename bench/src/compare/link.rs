//! A slow network on this machine: two network namespaces with a link of stated speed between them, the server at one
//! end and the trainers at the other. What goes over it is counted by the link itself.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail, ensure};
use psjobs_api::env::PSJOB_RESULT_FILE;
use psjobs_api::{DEFAULT_PORT, Environment, ReplicaResult, Role, Training};
use serde::Serialize;
use tempfile::TempDir;

use crate::namespace::run;
use crate::processes::Process;
use psjobs::BadInput;

/// A link; it and its namespaces go when it is dropped.
#[derive(Debug)]
pub struct Link {
    /// Namespaces of the server and of the trainers.
    ends: [String; 2],
    mbit: u32,
}

/// The traffic and speed of a job over a link.
#[derive(Clone, Debug, Serialize)]
pub struct Carried {
    pub way: &'static str,
    pub link_mbit: u32,
    /// Both ways, with all headers, for a step of one trainer.
    pub bytes_per_step: f64,
    /// The steps of all trainers together.
    pub steps_per_second: f64,
}

/// A job to run over it.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    pub worker: &'a Path,
    pub workload: &'a str,
    pub training: &'a Training,
    pub trainers: u32,
}

/// The ends' addresses, in a network namespace of their own.
const ADDRESSES: [&str; 2] = ["10.0.0.1", "10.0.0.2"];
/// The name of the link at both ends.
const DEVICE: &str = "psjobs0";
/// Limits of a queue: enough for whole batches of segments, and as long as a slow link's usually is.
const SHAPE: [&str; 4] = ["burst", "128kb", "latency", "50ms"];

impl Link {
    /// Makes one that carries so many Mb/s each way.
    pub fn make(mbit: u32) -> anyhow::Result<Self> {
        let name = |end: &str| format!("psjobs-{}-{end}", std::process::id());
        let link = Self { ends: ["server", "trainers"].map(name), mbit };
        link.set_up().map_err(|error| {
            BadInput::new(format!(
                "cannot make a link of {mbit} Mb/s between two network namespaces ({error:#}); that takes root, and \
                 the programs ip and tc (iproute2): run it as root, or without the link, by --link-mbit 0"
            ))
        })?;
        Ok(link)
    }

    fn set_up(&self) -> anyhow::Result<()> {
        let [server, trainers] = &self.ends;
        for end in &self.ends {
            run("ip", &["netns", "add", end])?;
            run("ip", &["-n", end, "link", "set", "lo", "up"])?;
        }
        let veth = ["type", "veth", "peer", "name", DEVICE, "netns", trainers];
        run("ip", &[&["link", "add", DEVICE, "netns", server], &veth[..]].concat())?;
        let rate = format!("{}mbit", self.mbit);
        for (end, address) in self.ends.iter().zip(ADDRESSES) {
            run("ip", &["-n", end, "addr", "add", &format!("{address}/30"), "dev", DEVICE])?;
            run("ip", &["-n", end, "link", "set", DEVICE, "up"])?;
            let shaped = ["qdisc", "add", "dev", DEVICE, "root", "tbf", "rate", &rate];
            run("tc", &[&["-n", end], &shaped[..], &SHAPE].concat())?;
        }
        Ok(())
    }

    /// Measures `steps` of each trainer of `job`, half of them without the costs of its beginning and end.
    pub fn carry(&self, way: &'static str, job: Job, steps: u32) -> anyhow::Result<Carried> {
        let first_steps = steps / 2;
        let (first, _) = self.train(job, first_steps)?;
        let (all, seconds) = self.train(job, steps)?;
        let more = f64::from((steps - first_steps) * job.trainers);
        Ok(Carried {
            way,
            link_mbit: self.mbit,
            bytes_per_step: all.saturating_sub(first) as f64 / more,
            steps_per_second: f64::from(steps * job.trainers) / seconds,
        })
    }

    /// Trains for `steps` of each trainer. Returns the bytes that the link carried, and the seconds of the slowest trainer.
    pub fn train(&self, job: Job, steps: u32) -> anyhow::Result<(u64, f64)> {
        let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
        let before = self.carried()?;
        let mut server = self.start(&folder, job, Role::Server, 0, &["serve"])?;
        let steps = steps.to_string();
        let args = ["train", job.workload, "--device", "cpu", "--epochs", "1000", "--max-steps", &steps];
        let trainers = (0..job.trainers).map(|index| self.start(&folder, job, Role::Trainer, index, &args));
        let mut seconds = 0.0_f64;
        for (index, mut trainer) in trainers.collect::<anyhow::Result<Vec<_>>>()?.into_iter().enumerate() {
            let ended = trainer.wait()?;
            let file = folder.path().join(format!("trainer-{index}"));
            let result = std::fs::read_to_string(&file).ok().as_deref().and_then(ReplicaResult::parse);
            let Some(result) = result.filter(|_| ended.success()) else {
                let log = std::fs::read_to_string(file.with_extension("log")).unwrap_or_default();
                bail!("a trainer failed: {}", log.lines().last().unwrap_or_default());
            };
            seconds = seconds.max(result.seconds);
        }
        ensure!(server.wait()?.success(), "the server failed");
        Ok((self.carried()? - before, seconds))
    }

    fn start(&self, folder: &TempDir, job: Job, role: Role, index: u32, args: &[&str]) -> anyhow::Result<Process> {
        let servers = vec![format!("{}:{DEFAULT_PORT}", ADDRESSES[0])];
        let uid = folder.path().display().to_string();
        let plain = Environment::new("compare", &uid, servers, job.trainers, job.training.clone());
        let place = Environment { role, index, local_rank: index, ..plain };
        let end = &self.ends[usize::from(role == Role::Trainer)];
        let file = folder.path().join(format!("{role}-{index}"));
        let log = File::create(file.with_extension("log")).context("cannot write to a temporary folder")?;
        let mut command = Command::new("ip");
        command.args(["netns", "exec", end]).arg(job.worker).args(args);
        command.envs(place.to_vars()).env("OMP_NUM_THREADS", "1").env(PSJOB_RESULT_FILE, &file);
        Process::start(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log))
    }

    /// Bytes that went over it so far, both ways.
    fn carried(&self) -> anyhow::Result<u64> {
        let count = |counter| {
            let file = format!("/sys/class/net/{DEVICE}/statistics/{counter}");
            let text = run("ip", &["netns", "exec", &self.ends[0], "cat", &file])?;
            text.trim().parse::<u64>().with_context(|| format!("{file} holds {text:?}"))
        };
        Ok(count("rx_bytes")? + count("tx_bytes")?)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        for end in &self.ends {
            // One that could not be made need not go.
            let _ = run("ip", &["netns", "del", end]);
        }
    }
}
