//! Reads an object: what is asked for at once, and what will be asked for next ahead of its time, because the blocks of a
//! checkpoint's column lie one behind the other and are read so.

use std::fmt;
use std::io::{self, ErrorKind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

use bytes::Bytes;
use futures::stream::StreamExt as _;
use object_store::{GetOptions, ObjectMeta, ObjectStore};
use parking_lot::Mutex;
use psjobs_ps::checkpoint::disk::OpenFile;

use crate::error::of_disk;
use crate::runtime::Requests;

/// Bytes that are read at once where less is asked for: headers and tables lie together.
const LEAST: u64 = 128 << 10;
/// Bytes on their way that were not asked for yet, of all objects of a bucket.
const AHEAD: usize = 24 << 20;
/// Pieces of one object that are ahead; a checkpoint has not more columns with Adam's state.
const PIECES: usize = 4;

/// Bytes that are read ahead, of all objects of a bucket.
pub type Budget = Arc<AtomicUsize>;

/// An object that is read. One that is replaced meanwhile gives an error, and no mixture.
#[derive(Debug)]
pub struct Reading {
    store: Arc<dyn ObjectStore>,
    requests: Arc<Requests>,
    object: ObjectMeta,
    budget: Budget,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    /// The last small piece, and where it begins.
    small: (u64, Bytes),
    ahead: Vec<Ahead>,
}

/// A piece that is on its way, or there.
struct Ahead {
    offset: u64,
    length: u64,
    coming: mpsc::Receiver<object_store::Result<Bytes>>,
    _spent: Arc<Spent>,
}

/// Bytes of the budget, which it gets back when neither the request nor a reader has them any more.
struct Spent {
    bytes: usize,
    budget: Budget,
}

impl fmt::Debug for Ahead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes from {} on", self.length, self.offset)
    }
}

impl Spent {
    /// Takes so many bytes, if there are as many left.
    fn take(budget: &Budget, bytes: usize) -> Option<Arc<Self>> {
        let spent = Self { bytes, budget: budget.clone() };
        let before = budget.fetch_add(bytes, Ordering::Relaxed);
        (before + bytes <= AHEAD).then(|| Arc::new(spent))
    }
}

impl Drop for Spent {
    fn drop(&mut self) {
        self.budget.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl OpenFile for Reading {
    fn write_at(&self, _: &[u8], _: u64) -> io::Result<()> {
        Err(io::Error::new(ErrorKind::PermissionDenied, "an object that is read cannot be written"))
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let length = buffer.len() as u64;
        if offset + length > self.object.size {
            return Err(io::Error::new(ErrorKind::UnexpectedEof, "the object ends before"));
        }
        let found = if length < LEAST { self.small(offset, length)? } else { self.large(offset, length)? };
        buffer.copy_from_slice(&found);
        Ok(())
    }

    /// Asks for all of it by one request, and puts each piece in its place when it comes, so that nothing is put together first.
    /// It asks for nothing ahead, because callers read several times at once.
    fn read_all_at(&self, buffers: &mut [&mut [u8]], offset: u64) -> io::Result<()> {
        let length: u64 = buffers.iter().map(|buffer| buffer.len() as u64).sum();
        if length == 0 {
            return Ok(());
        }
        if offset + length > self.object.size {
            return Err(io::Error::new(ErrorKind::UnexpectedEof, "the object ends before"));
        }
        let coming = self.stream(offset, length);
        let mut piece = Bytes::new();
        for buffer in buffers {
            let mut rest: &mut [u8] = buffer;
            while !rest.is_empty() {
                if piece.is_empty() {
                    let ended = || io::Error::other(format!("the store has sent fewer than {length} bytes"));
                    piece = coming.recv().map_err(|_| ended())?.map_err(of_disk)?;
                    continue;
                }
                let (now, later) = rest.split_at_mut(piece.len().min(rest.len()));
                now.copy_from_slice(&piece.split_to(now.len()));
                rest = later;
            }
        }
        match piece.is_empty() && coming.recv().is_err() {
            true => Ok(()),
            // A reply of another length is an error of the store: the object's length is known.
            false => Err(io::Error::other(format!("the store has sent more than {length} bytes"))),
        }
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn bytes(&self) -> io::Result<u64> {
        Ok(self.object.size)
    }
}

impl Reading {
    pub fn new(store: Arc<dyn ObjectStore>, requests: Arc<Requests>, object: ObjectMeta, budget: Budget) -> Self {
        Self { store, requests, object, budget, held: Mutex::default() }
    }

    /// Reads a little, out of the piece that was read last or of one that is kept for the next time.
    fn small(&self, offset: u64, length: u64) -> io::Result<Bytes> {
        let (begin, held) = self.held.lock().small.clone();
        if begin <= offset && offset + length <= begin + held.len() as u64 {
            let at = (offset - begin) as usize;
            return Ok(held.slice(at..at + length as usize));
        }
        let piece = self.get(offset, LEAST.min(self.object.size - offset))?;
        self.held.lock().small = (offset, piece.clone());
        Ok(piece.slice(..length as usize))
    }

    /// Reads a block, which may be on its way already, and asks for the one behind it.
    fn large(&self, offset: u64, length: u64) -> io::Result<Bytes> {
        let ahead = {
            let mut held = self.held.lock();
            let place = held.ahead.iter().position(|ahead| ahead.offset == offset && ahead.length >= length);
            place.map(|place| held.ahead.remove(place))
        };
        self.look_ahead(offset + length, length);
        let came = ahead.and_then(|ahead| ahead.coming.recv().ok()?.ok());
        // One that has failed is asked for again.
        match came.filter(|bytes| bytes.len() as u64 >= length) {
            Some(bytes) => Ok(bytes.slice(..length as usize)),
            None => self.get(offset, length),
        }
    }

    fn get(&self, offset: u64, length: u64) -> io::Result<Bytes> {
        let (done, coming) = mpsc::sync_channel(1);
        self.ask(offset, length, done, None);
        let came = coming.recv().map_err(|_| io::Error::other("the thread for requests to the store has ended"))?;
        let bytes = came.map_err(of_disk)?;
        // A reply of another length is an error of the store: the object's length is known.
        match bytes.len() as u64 == length {
            true => Ok(bytes),
            false => Err(io::Error::other(format!("the store has sent {} of {length} bytes", bytes.len()))),
        }
    }

    fn look_ahead(&self, offset: u64, length: u64) {
        let length = length.min(self.object.size.saturating_sub(offset));
        let mut held = self.held.lock();
        if length == 0 || held.ahead.iter().any(|ahead| ahead.offset == offset) {
            return;
        }
        let Some(spent) = Spent::take(&self.budget, length as usize) else { return };
        if held.ahead.len() >= PIECES {
            held.ahead.remove(0);
        }
        let (done, coming) = mpsc::sync_channel(1);
        self.ask(offset, length, done, Some(spent.clone()));
        held.ahead.push(Ahead { offset, length, coming, _spent: spent });
    }

    /// Asks for bytes, which come in pieces. At most all of them wait to be taken.
    fn stream(&self, offset: u64, length: u64) -> mpsc::Receiver<object_store::Result<Bytes>> {
        let (store, location, options) =
            (self.store.clone(), self.object.location.clone(), self.options(offset, length));
        let (sender, coming) = mpsc::channel();
        self.requests.begin(async move {
            let mut pieces = match store.get_opts(&location, options).await {
                Ok(reply) => reply.into_stream(),
                // It may be wanted no more.
                Err(error) => return drop(sender.send(Err(error))),
            };
            while let Some(piece) = pieces.next().await {
                if sender.send(piece).is_err() {
                    return;
                }
            }
        });
        coming
    }

    fn options(&self, offset: u64, length: u64) -> GetOptions {
        GetOptions {
            range: Some((offset..offset + length).into()),
            if_match: self.object.e_tag.clone(),
            ..GetOptions::default()
        }
    }

    fn ask(
        &self,
        offset: u64,
        length: u64,
        done: mpsc::SyncSender<object_store::Result<Bytes>>,
        spent: Option<Arc<Spent>>,
    ) {
        let (store, location, options) =
            (self.store.clone(), self.object.location.clone(), self.options(offset, length));
        self.requests.begin(async move {
            let read = async { store.get_opts(&location, options).await?.bytes().await };
            // It may be wanted no more.
            drop(done.send(read.await));
            drop(spent);
        });
    }
}
