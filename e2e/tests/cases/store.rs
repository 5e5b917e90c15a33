//! A store that speaks S3's protocol, for jobs on a cluster of kind: versitygw on a node.

use std::path::Path;

use anyhow::{Context, Result};
use psjobs_e2e::command::run;
use psjobs_e2e::namespace::TestNamespace;
use psjobs_e2e::nodes::address;
use psjobs_e2e::wait::{SHORT, until_ok};

const KEY: &str = "key";
/// The Secret with the variables of pods that use the store.
pub const KEYS: &str = "store-keys";
/// Where the objects are: those of a bucket are the files in the folder of its name.
pub const FOLDER: &str = "/var/lib/psjobs-e2e-store";
const SECRET: &str = "secretsecret";
/// Where the store listens, on all addresses of its node.
const PORT: u16 = 17_070;
const PROGRAM: &str = "/usr/local/bin/versitygw";
/// Files on their way into the store: docker copies them here, and the node moves them to its volume.
const COPY: &str = "/usr/local/psjobs-e2e-copy";

/// A store on a node, which is a container of this machine: pods reach it there wherever the tests run.
pub struct Store {
    node: String,
    pub endpoint: String,
}

impl Store {
    /// Starts it with an empty bucket, `bucket`.
    pub async fn start(namespace: &TestNamespace) -> Result<Self> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/object-stores.sh");
        let programs = run(script.to_str().context("a path of text")?, &[]).await?;
        let nodes = namespace.kubectl(&["get", "nodes", "--output", "jsonpath={.items[0].metadata.name}"]).await?;
        let node = nodes.trim().to_owned();
        let address = address(&node).await?;
        let store = Self { node, endpoint: format!("http://{address}:{PORT}") };
        run("docker", &["cp", &format!("{}/versitygw", programs.trim()), &format!("{}:{PROGRAM}", store.node)]).await?;
        store.stop().await?;
        store.shell(&format!("mkdir -p {FOLDER}/bucket")).await?;
        // A file that no client has put is an object, too, and has a tag.
        let listen = format!("--port 0.0.0.0:{PORT} --access {KEY} --secret {SECRET} --quiet");
        let serve = format!("exec {PROGRAM} {listen} posix --default-etag a-file {FOLDER}");
        run("docker", &["exec", "--detach", &store.node, "sh", "-c", &serve]).await?;
        let answers = format!("bash -c 'echo > /dev/tcp/127.0.0.1/{PORT}'");
        until_ok(SHORT, "the store to listen", || store.shell(&answers)).await?;
        Ok(store)
    }

    /// Creates the Secret [`KEYS`] in the namespace.
    pub async fn create_keys(&self, namespace: &TestNamespace) -> Result<()> {
        self.create_secret(namespace, KEYS, SECRET).await
    }

    /// Creates a Secret with the variables of the store, and with `secret` as its secret key.
    pub async fn create_secret(&self, namespace: &TestNamespace, name: &str, secret: &str) -> Result<()> {
        let keys = [
            format!("--from-literal=AWS_ACCESS_KEY_ID={KEY}"),
            format!("--from-literal=AWS_SECRET_ACCESS_KEY={secret}"),
            format!("--from-literal=AWS_ENDPOINT={}", self.endpoint),
            "--from-literal=AWS_REGION=us-east-1".to_owned(),
        ];
        let create = ["create", "secret", "generic", name].into_iter().chain(keys.iter().map(String::as_str));
        namespace.kubectl(&create.collect::<Vec<_>>()).await.map(drop)
    }

    /// Puts the files of a folder into the bucket, below `name`.
    pub async fn put(&self, folder: &Path, name: &str) -> Result<()> {
        self.shell(&format!("rm -rf {COPY}")).await?;
        let folder = folder.to_str().context("a path of text")?;
        run("docker", &["cp", folder, &format!("{}:{COPY}", self.node)]).await?;
        self.shell(&format!("mv {COPY} {FOLDER}/bucket/{name}")).await.map(drop)
    }

    /// Runs a command on the node, and returns its output.
    pub async fn shell(&self, command: &str) -> Result<String> {
        run("docker", &["exec", &self.node, "sh", "-c", command]).await
    }

    /// Ends it, if it runs, and removes its objects.
    pub async fn stop(&self) -> Result<()> {
        self.shell("pkill versitygw || true").await?;
        until_ok(SHORT, "the store to end", || self.shell("! pgrep versitygw")).await?;
        self.shell(&format!("rm -rf {FOLDER}")).await.map(drop)
    }
}
