//! The page of a job as a browser gets it: its parts, as events bring them.

use anyhow::{Context, Result};
use psjobs_e2e::wait::TRAINING;
use serde_json::{Map, Value};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// An open page.
pub struct Page {
    /// The parts of the job that were sent last.
    pub job: Map<String, Value>,
    lines: Lines<BufReader<TcpStream>>,
}

impl Page {
    /// Opens the page of `job` at `host`, `127.0.0.1:8090`.
    pub async fn open(host: &str, token: &str, job: &str) -> Result<Self> {
        let stream = request(host, Some(token), &format!("/events/{job}"), "keep-alive").await?;
        Ok(Self { job: Map::new(), lines: BufReader::new(stream).lines() })
    }

    /// Reads what changes until the job is as `wanted`.
    pub async fn read_until(&mut self, what: &str, wanted: impl Fn(&Map<String, Value>) -> bool) -> Result<()> {
        let read = async {
            while !wanted(&self.job) {
                let line = self.lines.next_line().await?.context("the server of the page has ended")?;
                let Some(event) = line.strip_prefix("data: ") else { continue };
                self.job.extend(serde_json::from_str::<Map<String, Value>>(event)?);
            }
            anyhow::Ok(())
        };
        timeout(TRAINING, read).await.with_context(|| format!("the page does not show {what}"))?
    }
}

/// Returns the answer to a request, with its head.
pub async fn get(host: &str, token: Option<&str>, path: &str) -> Result<String> {
    let mut answer = Vec::new();
    let mut stream = request(host, token, path, "close").await?;
    timeout(TRAINING, stream.read_to_end(&mut answer)).await.with_context(|| format!("{path} has no end"))??;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

async fn request(host: &str, token: Option<&str>, path: &str, connection: &str) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(host).await?;
    let token = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
    let head = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: {connection}\r\n{token}\r\n");
    stream.write_all(head.as_bytes()).await?;
    Ok(stream)
}

/// Returns how often a process of the page was started.
pub fn runs(job: &Map<String, Value>, process: &str) -> usize {
    let processes = job.get("processes").and_then(Value::as_array).into_iter().flatten();
    processes.filter(|one| one["name"] == process).filter_map(|one| Some(one["runs"].as_array()?.len())).sum()
}
