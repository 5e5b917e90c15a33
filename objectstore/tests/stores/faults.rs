//! A store that throttles, loses its replies and breaks connections, at places that a seed chooses: no checkpoint is ever
//! complete and wrong, and what a server was promised is there.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use psjobs_ps::checkpoint::{Checkpoint, Runs, write};
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::checkpoints::{description, identity, manifest, state, write_part};
use crate::store::{Kind, Store};

/// Faults that each store is tried with.
const FAULTS: u32 = 250;
/// A part of an upload and a piece of it, so that uploads have several.
const ELEMENTS: u64 = 1_200_000;

/// The faults of a connection.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The store answers that it has too much to do.
    Throttled,
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
    pub fn start(store: SocketAddr, seed: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        let (faults, active) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(true)));
        let random = Arc::new(Mutex::new(ChaCha8Rng::seed_from_u64(seed)));
        let (counted, is_active) = (faults.clone(), active.clone());
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let (kind, after) = {
                    let mut random = random.lock().expect("no thread panics");
                    let kind =
                        [Fault::Throttled, Fault::Torn, Fault::LostReply, Fault::TornReply][random.random_range(0..4)];
                    // A request of a few hundred bytes, or the middle of a large one.
                    let most = if random.random_bool(0.5) { 4_000 } else { 15_000_000 };
                    (kind, random.random_range(1..most))
                };
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
                Fault::Throttled => {
                    is_silent.store(true, Ordering::SeqCst);
                    client.write_all(
                        b"HTTP/1.1 503 Slow Down\r\nContent-Length: 8\r\nConnection: close\r\n\r\nSlowDown",
                    )?;
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

#[test]
fn no_fault_of_s3_makes_a_checkpoint_that_is_wrong_or_loses_one() {
    Store::start(Kind::S3).iter().for_each(survive);
}

#[test]
fn no_fault_of_azure_makes_a_checkpoint_that_is_wrong_or_loses_one() {
    Store::start(Kind::Azure).iter().for_each(survive);
}

/// Writes and reads checkpoints in a store until all faults have come.
fn survive(store: &Store) {
    let between = Between::start(store.address, 7);
    let faulty = psjobs_object_store::folder(&store.url("jobs/mnist"), store.variables_at(between.address));
    let faulty = Runs::new(faulty.expect("a folder"));
    let sound = Runs::new(store.folder("jobs/mnist"));
    // The reply to an attempt may be lost for good: then there are two runs, of which the later one counts.
    let mut attempts = (0..100).map(|_| faulty.begin(&identity(), None, 1));
    let run = attempts.find_map(Result::ok).expect("one of a hundred attempts succeeds").run;
    let (mut acknowledged, mut failed, mut step) = (Vec::new(), 0, 0);
    while between.faults.load(Ordering::SeqCst) < FAULTS {
        step += 1;
        assert!(step < 5_000, "the faults do not come");
        let folder = faulty.catalog(run).path(step);
        let written = write_part(&folder, &description(step, ELEMENTS, 0, 1))
            .and_then(|part| write::commit(&folder, &manifest(step, vec![part])));
        match written {
            Ok(()) => acknowledged.push(step),
            Err(_) => failed += 1,
        }
        // Old ones go, as servers do it.
        if step > 3 {
            drop(faulty.catalog(run).remove(step - 3));
            acknowledged.retain(|kept| *kept > step - 3);
        }
        let complete = sound.catalog(run).complete().expect("the store itself is sound");
        assert!(acknowledged.iter().all(|step| complete.contains(step)), "{:?}: {complete:?}", store.kind);
        for step in complete.iter().rev().take(1).copied() {
            // A reader behind the faults gets the right values, or an error.
            for runs in [&sound, &faulty] {
                let read = Checkpoint::open(runs.catalog(run).path(step));
                let read = read.and_then(|checkpoint| checkpoint.read(0..ELEMENTS as usize));
                match read {
                    Ok(found) => {
                        assert!(found == state(step, 0..ELEMENTS as usize), "{:?}: step {step}", store.kind)
                    }
                    Err(damage) => {
                        assert!(
                            std::ptr::eq(runs, &raw const faulty) && !damage.is_proved(),
                            "{:?}: {damage}",
                            store.kind
                        );
                    }
                }
            }
        }
    }
    between.active.store(false, Ordering::SeqCst);
    let kind = store.kind;
    assert!(step - failed > 10, "{kind:?}: of {step} checkpoints {failed} failed, so that little was tried");
    eprintln!("{kind:?}: {FAULTS} faults, {step} checkpoints, {failed} could not be written");
}
