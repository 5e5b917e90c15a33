//! A rank's place in the ring. Sums are done one after the other on a thread of its own; the trainer
//! hands values in and takes the sums out, in the same order on every rank.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::order::{chunk, rounds};
use super::{Neighbours, Place, RingError};

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

impl Ring {
    /// Starts the ring with the neighbours that were met; without them, this trainer is alone. `interrupt` ends whatever
    /// is waited for.
    ///
    /// # Errors
    /// If the system has no thread left.
    pub fn start(neighbours: Option<Neighbours>, interrupt: Arc<AtomicBool>) -> io::Result<Self> {
        let place = neighbours.as_ref().map_or(Place { rank: 0, size: 1 }, Neighbours::place);
        let (done, sums) = mpsc::channel();
        let broken = Arc::<AtomicBool>::default();
        let (work, thread) = match neighbours {
            None => (Work::Alone(done), None),
            Some(neighbours) => {
                let (work, queue) = mpsc::channel();
                let breaks = broken.clone();
                let run = move || {
                    if let Err(error) = add_up(neighbours, &queue, &done) {
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
    mut neighbours: Neighbours,
    queue: &mpsc::Receiver<Option<Vec<f32>>>,
    done: &mpsc::Sender<Sum>,
) -> Result<(), RingError> {
    let own = neighbours.place().rank;
    loop {
        let summed = match queue.recv_timeout(LOOK) {
            Ok(Some(mut values)) => sum(&mut neighbours, &mut values).map(|()| Some(values)),
            Ok(None) => return neighbours.report_done(),
            Err(RecvTimeoutError::Timeout) => neighbours.look().map(|()| None),
            Err(RecvTimeoutError::Disconnected) => {
                neighbours.leave();
                return Ok(());
            }
        };
        match &summed {
            Err(RingError::Lost { rank, reason }) => neighbours.report_lost(*rank, reason),
            // The others cannot go on with this rank.
            Err(error) => neighbours.report_lost(own, &error.to_string()),
            Ok(_) => {}
        }
        if let Some(values) = summed?
            && done.send(Ok(values)).is_err()
        {
            neighbours.leave();
            return Ok(());
        }
    }
}

/// Replaces `values` by their sum over all ranks.
fn sum(neighbours: &mut Neighbours, values: &mut [f32]) -> Result<(), RingError> {
    let Place { rank, size } = neighbours.place();
    let (rank, size) = (rank as usize, size as usize);
    for round in rounds(rank, size) {
        neighbours.send(&values[chunk(round.send, values.len(), size)])?;
        let range = chunk(round.receive, values.len(), size);
        let came = neighbours.receive(range.len())?;
        let own = &mut values[range];
        if round.add {
            // In the order of the ranks that it has been through: what came, then our own.
            own.iter_mut().zip(came.as_chunks().0).for_each(|(own, came)| *own += f32::from_ne_bytes(*came));
        } else {
            bytemuck::cast_slice_mut(own).copy_from_slice(&came);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
