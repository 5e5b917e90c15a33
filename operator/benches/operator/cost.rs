//! Measures the memory and CPU of processes as the kernel counts them.

use std::fs;
use std::process::Child;

use anyhow::{Context as _, Result};

use crate::process::Operator;

/// Clock ticks a second in /proc; Linux has no other value for programs.
const TICKS: f64 = 100.0;

impl Operator {
    /// Resident memory now, in MiB.
    pub fn rss_mib(&self) -> Result<f64> {
        memory_mib(&self.process, "VmRSS")
    }

    /// CPU time used so far, in seconds.
    pub fn cpu_seconds(&self) -> Result<f64> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.process.id())).context("the operator is gone")?;
        let after_name = stat.rsplit_once(')').context("stat has a name")?.1;
        let fields = after_name.split_whitespace().collect::<Vec<_>>();
        let ticks = |index: usize| fields.get(index).and_then(|field| field.parse::<f64>().ok());
        // utime and stime are fields 14 and 15; two are before the name's end.
        Ok((ticks(11).context("utime")? + ticks(12).context("stime")?) / TICKS)
    }
}

/// Memory of a process in MiB, by the name of its line in /proc.
pub fn memory_mib(process: &Child, name: &str) -> Result<f64> {
    let path = format!("/proc/{}/status", process.id());
    let status = fs::read_to_string(&path).with_context(|| format!("cannot read {path}; has the process ended?"))?;
    let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let value = value.with_context(|| format!("{path} has no {name}"))?;
    let kib: f64 = value.trim().trim_end_matches(" kB").parse().with_context(|| format!("{name} is a number"))?;
    Ok(kib / 1024.0)
}
