//! Finds trainers that other trainers call. A job sends its processes the addresses of servers
//! only; a trainer that others connect to listens on a port of its own and reports it to server 0.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tokio::net::TcpListener;

use crate::error::RemoteError;
use crate::objects::{Endpoint, Peer, Registry};

const PUBLISH: &str = "psjobs/publish";
const LOCATE: &str = "psjobs/locate";
/// How long the name of a server that was reached before may not be found: on a cluster names are away with a node.
const LOOKUP: Duration = Duration::from_secs(60);
/// Pause between two lookups of it.
const PAUSE: Duration = Duration::from_millis(500);
/// How long an address is dialled before the server is asked again.
const LOOK_AGAIN: Duration = Duration::from_secs(3);

#[derive(Default)]
struct Published {
    addresses: Mutex<HashMap<String, String>>,
    changed: Condvar,
}

/// Registers the functions of a server that keeps addresses, for as long as it lives.
pub fn offer(registry: &mut Registry) {
    let published = Arc::<Published>::default();
    let known = Arc::clone(&published);
    registry.function(PUBLISH, move |call, (address,): (String,)| {
        tracing::info!(trainer = %call.caller, address, "listens for other trainers");
        published.addresses.lock().insert(call.caller.to_string(), address);
        published.changed.notify_all();
        Ok(())
    });
    registry.function(LOCATE, move |call, (name,): (String,)| {
        let mut addresses = known.addresses.lock();
        loop {
            if let Some(address) = addresses.get(&name) {
                return Ok(address.clone());
            }
            let Some(left) = call.deadline.checked_duration_since(Instant::now()) else {
                return Err(RemoteError::new(format!("{name} has not said where it listens")));
            };
            known.changed.wait_for(&mut addresses, left);
        }
    });
}

/// Registers the same functions of a server that is not to be asked: they fail, and say `why`.
pub fn refuse(registry: &mut Registry, why: &'static str) {
    registry.function(PUBLISH, move |_, (_,): (String,)| Err::<(), _>(RemoteError::new(why)));
    registry.function(LOCATE, move |_, (_,): (String,)| Err::<String, _>(RemoteError::new(why)));
}

impl Endpoint {
    /// Listens on a free port of the interface by which `server`, at `address`, is reached, and sends it that address,
    /// which is returned. Each process that takes the server's place is sent it, too.
    ///
    /// # Errors
    /// If there is no such interface or port for a minute, or the server does not answer.
    pub fn publish(&self, server: &Peer, address: &str) -> Result<String, RemoteError> {
        let cannot = |error| RemoteError::new(format!("cannot listen for other trainers: {error}"));
        let listener = repeated(LOOKUP, || listen_towards(address)).map_err(|error| RemoteError::Unreachable {
            peer: server.name().into(),
            call: PUBLISH.into(),
            reason: format!("cannot listen for other trainers: {error}"),
        })?;
        let own = listener.local_addr().map_err(cannot)?;
        listener.set_nonblocking(true).map_err(cannot)?;
        {
            let _runtime = self.connections().runtime.enter();
            self.serve(TcpListener::from_std(listener).map_err(cannot)?);
        }
        let own = own.to_string();
        *self.shared().published.lock() = Some((server.name().into(), own.clone()));
        server.rpc_sync::<()>(PUBLISH, own.clone())?;
        Ok(own)
    }

    /// Asks `server` where the trainer `name` can be reached, waiting up to `timeout` for that trainer to publish it.
    ///
    /// # Errors
    /// If it does not say so in time.
    pub fn locate(&self, server: &Peer, name: &str, timeout: Duration) -> Result<String, RemoteError> {
        server.clone().timeout(timeout).rpc_sync(LOCATE, name)
    }

    /// Connects to the trainer `name`, which publishes its address at `server`, waiting up to `timeout`. Where nobody
    /// answers, the address is looked up again: a process that takes the trainer's place listens elsewhere.
    ///
    /// # Errors
    /// If it does not publish an address in time, or does not answer there.
    pub fn connect_published(&self, server: &Peer, name: &str, timeout: Duration) -> Result<Peer, RemoteError> {
        let end = Instant::now() + timeout;
        loop {
            let address = self.locate(server, name, end.saturating_duration_since(Instant::now()))?;
            let (began, left) = (Instant::now(), end.saturating_duration_since(Instant::now()));
            let limit = left.min(LOOK_AGAIN);
            match self.connect(name, &address, limit) {
                // An error that came earlier is a refusal, which does not pass.
                Err(_) if limit < left && began.elapsed() >= limit => {}
                connected => return connected,
            }
        }
    }
}

/// Sends `peer` the address again that was published there: another process may have taken its place, which knows none.
pub(crate) fn publish_again(endpoint: &Endpoint, peer: &Arc<str>) {
    let published = endpoint.shared().published.lock().clone();
    let Some((_, address)) = published.filter(|(server, _)| server == peer) else { return };
    let (endpoint, peer) = (endpoint.clone(), Arc::clone(peer));
    // A call may have to wait for the connection, which the tasks of the runtime must not.
    endpoint.connections().runtime.clone().spawn_blocking(move || {
        // A connection that breaks meanwhile is followed by another one.
        if let Err(error) = endpoint.peer(&peer).rpc_async::<()>(PUBLISH, address) {
            tracing::debug!(%error, "the address of this process is not published again");
        }
    });
}

/// Repeats `attempt` until it succeeds, at most for `limit`.
fn repeated<T>(limit: Duration, mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let begun = Instant::now();
    loop {
        match attempt() {
            Err(error) if begun.elapsed() < limit => {
                tracing::debug!(%error, "trying again");
                thread::sleep(PAUSE);
            }
            done => return done,
        }
    }
}

/// Listens on a free port of the interface by which `address` is reached.
fn listen_towards(address: &str) -> io::Result<std::net::TcpListener> {
    std::net::TcpListener::bind((interface_towards(address)?, 0))
}

/// Returns the address of the interface that packets to `address` leave by. Nothing is sent.
fn interface_towards(address: &str) -> io::Result<IpAddr> {
    let mut error = io::Error::other(format!("{address} has no address"));
    for target in address.to_socket_addrs()? {
        let any: SocketAddr = if target.is_ipv4() { ([0; 4], 0).into() } else { ([0_u16; 8], 0).into() };
        match UdpSocket::bind(any).and_then(|socket| socket.connect(target).and_then(|()| socket.local_addr())) {
            Ok(own) => return Ok(own.ip()),
            Err(reason) => error = reason,
        }
    }
    Err(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_to_this_machine_is_its_loopback() {
        assert_eq!(interface_towards("127.0.0.1:29500").expect("there is one"), IpAddr::from([127, 0, 0, 1]));
        assert!(interface_towards("no.such.host.invalid:1").is_err());
    }

    #[test]
    fn a_name_that_is_not_found_for_a_moment_is_looked_up_again() {
        for (limit, want) in [(LOOKUP, Some(3)), (Duration::ZERO, None)] {
            let mut tries = 0;
            let found = repeated(limit, || {
                tries += 1;
                if tries < 3 { Err(io::Error::other("Name or service not known")) } else { Ok(tries) }
            });
            assert_eq!(found.ok(), want, "within {limit:?}");
        }
    }
}
