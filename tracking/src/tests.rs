//! A job that is followed while its tracking server is away for ten minutes, of a clock that the test moves on.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use psjobs_ps::checkpoint::Folder;
use psjobs_ps::series::Source;
use psjobs_ps::series::event_file::Point;
use psjobs_ps::series::writer::{Entry, SeriesWriter};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;

use crate::{Ending, Folders, Job, Settings, follow};

/// Points that the job makes in a second: in ten minutes more than wait in memory.
const POINTS: u64 = 200;
/// Seconds that the tracking server is away.
const AWAY: u64 = 600;
/// The clock goes on by so much whenever all tasks wait, also for a connection: less than any limit of the client.
const TICK: Duration = Duration::from_millis(10);

/// A tracking server: what it knows of its one run.
#[derive(Default)]
struct Mlflow {
    is_away: bool,
    /// Requests that came while it was away.
    refused: u32,
    is_made: bool,
    /// Metric, step and value, as they came.
    values: Vec<(String, u64, f32)>,
    status: String,
}

impl Mlflow {
    /// Does what a request asks for. Returns the answer, if it is not away: then it takes values, and does not say so.
    fn take(&mut self, path: &str, body: &Value) -> Option<Value> {
        for metric in body["metrics"].as_array().into_iter().flatten() {
            let (key, step) = (metric["key"].as_str()?.to_owned(), metric["step"].as_u64()?);
            self.values.push((key, step, metric["value"].as_f64()? as f32));
        }
        if self.is_away {
            self.refused += 1;
            return None;
        }
        let name = path.rsplit('/').next()?;
        self.is_made |= name == "create";
        if name == "update" {
            body["status"].as_str()?.clone_into(&mut self.status);
        }
        let run = || {
            let latest: BTreeMap<_, _> = self.values.iter().map(|(key, step, _)| (key, *step)).collect();
            let metrics: Vec<_> = latest.into_iter().map(|(key, step)| json!({"key": key, "step": step})).collect();
            json!({"info": {"run_id": "a1", "status": "RUNNING"}, "data": {"metrics": metrics}})
        };
        Some(match name {
            "get-by-name" => json!({"experiment": {"experiment_id": "1"}}),
            "search" if self.is_made => json!({"runs": [run()]}),
            "create" | "get" => json!({"run": run()}),
            _ => json!({}),
        })
    }
}

/// Serves a tracking server on a port of its own. Returns its address.
async fn serve(mlflow: &Arc<Mutex<Mlflow>>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let mlflow = mlflow.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(answer(stream, mlflow.clone()));
        }
    });
    format!("http://{address}")
}

/// Answers the request of a connection, or closes it without an answer.
async fn answer(mut stream: TcpStream, mlflow: Arc<Mutex<Mlflow>>) {
    let (mut request, mut piece) = (Vec::new(), vec![0; 1 << 16]);
    let (path, body) = loop {
        if let Some(whole) = whole(&request) {
            break whole;
        }
        match stream.read(&mut piece).await {
            Ok(count @ 1..) => request.extend_from_slice(&piece[..count]),
            _ => return,
        }
    };
    let answer = mlflow.lock().take(&path, &body);
    let Some(answer) = answer else { return };
    let answer = answer.to_string();
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close", answer.len());
    // The caller may have given up.
    stream.write_all(format!("{head}\r\n\r\n{answer}").as_bytes()).await.ok();
}

/// Returns the path and the body of a request, once all of it is there.
fn whole(request: &[u8]) -> Option<(String, Value)> {
    let end = request.windows(4).position(|letters| letters == b"\r\n\r\n")?;
    let head = String::from_utf8_lossy(&request[..end]).to_ascii_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
    let length: usize = length.map_or(0, |length| length.trim().parse().expect("a number"));
    let body = request.get(end + 4..end + 4 + length)?;
    let path = head.split([' ', '?']).nth(1)?;
    Some((path.to_owned(), serde_json::from_slice(body).unwrap_or_default()))
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_away_for_ten_minutes_gets_every_point_once() {
    tokio::spawn(tick());
    let scratch = tempfile::tempdir().expect("a folder");
    let series = Folder::from(scratch.path());
    let mlflow = Arc::new(Mutex::new(Mlflow::default()));
    let settings = Settings::new(&serve(&mlflow).await, "digits", []).expect("an address");
    let job = Job { name: "mnist".into(), namespace: "n".into(), uid: "u".into(), parameters: BTreeMap::new() };
    let folders = Folders { series: Some(series.clone()), checkpoints: None, steps_per_exchange: 1, elastic: false };
    let follower = follow(settings, job, folders).expect("sends requests");
    let mut writer = SeriesWriter::new(series, 1);
    let mut step = 0;
    let sent = || mlflow.lock().values.len() as u64;
    for (is_away, seconds) in [(false, 20), (true, AWAY), (false, 60)] {
        mlflow.lock().is_away = is_away;
        let (made, had) = (step, sent());
        for _ in 0..seconds {
            let points = (step + 1..=step + POINTS).map(|step| {
                Entry::Point(Point { step, unix_seconds: 1.0, values: [("loss".to_owned(), value(step))].into() })
            });
            writer.append(Source::Trainer(0), &points.collect::<Vec<_>>()).expect("written");
            step += POINTS;
            sleep(Duration::from_secs(1)).await;
        }
        let (has, refused) = (sent(), mlflow.lock().refused);
        if is_away {
            assert!(has < had + 10 * POINTS, "{had} values before, {has} after the time that it was away");
            assert!((20..=30).contains(&refused), "it was asked {refused} times in {AWAY} s");
        } else {
            assert!(has >= made, "it has {has} values, of {made} that were made before it came");
        }
    }
    assert!(follower.end(Ending::Finished).await, "all was sent");
    let mlflow = mlflow.lock();
    assert_eq!((mlflow.values.len() as u64, mlflow.status.as_str()), (step, "FINISHED"));
    for ((key, found, bits), step) in mlflow.values.iter().zip(1..) {
        assert_eq!((key.as_str(), *found, bits.to_bits()), ("trainer-0/loss", step, value(step).to_bits()));
    }
}

/// Keeps the clock from going on by more at once.
async fn tick() {
    loop {
        sleep(TICK).await;
    }
}

fn value(step: u64) -> f32 {
    1.0 / step as f32
}
