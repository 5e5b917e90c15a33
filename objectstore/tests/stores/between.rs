//! A process between clients and a store, which breaks connections or refuses requests.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;

use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

/// Status of a store that has too much to do.
pub const SLOW_DOWN: &str = "503 SlowDown";

/// The faults of a connection.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The store answers a request with this status, and does not do what it was asked for.
    Refused(&'static str),
    /// The next bytes from the server are cut off: the store gets a part of a request.
    Torn,
    /// The reply of the store is cut off: it has done what it was asked for, perhaps.
    LostReply,
    /// A reply breaks off in its middle, as of an object that is read.
    TornReply,
}

/// A process between the servers and a store, which breaks connections while it is `active`.
pub struct Between {
    pub address: SocketAddr,
    pub faults: Arc<AtomicU32>,
    pub active: Arc<AtomicBool>,
}

impl Between {
    /// Starts one with faults of all kinds, drawn by `seed`.
    pub fn start(store: SocketAddr, seed: u64) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let kinds = [Fault::Refused(SLOW_DOWN), Fault::Torn, Fault::LostReply, Fault::TornReply];
        Self::with(store, true, move || {
            let kind = kinds[random.random_range(0..kinds.len())];
            // A request of a few hundred bytes, or the middle of a large one.
            let most = if random.random_bool(0.5) { 4_000 } else { 15_000_000 };
            (kind, random.random_range(1..most))
        })
    }

    /// Starts one that answers every request with `status` while it is active, which it is not yet.
    pub fn refusing(store: SocketAddr, status: &'static str) -> Self {
        Self::with(store, false, move || (Fault::Refused(status), 1))
    }

    /// Starts one; `draw` returns the fault of a connection, and after how many bytes of requests it comes.
    fn with(store: SocketAddr, is_active: bool, mut draw: impl FnMut() -> (Fault, usize) + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        let (faults, active) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(is_active)));
        let (counted, is_active) = (faults.clone(), active.clone());
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let (kind, after) = draw();
                let (faults, active) = (counted.clone(), is_active.clone());
                thread::spawn(move || drop(carry(client, store, kind, after, &faults, &active)));
            }
        });
        Self { address, faults, active }
    }
}

/// Carries a connection until its fault, which comes after so many bytes of requests.
fn carry(
    mut client: TcpStream,
    store: SocketAddr,
    kind: Fault,
    after: usize,
    faults: &Arc<AtomicU32>,
    active: &Arc<AtomicBool>,
) -> std::io::Result<()> {
    let mut server = TcpStream::connect(store)?;
    let is_silent = Arc::new(AtomicBool::new(false));
    let (mut replies, mut back, silent) = (server.try_clone()?, client.try_clone()?, is_silent.clone());
    let (back_faults, back_active) = (faults.clone(), active.clone());
    let carrying_back = thread::spawn(move || {
        let (mut carried, mut buffer) = (0, vec![0; 1 << 16]);
        while let Ok(count @ 1..) = replies.read(&mut buffer) {
            carried += count;
            let is_torn = matches!(kind, Fault::TornReply) && carried >= after && back_active.load(Ordering::SeqCst);
            let sent = if is_torn { count / 2 } else { count };
            if silent.load(Ordering::SeqCst) || back.write_all(&buffer[..sent]).is_err() || is_torn {
                back_faults.fetch_add(u32::from(is_torn), Ordering::SeqCst);
                break;
            }
        }
        drop(back.shutdown(Shutdown::Both));
    });
    let mut carried = 0;
    let mut buffer = vec![0; 1 << 16];
    while let Ok(count @ 1..) = client.read(&mut buffer) {
        carried += count;
        if carried >= after && !matches!(kind, Fault::TornReply) && active.load(Ordering::SeqCst) {
            faults.fetch_add(1, Ordering::SeqCst);
            match kind {
                Fault::Refused(status) => {
                    is_silent.store(true, Ordering::SeqCst);
                    let length = status.len();
                    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close");
                    client.write_all(format!("{head}\r\n\r\n{status}").as_bytes())?;
                }
                Fault::Torn => server.write_all(&buffer[..count / 2])?,
                Fault::TornReply => {}
                Fault::LostReply => {
                    is_silent.store(true, Ordering::SeqCst);
                    server.write_all(&buffer[..count])?;
                    // The request is in the store's hands, as far as it was sent.
                    server.shutdown(Shutdown::Write)?;
                    carrying_back.join().ok();
                    return client.shutdown(Shutdown::Both);
                }
            }
            drop(server.shutdown(Shutdown::Both));
            return client.shutdown(Shutdown::Both);
        }
        server.write_all(&buffer[..count])?;
    }
    server.shutdown(Shutdown::Write)
}
