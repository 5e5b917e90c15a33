//! How trainers come together: each says at server 0 where it listens, and asks there for the next one. They
//! meet again when one of them was lost and its replacement has come.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use psjobs_api::Environment;

use super::error::RecsysError;
use super::rows::{Beginning, Rows};
use crate::allreduce::{Identity, Neighbours, Place, Ring, RingError};
use psjobs_rpc::{rendezvous, server_integration};
use psjobs_worker::train::modules::Participant;
use psjobs_worker::train::replicated_layers::ReplicatedLayers;

/// With whom and how patiently.
#[derive(Clone, Copy)]
pub struct RingRendezvous<'a> {
    /// `None` if this trainer is alone.
    pub job: Option<(&'a Environment, &'a Participant)>,
    pub interrupt: &'a Arc<AtomicBool>,
    pub patience: Duration,
}

impl RingRendezvous<'_> {
    /// Closes the ring, and brings `dense` to the state of the trainer that has come furthest since the servers went to
    /// a checkpoint, if they did. The step that all go on from: the first that one of them says is `next`.
    pub fn meet(
        &self,
        rows: &mut Rows,
        dense: &mut ReplicatedLayers,
        beginning: &Beginning,
        mut next: u64,
    ) -> Result<(Ring, u64), RecsysError> {
        loop {
            next = rows.follow(dense, beginning, next).map_err(RecsysError::Follow)?;
            let mut ring = self.close()?;
            match agree(&mut ring, rows.epoch(), dense, next) {
                Ok(Some(first)) => return Ok((ring, first)),
                Ok(None) => tracing::info!("the servers have gone to a checkpoint meanwhile; meeting again"),
                // One was lost again, before it could say where it is.
                Err(lost @ RingError::Lost { .. }) => tracing::warn!("{lost}; meeting again"),
                Err(error) => return Err(RecsysError::Meet(error)),
            }
        }
    }

    fn close(&self) -> Result<Ring, RecsysError> {
        let alone = Place { rank: 0, size: 1 };
        let place = self.job.map_or(alone, |(job, _)| Place { rank: job.index, size: job.trainers });
        let neighbours = match self.job {
            Some((environment, participant)) if place.size > 1 => Some(self.find(place, environment, participant)?),
            _ => None,
        };
        Ring::start(place, neighbours, self.interrupt.clone()).map_err(RecsysError::Start)
    }

    fn find(&self, place: Place, job: &Environment, participant: &Participant) -> Result<Neighbours, RecsysError> {
        let (endpoint, server) = (participant.endpoint(), &participant.servers()[0]);
        let listener = rendezvous::listen_towards(&job.servers[0]).map_err(RecsysError::Start)?;
        let own = listener.local_addr().map_err(RecsysError::Start)?.to_string();
        endpoint.publish_address(server, &own).map_err(RecsysError::Publish)?;
        let next = server_integration::trainer_name(place.next());
        let address = |patience| endpoint.locate(server, &next, patience).map_err(|error| error.to_string());
        let identity = Identity { place, uid: &job.uid, credentials: endpoint.network().credentials() };
        let found = Neighbours::connect(identity, &listener, address, self.patience, self.interrupt);
        let found = found.map_err(RecsysError::Meet)?;
        tracing::info!(rank = place.rank, size = place.size, "the trainers' ring is closed");
        Ok(found)
    }
}

/// The step to go on from; `None` if not all are where the servers are.
fn agree(ring: &mut Ring, epoch: u64, dense: &mut ReplicatedLayers, next: u64) -> Result<Option<u64>, RingError> {
    // The lower bits tell two of one job from each other.
    let epochs = ring.gather(epoch & ((1 << 48) - 1))?;
    if epochs.iter().any(|other| *other != epochs[0]) {
        return Ok(None);
    }
    let first = ring.gather(next)?.into_iter().min().unwrap_or(next);
    let updates = ring.gather(dense.updates())?;
    let newest = updates.iter().copied().max().unwrap_or(0);
    // The lowest of those that have come furthest gives; the others add nothing to it.
    let source = updates.iter().position(|updates| *updates == newest);
    if updates.iter().any(|updates| *updates != newest) {
        let gives = source == Some(ring.place().rank as usize);
        ring.begin_sum(if gives { dense.state() } else { vec![0.0; dense.state_len()] });
        let state = ring.summed()?;
        dense.take(&state, newest);
        tracing::info!(trainer = source, updates = newest, "took over the dense layers");
    } else if first > 0 && newest == 0 {
        tracing::warn!(step = first, "no trainer has the dense layers any more: they begin anew, the tables go on");
    }
    Ok(Some(first))
}
