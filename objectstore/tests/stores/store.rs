//! An object store as a process.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use psjobs_ps::checkpoint::Folder;
use tempfile::TempDir;

/// Time for a store to start.
const START: Duration = Duration::from_secs(30);
pub const BUCKET: &str = "bucket";
/// Azurite's account, its key, and the signature of a request by it to make a container, which the client cannot.
const ACCOUNT: &str = "devstoreaccount1";
const KEY: &str = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";
const SIGNATURE: &str = "sv=2020-08-04&ss=b&srt=sco&sp=rwdlacu&se=2099-01-01T00%3A00%3A00Z&spr=https,http&sig=RhIOebeNSUTPn6TLk52nWJ%2B4if9T7NY0iljXci%2FPOpo%3D";

/// The programs that play stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    S3,
    Google,
    Azure,
}

/// A store with an empty bucket; ends when it is dropped.
pub struct Store {
    pub kind: Kind,
    pub address: SocketAddr,
    /// The folder of the store; the objects of S3 are the files in its folder `bucket`.
    pub root: TempDir,
    process: Child,
}

/// Starts one store of each kind; none where their programs are missing.
pub fn all() -> Vec<Store> {
    [Kind::S3, Kind::Google, Kind::Azure].into_iter().filter_map(Store::start).collect()
}

impl Store {
    /// Starts a store; `None` where its program is missing.
    ///
    /// # Panics
    /// If it is missing and PSJOBS_REQUIRE_OBJECT_STORES is set.
    pub fn start(kind: Kind) -> Option<Self> {
        let program = program(kind)?;
        let root = tempfile::tempdir().expect("a folder");
        fs::create_dir(root.path().join(BUCKET)).expect("a bucket");
        let port = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let mut command = Command::new(program);
        match kind {
            Kind::S3 => {
                command.args(["--port", &port.to_string(), "--access", "key", "--secret", "secretsecret", "--quiet"]);
                command.arg("posix").arg(root.path());
            }
            Kind::Google => {
                command.args(["-address", &port.to_string(), "-bucket", BUCKET]);
            }
            Kind::Azure => {
                command.args(["--silent", "--disableTelemetry", "--skipApiVersionCheck"]);
                command.args(["--blobPort", &port.port().to_string(), "--location"]).arg(root.path());
            }
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).current_dir(root.path());
        let process = command.spawn().expect("the store starts");
        let store = Self { kind, address: port, root, process };
        let until = Instant::now() + START;
        while TcpStream::connect(port).is_err() {
            assert!(Instant::now() < until, "{kind:?} does not listen");
            std::thread::sleep(Duration::from_millis(50));
        }
        if kind == Kind::Azure {
            let mut stream = TcpStream::connect(port).expect("it listens");
            let request = format!("PUT /{ACCOUNT}/{BUCKET}?restype=container&{SIGNATURE} HTTP/1.1");
            write!(stream, "{request}\r\nHost: {port}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                .expect("asks");
            let mut answer = String::new();
            stream.read_to_string(&mut answer).expect("text");
            assert!(answer.starts_with("HTTP/1.1 201"), "{answer}");
        }
        Some(store)
    }

    /// The variables of a process that uses the store at `address`: its own, or that of something in between.
    pub fn variables_at(&self, address: SocketAddr) -> Vec<(String, String)> {
        let variables = match self.kind {
            Kind::S3 => vec![
                ("AWS_ACCESS_KEY_ID", "key".to_owned()),
                ("AWS_SECRET_ACCESS_KEY", "secretsecret".to_owned()),
                ("AWS_REGION", "us-east-1".to_owned()),
                ("AWS_ENDPOINT", format!("http://{address}")),
            ],
            Kind::Google => vec![(
                "GOOGLE_SERVICE_ACCOUNT_KEY",
                format!(
                    r#"{{"gcs_base_url":"http://{address}","disable_oauth":true,"client_email":"","private_key":"","private_key_id":""}}"#
                ),
            )],
            Kind::Azure => vec![
                ("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT.to_owned()),
                ("AZURE_STORAGE_ACCOUNT_KEY", KEY.to_owned()),
                ("AZURE_STORAGE_ENDPOINT", format!("http://{address}/{ACCOUNT}")),
            ],
        };
        variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }

    pub fn variables(&self) -> Vec<(String, String)> {
        self.variables_at(self.address)
    }

    /// The URL of a folder in the bucket.
    pub fn url(&self, folder: &str) -> String {
        let scheme = match self.kind {
            Kind::S3 => "s3",
            Kind::Google => "gs",
            Kind::Azure => "az",
        };
        format!("{scheme}://{BUCKET}/{folder}")
    }

    pub fn folder(&self, folder: &str) -> Folder {
        psjobs_object_store::folder(&self.url(folder), self.variables()).expect("a folder in the bucket")
    }

    /// Where the objects of a folder in the bucket are files, of S3.
    pub fn files(&self, folder: &str) -> PathBuf {
        self.root.path().join(BUCKET).join(folder)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns a port that no other test of this program is given. It is below those that the kernel gives to connections, of
/// which these tests open thousands: a process that starts again finds it free.
pub fn free_port() -> u16 {
    static GIVEN: AtomicU16 = AtomicU16::new(0);
    // Programs that run at the same time begin at different ports.
    let begin = std::process::id().wrapping_mul(97) % 10_000;
    loop {
        let port = 20_000 + (begin as u16 + GIVEN.fetch_add(1, Ordering::Relaxed)) % 10_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Returns how many of the seeded faults or kills a run does: all of them with `PSJOBS_STORES_ALL`, as `make test-stores` does each
/// night, and else the first half.
pub fn sample(all: u32) -> u32 {
    if std::env::var_os("PSJOBS_STORES_ALL").is_some() { all } else { all / 2 }
}

fn program(kind: Kind) -> Option<PathBuf> {
    let name = match kind {
        Kind::S3 => "versitygw",
        Kind::Google => "gcs",
        Kind::Azure => "azurite-blob",
    };
    let program = std::env::var_os("PSJOBS_OBJECT_STORES").map(|folder| Path::new(&folder).join(name));
    let program = program.filter(|program| program.exists());
    if program.is_none() {
        let text =
            format!("{name} is missing; PSJOBS_OBJECT_STORES names the folder that scripts/object-stores.sh prints");
        assert!(std::env::var_os("PSJOBS_REQUIRE_OBJECT_STORES").is_none(), "{text}");
        eprintln!("not tested: {text}");
    }
    program
}
