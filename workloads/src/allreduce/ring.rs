//! A rank's place in the ring. Sums are done one after the other on a thread of its own; the trainer
//! hands values in and takes the sums out, in the same order on every rank.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

#[cfg(test)]
use super::HEARTBEAT;
use super::connect::{Neighbours, Place};
use super::link::{Receiver, Sender};
use super::order::{chunk, turns};
use super::{RingError, SILENCE};

/// How often the neighbour is looked after while there is nothing to add up.
const LOOK: Duration = Duration::from_millis(200);
/// How soon an interrupt is seen by a trainer that waits.
const INTERRUPTIBLE: Duration = Duration::from_millis(100);

type Sum = Result<Vec<f32>, RingError>;

/// One trainer's end of the ring.
pub struct Ring {
    place: Place,
    work: Option<Work>,
    sums: mpsc::Receiver<Sum>,
    thread: Option<JoinHandle<()>>,
    /// Handed in and not taken out.
    under_way: usize,
    interrupt: Arc<AtomicBool>,
    broken: Arc<AtomicBool>,
    waiting: Duration,
}

/// Where values are handed in.
enum Work {
    /// To the thread that adds up; `None` when all is done.
    Ring(mpsc::Sender<Option<Vec<f32>>>),
    /// A trainer alone has its sums at once.
    Alone(mpsc::Sender<Sum>),
}

struct Links {
    place: Place,
    next: Sender,
    before: Receiver,
    scratch: Vec<f32>,
}

impl Ring {
    /// Starts the ring over the connections to its neighbours. `interrupt` ends whatever is waited for.
    ///
    /// # Errors
    /// If a thread or a connection cannot be had.
    pub fn start(place: Place, neighbours: Option<Neighbours>, interrupt: Arc<AtomicBool>) -> io::Result<Self> {
        Self::with_silence(place, neighbours, interrupt, SILENCE)
    }

    fn with_silence(
        place: Place,
        neighbours: Option<Neighbours>,
        interrupt: Arc<AtomicBool>,
        silence: Duration,
    ) -> io::Result<Self> {
        let (done, sums) = mpsc::channel();
        let broken = Arc::<AtomicBool>::default();
        let (work, thread) = match neighbours {
            None => (Work::Alone(done), None),
            Some(Neighbours { next, before }) => {
                let before = Receiver::new(before, place.before(), silence)?;
                let links = Links { place, next: Sender::start(next)?, before, scratch: Vec::new() };
                let (work, queue) = mpsc::channel();
                let breaks = broken.clone();
                let run = move || {
                    if let Err(error) = add_up(links, &queue, &done) {
                        // A trainer that has gone on without the ring no longer asks.
                        drop(done.send(Err(error)));
                        breaks.store(true, Ordering::Release);
                    }
                };
                let thread = thread::Builder::new().name("ring".into()).spawn(run)?;
                (Work::Ring(work), Some(thread))
            }
        };
        Ok(Self { place, work: Some(work), sums, thread, under_way: 0, interrupt, broken, waiting: Duration::ZERO })
    }

    /// Which trainer this is of how many.
    #[must_use]
    pub fn place(&self) -> Place {
        self.place
    }

    /// Time spent waiting in [`Ring::summed`] so far.
    #[must_use]
    pub fn waiting(&self) -> Duration {
        self.waiting
    }

    /// Set when a trainer is lost, also while nothing is being added up.
    #[must_use]
    pub fn broken(&self) -> &AtomicBool {
        &self.broken
    }

    /// Which trainer is lost, if one is, while nothing of this one's is being added up.
    pub fn lost(&mut self) -> Option<RingError> {
        if !self.broken.load(Ordering::Acquire) {
            return None;
        }
        match self.sums.try_recv() {
            Ok(Err(error)) => Some(error),
            _ => Some(RingError::Lost { rank: self.place.before(), reason: "the ring was broken".to_owned() }),
        }
    }

    /// Hands in values; their sum over all ranks comes out of [`Ring::summed`] in its turn.
    pub fn begin_sum(&mut self, values: Vec<f32>) {
        self.under_way += 1;
        // A thread that has ended left an error to be taken out.
        match &self.work {
            Some(Work::Ring(work)) => drop(work.send(Some(values))),
            Some(Work::Alone(done)) => drop(done.send(Ok(values))),
            None => {}
        }
    }

    /// The sum of the values that were handed in first, of those not yet taken out.
    ///
    /// # Errors
    /// If a trainer is lost, or the wait is interrupted. The ring is of no use after that.
    ///
    /// # Panics
    /// If nothing was handed in.
    pub fn summed(&mut self) -> Sum {
        assert!(self.under_way > 0, "values are handed in before their sum is asked for");
        let start = Instant::now();
        let sum = loop {
            match self.sums.recv_timeout(INTERRUPTIBLE) {
                Ok(sum) => break sum,
                Err(RecvTimeoutError::Timeout) if self.interrupt.load(Ordering::Relaxed) => {
                    return Err(RingError::Interrupted);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    let reason = "the ring was broken before".to_owned();
                    return Err(RingError::Lost { rank: self.place.before(), reason });
                }
            }
        };
        self.under_way -= 1;
        self.waiting += start.elapsed();
        sum
    }

    /// Leaves the ring when all sums are done. The others do not take this trainer for lost.
    pub fn finish(mut self) {
        if let Some(Work::Ring(work)) = self.work.take() {
            // A thread that has ended says nothing more.
            drop(work.send(None));
        }
    }

    /// The numbers that the ranks give, which are below 2^48, in their order.
    ///
    /// # Errors
    /// As [`Ring::summed`].
    pub fn gather(&mut self, number: u64) -> Result<Vec<u64>, RingError> {
        // Each rank's number in a place of its own, as two parts that an f32 holds exactly.
        let mut all = vec![0.0; 2 * self.place.size as usize];
        all[2 * self.place.rank as usize] = (number >> 24) as f32;
        all[2 * self.place.rank as usize + 1] = (number & 0xff_ffff) as f32;
        self.begin_sum(all);
        let all = self.summed()?;
        Ok(all.chunks_exact(2).map(|parts| ((parts[0] as u64) << 24) | parts[1] as u64).collect())
    }
}

impl Drop for Ring {
    /// Ends the threads. What other ranks still need of the sums that were taken out has been sent.
    fn drop(&mut self) {
        self.work = None;
        if self.under_way > 0 {
            return; // It waits for others, who may never come; it ends with the process.
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // If it panicked, that has been logged.
        }
    }
}

/// Adds up what is handed in until the trainer is done, or another one is lost, which is sent to the others.
fn add_up(
    mut links: Links,
    queue: &mpsc::Receiver<Option<Vec<f32>>>,
    done: &mpsc::Sender<Sum>,
) -> Result<(), RingError> {
    loop {
        let summed = match queue.recv_timeout(LOOK) {
            Ok(Some(mut values)) => links.sum(&mut values).map(|()| Some(values)),
            Ok(None) => {
                links.next.tell_done();
                return Ok(());
            }
            Err(RecvTimeoutError::Timeout) => links.before.look().map(|()| None),
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        };
        if let Err(RingError::Lost { rank, .. }) = &summed {
            links.next.tell_lost(*rank);
        }
        if let Some(values) = summed?
            && done.send(Ok(values)).is_err()
        {
            return Ok(());
        }
    }
}

impl Links {
    fn sum(&mut self, values: &mut [f32]) -> Result<(), RingError> {
        let (rank, size) = (self.place.rank as usize, self.place.size as usize);
        for turn in turns(rank, size) {
            self.next.send(&values[chunk(turn.send, values.len(), size)]);
            let range = chunk(turn.receive, values.len(), size);
            if !turn.add {
                self.before.receive(&mut values[range])?;
                continue;
            }
            self.scratch.resize(range.len(), 0.0);
            self.before.receive(&mut self.scratch)?;
            // In the order of the ranks that it has been through: what came, then our own.
            values[range].iter_mut().zip(&self.scratch).for_each(|(own, came)| *own += came);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
