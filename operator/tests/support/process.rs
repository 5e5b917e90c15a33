//! The operator as a process of its own.

use std::fs::{self, File};
use std::process::{Child, Command, Stdio};

use kube::config::Kubeconfig;
use tempfile::TempDir;

/// Killed with this value.
pub struct Operator {
    pub process: Child,
    /// Holds its `log`.
    pub folder: TempDir,
}

impl Operator {
    /// Starts the binary of this build with more flags and variables.
    pub fn start(kubeconfig: &Kubeconfig, flags: &[&str], variables: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("kubeconfig");
        fs::write(&file, serde_yaml::to_string(kubeconfig).expect("YAML")).expect("the folder is writable");
        let process = Command::new(env!("CARGO_BIN_EXE_psjobs-operator"))
            .arg("--metrics-addr=127.0.0.1:0")
            .args(flags)
            .env("KUBECONFIG", &file)
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stderr(File::create(folder.path().join("log")).expect("the folder is writable"))
            .spawn()
            .expect("the operator starts");
        Self { process, folder }
    }
}

impl Drop for Operator {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
