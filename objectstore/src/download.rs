//! Reads an object in pieces, and the piece that follows ahead of its time: files are read from their beginning to their end,
//! often in several places at once.

use std::fmt;
use std::io::{self, ErrorKind};
use std::sync::{Arc, mpsc};

use bytes::Bytes;
use object_store::path::Path;
use object_store::{GetOptions, ObjectMeta, ObjectStore};
use parking_lot::Mutex;
use psjobs_ps::checkpoint::disk::OpenFile;

use crate::error::of_disk;
use crate::runtime::Requests;

/// Bytes of a piece.
const PIECE: u64 = 4 << 20;
/// Pieces in memory, of all objects of a bucket.
const HELD: usize = 12;

/// The pieces that were read last, of all objects of a bucket.
#[derive(Debug, Default)]
pub struct Pieces(Mutex<Vec<Arc<Piece>>>);

/// A piece of an object, there or on its way.
struct Piece {
    object: Path,
    /// The version of the object.
    tag: Option<String>,
    number: u64,
    content: Mutex<State>,
}

enum State {
    UnderWay(mpsc::Receiver<object_store::Result<Bytes>>),
    There(Bytes),
    Failed,
}

impl fmt::Debug for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Piece").field("object", &self.object).field("number", &self.number).finish_non_exhaustive()
    }
}

/// An object that is read. One that is replaced meanwhile gives an error, and no mixture.
#[derive(Debug)]
pub struct Reading {
    pub store: Arc<dyn ObjectStore>,
    pub requests: Arc<Requests>,
    pub pieces: Arc<Pieces>,
    pub object: ObjectMeta,
}

impl OpenFile for Reading {
    fn write_at(&self, _: &[u8], _: u64) -> io::Result<()> {
        Err(io::Error::new(ErrorKind::PermissionDenied, "an object that is read cannot be written"))
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset + buffer.len() as u64;
        if end > self.object.size {
            return Err(io::Error::new(ErrorKind::UnexpectedEof, "the object ends before"));
        }
        let mut at = offset;
        while at < end {
            let (number, within) = (at / PIECE, (at % PIECE) as usize);
            let content = self.piece(number)?;
            let part = &content[within..content.len().min(within + (end - at) as usize)];
            buffer[(at - offset) as usize..][..part.len()].copy_from_slice(part);
            at += part.len() as u64;
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn bytes(&self) -> io::Result<u64> {
        Ok(self.object.size)
    }
}

impl Reading {
    /// Waits for a piece, and asks for the next one.
    fn piece(&self, number: u64) -> io::Result<Bytes> {
        let piece = self.ask(number);
        let next = number + 1;
        // One that is read somewhere in the middle may be read there only.
        if next * PIECE < self.object.size && (number == 0 || self.is_held(number - 1)) {
            self.ask(next);
        }
        let mut content = piece.content.lock();
        let found = match &*content {
            State::There(bytes) => Ok(bytes.clone()),
            State::UnderWay(coming) => match coming.recv() {
                Ok(Ok(bytes)) if bytes.len() as u64 == self.range(number).1 - self.range(number).0 => Ok(bytes),
                Ok(Ok(_)) => {
                    Err(io::Error::new(ErrorKind::UnexpectedEof, "the store has sent a part of what was asked for"))
                }
                Ok(Err(error)) => Err(of_disk(error)),
                Err(_) => Err(io::Error::other("the thread for requests to the store has ended")),
            },
            State::Failed => Err(io::Error::other("the store did not send this part of the object")),
        };
        match &found {
            Ok(bytes) => *content = State::There(bytes.clone()),
            Err(_) => {
                *content = State::Failed;
                // The next attempt asks again.
                self.pieces.0.lock().retain(|other| !Arc::ptr_eq(other, &piece));
            }
        }
        found
    }

    fn is_held(&self, number: u64) -> bool {
        self.pieces.0.lock().iter().any(|piece| self.is_own(piece, number))
    }

    fn is_own(&self, piece: &Piece, number: u64) -> bool {
        piece.number == number && piece.object == self.object.location && piece.tag == self.object.e_tag
    }

    /// Returns a piece that is there or on its way; asks for it, if it is neither.
    fn ask(&self, number: u64) -> Arc<Piece> {
        let mut held = self.pieces.0.lock();
        if let Some(place) = held.iter().position(|piece| self.is_own(piece, number)) {
            let piece = held.remove(place);
            held.push(piece.clone());
            return piece;
        }
        let (begin, end) = self.range(number);
        let (store, location) = (self.store.clone(), self.object.location.clone());
        let options = GetOptions {
            range: Some((begin..end).into()),
            if_match: self.object.e_tag.clone(),
            ..GetOptions::default()
        };
        let (done, coming) = mpsc::sync_channel(1);
        self.requests.begin(async move {
            let read = async { store.get_opts(&location, options).await?.bytes().await };
            // The piece may be wanted no more.
            drop(done.send(read.await));
        });
        let (object, tag) = (self.object.location.clone(), self.object.e_tag.clone());
        let piece = Arc::new(Piece { object, tag, number, content: Mutex::new(State::UnderWay(coming)) });
        if held.len() >= HELD {
            held.remove(0);
        }
        held.push(piece.clone());
        piece
    }

    /// Returns the first byte of a piece and the one behind its last.
    fn range(&self, number: u64) -> (u64, u64) {
        (number * PIECE, self.object.size.min((number + 1) * PIECE))
    }
}
