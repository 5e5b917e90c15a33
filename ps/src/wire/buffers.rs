//! Memory for messages, used again. Fresh pages cost a page fault each, which was a fifth of the
//! time of an exchange.

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;

/// Smaller buffers are cheap to allocate and are not kept.
const SMALLEST: usize = 4 * 1024;
/// Buffers kept for later, where one trainer uses them: it may leave all free between two steps.
const MOST_KEPT: usize = 64;
/// Fewest buffers kept where many trainers share them: while one computes, others' messages take what it has left free. When a
/// task that owns a block loses its core for some milliseconds, up to 16 messages come in meanwhile.
const FEWEST_KEPT: usize = 16;

/// A stock of buffers. Clones share it.
#[derive(Clone, Debug)]
pub struct Buffers(Arc<Stock>);

#[derive(Debug)]
struct Stock {
    free: Mutex<Vec<Vec<u8>>>,
    kept: usize,
}

impl Default for Buffers {
    fn default() -> Self {
        Self::for_trainers(1)
    }
}

/// A buffer that goes back to its stock when the last [`Bytes`] made of it is dropped.
#[derive(Debug)]
pub struct Buffer {
    bytes: Vec<u8>,
    length: usize,
    home: Buffers,
}

impl Buffers {
    /// For what so many trainers exchange.
    #[must_use]
    pub fn for_trainers(trainers: u32) -> Self {
        let kept = (MOST_KEPT / trainers.max(1) as usize).max(FEWEST_KEPT);
        Self(Arc::new(Stock { free: Mutex::default(), kept }))
    }

    /// A buffer of `length` bytes; what is in them is left from before.
    #[must_use]
    pub fn take(&self, length: usize) -> Buffer {
        let kept = if length < SMALLEST { None } else { self.lock().pop() };
        // A new vector of zeros is taken from fresh pages where there are any, and those need not be written with zeros.
        let bytes = kept.filter(|kept| kept.len() >= length).unwrap_or_else(|| vec![0; length]);
        Buffer { bytes, length, home: self.clone() }
    }

    fn lock(&self) -> parking_lot::MutexGuard<'_, Vec<Vec<u8>>> {
        self.0.free.lock()
    }
}

impl Buffer {
    /// The bytes, to be filled.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.length]
    }

    /// The bytes, to be handed on.
    #[must_use]
    pub fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        let mut stock = self.home.lock();
        if bytes.len() >= SMALLEST && stock.len() < self.home.0.kept {
            stock.push(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kept_buffer_serves_again_unless_it_is_too_short() {
        let buffers = Buffers::default();
        let filled = |length: usize| {
            let mut buffer = buffers.take(length);
            buffer.bytes_mut().fill(7);
            buffer
        };
        drop(filled(2 * SMALLEST));
        // The bytes of before show which memory it is.
        let again = buffers.take(SMALLEST);
        assert_eq!((again.as_ref().len(), again.as_ref()[0]), (SMALLEST, 7), "a long one serves for less");
        drop(again);
        let longer = buffers.take(3 * SMALLEST);
        assert_eq!((longer.as_ref().len(), longer.as_ref().iter().max()), (3 * SMALLEST, Some(&0)), "a new one");
        assert!(buffers.lock().is_empty(), "the short one is kept no longer");
        drop(longer);
        assert_eq!(buffers.take(3 * SMALLEST).freeze().len(), 3 * SMALLEST);
        drop(filled(SMALLEST - 1));
        assert_eq!(buffers.lock().len(), 1, "short ones are not kept");
    }
}
