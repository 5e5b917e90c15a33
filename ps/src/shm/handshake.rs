//! How a memory file gets from trainer to server: over a Unix socket with an abstract name, which
//! only processes of the same network namespace can reach. The trainer sends the number of elements
//! with the file; the server answers a token, by which the trainer's stream names the mapping, and then
//! its pulls. Both sides must run as the same user.

use std::collections::HashMap;
use std::io::{self, IoSlice, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::fs::fstat;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

use super::Mapping;

/// Either side gives up on a peer that says nothing for this long.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Mappings that wait for their stream; more means that somebody only knocks.
const WAITING: usize = 4096;
/// How long a mapping waits for its stream, which its trainer opens at once. One that never comes, because the servers go to a
/// checkpoint or the trainer has died, must not hold the trainer's memory.
const LIFETIME: Duration = Duration::from_secs(60);

/// A server's socket, and the mappings of trainers.
#[derive(Debug)]
pub struct Offer {
    name: String,
    waiting: Mutex<HashMap<u64, Waiting>>,
    /// Mappings whose streams have been opened. This lock is taken after that of those that wait.
    lent: Mutex<HashMap<u64, Weak<Mapping>>>,
}

/// A mapping whose stream has not been opened yet.
#[derive(Debug)]
struct Waiting {
    mapping: Arc<Mapping>,
    since: Instant,
}

impl Offer {
    /// The socket's name, for `JoinReply.shared_memory_socket`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The mapping of a token; a token is good for one stream.
    #[must_use]
    pub fn take(&self, token: u64) -> Option<Arc<Mapping>> {
        let mut waiting = self.waiting.lock();
        let mapping = waiting.remove(&token)?.mapping;
        let mut lent = self.lent.lock();
        lent.retain(|_, mapping| mapping.strong_count() > 0);
        lent.insert(token, Arc::downgrade(&mapping));
        Some(mapping)
    }

    /// The mapping of a token whose stream is open, or is still to be opened.
    #[must_use]
    pub fn mapping_of_pull(&self, token: u64) -> Option<Arc<Mapping>> {
        let waiting = self.waiting.lock();
        let found = waiting.get(&token).map(|waiting| waiting.mapping.clone());
        found.or_else(|| self.lent.lock().get(&token)?.upgrade())
    }

    /// Drops the mappings that have waited for `lifetime` until `now`; returns whether others wait.
    fn expire(&self, lifetime: Duration, now: Instant) -> bool {
        let mut waiting = self.waiting.lock();
        waiting.retain(|_, waiting| now.saturating_duration_since(waiting.since) < lifetime);
        !waiting.is_empty()
    }
}

/// Offers shared memory: takes files on a thread of its own as long as the returned value lives.
///
/// # Errors
/// If no socket can be bound.
pub fn offer() -> io::Result<Arc<Offer>> {
    offer_for(LIFETIME)
}

/// As [`offer`]; a mapping waits for its stream for `lifetime`, and up to half as long again.
fn offer_for(lifetime: Duration) -> io::Result<Arc<Offer>> {
    let name = format!("psjobs-{:032x}", rand::random::<u128>());
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
    let offer = Arc::new(Offer { name, waiting: Mutex::default(), lent: Mutex::default() });
    let weak = Arc::downgrade(&offer);
    std::thread::Builder::new().name("psjobs-shm".into()).spawn(move || {
        loop {
            let stream = listener.accept();
            let Some(offer) = weak.upgrade() else { return };
            match stream.and_then(|(stream, _)| receive(&offer, stream)) {
                Ok(()) => {}
                // No trainer has come for a while.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => tracing::debug!(%error, "a shared memory handshake failed; that trainer uses TCP"),
            }
            // While a mapping waits the thread looks again, also when no trainer comes.
            let timeout = offer.expire(lifetime, Instant::now()).then_some(lifetime / 2);
            if let Err(error) = set_socket_timeout(&listener, Timeout::Recv, timeout) {
                tracing::debug!(%error, "cannot set how long to wait for trainers of this host");
            }
        }
    })?;
    Ok(offer)
}

impl Drop for Offer {
    fn drop(&mut self) {
        // Wakes the thread, which then sees that its mappings are no longer needed.
        if let Ok(address) = SocketAddr::from_abstract_name(&self.name) {
            let _ = UnixStream::connect_addr(&address);
        }
    }
}

/// Hands `mapping` to the server behind the socket `name`; the token, or why there is none.
///
/// # Errors
/// If the socket is not of this host and namespace, or the server does not want the file.
pub fn accept(name: &str, mapping: &Mapping) -> io::Result<u64> {
    let mut stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let files = [mapping.file()];
    ancillary.push(SendAncillaryMessage::ScmRights(&files));
    let elements = (mapping.elements() as u64).to_le_bytes();
    sendmsg(&stream, &[IoSlice::new(&elements)], &mut ancillary, SendFlags::NOSIGNAL)?;
    let mut token = [0; 8];
    stream.read_exact(&mut token)?;
    Ok(u64::from_le_bytes(token))
}

fn receive(offer: &Offer, mut stream: UnixStream) -> io::Result<()> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let (elements, file) = receive_file(&stream)?;
    // A memory file belongs to the user of the process that made it. The socket's peer may be in another PID namespace, where
    // its number is 0 and `socket_peercred` of rustix 1.1 fails.
    if fstat(&file)?.st_uid != rustix::process::geteuid().as_raw() {
        return Err(io::Error::other("the memory file belongs to another user"));
    }
    let mapping = Mapping::receive(file, elements)?;
    let token = rand::random_range(1..=u64::MAX);
    {
        let mut waiting = offer.waiting.lock();
        if waiting.len() >= WAITING {
            return Err(io::Error::other("too many mappings wait for their streams"));
        }
        waiting.insert(token, Waiting { mapping: Arc::new(mapping), since: Instant::now() });
    }
    stream.write_all(&token.to_le_bytes())
}

fn receive_file(stream: &UnixStream) -> io::Result<(usize, OwnedFd)> {
    let mut elements = [0; 8];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(stream, &mut [IoSliceMut::new(&mut elements)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let file = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    match file {
        Some(file) if received.bytes == elements.len() => Ok((u64::from_le_bytes(elements) as usize, file)),
        _ => Err(io::Error::other("expected a number of elements and a memory file")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_handed_over_is_found_by_its_token_once() {
        let offer = offer().expect("binds");
        let mut mapping = Mapping::new(100).expect("a memory file");
        let token = accept(offer.name(), &mapping).expect("is taken");
        assert!(offer.mapping_of_pull(token).is_some(), "it waits");
        let server = offer.take(token).expect("waits");
        mapping.gradients_mut()[99] = 4.0;
        assert_eq!(server.gradients()[99], 4.0);
        assert!(offer.take(token).is_none());
        assert!(offer.mapping_of_pull(token).is_some_and(|found| Arc::ptr_eq(&found, &server)));
        drop(server);
        assert!(offer.mapping_of_pull(token).is_none(), "its stream has ended");
    }

    #[test]
    fn a_mapping_whose_stream_is_never_opened_is_freed_though_no_trainer_comes_again() {
        let offer = offer_for(Duration::from_secs(2)).expect("binds");
        let mapping = Mapping::new(100).expect("a memory file");
        let token = accept(offer.name(), &mapping).expect("is taken");
        let handed_over = Arc::downgrade(&offer.waiting.lock()[&token].mapping);
        let deadline = Instant::now() + Duration::from_secs(20);
        while handed_over.strong_count() > 0 {
            assert!(Instant::now() < deadline, "it is still mapped");
            std::thread::yield_now();
        }
        assert!(offer.take(token).is_none());
        let later = accept(offer.name(), &mapping).expect("others are still taken");
        assert!(offer.take(later).is_some());
    }

    #[test]
    fn a_socket_that_is_not_there_is_an_error() {
        let mapping = Mapping::new(1).expect("a memory file");
        assert!(accept("psjobs-absent", &mapping).is_err());
    }

    #[test]
    fn nonsense_is_not_answered() {
        let offer = offer().expect("binds");
        let mut stream =
            UnixStream::connect_addr(&SocketAddr::from_abstract_name(offer.name()).expect("a name")).expect("connects");
        stream.write_all(&[1; 8]).expect("sends");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("closes");
        assert!(answer.is_empty(), "no file, no token");
    }
}
