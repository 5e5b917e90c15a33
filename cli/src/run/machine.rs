//! Looks at the machine: cores, GPUs, free ports, and where `psjobs-worker` is.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;
use std::path::{self, Path, PathBuf};
use std::thread;

use anyhow::Context as _;
use psjobs_api::checkpoint::is_object_store;

use super::Options;
use super::plan::Machine;
use crate::bad_input::BadInput;

const WORKER: &str = "psjobs-worker";
/// Ports for servers. Linux gives ports from 32768 on to connections, so that a server that starts again could find its port
/// taken by one of them.
const PORTS: Range<u16> = 20_000..32_000;

/// Finds the resources for a run of `job` with `servers` servers. `results` takes the result files.
pub fn look(job: &str, servers: u32, options: &Options, results: PathBuf) -> anyhow::Result<Machine> {
    let Options { worker, data, checkpoint_dir, log_dir, .. } = options;
    if let Some(data) = data
        && !data.is_dir()
    {
        return Err(BadInput::new(format!("--data {}: there is no such folder", data.display())).into());
    }
    Ok(Machine {
        cores: thread::available_parallelism().map_or(1, |cores| cores.get() as u32),
        gpus: gpus(),
        worker: find_worker(worker.as_deref())?,
        data: data.clone(),
        threads_are_set: env::var_os("OMP_NUM_THREADS").is_some(),
        waiting_is_set: env::var_os("OMP_WAIT_POLICY").is_some(),
        servers: free_addresses(PORTS, servers).context("no free port on 127.0.0.1 for a server")?,
        results,
        checkpoints: match checkpoint_dir.to_str().is_some_and(is_object_store) {
            true => checkpoint_dir.clone(),
            false => path::absolute(checkpoint_dir).context("this folder has no path")?,
        },
        metrics: log_dir.as_deref().map(|logs| metrics_folder(logs, job)).transpose()?,
        uid: format!("{:032x}", rand::random::<u128>()),
    })
}

/// Returns the folder for the metrics of this run of `job`: one that does not exist, so that runs can be compared.
fn metrics_folder(logs: &Path, job: &str) -> anyhow::Result<PathBuf> {
    let folder = path::absolute(logs).context("this folder has no path")?.join("metrics");
    let mut runs = (1..).map(|run| folder.join(format!("{job}-{run}")));
    Ok(runs.find(|run| !run.exists()).expect("some number is free"))
}

/// The worker that was named, or the one beside this program, or the one on PATH.
pub fn find_worker(named: Option<&Path>) -> Result<Option<PathBuf>, BadInput> {
    if let Some(named) = named {
        let missing = || BadInput::new(format!("--worker {}: there is no such file", named.display()));
        return fs::canonicalize(named).map(Some).map_err(|_| missing());
    }
    Ok(find(WORKER))
}

/// Returns the path of `program`: beside this program, or on PATH.
pub fn find(program: &str) -> Option<PathBuf> {
    let beside = env::current_exe().ok().and_then(|here| Some(here.parent()?.to_owned()));
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = beside.into_iter().chain(env::split_paths(&path));
    folders.map(|folder| folder.join(program)).find(|program| program.is_file())
}

/// Returns the GPUs that the user makes visible, else all that the driver shows.
pub fn gpus() -> Vec<String> {
    if let Ok(visible) = env::var("CUDA_VISIBLE_DEVICES") {
        return named(&visible);
    }
    (0..count(Path::new("/"))).map(|gpu| gpu.to_string()).collect()
}

/// Returns how many GPUs the driver shows below `root`. Where it has no folder in /proc, as under gVisor, their devices count; WSL2
/// has one device for all, which counts as one GPU.
fn count(root: &Path) -> usize {
    let entries = |folder: &str| fs::read_dir(root.join(folder)).into_iter().flatten().flatten();
    let is_gpu = |name: &OsStr| {
        let number = name.to_str().and_then(|name| name.strip_prefix("nvidia"));
        number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    match entries("proc/driver/nvidia/gpus").count() {
        0 => match entries("dev").filter(|entry| is_gpu(&entry.file_name())).count() {
            0 => usize::from(root.join("dev/dxg").exists()),
            devices => devices,
        },
        gpus => gpus,
    }
}

/// Returns the GPUs in a value of `CUDA_VISIBLE_DEVICES`. As CUDA has it, the list ends at a number that no GPU has,
/// such as -1.
fn named(visible: &str) -> Vec<String> {
    let names = visible.split(',').map(str::trim).filter(|name| !name.is_empty());
    names.take_while(|name| !name.starts_with('-')).map(str::to_owned).collect()
}

/// Returns addresses with `ports` that are free now. All ports are held until the last is found, so that no two are equal.
/// Programs that start at the same time begin to look at different ports.
fn free_addresses(ports: Range<u16>, count: u32) -> io::Result<Vec<String>> {
    let first = rand::random_range(ports.clone());
    let all = (first..ports.end).chain(ports.start..first);
    let free = all.filter_map(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok());
    let held: Vec<_> = free.take(count as usize).collect();
    if held.len() < count as usize {
        let found = held.len();
        return Err(io::Error::new(io::ErrorKind::AddrInUse, format!("of {ports:?} only {found} are free")));
    }
    held.iter().map(|listener| Ok(listener.local_addr()?.to_string())).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::net::SocketAddr;

    use super::*;

    #[test]
    fn servers_get_different_ports_that_no_connection_is_given() {
        let addresses = free_addresses(PORTS, 50).expect("ports are free");
        let found: BTreeSet<u16> = addresses.iter().map(|address| port(address)).collect();
        assert!(found.len() == 50 && found.iter().all(|port| PORTS.contains(port)), "{found:?}");
    }

    #[test]
    fn a_port_that_is_in_use_is_left_out() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let taken = listener.local_addr().expect("it listens");
        let error = free_addresses(taken.port()..taken.port() + 1, 1).expect_err("it is taken");
        assert!(error.to_string().ends_with("only 0 are free"), "{error}");
    }

    #[test]
    fn a_number_that_no_gpu_has_hides_the_gpus_behind_it() {
        for (visible, want) in [
            ("0, 2", &["0", "2"][..]),
            ("1,-1,0", &["1"]),
            ("GPU-1a,GPU-2b", &["GPU-1a", "GPU-2b"]),
            ("MIG-1a,MIG-2b", &["MIG-1a", "MIG-2b"]),
            ("-1", &[]),
            (" ", &[]),
            ("", &[]),
        ] {
            assert_eq!(named(visible), want, "{visible:?}");
        }
    }

    #[test]
    fn gpus_are_found_in_proc_or_by_their_devices() {
        let root = tempfile::tempdir().expect("a folder");
        let make = |path: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("it has one")).expect("a folder");
            fs::write(path, "").expect("a file");
        };
        let found = || count(root.path());
        assert_eq!(found(), 0);
        make("dev/dxg");
        assert_eq!(found(), 1, "WSL2");
        ["dev/nvidia0", "dev/nvidia1", "dev/nvidiactl", "dev/nvidia-uvm"].into_iter().for_each(make);
        assert_eq!(found(), 2, "gVisor");
        ["proc/driver/nvidia/gpus/0000:01:00.0"].into_iter().for_each(make);
        assert_eq!(found(), 1);
    }

    fn port(address: &str) -> u16 {
        address.parse::<SocketAddr>().expect("an address").port()
    }
}
