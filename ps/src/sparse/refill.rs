//! The way of rows from a checkpoint to the tasks that own them.

use super::key;
use super::owner::Owned;
use super::place::Place;
use super::rows::Row;
use super::shard::Clock;

/// The rows of one server's tables, while they are read from a checkpoint.
pub(crate) struct Refill {
    pub(super) place: Place,
    pub(super) shards: Vec<Owned>,
}

impl Refill {
    /// Takes a row of a table, if it belongs to this server.
    pub fn insert(&mut self, table: usize, row: Row) {
        if key::server(row.key, self.place.servers) == self.place.server {
            let shard = key::shard(row.key, self.shards.len());
            self.shards[shard].insert(table, row);
        }
    }

    /// Goes on from where the tasks were whose rows were read, by server: each task from where its own was, if the
    /// rows are cut as they were, else all from the furthest.
    pub fn resume(&mut self, clocks: &[Vec<Clock>]) {
        let Place { server, servers, .. } = self.place;
        let own = clocks.get(server as usize).filter(|own| own.len() == self.shards.len());
        match own.filter(|_| clocks.len() == servers as usize) {
            Some(own) => self.shards.iter_mut().zip(own).for_each(|(shard, clock)| shard.resume([clock])),
            None => self.shards.iter_mut().for_each(|shard| shard.resume(clocks.iter().flatten())),
        }
    }
}
