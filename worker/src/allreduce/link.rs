//! The two connections of a rank: frames to the next one, written by a thread of its own so that
//! sending never keeps from receiving, and frames from the one before.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::{HEARTBEAT, RingError, SILENCE};

/// In front of every frame: what it is, and a number.
const HEADER: usize = 8;

/// What a header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum Kind {
    /// So many f32 follow.
    Values = 1,
    /// Nothing: its sender lives.
    Heartbeat = 2,
    /// The rank that was lost; the sender ends.
    Lost = 3,
}

enum Outgoing {
    Values(Vec<u8>),
    Lost(u32),
}

/// Sends to the next rank.
pub struct Sender {
    frames: Option<mpsc::Sender<Outgoing>>,
    /// Buffers that were written and can be filled again.
    spare: mpsc::Receiver<Vec<u8>>,
    stream: TcpStream,
    thread: Option<JoinHandle<()>>,
}

impl Sender {
    pub fn start(stream: TcpStream) -> io::Result<Self> {
        let (frames, queue) = mpsc::channel();
        let (written, spare) = mpsc::channel();
        let mut writing = stream.try_clone()?;
        let write = move || {
            // A next rank that is gone is noticed by the rank behind it, and told round the ring.
            drop(write_all(&mut writing, &queue, &written));
        };
        let thread = thread::Builder::new().name("ring-send".into()).spawn(write)?;
        Ok(Self { frames: Some(frames), spare, stream, thread: Some(thread) })
    }

    pub fn send(&self, values: &[f32]) {
        let mut frame = self.spare.try_recv().unwrap_or_default();
        frame.clear();
        frame.extend_from_slice(&header(Kind::Values, values.len() as u32));
        frame.extend_from_slice(bytemuck::cast_slice(values));
        self.queue(Outgoing::Values(frame));
    }

    /// Tells the ring which rank was lost.
    pub fn tell_lost(&self, rank: u32) {
        self.queue(Outgoing::Lost(rank));
    }

    fn queue(&self, frame: Outgoing) {
        if let Some(frames) = &self.frames {
            // The thread has ended if the next rank is gone; that shows elsewhere.
            drop(frames.send(frame));
        }
    }
}

impl Drop for Sender {
    /// What was sent before still arrives, if the next rank takes it in time.
    fn drop(&mut self) {
        self.frames = None;
        let end = Instant::now() + SILENCE;
        loop {
            match self.spare.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    // The thread is held up by a next rank that does not read.
                    drop(self.stream.shutdown(Shutdown::Both));
                    break;
                }
            }
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // It does not panic.
        }
    }
}

fn write_all(
    stream: &mut TcpStream,
    queue: &mpsc::Receiver<Outgoing>,
    written: &mpsc::Sender<Vec<u8>>,
) -> io::Result<()> {
    loop {
        match queue.recv_timeout(HEARTBEAT) {
            Ok(Outgoing::Values(frame)) => {
                stream.write_all(&frame)?;
                // Nobody takes it back at the end.
                drop(written.send(frame));
            }
            Ok(Outgoing::Lost(rank)) => return stream.write_all(&header(Kind::Lost, rank)),
            Err(RecvTimeoutError::Timeout) => stream.write_all(&header(Kind::Heartbeat, 0))?,
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
    }
}

/// Receives from the rank before.
pub struct Receiver {
    stream: TcpStream,
    rank: u32,
    silence: Duration,
}

impl Receiver {
    /// `rank` sends on `stream`; it is lost when it has said nothing for `silence`.
    pub fn new(stream: TcpStream, rank: u32, silence: Duration) -> io::Result<Self> {
        stream.set_read_timeout(Some(silence))?;
        Ok(Self { stream, rank, silence })
    }

    /// The next values, as many as `into` takes.
    pub fn receive(&mut self, into: &mut [f32]) -> Result<(), RingError> {
        let rank = self.rank;
        loop {
            let mut header = [0; HEADER];
            self.read(&mut header)?;
            let [kind, number] = [&header[..4], &header[4..]].map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            match kind {
                _ if kind == Kind::Values as u32 => {
                    let (found, want) = (number as usize, into.len());
                    if found != want {
                        return Err(RingError::OtherLength { rank, found, want });
                    }
                    return self.read(bytemuck::cast_slice_mut(into));
                }
                _ if kind == Kind::Heartbeat as u32 => {}
                _ if kind == Kind::Lost as u32 => {
                    let reason = format!("trainer {rank} says so");
                    return Err(RingError::Lost { rank: number, reason });
                }
                _ => return Err(RingError::Protocol { rank }),
            }
        }
    }

    fn read(&mut self, bytes: &mut [u8]) -> Result<(), RingError> {
        self.stream.read_exact(bytes).map_err(|error| {
            let reason = match error.kind() {
                io::ErrorKind::UnexpectedEof => "its connection was closed".to_owned(),
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                    format!("it was silent for {} s", self.silence.as_secs_f64())
                }
                _ => error.to_string(),
            };
            RingError::Lost { rank: self.rank, reason }
        })
    }
}

fn header(kind: Kind, number: u32) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..4].copy_from_slice(&(kind as u32).to_le_bytes());
    header[4..].copy_from_slice(&number.to_le_bytes());
    header
}
