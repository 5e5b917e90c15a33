//! The lines of one pod, each once, also where the connection breaks meanwhile.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use futures::{AsyncBufRead, AsyncBufReadExt as _};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::LogParams;
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore, mpsc};

use crate::programs::programs;

/// Lines of each pod that may wait for earlier ones of others, however many the others' are.
const WAITING_LINES: usize = 256;
/// Bytes of further lines that wait, of all pods together, where pods are followed: lines wait for silent pods, and one
/// pod alone may say 50,000 lines/s meanwhile.
const WAITING_BYTES: usize = 16 << 20;
/// Time between two tries to read a pod that should say more.
const RETRY: Duration = Duration::from_millis(500);

/// Which lines of a pod are wanted.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    pub follow: bool,
    pub since_seconds: Option<i64>,
    pub tail_lines: Option<u32>,
}

/// A line of a pod.
pub struct Line {
    pub source: usize,
    pub time: Timestamp,
    pub text: String,
    /// Makes room for another one when this is gone.
    _room: Option<OwnedSemaphorePermit>,
}

impl Line {
    /// A line that no reader has read.
    pub fn lone(source: usize, time: Timestamp, text: &str) -> Self {
        Self { source, time, text: text.to_owned(), _room: None }
    }
}

/// A message of a reader, with its source.
pub enum Message {
    Line(usize, Line),
    /// A sentence for whoever waits for lines.
    Note(String),
    /// There is no further line.
    End(usize),
}

/// Where readers bring their lines.
#[derive(Clone)]
pub struct Outlet {
    sender: mpsc::Sender<Message>,
    shared: Arc<Semaphore>,
}

impl Outlet {
    /// Returns it with its other end, for pods that are followed or not.
    pub fn channel(follow: bool) -> (Self, mpsc::Receiver<Message>) {
        let (sender, receiver) = mpsc::channel(1024);
        let shared = Arc::new(Semaphore::new(if follow { WAITING_BYTES } else { 0 }));
        (Self { sender, shared }, receiver)
    }
}

/// Room for the lines of a pod that wait.
struct Room {
    own: Arc<Semaphore>,
    shared: Arc<Semaphore>,
}

impl Room {
    fn new(shared: &Arc<Semaphore>) -> Self {
        Self { own: Arc::new(Semaphore::new(WAITING_LINES)), shared: Arc::clone(shared) }
    }

    /// Waits for room for a line of this length, which is given back with the permit.
    async fn take(&self, length: usize) -> Result<OwnedSemaphorePermit, AcquireError> {
        if let Ok(permit) = Arc::clone(&self.own).try_acquire_owned() {
            return Ok(permit);
        }
        let bytes = u32::try_from(length + size_of::<Line>()).unwrap_or(u32::MAX);
        tokio::select! {
            biased;
            permit = Arc::clone(&self.own).acquire_owned() => permit,
            permit = Arc::clone(&self.shared).acquire_many_owned(bytes) => permit,
        }
    }
}

/// Reads a pod in a task of its own.
pub struct Reader {
    source: usize,
    pod: String,
    uid: String,
    container: Option<String>,
    pods: Api<Pod>,
    wanted: Wanted,
    sender: mpsc::Sender<Message>,
    room: Room,
    position: Position,
}

/// How one look at a pod's log ended.
enum Look {
    /// The log has ended, or no caller wants it any more.
    Over,
    /// There may be more.
    Again,
}

impl Reader {
    pub fn new(source: usize, pod: &Pod, pods: Api<Pod>, wanted: Wanted, outlet: &Outlet) -> Self {
        let container = first_container(pod);
        Self {
            source,
            pod: pod.metadata.name.clone().unwrap_or_default(),
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            container,
            pods,
            wanted,
            sender: outlet.sender.clone(),
            room: Room::new(&outlet.shared),
            position: Position::default(),
        }
    }

    pub async fn run(mut self) {
        loop {
            match self.look().await {
                Ok(Look::Over) => break,
                Ok(Look::Again) => tokio::time::sleep(RETRY).await,
                Err(error) => {
                    self.sender.send(Message::Note(format!("{}: {error:#}", self.pod))).await.ok();
                    break;
                }
            }
        }
        self.sender.send(Message::End(self.source)).await.ok();
    }

    async fn look(&mut self) -> anyhow::Result<Look> {
        let opened = self.pods.log_stream(&self.pod, &self.parameters()).await;
        let stream = match opened {
            Ok(stream) => stream,
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(Look::Over),
            Err(error) if !self.wanted.follow => return Err(error).context("its log cannot be read"),
            Err(_) => return self.ended().await,
        };
        // The name may belong to the pod's successor by now, which has a reader of its own.
        match self.current().await {
            Ok(Some(_)) => {}
            Ok(None) => return Ok(Look::Over),
            Err(_) if self.wanted.follow => return Ok(Look::Again),
            Err(error) => return Err(error),
        }
        self.position.resume();
        match self.lines(std::pin::pin!(stream)).await {
            Ok(true) if self.wanted.follow => self.ended().await,
            Ok(_) => Ok(Look::Over),
            Err(_) if self.wanted.follow => self.ended().await,
            Err(error) => Err(error).context("the connection broke while its log was read; try again"),
        }
    }

    fn parameters(&self) -> LogParams {
        let begins = self.position.newest.is_none();
        LogParams {
            container: self.container.clone(),
            follow: self.wanted.follow,
            since_seconds: self.wanted.since_seconds.filter(|_| begins),
            since_time: self.position.second(),
            tail_lines: self.wanted.tail_lines.filter(|_| begins).map(i64::from),
            timestamps: true,
            ..LogParams::default()
        }
    }

    /// The pod, unless it is gone or another one has its name.
    async fn current(&self) -> anyhow::Result<Option<Pod>> {
        let found = self.pods.get_opt(&self.pod).await.context("the cluster did not answer as it should")?;
        Ok(found.filter(|pod| pod.metadata.uid.as_ref() == Some(&self.uid)))
    }

    /// Returns whether the pod's process has ended, so that its log is complete.
    async fn ended(&self) -> anyhow::Result<Look> {
        // An API server that is away is waited for.
        let Ok(found) = self.current().await else { return Ok(Look::Again) };
        // The pod may have another program, too.
        let own = |program: &Pod| first_container(program) == self.container;
        let program = found.and_then(|pod| programs(pod).into_iter().find(own));
        let ended = program.is_none_or(|program| state(&program) == State::Ended);
        Ok(if ended { Look::Over } else { Look::Again })
    }

    /// Hands on the lines of a stream; returns false if no caller wants them any more.
    async fn lines(&mut self, mut stream: std::pin::Pin<&mut impl AsyncBufRead>) -> std::io::Result<bool> {
        let mut bytes = Vec::new();
        loop {
            bytes.clear();
            if stream.read_until(b'\n', &mut bytes).await? == 0 {
                return Ok(true);
            }
            let text = String::from_utf8_lossy(&bytes);
            let text = text.trim_end_matches(['\n', '\r']);
            // A line without a time is of the kubelet itself, about a log that is gone.
            let Some((time, text)) = text.split_once(' ').and_then(|(time, text)| Some((time.parse().ok()?, text)))
            else {
                continue;
            };
            if !self.position.accepts(time) {
                continue;
            }
            let Ok(room) = self.room.take(text.len()).await else { return Ok(false) };
            let line = Line { source: self.source, time, text: text.to_owned(), _room: Some(room) };
            if self.sender.send(Message::Line(self.source, line)).await.is_err() {
                return Ok(false);
            }
        }
    }
}

/// How far a pod's process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It has not started, so there is no log.
    Waits,
    Runs,
    Ended,
}

/// The state of a pod's first container.
pub fn state(pod: &Pod) -> State {
    let Some(status) = &pod.status else { return State::Waits };
    let first = pod.spec.as_ref().and_then(|spec| Some(&spec.containers.first()?.name));
    let statuses = status.container_statuses.as_deref().unwrap_or_default();
    let container = statuses.iter().find(|status| Some(&status.name) == first).and_then(|status| status.state.as_ref());
    match container {
        Some(state) if state.terminated.is_some() => State::Ended,
        Some(state) if state.running.is_some() => State::Runs,
        _ if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) => State::Ended,
        _ => State::Waits,
    }
}

fn first_container(pod: &Pod) -> Option<String> {
    pod.spec.as_ref().and_then(|spec| Some(spec.containers.first()?.name.clone()))
}

/// The last line that was read, from which a log is read on. A log is asked for from a second on, so that its first lines
/// come again.
#[derive(Default)]
struct Position {
    newest: Option<Timestamp>,
    /// Lines from the first one with the newest time on, without late ones of an earlier second.
    shown: usize,
    /// How many of these still come again; `None` if all that follows is new.
    again: Option<usize>,
}

impl Position {
    /// The log is read again, from the second of the newest line on.
    fn resume(&mut self) {
        self.again = self.newest.map(|_| self.shown);
    }

    /// Returns the beginning of the newest line's second: a request names a second, and rounds up to the next.
    fn second(&self) -> Option<Timestamp> {
        Timestamp::from_second(self.newest?.as_second()).ok()
    }

    /// Returns whether a line of this time is new.
    fn accepts(&mut self, time: Timestamp) -> bool {
        let Some(newest) = self.newest else {
            (self.newest, self.shown) = (Some(time), 1);
            return true;
        };
        if time > newest {
            (self.newest, self.shown, self.again) = (Some(time), 1, None);
            return true;
        }
        match self.again {
            // In front of the first line with the newest time.
            Some(again) if again == self.shown && time < newest => return false,
            Some(again) => {
                self.again = Some(again - 1).filter(|again| *again > 0);
                return false;
            }
            None => {}
        }
        if self.second().is_some_and(|second| time >= second) {
            self.shown += 1;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn a_pod_that_says_much_takes_the_shared_room_and_leaves_others_their_own() {
        let line = 100;
        let shared = Arc::new(Semaphore::new(3 * (line + size_of::<Line>())));
        let (much, little) = (Room::new(&shared), Room::new(&shared));
        let take = |room: &Room| room.take(line).now_or_never().map(|taken| taken.expect("is not closed"));
        let mut taken: Vec<_> = std::iter::from_fn(|| take(&much)).collect();
        assert_eq!(taken.len(), WAITING_LINES + 3);
        let others: Vec<_> = std::iter::from_fn(|| take(&little)).collect();
        assert_eq!(others.len(), WAITING_LINES);
        taken.pop();
        assert!(take(&little).is_some(), "the shared room was given back");
    }

    #[test]
    fn what_is_not_followed_has_no_room_but_that_of_each_pod() {
        let (outlet, _receiver) = Outlet::channel(false);
        let room = Room::new(&outlet.shared);
        let taken: Vec<_> = std::iter::from_fn(|| room.take(1).now_or_never()).collect();
        assert_eq!(taken.len(), WAITING_LINES);
        let (outlet, _receiver) = Outlet::channel(true);
        let room = Room::new(&outlet.shared);
        // As many as one pod says at 50,000 lines/s while its lines wait for a silent pod.
        let taken: Vec<_> = std::iter::from_fn(|| room.take(120).now_or_never()).take(15_000).collect();
        assert_eq!(taken.len(), 15_000);
    }

    #[test]
    fn a_log_that_is_read_again_goes_on_behind_the_last_line() {
        let at = |nanosecond| Timestamp::from_nanosecond(nanosecond).expect("in range");
        let mut position = Position::default();
        position.resume();
        let first: Vec<bool> = [3, 5, 4, 7, 7].map(|time| position.accepts(at(time))).to_vec();
        assert_eq!(first, [true; 5], "lines out of order are lines");
        position.resume();
        let second: Vec<bool> = [3, 5, 4, 7, 7, 7, 6, 8].map(|time| position.accepts(at(time))).to_vec();
        assert_eq!(second, [false, false, false, false, false, true, true, true]);
        position.resume();
        assert!(!position.accepts(at(8)) && position.accepts(at(8)));
    }

    #[test]
    fn a_late_line_comes_neither_twice_nor_never() {
        let at = |nanosecond| Timestamp::from_nanosecond(nanosecond).expect("in range");
        let mut position = Position::default();
        assert!([7, 6].iter().all(|time| position.accepts(at(*time))));
        position.resume();
        let found: Vec<bool> = [7, 6, 6, 5, 8].map(|time| position.accepts(at(time))).to_vec();
        assert_eq!(found, [false, false, true, true, true]);
    }

    #[test]
    fn a_log_is_read_again_from_the_beginning_of_the_second_of_its_last_line() {
        let mut position = Position::default();
        assert_eq!(position.second(), None);
        position.accepts("2026-01-01T00:00:05.7Z".parse().expect("a time"));
        let since_time = position.second();
        assert_eq!(since_time, "2026-01-01T00:00:05Z".parse().ok());
        let parameters = LogParams { since_time, ..LogParams::default() };
        let request = kube::core::Request::new("/pods").logs("mnist", &parameters).expect("a request");
        let asked = request.uri().to_string();
        assert!(asked.ends_with("sinceTime=2026-01-01T00%3A00%3A05Z"), "{asked}");
    }

    #[test]
    fn the_first_container_says_how_far_a_pod_is() {
        let pod = |status: serde_json::Value| -> Pod {
            let containers = serde_json::json!([{"name": "trainer"}, {"name": "sidecar"}]);
            serde_json::from_value(serde_json::json!({"spec": {"containers": containers}, "status": status}))
                .expect("a pod")
        };
        let container = |name: &str, state: serde_json::Value| serde_json::json!({"name": name, "state": state, "image": "", "imageID": "", "ready": true, "restartCount": 0});
        let running = serde_json::json!({"running": {}});
        let ended = serde_json::json!({"terminated": {"exitCode": 1}});
        for (status, wanted) in [
            (serde_json::json!({"phase": "Pending"}), State::Waits),
            (serde_json::json!({"phase": "Failed", "reason": "Evicted"}), State::Ended),
            (
                serde_json::json!({"phase": "Running", "containerStatuses": [container("sidecar", running.clone())]}),
                State::Waits,
            ),
            (
                serde_json::json!({"phase": "Running", "containerStatuses": [container("trainer", running.clone())]}),
                State::Runs,
            ),
            (
                serde_json::json!({"phase": "Running", "containerStatuses": [container("sidecar", running), container("trainer", ended)]}),
                State::Ended,
            ),
        ] {
            assert_eq!(state(&pod(status.clone())), wanted, "{status}");
        }
    }
}
