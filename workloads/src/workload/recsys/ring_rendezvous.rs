//! How trainers come together: each says at server 0 where it listens, and asks there for the next one. They
//! meet again when one of them was lost and its replacement has come.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use psjobs_api::Environment;
use psjobs_rpc::Peer;

use super::error::RecsysError;
use super::rows::{Beginning, Rows};
use crate::allreduce::{Inbox, Meeting, Neighbours, Ring, RingError};
use psjobs_worker::train::modules::Participant;
use psjobs_worker::train::replicated_layers::ReplicatedLayers;

/// The place where the trainers come together, and how long one waits there for the others.
pub struct RingRendezvous<'a> {
    /// `None` if this trainer is alone.
    pub others: Option<Others<'a>>,
    /// Steps of each trainer.
    pub total: u64,
    pub interrupt: &'a Arc<AtomicBool>,
    pub connect_timeout: Duration,
}

/// The way to the other trainers of a job.
pub struct Others<'a> {
    server: &'a Peer,
    participant: &'a Participant,
    meeting: Meeting,
}

impl<'a> Others<'a> {
    /// Lets the others connect to this trainer, whose registry has offered `inbox`.
    pub fn find(environment: &Environment, participant: &'a Participant, inbox: Inbox) -> Result<Self, RecsysError> {
        let (endpoint, server) = (participant.endpoint(), &participant.servers()[0]);
        endpoint.publish(server, &environment.servers[0]).map_err(RecsysError::Publish)?;
        Ok(Self { server, participant, meeting: Meeting::new(endpoint.clone(), inbox) })
    }
}

impl RingRendezvous<'_> {
    /// Closes the ring, or lets this trainer end alone if another one has finished, and brings `dense` to the state of the trainer that has come furthest since the servers went to
    /// a checkpoint, if they did. The step that all go on from: the first that one of them says is `next`.
    pub fn meet(
        &mut self,
        rows: &mut Rows,
        dense: &mut ReplicatedLayers,
        beginning: &Beginning,
        mut next: u64,
    ) -> Result<(Ring, u64), RecsysError> {
        loop {
            next = rows.follow(dense, beginning, next).map_err(RecsysError::Follow)?;
            let mut ring = self.close(next)?;
            match agree(&mut ring, rows.epoch(), dense, next) {
                Ok(Some(first)) => return Ok((ring, first)),
                Ok(None) => tracing::info!("the servers have gone to a checkpoint meanwhile; meeting again"),
                // One was lost again, before it could say where it is.
                Err(lost @ RingError::Lost { .. }) => tracing::warn!("{lost}; meeting again"),
                Err(error) => return Err(RecsysError::Meet(error)),
            }
        }
    }

    fn close(&mut self, next: u64) -> Result<Ring, RecsysError> {
        let (connect_timeout, interrupt) = (self.connect_timeout, self.interrupt);
        // One that has finished has added up the gradients of the last step, so that all are at that step at least.
        let is_last = next.saturating_add(1) >= self.total;
        let meet = |Others { server, participant, meeting }: &mut Others<'_>| {
            let endpoint = participant.endpoint();
            let locate = |name: &str, limit| endpoint.locate(server, name, limit);
            let finished = || if is_last { participant.finished() } else { Vec::new() };
            match meeting.meet(locate, finished, connect_timeout, interrupt) {
                Err(RingError::Finished { rank }) => {
                    tracing::info!(step = next, "trainer {rank} has finished; this one ends without the others");
                    Ok(None)
                }
                met => met.map(Some).map_err(RecsysError::Meet),
            }
        };
        let neighbours = self.others.as_mut().map(meet).transpose()?.flatten();
        if let Some(place) = neighbours.as_ref().map(Neighbours::place) {
            tracing::info!(rank = place.rank, size = place.size, "the trainers' ring is closed");
        }
        Ring::start(neighbours, self.interrupt.clone()).map_err(RecsysError::Start)
    }
}

/// The step to go on from; `None` if not all are where the servers are.
fn agree(ring: &mut Ring, epoch: u64, dense: &mut ReplicatedLayers, next: u64) -> Result<Option<u64>, RingError> {
    // The lower bits distinguish two of one job.
    let epochs = ring.gather(epoch & ((1 << 48) - 1))?;
    if epochs.iter().any(|other| *other != epochs[0]) {
        return Ok(None);
    }
    let first = ring.gather(next)?.into_iter().min().unwrap_or(next);
    let updates = ring.gather(dense.updates())?;
    let steps = ring.gather(dense.next_step())?;
    let newest = updates.iter().copied().max().unwrap_or(0);
    // The lowest of those that have come furthest gives; the others add nothing to it.
    let source = updates.iter().position(|updates| *updates == newest).unwrap_or(0);
    if updates.iter().any(|updates| *updates != newest) {
        let gives = source == ring.place().rank as usize;
        ring.begin_sum(if gives { dense.state() } else { vec![0.0; dense.state_len()] });
        let state = ring.summed()?;
        dense.take(&state, newest, steps[source]);
        tracing::info!(trainer = source, updates = newest, "took over the dense layers");
    } else if first > 0 && newest == 0 {
        tracing::warn!(step = first, "no trainer has the dense layers any more: they begin anew, the tables go on");
    }
    Ok(Some(first))
}
