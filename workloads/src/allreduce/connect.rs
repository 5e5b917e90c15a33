//! Connects a rank to its neighbours: it listens for the one before and connects to the next, whose address the
//! caller finds. Both say which job, rank and size are theirs, so that a process of another job does not get into the
//! ring.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use psjobs_ps::retry::{Attempts, Schedule};
use socket2::SockRef;

use super::RingError;
use super::stream::{Identity, Stream};

/// Which trainer of how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub rank: u32,
    pub size: u32,
}

/// Connections to the next rank and from the one before.
pub struct Neighbours {
    pub next: Stream,
    pub before: Stream,
}

/// The first bytes of a connection; the last one is the version.
const MAGIC: &[u8; 8] = b"psring\0\x01";
/// The answer to who belongs here.
const WELCOME: u8 = 1;
/// A single try to connect, or to hear who comes, takes no longer.
const TRY: Duration = Duration::from_secs(5);
/// Between two looks whether somebody wants the wait to end.
const LOOK: Duration = Duration::from_millis(100);
/// Pause between two tries to connect.
const PAUSE: Duration = Duration::from_millis(20);

impl Place {
    #[must_use]
    pub fn before(self) -> u32 {
        (self.rank + self.size - 1) % self.size
    }

    #[must_use]
    pub fn next(self) -> u32 {
        (self.rank + 1) % self.size
    }
}

impl Neighbours {
    /// Connects this rank. `next_address` tells where the next rank listens, waiting so
    /// long at most; it is asked again when no process of this job is there. `interrupt` ends the wait.
    ///
    /// # Errors
    /// If a neighbour does not come within `patience`.
    pub fn connect(
        identity: Identity,
        listener: &TcpListener,
        next_address: impl Fn(Duration) -> Result<String, String> + Send,
        patience: Duration,
        interrupt: &AtomicBool,
    ) -> Result<Self, RingError> {
        let wait = Wait { end: Instant::now() + patience, patience, interrupt };
        thread::scope(|scope| {
            let next = scope.spawn(|| reach(identity, next_address, wait));
            let before = await_before(identity, listener, wait);
            let next = next
                .join()
                .unwrap_or_else(|_| Err(wait.absent(identity.place.next(), "its address cannot be asked for")));
            let (next, before) = (next?, before?);
            for Stream { socket, .. } in [&next, &before] {
                socket.set_nodelay(true).and_then(|()| socket.set_read_timeout(None)).map_err(RingError::Listen)?;
            }
            Ok(Self { next, before })
        })
    }
}

#[derive(Clone, Copy)]
struct Wait<'a> {
    end: Instant,
    patience: Duration,
    interrupt: &'a AtomicBool,
}

impl Wait<'_> {
    /// Returns the time left, or why there is none; `reason` is the result of the last try.
    fn left(&self, rank: u32, reason: &str) -> Result<Duration, RingError> {
        if self.interrupt.load(Ordering::Relaxed) {
            return Err(RingError::Interrupted);
        }
        match self.end.checked_duration_since(Instant::now()) {
            Some(left) if !left.is_zero() => Ok(left),
            _ => Err(self.absent(rank, reason)),
        }
    }

    fn absent(&self, rank: u32, reason: &str) -> RingError {
        RingError::Absent { rank, seconds: self.patience.as_secs(), reason: reason.to_owned() }
    }
}

fn reach(
    identity: Identity,
    next_address: impl Fn(Duration) -> Result<String, String>,
    wait: Wait,
) -> Result<Stream, RingError> {
    let next = identity.place.next();
    let mut reason = "it has not said where it listens".to_owned();
    let (begun, mut attempts) = (Instant::now(), Attempts::new(Schedule::every(PAUSE).within(wait.patience)));
    loop {
        let left = wait.left(next, &reason)?;
        let tried = next_address(left.min(TRY)).and_then(|address| {
            introduce(identity, &address, left.min(TRY)).map_err(|error| format!("{address}: {error}"))
        });
        match tried {
            Ok(stream) => return Ok(stream),
            Err(why) => reason = why,
        }
        let Some(pause) = attempts.failed(begun.elapsed()) else { return Err(wait.absent(next, &reason)) };
        thread::sleep(pause);
    }
}

/// Connects and says who this is; the connection, if the other side is the one that is meant.
fn introduce(identity: Identity, address: &str, patience: Duration) -> io::Result<Stream> {
    let target = address.to_socket_addrs()?.next().ok_or_else(|| io::Error::other("it has no address"))?;
    let socket = TcpStream::connect_timeout(&target, patience)?;
    socket.set_read_timeout(Some(patience))?;
    let mut stream = identity.call(socket)?;
    stream.write_all(&hello(identity.place, identity.uid))?;
    let mut answer = [0];
    stream.read_exact(&mut answer)?;
    if answer[0] == WELCOME { Ok(stream) } else { Err(io::Error::other("it belongs to another job")) }
}

fn await_before(identity: Identity, listener: &TcpListener, wait: Wait) -> Result<Stream, RingError> {
    let Identity { place, uid, .. } = identity;
    listener.set_nonblocking(false).map_err(RingError::Listen)?;
    let expected = hello(Place { rank: place.before(), size: place.size }, uid);
    loop {
        let left = wait.left(place.before(), "it has not connected")?;
        // A blocking accept that ends now and then, as it alone does not see an interrupt.
        SockRef::from(listener).set_read_timeout(Some(left.min(LOOK))).map_err(RingError::Listen)?;
        match listener.accept() {
            Ok((socket, _)) => {
                if let Some(stream) = welcome(identity, socket, &expected, left.min(TRY)) {
                    return Ok(stream);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(RingError::Listen(error)),
        }
    }
}

/// Lets in who says `expected`; a stranger's connection is closed.
fn welcome(identity: Identity, socket: TcpStream, expected: &[u8], patience: Duration) -> Option<Stream> {
    let hear = || {
        socket.set_read_timeout(Some(patience))?;
        let mut stream = identity.answer(socket)?;
        let mut said = vec![0; expected.len()];
        stream.read_exact(&mut said)?;
        if said != expected {
            return Err(io::Error::other("it said that it is somebody else"));
        }
        stream.write_all(&[WELCOME])?;
        Ok(stream)
    };
    let strange = |error: &io::Error| {
        tracing::warn!(%error, "a process that is not the trainer before this one tried to connect");
    };
    hear().inspect_err(strange).ok()
}

/// Returns the first message; its length does not depend on the uid, so that one of another job can be read too.
fn hello(place: Place, uid: &str) -> Vec<u8> {
    let mut said = MAGIC.to_vec();
    said.extend_from_slice(&place.rank.to_le_bytes());
    said.extend_from_slice(&place.size.to_le_bytes());
    let mut name = [0; 64];
    name.iter_mut().zip(uid.bytes()).for_each(|(place, byte)| *place = byte);
    said.extend_from_slice(&name);
    said
}
