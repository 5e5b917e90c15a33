//! The exchange of one trainer with the blocks of all servers, as a state machine without I/O: it decides which block
//! leaves next and over which stream, which answers count, and what is sent again after a stream has broken.
//! [`AsyncSession`](super::AsyncSession) owns the streams and carries out what it decides.
//!
//! All trainers send their blocks in one order, back layers first, whatever the number of their connections, so that a
//! round never waits for a block that a trainer holds back.

mod queue;
#[cfg(test)]
mod tests;
mod versions;

use std::collections::BTreeMap;

use self::queue::Queue;
use self::versions::Versions;
use super::lane::Name;
use crate::layout::Layout;

/// The content that a trainer exchanges with every block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The gradients of a step, for the parameters after it.
    Step,
    /// The step with which a trainer of an elastic job begins, for the parameters before it. A block that is past that
    /// step answers with the one that it is at.
    Entry,
}

/// The gradients of a step that are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
    /// All of the elements from here on, in the flat space.
    From(usize),
    /// The rest will not come.
    GivenUp,
}

/// The next block to send, and the number of the stream to its server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outgoing {
    pub block: u32,
    pub lane: u32,
}

/// The streams to a server that were opened together.
#[derive(Clone, Debug)]
pub struct Opened {
    /// Streams among which the server's blocks are divided.
    pub width: u32,
    /// The streams that are new: all of them, or the one that had broken.
    pub lanes: Vec<u32>,
    /// Distinguishes them from the streams that had these numbers before.
    pub generation: u64,
    /// Blocks of a step that may be unanswered at a time.
    pub window: usize,
}

/// The state of the exchange with all servers.
#[derive(Debug)]
pub struct Exchange {
    layout: Layout,
    purpose: Purpose,
    step: u64,
    /// The first block whose content is there. Those before it are still being computed.
    ready: u32,
    /// The highest step that an answer has named, at least `step`.
    furthest: u64,
    servers: Vec<Server>,
    /// Blocks without an answer.
    owed: Vec<bool>,
    unanswered: usize,
    /// Updates of each block that parameters contain.
    versions: Versions,
}

/// The exchange with one server.
#[derive(Debug, Default)]
struct Server {
    queue: Queue,
    width: u32,
    window: usize,
    /// The newest generation of each stream.
    generations: BTreeMap<u32, u64>,
}

impl Exchange {
    /// Creates the state of a trainer that has no stream to any of `servers` yet. It may compute a gradient while the exchange of
    /// the one before is under way (`overlaps`).
    #[must_use]
    pub fn new(layout: Layout, servers: usize, overlaps: bool) -> Self {
        let blocks = layout.blocks() as usize;
        Self {
            layout,
            purpose: Purpose::Step,
            step: 0,
            ready: 0,
            furthest: 0,
            servers: (0..servers).map(|_| Server::default()).collect(),
            owed: vec![false; blocks],
            unanswered: 0,
            versions: Versions::new(blocks, overlaps),
        }
    }

    /// Begins an exchange with all blocks. The one before is over, or was given up.
    pub fn begin(&mut self, purpose: Purpose, step: u64) {
        (self.purpose, self.step, self.ready, self.furthest) = (purpose, step, 0, step);
        if purpose == Purpose::Step {
            self.versions.begin();
        }
        self.owed.fill(true);
        self.unanswered = self.owed.len();
        for (index, server) in (0..).zip(&mut self.servers) {
            server.queue.begin(self.layout.owned_by(index));
        }
    }

    /// Lets only those blocks leave whose elements are all at or after `first` in the flat space.
    pub fn set_ready(&mut self, first: usize) {
        self.ready = first.div_ceil(self.layout.block_elements()) as u32;
    }

    /// Records new streams to a server. What the streams before them took along is sent again.
    pub fn opened(&mut self, server: u32, opened: &Opened) {
        let Server { queue, width, window, generations } = &mut self.servers[server as usize];
        (*width, *window) = (opened.width, opened.window);
        generations.retain(|lane, _| *lane < opened.width);
        generations.extend(opened.lanes.iter().map(|lane| (*lane, opened.generation)));
        queue.lost(|block| opened.lanes.contains(&self.layout.lane(block, opened.width)));
    }

    /// Returns the first step that a server may lack which has kept what it was given: it has answered all steps before.
    #[must_use]
    pub fn may_lack(&self, server: u32) -> u64 {
        let owes = self.layout.owned_by(server).any(|block| self.owed[block as usize]);
        self.step.saturating_add(u64::from(!owes))
    }

    /// Sends all blocks of a server again, also those that it has answered: it was started anew and has forgotten them, and
    /// another trainer may wait for a round that this one takes for closed.
    pub fn forgotten(&mut self, server: u32) {
        for block in self.layout.owned_by(server) {
            let owed = std::mem::replace(&mut self.owed[block as usize], true);
            self.unanswered += usize::from(!owed);
        }
        self.servers[server as usize].queue.begin(self.layout.owned_by(server));
    }

    /// Returns whether a stream is open, as far as is known. What comes over an older one of its number is dropped.
    #[must_use]
    pub fn is_open(&self, stream: Name) -> bool {
        self.servers[stream.server as usize].generations.get(&stream.lane) == Some(&stream.generation)
    }

    /// Returns one of the streams to a server.
    #[must_use]
    pub fn any_stream(&self, server: u32) -> Option<Name> {
        let (lane, generation) = self.servers[server as usize].generations.first_key_value()?;
        Some(Name { server, lane: *lane, generation: *generation })
    }

    /// Returns the next block that leaves for a server, `None` while its window is full.
    pub fn next_to_send(&mut self, server: u32) -> Option<Outgoing> {
        let Server { queue, width, window, .. } = &mut self.servers[server as usize];
        let window = if self.purpose == Purpose::Step { *window } else { usize::MAX };
        let block = queue.next(window, self.ready)?;
        Some(Outgoing { block, lane: self.layout.lane(block, *width) })
    }

    /// Takes the answer of a block that names `step`. Returns whether its values count: they are put in place then, and
    /// [`Self::holds`] is called.
    #[must_use]
    pub fn receive(&mut self, stream: Name, block: u32, step: u64) -> bool {
        let owed = self.owed.get(block as usize) == Some(&true) && self.layout.owner(block) == stream.server;
        let refused = self.purpose == Purpose::Entry && step > self.step;
        // A gradient that was sent again is answered twice.
        if !owed || !(refused || step == self.step) {
            return false;
        }
        self.owed[block as usize] = false;
        self.unanswered -= 1;
        self.servers[stream.server as usize].queue.answered(block);
        self.furthest = self.furthest.max(step);
        !refused
    }

    /// Records that the parameters contain `version` updates of a block.
    pub fn holds(&mut self, block: u32, version: u64) {
        self.versions.holds(block, version);
    }

    /// The trainer takes the parameters, and computes its next gradient with them. Where exchanges do not overlap it always
    /// does so when one has ended.
    pub fn take(&mut self) {
        self.versions.take();
    }

    /// Returns the updates of a block that the parameters contain with which the gradient was computed.
    #[must_use]
    pub fn version(&self, block: u32) -> u64 {
        self.versions.of_gradient(block)
    }

    /// Returns what is exchanged, and the step.
    #[must_use]
    pub fn subject(&self) -> (Purpose, u64) {
        (self.purpose, self.step)
    }

    /// Returns whether every block has answered.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.unanswered == 0
    }

    /// Returns the highest step that a block has named: above the step of the entry, that is to be repeated.
    #[must_use]
    pub fn furthest(&self) -> u64 {
        self.furthest
    }
}
