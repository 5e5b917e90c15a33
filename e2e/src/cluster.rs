//! The cluster under test: finds or creates it, loads this checkout's images and installs its chart.

use std::env;
use std::path::Path;

use anyhow::{Context, Result};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use crate::command::{run, run_with_input};

/// The repository's root; commands run there.
pub const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
/// Namespace of the operator.
pub const SYSTEM: &str = "psjobs-system";
/// Helm release.
const RELEASE: &str = "psjobs";
/// Kind clusters that are used when KUBECONFIG is not set; the last is created when there is none.
const KIND_CLUSTERS: [&str; 2] = ["psjobs", "psjobs-e2e"];

/// A cluster that is ready for jobs.
pub struct Cluster {
    pub client: Client,
    pub context: String,
    /// True if [`Cluster::prepare`] installed the chart and did not upgrade it.
    installed: bool,
}

/// The cluster to use.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Choice {
    /// KUBECONFIG's current context.
    Current,
    /// An existing kind cluster.
    Kind(&'static str),
    /// A new kind cluster.
    New(&'static str),
}

/// Chooses the cluster. Without KUBECONFIG the current context of the user's own configuration is not
/// used: it may be a production cluster.
fn choose(kubeconfig_is_set: bool, of_kind: &[&str]) -> Choice {
    if kubeconfig_is_set {
        return Choice::Current;
    }
    match KIND_CLUSTERS.into_iter().find(|name| of_kind.contains(name)) {
        Some(name) => Choice::Kind(name),
        None => Choice::New(KIND_CLUSTERS[1]),
    }
}

impl Cluster {
    /// Finds a cluster or creates one with `workers` nodes besides the control plane, loads the operator's and the workers'
    /// images and those of `others`, and installs the chart.
    ///
    /// # Errors
    /// If kind, docker, helm or the API server fails.
    pub async fn prepare(workers: usize, others: &[&str]) -> Result<Self> {
        env::set_current_dir(ROOT).with_context(|| format!("cannot work in {ROOT}"))?;
        let context = context(workers).await?;
        let options = KubeConfigOptions { context: Some(context.clone()), ..KubeConfigOptions::default() };
        let config = Config::from_kubeconfig(&options).await.context("cannot read the cluster's configuration")?;
        let client = Client::try_from(config)?;
        let version = client.apiserver_version().await.with_context(|| format!("{context} does not answer"))?;
        println!("cluster: {context}, Kubernetes {}", version.git_version);
        load_images(&context, others).await?;
        let installed = install(&context).await?;
        Ok(Self { client, context, installed })
    }

    /// Runs `kubectl` and returns its output.
    ///
    /// # Errors
    /// If it fails; the error holds its output.
    pub async fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        self.kubectl_with_input(arguments, "").await
    }

    /// Runs `kubectl psjob`, the plugin on PATH, with `input` as standard input, and returns its output.
    ///
    /// # Errors
    /// If it fails.
    pub async fn psjob(&self, arguments: &[&str], input: &str) -> Result<String> {
        // kubectl takes no flag before the name of a plugin.
        run_with_input("kubectl", &[&["psjob"], arguments, &["--context", &self.context]].concat(), input).await
    }

    /// Runs `kubectl` with `input` as standard input.
    ///
    /// # Errors
    /// As [`Cluster::kubectl`].
    pub async fn kubectl_with_input(&self, arguments: &[&str], input: &str) -> Result<String> {
        let arguments: Vec<&str> = ["--context", &self.context].into_iter().chain(arguments.iter().copied()).collect();
        run_with_input("kubectl", &arguments, input).await
    }

    /// Returns true if the nodes are containers of this machine's docker.
    #[must_use]
    pub fn is_of_kind(&self) -> bool {
        self.context.starts_with("kind-")
    }

    /// Runs `helm` and returns its output; the first argument is the command, which the release's name follows.
    ///
    /// # Errors
    /// If it fails.
    pub async fn helm(&self, arguments: &[&str]) -> Result<String> {
        let (command, rest) = arguments.split_first().context("a command of helm")?;
        let in_context = ["--kube-context", &self.context, "--namespace", SYSTEM, "--wait", "--timeout", "180s"];
        run("helm", &[&[*command, RELEASE], rest, &in_context].concat()).await
    }

    /// Uninstalls the chart, if [`Cluster::prepare`] installed it.
    ///
    /// # Errors
    /// If helm fails.
    pub async fn clean_up(&self) -> Result<()> {
        if self.installed {
            let in_context = ["--kube-context", &self.context, "--namespace", SYSTEM];
            run("helm", &[&["uninstall", RELEASE, "--wait"], &in_context[..]].concat()).await?;
        }
        Ok(())
    }
}

async fn context(workers: usize) -> Result<String> {
    let kubeconfig_is_set = env::var_os("KUBECONFIG").is_some_and(|value| !value.is_empty());
    let of_kind = if kubeconfig_is_set { String::new() } else { run("kind", &["get", "clusters"]).await? };
    match choose(kubeconfig_is_set, &of_kind.lines().collect::<Vec<_>>()) {
        Choice::Current => {
            let file = Kubeconfig::read().context("cannot read KUBECONFIG")?;
            file.current_context.context("KUBECONFIG has no current context; set one with kubectl config use-context")
        }
        Choice::Kind(name) => Ok(format!("kind-{name}")),
        Choice::New(name) => {
            println!("cluster: making one with kind; `kind delete cluster --name {name}` removes it");
            let create = ["create", "cluster", "--name", name, "--wait", "180s", "--config", "-"];
            run_with_input("kind", &create, &kind_config(workers)).await?;
            Ok(format!("kind-{name}"))
        }
    }
}

/// Returns the configuration of a cluster of kind with this many nodes that take pods, besides the control plane; with none that one takes them.
fn kind_config(workers: usize) -> String {
    let roles = ["control-plane"].into_iter().chain(std::iter::repeat_n("worker", workers));
    let nodes: String = roles.map(|role| format!("- role: {role}\n")).collect();
    format!("kind: Cluster\napiVersion: kind.x-k8s.io/v1alpha4\nnodes:\n{nodes}")
}

/// Returns the image of a program with this version's tag, for example `psjobs-worker:0.1.0`.
#[must_use]
pub fn image(program: &str) -> String {
    format!("{program}:{}", env!("CARGO_PKG_VERSION"))
}

async fn load_images(context: &str, others: &[&str]) -> Result<()> {
    let programs = ["psjobs-operator", "psjobs-worker"].iter().chain(others);
    let images: Vec<String> = programs.map(|program| image(program)).collect();
    let all = images.join(", ");
    match context.strip_prefix("kind-") {
        Some(name) => {
            let images = images.iter().map(String::as_str);
            let arguments: Vec<_> = ["load", "docker-image", "--name", name].into_iter().chain(images).collect();
            run("kind", &arguments).await?;
            println!("images: loaded {all}");
        }
        None => println!("images: {all} are expected on the nodes of {context}"),
    }
    Ok(())
}

/// Installs or upgrades the chart; returns true if it was not installed before.
async fn install(context: &str) -> Result<bool> {
    let in_context = ["--kube-context", context, "--namespace", SYSTEM];
    let installed = run("helm", &[&["status", RELEASE], &in_context[..]].concat()).await.is_err();
    if !installed {
        // A run that was ended in the middle leaves another number of operators, which Helm refuses to change. Where there is
        // no Deployment, Helm makes it.
        let deployment = format!("deployment/{RELEASE}");
        drop(
            run("kubectl", &["--context", context, "--namespace", SYSTEM, "scale", &deployment, "--replicas=1"]).await,
        );
    }
    // The tag stays the same from build to build; the annotation makes the operator's pod follow its image.
    let id = run("docker", &["image", "inspect", "--format", "{{.Id}}", &image("psjobs-operator")]).await;
    let annotation = format!("podAnnotations.image={}", id.as_deref().unwrap_or("unknown").trim());
    let chart = Path::new("charts").join("psjobs");
    let upgrade = ["upgrade", "--install", RELEASE, &chart.to_string_lossy(), "--create-namespace", "--wait"];
    // The definition may be there from `kubectl apply` or from a release of another name.
    let upgrade = [&upgrade[..], &["--take-ownership", "--timeout", "180s", "--set-string", &annotation], &in_context];
    run("helm", &upgrade.concat()).await?;
    println!("chart: {} in {SYSTEM}", if installed { "installed" } else { "upgraded" });
    Ok(installed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_own_context_is_never_chosen_unasked() {
        let rows: [(&str, bool, &[&str], Choice); 5] = [
            ("asked", true, &["psjobs"], Choice::Current),
            ("the developer's", false, &["other", "psjobs-e2e", "psjobs"], Choice::Kind("psjobs")),
            ("an earlier run's", false, &["psjobs-e2e"], Choice::Kind("psjobs-e2e")),
            ("others only", false, &["other"], Choice::New("psjobs-e2e")),
            ("none", false, &[], Choice::New("psjobs-e2e")),
        ];
        for (label, kubeconfig, of_kind, want) in rows {
            assert_eq!(choose(kubeconfig, of_kind), want, "{label}");
        }
    }
}
