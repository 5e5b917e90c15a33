//! An API server as far as `logs` needs one: a job, its pods, and their logs as the kubelet sends them. Each connection
//! has a thread.

mod objects;

use std::fs;
use std::io::{BufRead as _, BufReader, Result as IoResult, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::DEADLINE;
use crate::speech::{LINES, PODS, SPEAKERS, TURN, due, line, lines_of_turn, pod_of};
use objects::{job, list, pod};

pub use objects::{JOB, log_path};

/// Before what is sent bit by bit.
const STREAM: &str = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n";
const END: &str = "0\r\n\r\n";
/// Bytes that a log is sent in at once.
const PART: usize = 1 << 14;

pub struct Server {
    pub address: SocketAddr,
    site: Arc<Site>,
    opened: mpsc::Receiver<Opened>,
    /// Holds the kubeconfig.
    folder: TempDir,
}

/// Shared by all connections.
struct Site {
    /// The answer to a request for the whole log of each pod.
    logs: Vec<Vec<u8>>,
    /// The job and its pods have succeeded.
    over: AtomicBool,
    opened: mpsc::Sender<Opened>,
}

/// A connection on which a client waits for more.
enum Opened {
    Log(usize, TcpStream),
    Job(TcpStream),
}

impl Server {
    /// Listens until this program ends.
    pub fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let folder = tempfile::tempdir()?;
        fs::write(folder.path().join("kubeconfig"), objects::kubeconfig(address).to_string())?;
        let (sender, opened) = mpsc::channel();
        let site = Arc::new(Site { logs: whole_logs(), over: AtomicBool::new(false), opened: sender });
        let served = Arc::clone(&site);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let site = Arc::clone(&served);
                // A client that goes away is no error.
                thread::spawn(move || serve(stream, &site));
            }
        });
        Ok(Self { address, site, opened, folder })
    }

    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.path().join("kubeconfig")
    }

    /// Bytes of the answers with the logs of all pods.
    pub fn bytes(&self) -> usize {
        self.site.logs.iter().map(Vec::len).sum()
    }

    /// The job runs, and no client follows it.
    pub fn forget(&self) {
        self.site.over.store(false, Ordering::SeqCst);
        while self.opened.try_recv().is_ok() {}
    }

    /// Waits until a client follows the job and the logs of all its pods, then lets them speak and end. Returns when the
    /// first line is due.
    ///
    /// # Errors
    /// If no client follows all of them in time.
    pub fn speak(&self) -> Result<Instant> {
        let mut logs: Vec<Option<TcpStream>> = std::iter::repeat_with(|| None).take(PODS).collect();
        let mut job = None;
        while job.is_none() || logs.iter().any(Option::is_none) {
            match self.opened.recv_timeout(DEADLINE).context("the program did not follow all pods in time")? {
                Opened::Log(pod, stream) => logs[pod] = Some(stream),
                Opened::Job(stream) => job = Some(stream),
            }
        }
        let streams = logs.into_iter().flatten().collect();
        let begin = Instant::now() + Duration::from_millis(100);
        let site = Arc::clone(&self.site);
        // A client that goes away shows in what it has printed.
        thread::spawn(move || speak(&site, begin, streams, job));
        Ok(begin)
    }
}

/// Sends each line when it is due, with the others of its pod's turn; then the job ends.
fn speak(site: &Site, begin: Instant, mut logs: Vec<TcpStream>, job_events: Option<TcpStream>) -> IoResult<()> {
    for first in (0..LINES).step_by(TURN) {
        let last = begin + due(first + TURN - 1);
        thread::sleep(last.saturating_duration_since(Instant::now()));
        for place in 0..SPEAKERS {
            logs[pod_of(first + place)].write_all(&chunk(lines_of_turn(first, place).as_bytes()))?;
        }
    }
    site.over.store(true, Ordering::SeqCst);
    for log in &mut logs {
        log.write_all(END.as_bytes())?;
    }
    let event = json!({"type": "MODIFIED", "object": job(true)});
    job_events.map_or(Ok(()), |mut stream| stream.write_all(&chunk(format!("{event}\n").as_bytes())))
}

/// The answers with the whole logs of all pods.
fn whole_logs() -> Vec<Vec<u8>> {
    let mut texts = vec![String::new(); PODS];
    for number in 0..LINES {
        texts[pod_of(number)].push_str(&line(number));
    }
    let answer = |text: &String| {
        let mut answer = STREAM.as_bytes().to_vec();
        text.as_bytes().chunks(PART).for_each(|part| answer.extend(chunk(part)));
        answer.extend(END.as_bytes());
        answer
    };
    texts.iter().map(answer).collect()
}

/// Bytes as a chunk of an answer.
fn chunk(bytes: &[u8]) -> Vec<u8> {
    let mut chunk = format!("{:x}\r\n", bytes.len()).into_bytes();
    chunk.extend(bytes);
    chunk.extend(b"\r\n");
    chunk
}

/// Answers the requests of a connection.
fn serve(mut stream: TcpStream, site: &Site) -> IoResult<()> {
    stream.set_nodelay(true)?;
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    while let Some(first) = lines.next().transpose()? {
        let mut closes = false;
        while let Some(header) = lines.next().transpose()?.filter(|header| !header.is_empty()) {
            closes |= header.eq_ignore_ascii_case("connection: close");
        }
        answer(&mut stream, site, first.split(' ').nth(1).unwrap_or_default())?;
        if closes {
            break;
        }
    }
    Ok(())
}

fn answer(stream: &mut TcpStream, site: &Site, target: &str) -> IoResult<()> {
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let has = |parameter: &str| query.split('&').any(|found| found == parameter);
    let over = site.over.load(Ordering::SeqCst);
    if let Some(name) = path.strip_prefix(objects::JOBS) {
        if has("watch=true") {
            stream.write_all(STREAM.as_bytes())?;
            site.opened.send(Opened::Job(stream.try_clone()?)).ok();
            return Ok(());
        }
        return send(stream, &if name.is_empty() { list("ParameterServerJob", &[job(over)]) } else { job(over) });
    }
    let Some(name) = path.strip_prefix(objects::PODS_PATH) else {
        return stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n");
    };
    if has("watch=true") {
        // No pod changes.
        return stream.write_all(STREAM.as_bytes());
    }
    if name.is_empty() {
        return send(stream, &list("Pod", &(0..PODS).map(|index| pod(index, over)).collect::<Vec<_>>()));
    }
    let (name, part) = name.trim_start_matches('/').split_once('/').unwrap_or((name, ""));
    let index = name.rsplit('-').next().and_then(|index| index.parse::<usize>().ok()).filter(|index| *index < PODS);
    let index = index.unwrap_or_default();
    match part {
        "log" if has("follow=true") => {
            stream.write_all(STREAM.as_bytes())?;
            site.opened.send(Opened::Log(index, stream.try_clone()?)).ok();
            Ok(())
        }
        "log" => stream.write_all(&site.logs[index]),
        _ => send(stream, &pod(index, over)),
    }
}

fn send(stream: &mut TcpStream, object: &Value) -> IoResult<()> {
    let body = object.to_string();
    let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length";
    stream.write_all(format!("{head}: {}\r\n\r\n{body}", body.len()).as_bytes())
}
