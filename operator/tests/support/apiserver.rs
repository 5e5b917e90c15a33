//! Starts a bare control plane for tests: etcd and kube-apiserver as plain processes, without nodes. The tests take
//! the kubelet's part.

use std::fs;
use std::io::Write as _;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use kube::config::{KubeConfigOptions, Kubeconfig};
use tempfile::TempDir;

/// An API server that tests talk to, with its processes if this program started them.
pub struct ApiServer {
    pub config: kube::Config,
    /// Configuration for other programs that connect to it.
    #[allow(dead_code, reason = "of the programs that share this file, only the benchmark starts another one")]
    pub kubeconfig: Kubeconfig,
    /// Processes in the order in which they are stopped, and their folder.
    _ours: Option<(Vec<Supervised>, TempDir)>,
}

/// A process that is killed when its standard input is closed, hence also when this process dies.
struct Supervised(Child);

impl Drop for Supervised {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// Set to 1 where an API server must be available, as in CI: tests without one then fail and are not skipped.
const REQUIRE: &str = "PSJOBS_REQUIRE_APISERVER";

fn is_required() -> bool {
    std::env::var(REQUIRE).is_ok_and(|value| !matches!(value.as_str(), "" | "0"))
}

const TOKEN: &str = "admin-of-a-server-on-loopback";

impl ApiServer {
    /// Connects to the cluster of `PSJOBS_TEST_KUBECONFIG`; where that is not set, starts a control plane as
    /// [`ApiServer::start`] does.
    pub async fn find() -> Option<Self> {
        match std::env::var_os("PSJOBS_TEST_KUBECONFIG") {
            Some(path) => {
                let kubeconfig = Kubeconfig::read_from(path).expect("PSJOBS_TEST_KUBECONFIG names a kubeconfig");
                Some(Self { config: config(kubeconfig.clone()).await, kubeconfig, _ours: None })
            }
            None => Self::start().await,
        }
    }

    /// Starts a control plane; returns `None` where its programs are not installed.
    ///
    /// # Panics
    /// If they are not installed and `PSJOBS_REQUIRE_APISERVER` says that they must be.
    pub async fn start() -> Option<Self> {
        Self::start_with(&[], None).await
    }

    /// Starts a control plane with more flags for kube-apiserver, and with kube-scheduler if there are flags for it;
    /// otherwise as [`ApiServer::start`].
    pub async fn start_with(flags: &[String], scheduler_flags: Option<&[String]>) -> Option<Self> {
        let needed = ["etcd", "kube-apiserver", "openssl"].into_iter().chain(scheduler_flags.map(|_| "kube-scheduler"));
        let missing = needed.filter(|program| !is_installed(program)).collect::<Vec<_>>();
        if !missing.is_empty() {
            let missing = missing.join(", ");
            let advice = match scheduler_flags {
                Some(_) => "",
                None => ", or set PSJOBS_TEST_KUBECONFIG to use a cluster that is there",
            };
            assert!(
                !is_required(),
                "{REQUIRE} is set and this test needs an API server; put {missing} on the PATH{advice}"
            );
            // Written to standard error directly, because the test harness hides what a passing test prints.
            let _ = writeln!(std::io::stderr(), "SKIPPED: this needs an API server; put {missing} on the PATH{advice}");
            return None;
        }
        let folder = tempfile::tempdir().expect("a temporary folder");
        let [client, peer, api] = free_ports();
        let mut processes = vec![etcd(folder.path(), client, peer), apiserver(folder.path(), client, api, flags)];
        let kubeconfig = kubeconfig(api);
        let config = config(kubeconfig.clone()).await;
        wait_until_ready(&config, folder.path()).await;
        processes.extend(scheduler_flags.map(|flags| scheduler(folder.path(), &kubeconfig, flags)));
        Some(Self { config, kubeconfig, _ours: Some((processes, folder)) })
    }

    pub fn client(&self) -> kube::Client {
        kube::Client::try_from(self.config.clone()).expect("a usable configuration")
    }
}

fn is_installed(program: &str) -> bool {
    Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

/// Returns the flags that enable Kubernetes' own gang scheduling; `None` if this version does not have it.
///
/// # Panics
/// If this version does not have it and `PSJOBS_REQUIRE_APISERVER` says that an API server must be available.
#[allow(dead_code, reason = "of the programs that share this file, few need it")]
pub fn gang_scheduling() -> Option<[String; 2]> {
    let minor = minor_version();
    let installed = minor.map_or("none".to_owned(), |minor| format!("1.{minor}"));
    assert!(
        !is_required() || minor >= Some(37),
        "{REQUIRE} is set and this test needs the programs of Kubernetes 1.37 or newer; {installed} is on the PATH"
    );
    let flags = ["--feature-gates=GenericWorkload=true", "--runtime-config=scheduling.k8s.io/v1beta1=true"];
    (minor >= Some(37)).then(|| flags.map(str::to_owned))
}

/// Returns the 37 of the installed kube-apiserver's version 1.37.1.
fn minor_version() -> Option<u32> {
    let version = Command::new("kube-apiserver").arg("--version").output().ok()?;
    let version = String::from_utf8(version.stdout).ok()?;
    version.trim().strip_prefix("Kubernetes v1.")?.split('.').next()?.parse().ok()
}

fn etcd(folder: &Path, client: u16, peer: u16) -> Supervised {
    let (client, peer) = (format!("http://127.0.0.1:{client}"), format!("http://127.0.0.1:{peer}"));
    let mut command = supervise("etcd", &folder.join("etcd.log"));
    command.arg("--unsafe-no-fsync").arg("--data-dir").arg(folder.join("etcd"));
    command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
    command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
    command.arg(format!("--initial-cluster=default={peer}"));
    Supervised(command.spawn().expect("etcd starts"))
}

fn apiserver(folder: &Path, etcd: u16, port: u16, flags: &[String]) -> Supervised {
    let key = folder.join("sa.key");
    let made = Command::new("openssl").args(["genrsa", "-out"]).arg(&key).stderr(Stdio::null()).status();
    assert!(made.is_ok_and(|status| status.success()), "openssl makes a key");
    let tokens = folder.join("tokens.csv");
    fs::write(&tokens, format!("{TOKEN},admin,admin,system:masters\n")).expect("the folder is writable");
    let mut command = supervise("kube-apiserver", &folder.join("apiserver.log"));
    command.arg(format!("--etcd-servers=http://127.0.0.1:{etcd}")).arg(format!("--secure-port={port}"));
    command.args(["--bind-address=127.0.0.1", "--service-cluster-ip-range=10.96.0.0/16", "--authorization-mode=RBAC"]);
    command.arg("--disable-admission-plugins=ServiceAccount").arg("--cert-dir").arg(folder.join("certs"));
    command.arg("--token-auth-file").arg(tokens);
    command.arg("--service-account-key-file").arg(&key).arg("--service-account-signing-key-file").arg(&key);
    command.arg("--service-account-issuer=https://kubernetes.default.svc").args(flags);
    Supervised(command.spawn().expect("kube-apiserver starts"))
}

fn scheduler(folder: &Path, kubeconfig: &Kubeconfig, flags: &[String]) -> Supervised {
    let file = folder.join("kubeconfig");
    fs::write(&file, serde_yaml::to_string(kubeconfig).expect("YAML")).expect("the folder is writable");
    let mut command = supervise("kube-scheduler", &folder.join("scheduler.log"));
    for flag in ["--kubeconfig", "--authentication-kubeconfig", "--authorization-kubeconfig"] {
        command.arg(flag).arg(&file);
    }
    command.args(["--leader-elect=false", "--secure-port=0"]).args(flags);
    Supervised(command.spawn().expect("kube-scheduler starts"))
}

fn supervise(program: &str, log: &Path) -> Command {
    let log = fs::File::create(log).expect("the folder is writable");
    let mut command = Command::new("sh");
    command.args(["-c", r#""$@" </dev/null & cat >/dev/null; kill -KILL $!; wait $!"#, "sh", program]);
    command.stdin(Stdio::piped()).stdout(log.try_clone().expect("a second handle")).stderr(log);
    command
}

fn free_ports<const N: usize>() -> [u16; N] {
    // All listeners are open until all ports are known, so that the ports differ.
    let listeners: [TcpListener; N] = std::array::from_fn(|_| TcpListener::bind("127.0.0.1:0").expect("a free port"));
    listeners.map(|listener| listener.local_addr().expect("bound").port())
}

fn kubeconfig(port: u16) -> Kubeconfig {
    let yaml = format!(
        r#"
current-context: test
clusters: [{{name: test, cluster: {{server: "https://127.0.0.1:{port}", insecure-skip-tls-verify: true}}}}]
users: [{{name: test, user: {{token: {TOKEN}}}}}]
contexts: [{{name: test, context: {{cluster: test, user: test}}}}]"#
    );
    Kubeconfig::from_yaml(&yaml).expect("it is a kubeconfig")
}

async fn config(kubeconfig: Kubeconfig) -> kube::Config {
    let options = KubeConfigOptions::default();
    kube::Config::from_custom_kubeconfig(kubeconfig, &options).await.expect("a usable kubeconfig")
}

async fn wait_until_ready(config: &kube::Config, folder: &Path) {
    let client = kube::Client::try_from(config.clone()).expect("a usable configuration");
    let mut looks = tokio::time::interval(Duration::from_millis(200));
    for _ in 0..300 {
        looks.tick().await;
        let request = http::Request::get("/readyz").body(Vec::new()).expect("a request");
        if client.request_text(request).await.is_ok() {
            return;
        }
    }
    let log = fs::read_to_string(folder.join("apiserver.log")).unwrap_or_default();
    let tail = log.lines().rev().take(5).collect::<Vec<_>>();
    panic!("the API server is not ready after a minute; its last lines, newest first: {tail:#?}");
}
