//! The connection to the cluster, by kubectl's own files and flags.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Api, Client, Config};
use psjobs::BadInput;
use psjobs_api::crd::ParameterServerJob;

/// Flags of every command, which kubectl has too.
#[derive(Debug, Args)]
pub struct ConnectionArgs {
    /// Namespace of the job; by default that of the context
    #[arg(long, short, global = true, help_heading = "Cluster")]
    namespace: Option<String>,
    /// Context of the kubeconfig; by default the current one
    #[arg(long, global = true, help_heading = "Cluster")]
    context: Option<String>,
    /// The kubeconfig; by default that of KUBECONFIG, else ~/.kube/config
    #[arg(long, global = true, help_heading = "Cluster", value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

/// Flags that commands must repeat to mean the same cluster, each after a space.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    pub namespace: String,
    pub cluster: String,
}

impl Flags {
    /// Returns the command with the flags that it takes.
    pub fn behind(&self, command: &str) -> String {
        let namespaced = !command.contains("--all-namespaces") && !command.contains(" nodes");
        format!("{command}{}{}", if namespaced { &self.namespace } else { "" }, self.cluster)
    }
}

impl std::fmt::Display for Flags {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", self.namespace, self.cluster)
    }
}

/// A cluster, and the namespace that commands are about.
#[derive(Clone)]
pub struct Cluster {
    pub client: Client,
    pub namespace: String,
}

impl ConnectionArgs {
    /// Reads the kubeconfig. Nothing is sent yet.
    ///
    /// # Errors
    /// [`BadInput`] if there is no kubeconfig, or it has no such context.
    pub async fn open(&self) -> anyhow::Result<Cluster> {
        let options = KubeConfigOptions { context: self.context.clone(), ..KubeConfigOptions::default() };
        let read = async {
            let kubeconfig = match &self.kubeconfig {
                Some(file) => Kubeconfig::read_from(file)?,
                None => match env::var_os("KUBECONFIG").map(|list| read_listed(&list)).transpose()?.flatten() {
                    Some(kubeconfig) => kubeconfig,
                    None => Kubeconfig::read()?,
                },
            };
            Config::from_custom_kubeconfig(kubeconfig, &options).await
        };
        let mut config = read.await.map_err(|error| {
            BadInput::new(format!(
                "cannot determine which cluster is meant: {error}; name a kubeconfig with --kubeconfig or KUBECONFIG, \
                 and a context of it with --context"
            ))
        })?;
        // A log that is followed may stay silent for long.
        config.read_timeout = None;
        let namespace = self.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
        let client = Client::try_from(config).context("the kubeconfig cannot be used")?;
        Ok(Cluster { client, namespace })
    }

    /// Returns whether a flag says which namespace is meant.
    pub fn names_namespace(&self) -> bool {
        self.namespace.is_some()
    }

    /// The flags that say which cluster is meant, as arguments of kubectl.
    pub fn place(&self) -> Vec<OsString> {
        let context = self.context.iter().flat_map(|name| ["--context".into(), name.into()]);
        let file = self.kubeconfig.iter().flat_map(|file| ["--kubeconfig".into(), file.into()]);
        context.chain(file).collect()
    }

    /// The flags that were given, to be repeated in commands.
    pub fn as_flags(&self) -> Flags {
        let flag =
            |name: &str, value: Option<String>| value.map(|value| format!(" --{name} {value}")).unwrap_or_default();
        let file = self.kubeconfig.as_ref().map(|file| file.display().to_string());
        let cluster = flag("context", self.context.clone()) + &flag("kubeconfig", file);
        Flags { namespace: flag("namespace", self.namespace.clone()), cluster }
    }
}

/// Merges the files of a value of `KUBECONFIG`; `None` if it lists none. As with kubectl, files that are missing are
/// left out, unless all are.
fn read_listed(list: &OsStr) -> Result<Option<Kubeconfig>, KubeconfigError> {
    let (mut merged, mut missing): (Option<Kubeconfig>, _) = (None, None);
    for file in env::split_paths(list).filter(|file| !file.as_os_str().is_empty()) {
        match Kubeconfig::read_from(&file) {
            Ok(next) => merged = Some(merged.unwrap_or_default().merge(next)?),
            Err(KubeconfigError::ReadConfig(cause, file)) if cause.kind() == ErrorKind::NotFound => {
                missing = Some(KubeconfigError::ReadConfig(cause, file));
            }
            Err(error) => return Err(error),
        }
    }
    match (merged, missing) {
        (None, Some(error)) => Err(error),
        (merged, _) => Ok(merged),
    }
}

impl Cluster {
    pub fn jobs(&self) -> Api<ParameterServerJob> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Returns a job.
    ///
    /// # Errors
    /// If there is none of that name, or the cluster does not answer.
    pub async fn job(&self, name: &str) -> anyhow::Result<ParameterServerJob> {
        self.jobs().get(name).await.map_err(|error| self.explain(error, name))
    }

    /// Says what an error of a request about the job `name` means, and what to do.
    pub fn explain(&self, error: kube::Error, name: &str) -> anyhow::Error {
        let namespace = &self.namespace;
        match error {
            kube::Error::Api(status) if status.code == 404 && !status.message.contains(name) => BadInput::new(format!(
                "this cluster has no ParameterServerJobs; install psjobs in it first, see the README ({})",
                status.message
            ))
            .into(),
            kube::Error::Api(status) if status.code == 404 => BadInput::new(format!(
                "there is no job {name} in namespace {namespace}; `kubectl psjob list --all-namespaces` shows those \
                 that there are"
            ))
            .into(),
            // The API server's own words say which field, right or name is wrong.
            kube::Error::Api(status) if (400..500).contains(&status.code) => BadInput::new(status.message).into(),
            error => anyhow::Error::new(error)
                .context("the cluster did not answer as it should; try again, or look with `kubectl cluster-info`"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_kubeconfig_that_is_missing_is_left_out() {
        let folder = tempfile::tempdir().expect("a folder");
        let (missing, there) = (folder.path().join("missing"), folder.path().join("there"));
        let more = folder.path().join("more");
        std::fs::write(&there, "apiVersion: v1\nkind: Config\ncurrent-context: first\n").expect("written");
        std::fs::write(&more, "apiVersion: v1\nkind: Config\ncurrent-context: second\n").expect("written");
        let read = |files: &[&PathBuf]| read_listed(&env::join_paths(files).expect("no separator in them"));
        let context = |files: &[&PathBuf]| read(files).expect("a file is there").expect("a file").current_context;
        assert_eq!(context(&[&missing, &there, &more]).as_deref(), Some("first"));
        assert_eq!(context(&[&more, &missing, &there]).as_deref(), Some("second"));
        let error = read(&[&missing]).expect_err("all are missing").to_string();
        assert!(error.contains("missing"), "{error}");
        assert!(read_listed(OsStr::new("")).expect("no file").is_none(), "the default one is meant");
    }
}
