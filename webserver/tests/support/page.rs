//! psjobs-web in this process, and its visitors.

use std::net::SocketAddr;
use std::path::Path;

use clap::Parser as _;
use psjobs_web_server::settings::Settings;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::operator::{DEADLINE, eventually};

/// A running page.
pub struct Page {
    address: SocketAddr,
    stop: CancellationToken,
    work: JoinHandle<anyhow::Result<()>>,
}

impl Page {
    pub async fn start(config: &kube::Config, records: &Path) -> Self {
        let records = records.to_str().expect("a path").to_owned();
        let settings = Settings::try_parse_from(["psjobs-web", "--records", &records]).expect("flags are right");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let (address, stop) = (listener.local_addr().expect("it listens"), CancellationToken::new());
        let run = psjobs_web_server::run(settings, config.clone(), listener, stop.clone());
        let page = Self { address, stop, work: tokio::spawn(Box::pin(run)) };
        eventually("a page that is ready", async || {
            let answer = page.get("/readyz", None, "").await;
            answer.starts_with("HTTP/1.1 200 ").then_some(())
        })
        .await;
        page
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub async fn end(self) {
        self.stop.cancel();
        let ended = tokio::time::timeout(DEADLINE, self.work).await.expect("it ends").expect("it does not panic");
        ended.expect("it ends well");
    }

    async fn send(&self, request: String) -> BufReader<TcpStream> {
        let mut stream = TcpStream::connect(self.address).await.expect("it listens");
        stream.write_all(request.as_bytes()).await.expect("it reads");
        BufReader::new(stream)
    }

    async fn open(&self, path: &str, token: Option<&str>, headers: &str) -> BufReader<TcpStream> {
        let bearer = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
        let fixed = "Host: localhost\r\nConnection: close\r\n";
        self.send(format!("GET {path} HTTP/1.1\r\n{fixed}{bearer}{headers}\r\n")).await
    }

    /// Looks at a job until what this returns is dropped.
    pub async fn look_at(&self, path: &str, token: &str) -> BufReader<TcpStream> {
        self.open(path, Some(token), "").await
    }

    /// Returns the whole answer.
    pub async fn get(&self, path: &str, token: Option<&str>, headers: &str) -> String {
        read_all(self.open(path, token, headers).await).await
    }

    /// Sends the form.
    pub async fn login(&self, token: &str) -> String {
        let body = format!("token={token}\r\n");
        let headers = format!("Content-Type: text/plain\r\nContent-Length: {}\r\n", body.len());
        let fixed = "Host: localhost\r\nConnection: close\r\n";
        read_all(self.send(format!("POST / HTTP/1.1\r\n{fixed}{headers}\r\n{body}")).await).await
    }

    /// Returns the first event, which has everything.
    pub async fn first(&self, path: &str, token: &str) -> Value {
        let mut events = self.open(path, Some(token), "").await;
        let mut line = String::new();
        while !line.starts_with("data:") {
            line.clear();
            let read = tokio::time::timeout(DEADLINE, events.read_line(&mut line)).await.expect("it answers in time");
            assert!(read.expect("it answers") > 0, "{path}: an event");
        }
        serde_json::from_str(&line["data:".len()..]).expect("JSON")
    }

    /// Waits until the first event is as wanted, and returns it.
    pub async fn until(&self, path: &str, token: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        eventually(path, async || Some(self.first(path, token).await).filter(&wanted)).await
    }
}

async fn read_all(mut answer: BufReader<TcpStream>) -> String {
    let mut text = String::new();
    let read = tokio::time::timeout(DEADLINE, answer.read_to_string(&mut text)).await.expect("it answers in time");
    read.expect("it answers");
    text
}
