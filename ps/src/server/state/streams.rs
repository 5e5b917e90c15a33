//! The open streams of trainers. A newer stream replaces older ones.

use std::collections::BTreeMap;

use psjobs_api::env::MOST_CONNECTIONS;
use tonic::Status;

use crate::proto;
use crate::wire::StreamAbort;

/// The kind of a stream of a trainer to a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamKind {
    /// A training stream: number `lane` of the `lanes` streams that the blocks are distributed over.
    Exchange { lane: u32, lanes: u32 },
    /// A stream of the current values; a trainer has one at a time.
    Pull,
    /// A stream of values for blocks that have none; a trainer has one at a time.
    Initialize,
}

impl StreamKind {
    /// Returns the kind of the training stream that `open` opens.
    ///
    /// # Errors
    /// If `lane` or `lanes` is out of range.
    pub fn of(open: &proto::Open) -> Result<Self, Status> {
        let (lane, lanes) = (open.lane, open.lanes.max(1));
        if lane < lanes && lanes <= MOST_CONNECTIONS {
            return Ok(Self::Exchange { lane, lanes });
        }
        Err(Status::invalid_argument(format!(
            "stream {lane} of {lanes}: a trainer has up to {MOST_CONNECTIONS} to a server, numbered from 0; set lane and \
             lanes of Open"
        )))
    }

    /// Returns a number that distinguishes the kinds, its own number, and the number of streams of its kind.
    fn parts(self) -> (u8, u32, u32) {
        match self {
            Self::Pull => (0, 0, 1),
            Self::Exchange { lane, lanes } => (1, lane, lanes),
            Self::Initialize => (2, 0, 1),
        }
    }
}

/// The place of a call among all calls of this server. Calls are registered by tasks of their own, which may run in
/// another order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Arrival(u64);

/// The open streams of one trainer process to a shard.
#[derive(Debug)]
struct Open {
    incarnation: u32,
    lanes: u32,
    /// By number of the stream: when it arrived, and its end.
    ends: BTreeMap<u32, (Arrival, StreamAbort)>,
}

impl Open {
    fn ends(self) -> impl Iterator<Item = StreamAbort> {
        self.ends.into_values().map(|(_, end)| end)
    }
}

/// All open streams.
#[derive(Debug, Default)]
pub struct Streams {
    /// By trainer, shard and kind.
    open: BTreeMap<(u32, u32, u8), Open>,
    arrivals: u64,
}

impl Streams {
    /// Records that a call arrived.
    pub fn arrive(&mut self) -> Arrival {
        self.arrivals += 1;
        Arrival(self.arrivals)
    }

    /// Registers a stream, which `end` aborts. Returns the streams that the caller has to abort: the one with the same
    /// number, or all of them if the incarnation or the number of lanes differs, so that a block never receives
    /// gradients of a trainer over two streams. If one of them arrived after this stream, this stream itself.
    pub fn open(
        &mut self,
        id: &proto::TrainerId,
        shard: u32,
        kind: StreamKind,
        (arrival, end): (Arrival, StreamAbort),
    ) -> Vec<StreamAbort> {
        let (kind, lane, lanes) = kind.parts();
        let fresh = || Open { incarnation: id.incarnation, lanes, ends: BTreeMap::new() };
        let open = self.open.entry((id.index, shard, kind)).or_insert_with(fresh);
        let all = (open.incarnation, open.lanes) != (id.incarnation, lanes);
        let newest =
            open.ends.iter().filter(|(number, _)| all || **number == lane).map(|(_, (arrival, _))| *arrival).max();
        if open.incarnation == id.incarnation && newest > Some(arrival) {
            return vec![end];
        }
        let mut replaced = Vec::new();
        if all {
            replaced.extend(std::mem::replace(open, fresh()).ends.into_values());
        }
        replaced.extend(open.ends.insert(lane, (arrival, end)));
        replaced.into_iter().map(|(_, end)| end).collect()
    }

    /// Removes and returns the streams of a trainer.
    pub fn of(&mut self, trainer: u32) -> Vec<StreamAbort> {
        self.open.extract_if(.., |(of, ..), _| *of == trainer).flat_map(|(_, open)| open.ends()).collect()
    }

    /// Removes and returns the streams to a shard.
    pub fn to(&mut self, shard: u32) -> Vec<StreamAbort> {
        self.open.extract_if(.., |(_, to, _), _| *to == shard).flat_map(|(_, open)| open.ends()).collect()
    }

    /// Removes and returns all streams.
    pub fn all(&mut self) -> Vec<StreamAbort> {
        std::mem::take(&mut self.open).into_values().flat_map(Open::ends).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exchange(lane: u32, lanes: u32) -> StreamKind {
        StreamKind::Exchange { lane, lanes }
    }

    #[test]
    fn a_stream_takes_the_place_of_those_that_a_block_may_hear_no_more() {
        // Trainer 1 has three streams; another one comes.
        let rows = [
            ("the same one again", 1, 0, 0, exchange(1, 3), &[1][..]),
            ("of a successor", 1, 1, 0, exchange(2, 3), &[0, 1, 2]),
            ("the only one", 1, 0, 0, exchange(0, 1), &[0, 1, 2]),
            ("one of more", 1, 0, 0, exchange(3, 4), &[0, 1, 2]),
            ("to another shard", 1, 0, 1, exchange(0, 3), &[]),
            ("of another trainer", 2, 0, 0, exchange(0, 3), &[]),
            ("a pull", 1, 0, 0, StreamKind::Pull, &[]),
            ("of initial values", 1, 0, 0, StreamKind::Initialize, &[]),
        ];
        for (label, index, incarnation, shard, kind, want) in rows {
            let mut streams = Streams::default();
            let of = |index, incarnation| proto::TrainerId { job_uid: String::new(), index, incarnation };
            let ends: Vec<StreamAbort> = (0..3).map(|_| StreamAbort::default()).collect();
            for (number, end) in (0..).zip(&ends) {
                let end = (streams.arrive(), end.clone());
                assert!(streams.open(&of(1, 0), 0, exchange(number, 3), end).is_empty(), "{label}");
            }
            let why = || Status::aborted("replaced");
            let end = (streams.arrive(), StreamAbort::default());
            let replaced = streams.open(&of(index, incarnation), shard, kind, end);
            replaced.into_iter().for_each(|end| end.abort(why()));
            let ended: Vec<usize> = (0..3).filter(|number| ends[*number].is_aborted()).collect();
            assert_eq!(ended, want, "{label}");
            let left = streams.of(index).len();
            assert_eq!(left, if index == 1 { 4 - want.len() } else { 1 }, "{label}");
            assert_eq!(streams.all().len(), if index == 1 { 0 } else { 3 }, "{label}");
        }
    }

    #[test]
    fn a_stream_that_is_registered_late_does_not_replace_one_that_arrived_after_it() {
        // The kinds of the earlier and the later stream of a trainer, and whether the earlier one stays.
        let rows = [
            (StreamKind::Pull, StreamKind::Pull, false),
            (StreamKind::Initialize, StreamKind::Initialize, false),
            (StreamKind::Pull, StreamKind::Initialize, true),
            (exchange(0, 1), exchange(0, 1), false),
            (exchange(0, 1), exchange(1, 2), false),
            (exchange(0, 2), exchange(1, 2), true),
            (exchange(0, 1), StreamKind::Pull, true),
        ];
        for (earlier, later, stays) in rows {
            let mut streams = Streams::default();
            let id = proto::TrainerId { job_uid: String::new(), index: 0, incarnation: 0 };
            let [first, second] = [streams.arrive(), streams.arrive()];
            assert!(streams.open(&id, 0, later, (second, StreamAbort::default())).is_empty());
            let late = StreamAbort::default();
            let aborted = streams.open(&id, 0, earlier, (first, late.clone()));
            aborted.iter().for_each(|end| end.abort(Status::aborted("replaced")));
            assert_eq!(late.is_aborted(), !stays, "{earlier:?} after {later:?}");
            assert_eq!(streams.all().len(), 1 + usize::from(stays), "{earlier:?} after {later:?}");
        }
    }

    #[test]
    fn numbers_that_are_none_are_refused() {
        for (lane, lanes, good) in
            [(0, 0, true), (0, 1, true), (15, 16, true), (1, 0, false), (2, 2, false), (0, 17, false)]
        {
            let open = proto::Open { lane, lanes, ..proto::Open::default() };
            assert_eq!(StreamKind::of(&open).is_ok(), good, "{lane} of {lanes}");
        }
    }
}
