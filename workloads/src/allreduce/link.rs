//! The two connections of a rank: frames to the next one, written by a thread of its own so that
//! sending never keeps from receiving, and frames from the one before.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::stream::Stream;
use super::{HEARTBEAT, RingError, SILENCE};

/// In front of every frame: what it is, and a number.
const HEADER: usize = 8;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum Kind {
    /// So many f32 follow.
    Values = 1,
    /// Nothing: its sender lives.
    Heartbeat = 2,
    /// The rank that was lost; the sender ends.
    Lost = 3,
    /// The sender has done its work and ends.
    Done = 4,
}

enum Outgoing {
    Values(Vec<u8>),
    Lost(u32),
    Done,
}

/// Sends to the next rank.
pub struct Sender {
    frames: Option<mpsc::Sender<Outgoing>>,
    /// Buffers that were written and can be filled again.
    spare: mpsc::Receiver<Vec<u8>>,
    socket: TcpStream,
    thread: Option<JoinHandle<()>>,
}

impl Sender {
    pub fn start(mut stream: Stream) -> io::Result<Self> {
        let (frames, queue) = mpsc::channel();
        let (written, spare) = mpsc::channel();
        let socket = stream.socket.try_clone()?;
        let write = move || {
            // A next rank that is gone is noticed by the rank behind it, which passes that round the ring.
            drop(write_all(&mut stream, &queue, &written));
        };
        let thread = thread::Builder::new().name("ring-send".into()).spawn(write)?;
        Ok(Self { frames: Some(frames), spare, socket, thread: Some(thread) })
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

    /// Says that nothing more will come, because all is done.
    pub fn tell_done(&self) {
        self.queue(Outgoing::Done);
    }

    fn queue(&self, frame: Outgoing) {
        if let Some(frames) = &self.frames {
            // The thread has ended if the next rank is gone; that shows elsewhere.
            drop(frames.send(frame));
        }
    }
}

impl Drop for Sender {
    /// Ends the thread after the frames sent before have arrived, if the next rank takes them in time.
    fn drop(&mut self) {
        self.frames = None;
        let end = Instant::now() + SILENCE;
        loop {
            match self.spare.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    // The thread is held up by a next rank that does not read.
                    drop(self.socket.shutdown(Shutdown::Both));
                    break;
                }
            }
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // It does not panic.
        }
    }
}

fn write_all(stream: &mut Stream, queue: &mpsc::Receiver<Outgoing>, written: &mpsc::Sender<Vec<u8>>) -> io::Result<()> {
    loop {
        match queue.recv_timeout(HEARTBEAT) {
            Ok(Outgoing::Values(frame)) => {
                stream.write_all(&frame)?;
                // At the end no rank takes it back.
                drop(written.send(frame));
            }
            Ok(Outgoing::Lost(rank)) => return stream.write_all(&header(Kind::Lost, rank)),
            Ok(Outgoing::Done) => return stream.write_all(&header(Kind::Done, 0)),
            Err(RecvTimeoutError::Timeout) => stream.write_all(&header(Kind::Heartbeat, 0))?,
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
    }
}

/// Receives from the rank before.
pub struct Receiver {
    stream: Stream,
    rank: u32,
    silence: Duration,
    heard: Instant,
    done: bool,
    /// The part of the next frame's header that has come.
    header: [u8; HEADER],
    filled: usize,
}

impl Receiver {
    /// `rank` sends on `stream`; it is lost when it has said nothing for `silence`.
    pub fn new(stream: Stream, rank: u32, silence: Duration) -> io::Result<Self> {
        stream.socket.set_read_timeout(Some(silence))?;
        Ok(Self { stream, rank, silence, heard: Instant::now(), done: false, header: [0; HEADER], filled: 0 })
    }

    /// Looks whether the rank before still lives, while there is nothing to receive from it. What it has
    /// sent for the next sum stays where it is.
    pub fn look(&mut self) -> Result<(), RingError> {
        if self.done {
            return Ok(());
        }
        self.stream.socket.set_nonblocking(true).map_err(|error| self.lost(&error))?;
        let seen = self.heartbeats();
        self.stream.socket.set_nonblocking(false).map_err(|error| self.lost(&error))?;
        seen?;
        if self.heard.elapsed() > self.silence { Err(self.lost(&io::ErrorKind::TimedOut.into())) } else { Ok(()) }
    }

    /// Takes the heartbeats that have come.
    fn heartbeats(&mut self) -> Result<(), RingError> {
        loop {
            while self.filled < HEADER {
                match self.stream.read(&mut self.header[self.filled..]) {
                    Ok(0) => return Err(self.lost(&io::ErrorKind::UnexpectedEof.into())),
                    Ok(more) => self.filled += more,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(self.lost(&error)),
                }
            }
            // While a frame waits to be taken, nothing behind it is seen: then its sender is taken to live.
            self.heard = Instant::now();
            match parse(&self.header) {
                (kind, _) if kind == Kind::Heartbeat as u32 => self.filled = 0,
                (kind, number) if kind == Kind::Lost as u32 => return Err(self.told_lost(number)),
                (kind, _) => {
                    self.done = kind == Kind::Done as u32;
                    return Ok(());
                }
            }
        }
    }

    /// The next values, as many as `into` takes.
    pub fn receive(&mut self, into: &mut [f32]) -> Result<(), RingError> {
        let rank = self.rank;
        loop {
            let mut header = self.header;
            let filled = std::mem::take(&mut self.filled);
            self.read(&mut header[filled..])?;
            let (kind, number) = parse(&header);
            match kind {
                _ if kind == Kind::Values as u32 => {
                    let (found, want) = (number as usize, into.len());
                    if found != want {
                        return Err(RingError::OtherLength { rank, found, want });
                    }
                    return self.read(bytemuck::cast_slice_mut(into));
                }
                _ if kind == Kind::Heartbeat as u32 => {}
                _ if kind == Kind::Lost as u32 => return Err(self.told_lost(number)),
                _ if kind == Kind::Done as u32 => {
                    return Err(RingError::Lost { rank, reason: "it has ended its work".to_owned() });
                }
                _ => return Err(RingError::Protocol { rank }),
            }
        }
    }

    fn read(&mut self, bytes: &mut [u8]) -> Result<(), RingError> {
        self.stream.read_exact(bytes).map_err(|error| self.lost(&error))?;
        self.heard = Instant::now();
        Ok(())
    }

    fn lost(&self, error: &io::Error) -> RingError {
        let reason = match error.kind() {
            io::ErrorKind::UnexpectedEof => "its connection was closed".to_owned(),
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                format!("it was silent for {} s", self.silence.as_secs_f64())
            }
            _ => error.to_string(),
        };
        RingError::Lost { rank: self.rank, reason }
    }

    fn told_lost(&self, rank: u32) -> RingError {
        RingError::Lost { rank, reason: format!("trainer {} says so", self.rank) }
    }
}

/// Kind and number.
fn parse(header: &[u8; HEADER]) -> (u32, u32) {
    let [a, b, c, d, e, f, g, h] = *header;
    (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]))
}

fn header(kind: Kind, number: u32) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..4].copy_from_slice(&(kind as u32).to_le_bytes());
    header[4..].copy_from_slice(&number.to_le_bytes());
    header
}
