//! psjobs-web as a process of its own, with the rights that the chart gives it.

use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule};
use kube::api::{ObjectMeta, PostParams};
use kube::config::Kubeconfig;
use kube::{Api, Client};
use serde_json::json;
use tempfile::TempDir;

use super::visitor::{get, until_allowed};
use crate::DEADLINE;
use crate::cost::memory_mib;

const CHART: &str = include_str!("../../../../charts/psjobs/templates/web.yaml");

/// Returns the path of psjobs-web, which is built beside the operator.
pub fn program() -> Result<PathBuf> {
    let program = Path::new(env!("CARGO_BIN_EXE_psjobs-operator")).with_file_name("psjobs-web");
    let profile = if cfg!(debug_assertions) { "" } else { " --release" };
    ensure!(
        program.exists(),
        "there is no {}; build it: cargo build --locked{profile} -p psjobs-web-server",
        program.display()
    );
    Ok(program)
}

/// Killed with this value.
pub struct Server {
    pub address: SocketAddr,
    process: Child,
    /// Holds its kubeconfig, its `log` and its records.
    folder: TempDir,
}

impl Server {
    /// Starts psjobs-web as `user` of the cluster, which gets the chart's rights, and waits until it knows all jobs.
    pub async fn start(program: &Path, client: &Client, kubeconfig: &Kubeconfig, user: &str) -> Result<Self> {
        grant_chart(client, user).await?;
        let folder = tempfile::tempdir()?;
        let (config, records, log) =
            (folder.path().join("kubeconfig"), folder.path().join("records"), folder.path().join("log"));
        fs::write(&config, serde_yaml::to_string(&impersonating(kubeconfig, user))?)?;
        fs::create_dir(&records)?;
        // The port is free again for the process, which does not say which one it took.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let process = Command::new(program)
            .args(["--log=warn", "--addr", &address.to_string()])
            .arg("--records")
            .arg(&records)
            .env("KUBECONFIG", &config)
            // As in the chart.
            .env("MALLOC_ARENA_MAX", "1")
            .stdin(Stdio::null())
            .stderr(File::create(log)?)
            .spawn()
            .with_context(|| format!("{} does not start", program.display()))?;
        let mut server = Self { address, process, folder };
        let ready = tokio::time::timeout(DEADLINE, server.ready()).await;
        ready.context("psjobs-web does not know all jobs in time").flatten().with_context(|| server.log())?;
        Ok(server)
    }

    async fn ready(&mut self) -> Result<()> {
        let mut looks = tokio::time::interval(Duration::from_millis(20));
        loop {
            looks.tick().await;
            if let Some(status) = self.process.try_wait()? {
                anyhow::bail!("psjobs-web has ended: {status}");
            }
            // Nothing listens until it has started, and it refuses until it knows all jobs.
            if get(self.address, "/readyz", "").await.is_ok() {
                return Ok(());
            }
        }
    }

    /// Most resident memory so far, in MiB.
    pub fn peak_mib(&self) -> Result<f64> {
        memory_mib(&self.process, "VmHWM")
    }

    /// Resident memory now, in MiB.
    pub fn rss_mib(&self) -> Result<f64> {
        memory_mib(&self.process, "VmRSS")
    }

    fn log(&self) -> String {
        let text = fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
        format!("the log of psjobs-web is: {}", text.trim())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn impersonating(kubeconfig: &Kubeconfig, user: &str) -> Kubeconfig {
    let mut kubeconfig = kubeconfig.clone();
    for info in kubeconfig.auth_infos.iter_mut().filter_map(|named| named.auth_info.as_mut()) {
        info.impersonate = Some(user.to_owned());
    }
    kubeconfig
}

/// Gives a user the rights that the chart gives psjobs-web.
async fn grant_chart(client: &Client, user: &str) -> Result<()> {
    let lines = CHART.lines().filter(|line| !line.trim_start().starts_with("{{")).collect::<Vec<_>>().join("\n");
    let blocks = lines.split("\nrules:\n").skip(1).map(|block| block.split("\n---").next().unwrap_or_default());
    let rules = blocks.map(serde_yaml::from_str::<Vec<PolicyRule>>).collect::<Result<Vec<_>, _>>()?.concat();
    let metadata = ObjectMeta { name: Some(user.to_owned()), ..ObjectMeta::default() };
    let role = ClusterRole { metadata, rules: Some(rules), ..ClusterRole::default() };
    Api::all(client.clone()).create(&PostParams::default(), &role).await?;
    let group = "rbac.authorization.k8s.io";
    let binding: ClusterRoleBinding = serde_json::from_value(json!({
        "metadata": {"name": user},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": user},
        "subjects": [{"apiGroup": group, "kind": "User", "name": user}],
    }))?;
    Api::all(client.clone()).create(&PostParams::default(), &binding).await?;
    let attributes = json!({"verb": "create", "group": "authorization.k8s.io", "resource": "subjectaccessreviews"});
    until_allowed(client, user, attributes).await
}
