//! Fetches pieces in the background, a bounded number at a time. Readers say which ones they need now and which ones later.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::thread;

use parking_lot::{Condvar, Mutex};

use crate::error::DataError;

/// Pieces that are fetched at the same time.
const THREADS: usize = 8;
/// Pieces that wait to be fetched for later; more are asked for again when they are needed.
const LATER: usize = 1024;

/// Fetches one piece.
type Fetch = dyn Fn(usize) -> Result<(), DataError> + Send + Sync;

/// The threads that fetch. They end, each after its piece, when this is dropped.
#[derive(Debug)]
pub struct Fetcher {
    shared: Arc<Shared>,
    /// False if the system had no thread: then readers fetch themselves.
    has_threads: bool,
}

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    /// A piece was asked for, or is there, or all is over.
    changed: Condvar,
}

/// The pieces that are waited for. Pure.
#[derive(Debug)]
struct Queue {
    waiting: VecDeque<(usize, u64)>,
    /// Pieces that wait, and pieces that are being fetched.
    pending: HashSet<usize>,
    failed: HashMap<usize, DataError>,
    /// Bytes of memory that the pieces that are being fetched take.
    running: u64,
    /// The most of these bytes, unless one piece alone takes more.
    limit: u64,
    is_over: bool,
}

impl Queue {
    /// Takes a piece that costs so many bytes of memory: now before all others, or later behind them.
    fn ask(&mut self, piece: usize, cost: u64, now: bool) {
        if self.pending.contains(&piece) {
            // One that waits for later may have become urgent. The others keep their order.
            if now
                && let Some(place) = self.waiting.iter().position(|(waiting, _)| *waiting == piece)
                && let Some(waiting) = self.waiting.remove(place)
            {
                self.waiting.push_front(waiting);
            }
            return;
        }
        if now {
            self.waiting.push_front((piece, cost));
        } else if self.waiting.len() < LATER {
            self.waiting.push_back((piece, cost));
        } else {
            return;
        }
        self.failed.remove(&piece);
        self.pending.insert(piece);
    }

    /// Returns the next piece to fetch, if there is memory for it.
    fn begin(&mut self) -> Option<(usize, u64)> {
        let (_, cost) = *self.waiting.front()?;
        if self.running > 0 && self.running + cost > self.limit {
            return None;
        }
        self.running += cost;
        self.waiting.pop_front()
    }

    fn end(&mut self, piece: usize, cost: u64, fetched: Result<(), DataError>) {
        self.running -= cost;
        self.pending.remove(&piece);
        if let Err(error) = fetched {
            self.failed.insert(piece, error);
        }
    }
}

impl Fetcher {
    /// Starts the threads. The pieces that are fetched at the same time take at most `limit` bytes of memory, or one of
    /// them more.
    #[must_use]
    pub fn start(limit: u64, fetch: Arc<Fetch>) -> Self {
        let queue = Queue {
            waiting: VecDeque::new(),
            pending: HashSet::new(),
            failed: HashMap::new(),
            running: 0,
            limit,
            is_over: false,
        };
        let shared = Arc::new(Shared { queue: Mutex::new(queue), changed: Condvar::new() });
        let start = |_: &usize| {
            let (shared, fetch) = (shared.clone(), fetch.clone());
            thread::Builder::new().name("data-fetch".into()).spawn(move || shared.work(&*fetch)).is_ok()
        };
        let has_threads = (0..THREADS).filter(start).count() > 0;
        Self { shared, has_threads }
    }

    /// Asks for pieces with their costs in memory, which are needed now, the first one first, or later.
    pub fn ask(&self, pieces: impl DoubleEndedIterator<Item = (usize, u64)>, now: bool) {
        if !self.has_threads {
            return;
        }
        let mut queue = self.shared.queue.lock();
        if now {
            pieces.rev().for_each(|(piece, cost)| queue.ask(piece, cost, true));
        } else {
            pieces.for_each(|(piece, cost)| queue.ask(piece, cost, false));
        }
        drop(queue);
        self.shared.changed.notify_all();
    }

    /// Waits until a piece is fetched, if it was asked for.
    ///
    /// # Errors
    /// If it could not be fetched.
    pub fn wait(&self, piece: usize) -> Result<(), DataError> {
        let mut queue = self.shared.queue.lock();
        while queue.pending.contains(&piece) {
            self.shared.changed.wait(&mut queue);
        }
        queue.failed.remove(&piece).map_or(Ok(()), Err)
    }
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        self.shared.queue.lock().is_over = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn work(&self, fetch: &Fetch) {
        while let Some((piece, cost)) = self.next() {
            let mut ending = Ending { shared: self, piece, cost, fetched: None };
            ending.fetched = Some(fetch(piece));
        }
    }

    fn next(&self) -> Option<(usize, u64)> {
        let mut queue = self.queue.lock();
        loop {
            if queue.is_over {
                return None;
            }
            if let Some(next) = queue.begin() {
                return Some(next);
            }
            self.changed.wait(&mut queue);
        }
    }
}

/// Says that a piece is done, also if fetching it has panicked: then its reader fetches it, and meets the panic.
struct Ending<'a> {
    shared: &'a Shared,
    piece: usize,
    cost: u64,
    fetched: Option<Result<(), DataError>>,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        let fetched = self.fetched.take().unwrap_or(Ok(()));
        self.shared.queue.lock().end(self.piece, self.cost, fetched);
        self.shared.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(limit: u64) -> Queue {
        Queue {
            waiting: VecDeque::new(),
            pending: HashSet::new(),
            failed: HashMap::new(),
            running: 0,
            limit,
            is_over: false,
        }
    }

    #[test]
    fn pieces_that_are_needed_now_come_first_and_none_comes_twice() {
        let mut queue = queue(100);
        for (piece, now) in [(1, false), (2, false), (3, true), (2, true), (1, false)] {
            queue.ask(piece, 1, now);
        }
        let begun: Vec<_> = std::iter::from_fn(|| queue.begin()).map(|(piece, _)| piece).collect();
        assert_eq!(begun, [2, 3, 1]);
        queue.ask(3, 1, true);
        assert_eq!(queue.begin(), None, "it is being fetched");
        queue.end(3, 1, Ok(()));
        queue.ask(3, 1, true);
        assert_eq!(queue.begin(), Some((3, 1)));
    }

    #[test]
    fn pieces_that_are_fetched_take_a_bounded_memory() {
        let mut queue = queue(100);
        [(1, 60), (2, 60), (3, 500)].into_iter().for_each(|(piece, cost)| queue.ask(piece, cost, false));
        assert_eq!((queue.begin(), queue.begin()), (Some((1, 60)), None));
        queue.end(1, 60, Ok(()));
        assert_eq!((queue.begin(), queue.begin()), (Some((2, 60)), None));
        queue.end(2, 60, Ok(()));
        assert_eq!(queue.begin(), Some((3, 500)), "alone one may take more");
        for piece in 0..LATER + 10 {
            queue.ask(10 + piece, 1, false);
        }
        assert_eq!(queue.waiting.len(), LATER);
    }

    #[test]
    fn a_reader_gets_the_error_of_the_piece_it_waits_for() {
        let fetch = |piece: usize| match piece {
            7 => Err(DataError::unfit("x.csv", "line 3")),
            _ => Ok(()),
        };
        let fetcher = Fetcher::start(10, Arc::new(fetch));
        fetcher.ask((5..9).map(|piece| (piece, 4)), true);
        for piece in 5..9 {
            assert_eq!(fetcher.wait(piece).is_err(), piece == 7, "{piece}");
        }
        fetcher.wait(7).expect("an error is told once");
        fetcher.wait(100).expect("it was not asked for");
    }
}
