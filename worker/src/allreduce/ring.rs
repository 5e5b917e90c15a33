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
    waiting: Duration,
}

/// Where values are handed in.
enum Work {
    /// To the thread that adds up.
    Ring(mpsc::Sender<Vec<f32>>),
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
        let (work, thread) = match neighbours {
            None => (Work::Alone(done), None),
            Some(Neighbours { next, before }) => {
                let before = Receiver::new(before, place.before(), silence)?;
                let links = Links { place, next: Sender::start(next)?, before, scratch: Vec::new() };
                let (work, queue) = mpsc::channel();
                let thread = thread::Builder::new().name("ring".into()).spawn(move || add_up(links, &queue, &done))?;
                (Work::Ring(work), Some(thread))
            }
        };
        Ok(Self { place, work: Some(work), sums, thread, under_way: 0, interrupt, waiting: Duration::ZERO })
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

    /// Hands in values; their sum over all ranks comes out of [`Ring::summed`] in its turn.
    pub fn begin_sum(&mut self, values: Vec<f32>) {
        self.under_way += 1;
        // A thread that has ended left an error to be taken out.
        match &self.work {
            Some(Work::Ring(work)) => drop(work.send(values)),
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

    /// The smallest of the numbers that the ranks give, which are below 2^48.
    ///
    /// # Errors
    /// As [`Ring::summed`].
    pub fn smallest(&mut self, number: u64) -> Result<u64, RingError> {
        // Each rank's number in a place of its own, as two parts that an f32 holds exactly.
        let mut all = vec![0.0; 2 * self.place.size as usize];
        all[2 * self.place.rank as usize] = (number >> 24) as f32;
        all[2 * self.place.rank as usize + 1] = (number & 0xff_ffff) as f32;
        self.begin_sum(all);
        let all = self.summed()?;
        let numbers = all.chunks_exact(2).map(|parts| ((parts[0] as u64) << 24) | parts[1] as u64);
        Ok(numbers.min().unwrap_or(number))
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

fn add_up(mut links: Links, queue: &mpsc::Receiver<Vec<f32>>, done: &mpsc::Sender<Sum>) {
    while let Ok(mut values) = queue.recv() {
        let summed = links.sum(&mut values);
        let failed = summed.is_err();
        if let Err(RingError::Lost { rank, .. }) = &summed {
            links.next.tell_lost(*rank);
        }
        if done.send(summed.map(|()| values)).is_err() || failed {
            return;
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
