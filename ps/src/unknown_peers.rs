//! Limits connections whose peer is not known: without certificates anybody who reaches the port can make one, and each
//! costs some 31 KiB. A peer becomes known when a call of it names the job. Until then its connection has a place among few,
//! and ends after a short time. Streams of it have places among few, too.

use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;
use std::{fmt, io};

use futures::{Stream, StreamExt as _};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;
use tonic::Status;
use tonic::transport::server::Connected;

use crate::address_limit::{AddressLimit, Entry};

/// Connections from one address that may be open at once without a known peer, unless the job has more processes: they may
/// share an address, and all connect at its start. From all addresses there may be twice as many: 32 MiB.
const MOST_OF_ADDRESS: usize = 512;
/// How long a connection may stay open without a known peer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The peer of a connection. Requests of connections without TLS have it in their extensions.
#[derive(Clone)]
pub struct Peer(Arc<Mutex<Option<Place>>>);

/// The place of a connection whose peer is not known.
type Place = (OwnedSemaphorePermit, Entry);

impl Peer {
    fn new(place: Place) -> Self {
        Self(Arc::new(Mutex::new(Some(place))))
    }

    /// Lifts the limits of the connection: the peer belongs to the job.
    pub fn set_known(&self) {
        drop(self.0.lock().take());
    }

    /// Returns whether the peer belongs to the job.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.0.lock().is_none()
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_known() { "Peer(known)" } else { "Peer(unknown)" })
    }
}

/// Marks the peer in the extensions of a request as known. One with TLS is known by its certificate and has none.
pub fn set_known(extensions: &http::Extensions) {
    if let Some(peer) = extensions.get::<Peer>() {
        peer.set_known();
    }
}

/// The places of streams whose peers are not known. Clones share them.
#[derive(Clone)]
pub struct StreamPlaces {
    most: usize,
    places: Arc<Semaphore>,
    addresses: AddressLimit,
}

/// The place of a stream; dropped when the stream needs it no more.
pub struct StreamPlace {
    _place: Place,
}

impl StreamPlaces {
    /// Allows `most` at once, half of them from one address.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { most, places: Arc::new(Semaphore::new(most)), addresses: AddressLimit::new(most / 2) }
    }

    /// Takes a place for a stream of `peer`. A known peer needs none, because members of the job may send more than a place
    /// allows. A caller with a certificate is one, and has no [`Peer`].
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED if no place is left.
    pub fn enter(&self, peer: Option<&Peer>) -> Result<Option<StreamPlace>, Status> {
        let Some(peer) = peer else { return Ok(None) };
        let address = match &*peer.0.lock() {
            Some((_, connection)) => connection.address(),
            None => return Ok(None),
        };
        match place(&self.places, &self.addresses, address) {
            Some(place) => Ok(Some(StreamPlace { _place: place })),
            None => Err(Status::resource_exhausted(format!(
                "{} streams have yet to say whose they are, or {} from one address; try again later",
                self.most,
                self.most / 2
            ))),
        }
    }
}

/// A connection whose peer may be unknown.
pub struct Guarded<S> {
    stream: S,
    peer: Peer,
    /// `None` once the peer is known.
    deadline: Option<Pin<Box<Sleep>>>,
}

/// Returns how many connections without a known peer a server of a job of so many processes has at once, from all addresses
/// and from one.
fn most(processes: u32) -> (usize, usize) {
    let of_address = MOST_OF_ADDRESS.max(processes as usize);
    (2 * of_address, of_address)
}

/// Returns those of `incoming` that have a place; the others are closed, and counted in the log. `processes` of the job may
/// connect at the same time.
pub fn admit<S: AsyncRead + AsyncWrite + Connected + Unpin>(
    incoming: impl Stream<Item = io::Result<S>>,
    address: impl Fn(&S) -> Option<SocketAddr>,
    processes: u32,
) -> impl Stream<Item = io::Result<Guarded<S>>> {
    let (most, of_address) = most(processes);
    let (places, addresses) = (Arc::new(Semaphore::new(most)), AddressLimit::new(of_address));
    let refused = AtomicU64::new(0);
    incoming.filter_map(move |stream| {
        let admitted = match stream {
            Err(error) => Some(Err(error)),
            Ok(stream) => {
                let peer = address(&stream);
                let admitted = place(&places, &addresses, peer.map(|peer| peer.ip()));
                if admitted.is_none() {
                    refuse(&refused, peer);
                }
                admitted.map(|place| Ok(Guarded::new(stream, place)))
            }
        };
        std::future::ready(admitted)
    })
}

fn place(places: &Arc<Semaphore>, addresses: &AddressLimit, address: Option<IpAddr>) -> Option<Place> {
    Some((places.clone().try_acquire_owned().ok()?, addresses.enter(address)?))
}

/// Counts a connection that found no place; the log names the first, the second, the fourth and so on.
fn refuse(refused: &AtomicU64, peer: Option<SocketAddr>) {
    let refused = refused.fetch_add(1, Relaxed) + 1;
    if refused.is_power_of_two() {
        tracing::warn!(?peer, refused, "closed a connection: too many have yet to say which job they belong to");
    }
}

impl<S> Guarded<S> {
    fn new(stream: S, place: Place) -> Self {
        Self { stream, peer: Peer::new(place), deadline: Some(Box::pin(tokio::time::sleep(TIMEOUT))) }
    }

    /// Fails when the peer is still unknown at the deadline. Called in every direction, so that a peer that reads nothing
    /// has no more time than one that sends nothing.
    fn check(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let Some(deadline) = &mut self.deadline else { return Ok(()) };
        if self.peer.is_known() {
            self.deadline = None;
            return Ok(());
        }
        match deadline.as_mut().poll(cx) {
            Poll::Ready(()) => {
                Err(io::Error::new(io::ErrorKind::TimedOut, "the peer did not say which job it belongs to"))
            }
            Poll::Pending => Ok(()),
        }
    }
}

impl<S> Connected for Guarded<S> {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Guarded<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Guarded<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, duplex};

    use super::*;

    fn guarded() -> (Guarded<tokio::io::DuplexStream>, tokio::io::DuplexStream) {
        let (ours, theirs) = duplex(64);
        let places = Arc::new(Semaphore::new(1));
        let place = place(&places, &AddressLimit::new(1), None).expect("room");
        (Guarded::new(ours, place), theirs)
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_ends_unless_its_peer_becomes_known_in_time() {
        for known in [false, true] {
            let (mut connection, _theirs) = guarded();
            let peer = connection.connect_info();
            let mut byte = [0];
            let read = connection.read(&mut byte);
            tokio::pin!(read);
            let almost = TIMEOUT - Duration::from_millis(1);
            assert!(tokio::time::timeout(almost, &mut read).await.is_err(), "it has {TIMEOUT:?}");
            if known {
                peer.set_known();
            }
            match tokio::time::timeout(TIMEOUT * 10, &mut read).await {
                Ok(ended) => {
                    assert_eq!((known, ended.expect_err("no byte came").kind()), (false, io::ErrorKind::TimedOut))
                }
                Err(_) => assert!(known, "an unknown peer keeps its connection"),
            }
        }
    }

    #[test]
    fn a_job_of_many_processes_may_connect_at_once_from_one_address() {
        for (processes, want) in [(0, (1024, 512)), (512, (1024, 512)), (1001, (2002, 1001)), (4224, (8448, 4224))] {
            assert_eq!(most(processes), want, "{processes} processes");
        }
    }

    #[test]
    fn a_known_peer_leaves_its_place_to_another() {
        let (places, addresses) = (Arc::new(Semaphore::new(1)), AddressLimit::new(MOST_OF_ADDRESS));
        let peer = Peer::new(place(&places, &addresses, None).expect("room"));
        assert!(place(&places, &addresses, None).is_none());
        peer.set_known();
        assert!(place(&places, &addresses, None).is_some());
    }

    #[test]
    fn an_address_has_half_of_the_places_for_streams_and_a_known_peer_needs_none() {
        let (places, addresses) = (Arc::new(Semaphore::new(1024)), AddressLimit::new(MOST_OF_ADDRESS));
        let peer = |last| Peer::new(place(&places, &addresses, Some(IpAddr::from([10, 0, 0, last]))).expect("room"));
        let (one, other, third, known) = (peer(1), peer(2), peer(3), peer(1));
        known.set_known();
        let streams = StreamPlaces::new(4);
        let mut held: Vec<_> = (0..2).map(|_| streams.enter(Some(&one)).expect("room")).collect();
        let refused = streams.enter(Some(&one)).err().expect("its address has two");
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted, "{refused}");
        held.extend((0..2).map(|_| streams.enter(Some(&other)).expect("another address has room")));
        assert!(held.iter().all(Option::is_some) && streams.enter(Some(&third)).is_err(), "all are taken");
        for free in [Some(&known), None] {
            assert!(streams.enter(free).is_ok_and(|place| place.is_none()), "{free:?}");
        }
        held.clear();
        assert!(streams.enter(Some(&third)).is_ok(), "places are given back");
    }
}
