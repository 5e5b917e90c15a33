//! The files that servers leave on disk: a model that libtorch loads, and a checkpoint that survives a full disk.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{ChildStderr, Command, Stdio};

use crate::process::{Worker, all_end_well, command, end, free_port, read, start};
use psjobs_ps::checkpoint::{Checkpoint, Runs};
use psjobs_worker::Workload as _;
use psjobs_worker::tch::{Device, nn, no_grad};
use psjobs_workloads::data::mnist::{Mnist, default_folder};
use psjobs_workloads::model::mlp::Mlp;
use psjobs_workloads::workload::digits::Digits;
use rustix::process::{Pid, Resource, Rlimit, prlimit};

/// The command of a server that keeps checkpoints in `folder`, for one trainer.
fn serve(port: u16, folder: &Path) -> Command {
    let kept = folder.join("kept");
    let mut command = command(&format!(
        "serve --master-port {port} --consistency sync --checkpoint-interval 1 --checkpoint-dir {}",
        kept.display()
    ));
    command.arg("--result-file").arg(folder.join("server")).stderr(Stdio::piped());
    command
}

fn train(port: u16, steps: u64, folder: &Path) -> Worker {
    start(&format!("train mlp --device cpu --master-port {port} --max-steps {steps}"), &folder.join("trainer"))
}

fn train_undisturbed(port: u16, steps: u64, folder: &Path) {
    let server = Worker(serve(port, folder).spawn().expect("the binary starts"));
    all_end_well([train(port, steps, folder), server]);
}

#[test]
fn the_exported_model_is_what_libtorch_loads() {
    let folder = tempfile::tempdir().expect("temporary folder");
    train_undisturbed(free_port(), 300, folder.path());
    let mnist = Mnist::open(&default_folder().expect("known"), Device::Cpu).expect("MNIST");
    let workload = Digits::new(mnist, Mlp::new);
    let mut variables = nn::VarStore::new(Device::Cpu);
    let model = workload.model(&variables.root());
    variables.load(folder.path().join("kept/model.safetensors")).expect("loads");
    let found = no_grad(|| workload.evaluate(&model))["accuracy"];
    let reported = read(&folder.path().join("trainer")).metrics["accuracy"];
    assert!((found - reported).abs() < 1e-9 && reported > 0.5, "{found} here, {reported} there");
}

/// Reads a log until a line holds `words`.
fn said(log: &mut BufReader<ChildStderr>, words: &str) -> String {
    let mut line = String::new();
    while !line.contains(words) {
        line.clear();
        assert_ne!(log.read_line(&mut line).expect("text"), 0, "it ended without saying {words:?}");
    }
    line
}

#[test]
fn a_full_disk_keeps_the_last_good_checkpoint_and_the_job_waits_for_room() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let port = free_port();
    train_undisturbed(port, 60, folder.path());
    let catalog = Runs::new(folder.path().join("kept")).catalog(1);
    assert_eq!(catalog.complete().expect("a folder").last(), Some(&60));

    // Files may not become longer than 64 KiB, of which the model has ten times as much: as on a full disk, a write fails.
    let plain = serve(port, folder.path());
    let mut limited = Command::new("sh");
    limited.args(["-c", "trap '' XFSZ; ulimit -S -f 128; exec \"$@\"", "sh"]).arg(plain.get_program());
    limited.args(plain.get_args()).stderr(Stdio::piped());
    for (name, value) in plain.get_envs() {
        match value {
            Some(value) => limited.env(name, value),
            None => limited.env_remove(name),
        };
    }
    let mut server = limited.spawn().expect("the binary starts");
    let mut log = BufReader::new(server.stderr.take().expect("piped"));
    let server = Worker(server);
    let trainer = train(port, 200, folder.path());
    let line = said(&mut log, "no space left for");
    assert!(line.contains("enlarge the volume or keep fewer checkpoints"), "{line}");
    let kept = catalog.complete().expect("a folder");
    assert_eq!(kept.last(), Some(&60), "the last good one is still there");
    Checkpoint::open(catalog.path(60)).expect("and whole");

    let room = Rlimit { current: None, maximum: None };
    let pid = Pid::from_child(&server.0);
    prlimit(Some(pid), Resource::Fsize, room).expect("there is room again");
    let (code, output) = end(trainer);
    assert_eq!(code, Some(0), "{output}");
    let mut rest = String::new();
    log.read_to_string(&mut rest).expect("text");
    let mut server = server;
    assert_eq!(server.0.wait().expect("it ends").code(), Some(0), "{rest}");
    assert_eq!(catalog.complete().expect("a folder").last(), Some(&200));
}
