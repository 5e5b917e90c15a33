//! Sends to the next rank and receives from the one before. What was on its way when a connection broke is sent again. A
//! rank is lost that was replaced, has ended, or stays away; all ranks learn which.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;
use psjobs_rpc::{Endpoint, Pending, RRef};

use super::inbox::{Arrival, DONE, Inbox, LOST, OTHER_RING, PUT};
use super::{Place, RingError};

/// How long a connection may take to come back.
const RECONNECT: Duration = Duration::from_secs(2);
/// Chunks without an answer.
const WINDOW: usize = 4;
/// How often the neighbours are looked at while nothing arrives.
const LOOK: Duration = Duration::from_millis(100);
/// How often answers of the next rank are looked for while one is needed.
const ANSWER: Duration = Duration::from_millis(1);

/// A neighbour in the ring.
pub struct Neighbour {
    pub rank: u32,
    /// Distinguishes what travels between it and this rank from rings before.
    pub token: i64,
    /// Its inbox.
    pub inbox: RRef,
    /// The process that it was when the ring began.
    pub session: Option<u64>,
}

/// Both neighbours of a rank, which are one process in a ring of two.
pub struct Neighbours {
    endpoint: Endpoint,
    inbox: Inbox,
    next: Neighbour,
    before: Neighbour,
    /// Chunks that the next rank has not acknowledged, and the number of the first.
    unacknowledged: VecDeque<Chunk>,
    first: i64,
}

struct Chunk {
    values: Bytes,
    call: Option<Pending<i64>>,
}

impl Neighbour {
    fn lost(&self, reason: impl Into<String>) -> RingError {
        RingError::Lost { rank: self.rank, reason: reason.into() }
    }

    /// # Errors
    /// [`RingError::Lost`] if the process was replaced, has ended, or has stayed away for too long.
    fn check(&self, endpoint: &Endpoint) -> Result<(), RingError> {
        let name = self.inbox.owner();
        if endpoint.session(name) != self.session {
            return Err(self.lost("it was replaced"));
        }
        match endpoint.absence(name) {
            Some(absence) if absence.ended || absence.since.elapsed() > RECONNECT => Err(self.lost(absence.reason)),
            _ => Ok(()),
        }
    }
}

impl Neighbours {
    pub fn new(endpoint: Endpoint, inbox: Inbox, next: Neighbour, before: Neighbour) -> Self {
        Self { endpoint, inbox, next, before, unacknowledged: VecDeque::new(), first: 0 }
    }

    pub fn place(&self) -> Place {
        self.inbox.place()
    }

    /// Sends values to the next rank, without waiting until they have arrived.
    ///
    /// # Errors
    /// If a rank is lost.
    pub fn send(&mut self, values: &[f32]) -> Result<(), RingError> {
        while self.unacknowledged.len() >= WINDOW {
            self.wait(ANSWER)?;
        }
        let values = Bytes::copy_from_slice(bytemuck::cast_slice(values));
        self.unacknowledged.push_back(Chunk { values, call: None });
        self.send_unsent();
        Ok(())
    }

    /// Waits for values of the rank before, `want` f32 in the order of this machine's bytes.
    ///
    /// # Errors
    /// If a rank is lost, or the values are of another number.
    pub fn receive(&mut self, want: usize) -> Result<Bytes, RingError> {
        loop {
            match self.inbox.take(self.before.token) {
                Arrival::Values(values) if values.len() == want * size_of::<f32>() => return Ok(values),
                Arrival::Values(values) => {
                    let found = values.len() / size_of::<f32>();
                    return Err(RingError::OtherLength { rank: self.before.rank, found, want });
                }
                Arrival::Done => return Err(self.before.lost("it has ended its work")),
                Arrival::Lost { rank, reason } => return Err(RingError::Lost { rank, reason }),
                Arrival::Nothing => self.wait(LOOK)?,
            }
        }
    }

    /// Returns without waiting whether all ranks are there, while there is nothing to receive.
    ///
    /// # Errors
    /// If a rank is lost.
    pub fn look(&mut self) -> Result<(), RingError> {
        if let Some((rank, reason)) = self.inbox.lost(self.before.token) {
            return Err(RingError::Lost { rank, reason });
        }
        self.check()
    }

    /// Sends again what has to be, and checks that the neighbours live.
    fn check(&mut self) -> Result<(), RingError> {
        self.settle_sent()?;
        let (next_is_done, before_is_done) = self.inbox.done(self.before.token);
        for (neighbour, is_done) in [(&self.next, next_is_done), (&self.before, before_is_done)] {
            if !is_done {
                neighbour.check(&self.endpoint)?;
            }
        }
        Ok(())
    }

    /// Waits until something has arrived, or `limit` has passed.
    fn wait(&mut self, limit: Duration) -> Result<(), RingError> {
        self.check()?;
        self.inbox.wait(limit);
        Ok(())
    }

    /// Takes the answers of the next rank that are there, and sends again what it lacks.
    fn settle_sent(&mut self) -> Result<(), RingError> {
        if self.inbox.done(self.before.token).0 {
            // It has all that it needs, and may be gone.
            self.unacknowledged.clear();
        }
        while let Some(Chunk { call, .. }) = self.unacknowledged.front_mut()
            && let Some(answer) = call.take_if(|call| call.is_done())
        {
            let missing = match answer.wait() {
                Ok(OTHER_RING) => return Err(self.next.lost("it has left the ring")),
                Ok(missing) => missing,
                Err(error) if error.is_retryable() => self.first,
                Err(error) => return Err(self.next.lost(error.to_string())),
            };
            if missing > self.first {
                self.unacknowledged.pop_front();
                self.first += 1;
            } else {
                // It and those after it are sent again.
                self.unacknowledged.iter_mut().for_each(|chunk| chunk.call = None);
            }
        }
        self.send_unsent();
        Ok(())
    }

    /// Sends the chunks that are not on their way, if the next rank is connected.
    fn send_unsent(&mut self) {
        for (number, chunk) in (self.first..).zip(&mut self.unacknowledged) {
            if chunk.call.is_none() {
                if self.endpoint.absence(self.next.inbox.owner()).is_some() {
                    return;
                }
                // A connection that breaks just now is found at the next look.
                let sent = self.next.inbox.rpc_async(PUT, (self.next.token, number, chunk.values.clone()));
                chunk.call = sent.ok();
                if chunk.call.is_none() {
                    return;
                }
            }
        }
    }

    /// Reports to the next rank which one is lost. It passes that on, so that the ring has it, behind the values that each rank
    /// still needs.
    pub fn report_lost(&self, rank: u32, reason: &str) {
        if self.next.rank != rank {
            let lost = (self.next.token, i64::from(rank), reason.to_owned());
            self.notify(&[&self.next], |next| next.inbox.rpc_async(LOST, lost.clone()).ok());
        }
    }

    /// Leaves the ring before its end; the next rank has what this one has sent.
    pub fn leave(&mut self) {
        // A next rank that is lost needs nothing more.
        drop(self.settle_all());
        self.report_lost(self.place().rank, "it has left the ring");
    }

    /// Reports to the neighbours that this rank has done its work, when the next one has all of it.
    ///
    /// # Errors
    /// If a rank is lost before that.
    pub fn report_done(&mut self) -> Result<(), RingError> {
        self.settle_all()?;
        self.notify(&[&self.next, &self.before], |neighbour| neighbour.inbox.rpc_async(DONE, neighbour.token).ok());
        Ok(())
    }

    fn settle_all(&mut self) -> Result<(), RingError> {
        while !self.unacknowledged.is_empty() {
            self.wait(ANSWER)?;
        }
        Ok(())
    }

    /// Makes a call to each of `neighbours` that is connected, and waits for the answers, as long as a call may take.
    fn notify(&self, neighbours: &[&Neighbour], call: impl Fn(&Neighbour) -> Option<Pending<()>>) {
        let connected = |neighbour: &&&Neighbour| self.endpoint.absence(neighbour.inbox.owner()).is_none();
        let calls: Vec<_> = neighbours.iter().filter(connected).filter_map(|neighbour| call(neighbour)).collect();
        // One that does not answer finds this out by itself.
        calls.into_iter().for_each(|call| drop(call.wait()));
    }
}
