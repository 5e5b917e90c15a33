//! Puts the values of answers into the flat parameters piece by piece, as a stream brings them. It decides which answers may
//! be written there and when: from the departure of a block's gradient until its answer is complete, or the exchange ends.
//!
//! An answer that breaks off leaves some elements of its block new and the others old, each of them whole. The block is not
//! answered then: only [`Landing::end`] makes it so. Its gradient is sent again and answered with all values, or all blocks
//! are pulled. Outside of an exchange nothing is awaited, so nothing is written while a trainer computes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use psjobs_arithmetic::codec::Pieces;

use crate::proto;
use crate::shm::Mapping;
use crate::wire::codec_number;

/// The place where the answers of one stream land.
#[derive(Debug)]
pub struct Landing {
    /// A mapping through which only streams write.
    parameters: Arc<Mapping>,
    awaited: Mutex<Awaited>,
}

/// The blocks whose answers may land.
#[derive(Debug, Default)]
struct Awaited {
    blocks: BTreeMap<u32, Answer>,
    /// Number of the next answer that is awaited. Each has its own, so that one that began to land before the stream was
    /// [withdrawn](Landing::withdraw) is not completed after its block is awaited again.
    next: u64,
}

#[derive(Clone, Debug)]
struct Answer {
    number: u64,
    step: u64,
    range: Range<usize>,
}

/// An answer whose values are on their way.
#[derive(Debug)]
pub struct Arriving {
    number: u64,
    block: u32,
    pieces: Pieces,
}

impl Landing {
    /// Creates the place of a stream. Nothing but streams writes through `parameters`, each its own blocks.
    #[must_use]
    pub fn new(parameters: Arc<Mapping>) -> Self {
        Self { parameters, awaited: Mutex::default() }
    }

    /// Lets the answer of `step` to a block land, whose elements are those of `range`. Call it before the gradient leaves.
    pub fn await_answer(&self, block: u32, step: u64, range: Range<usize>) {
        let Awaited { blocks, next } = &mut *self.awaited.lock();
        blocks.insert(block, Answer { number: *next, step, range });
        *next += 1;
    }

    /// Lets no answer land any more that has not done so. When this returns, nothing is written.
    pub fn withdraw(&self) {
        self.awaited.lock().blocks.clear();
    }

    /// Begins to put the values of an answer in place, which has `head` and a payload of `length` bytes. `None` if it is not
    /// awaited or not that of its block: then the session looks at the whole message.
    #[must_use]
    pub fn begin(&self, head: &proto::ParameterBlock, length: usize) -> Option<Arriving> {
        let codec = codec_number::from_number(head.codec)?;
        let awaited = self.awaited.lock();
        let answer = awaited.blocks.get(&head.block).filter(|answer| answer.step == head.step)?;
        let pieces = Pieces::new(codec, length, answer.range.len())?;
        Some(Arriving { number: answer.number, block: head.block, pieces })
    }

    /// Puts the next piece of the values in place, unless the answer is awaited no more.
    pub fn take(&self, arriving: &mut Arriving, piece: &[u8]) {
        // The lock is held while values are written, for `withdraw` to wait.
        let awaited = self.awaited.lock();
        if let Some(Answer { range, .. }) = arriving.of(&awaited) {
            let pieces = &mut arriving.pieces;
            self.parameters.fill_parameters(range.start, range.len(), |block| pieces.take(piece, block));
        }
    }

    /// Ends an answer whose payload has come. Returns whether all of its values are in place; if not, it was awaited no
    /// more before it was complete, and does not count.
    #[must_use]
    pub fn end(&self, arriving: &Arriving) -> bool {
        let mut awaited = self.awaited.lock();
        let is_complete = arriving.of(&awaited).is_some();
        if is_complete {
            awaited.blocks.remove(&arriving.block);
        }
        is_complete
    }
}

impl Arriving {
    /// Returns what is awaited of this answer, if it is.
    fn of(&self, awaited: &Awaited) -> Option<Answer> {
        awaited.blocks.get(&self.block).filter(|answer| answer.number == self.number).cloned()
    }
}

#[cfg(test)]
mod tests {
    use psjobs_arithmetic::codec::Codec;

    use super::*;

    /// A landing of which block 3 is elements 2 to 4 of 6, and the trainer's view of the parameters, all 7.
    fn landing() -> (Landing, Mapping) {
        let mut memory = Mapping::new(6).expect("a memory file");
        memory.parameters_mut().fill(7.0);
        let streams = Mapping::receive(memory.file().try_clone_to_owned().expect("a handle"), 6).expect("maps");
        (Landing::new(Arc::new(streams)), memory)
    }

    fn head(step: u64, codec: Codec) -> proto::ParameterBlock {
        proto::ParameterBlock { step, block: 3, codec: codec_number::number(codec), version: 9, ..Default::default() }
    }

    fn bytes(values: [f32; 2]) -> Vec<u8> {
        values.map(f32::to_le_bytes).concat()
    }

    #[test]
    fn an_answer_lands_in_its_place_and_counts_when_it_is_complete() {
        let (landing, memory) = landing();
        landing.await_answer(3, 5, 2..4);
        let mut arriving = landing.begin(&head(5, Codec::F32), 8).expect("awaited");
        let values = bytes([1.5, 2.5]);
        landing.take(&mut arriving, &values[..6]);
        assert_eq!(memory.parameters(), [7.0, 7.0, 1.5, 7.0, 7.0, 7.0], "no element is half written");
        landing.take(&mut arriving, &values[6..]);
        assert!(landing.end(&arriving));
        assert_eq!(memory.parameters(), [7.0, 7.0, 1.5, 2.5, 7.0, 7.0]);
        // It may come twice if its gradient was sent twice; the trainer may compute by then.
        assert!(landing.begin(&head(5, Codec::F32), 8).is_none(), "it is awaited no more");
    }

    #[test]
    fn what_is_not_awaited_does_not_land() {
        let (landing, _) = landing();
        landing.await_answer(3, 5, 2..4);
        let another = proto::ParameterBlock { block: 4, ..head(5, Codec::F32) };
        for (label, head, length) in [
            ("another block", another, 8),
            ("an earlier step", head(4, Codec::F32), 8),
            ("too short", head(5, Codec::F32), 4),
            ("too long", head(5, Codec::F32), 12),
            ("no values", head(5, Codec::F32), 0),
            ("a codec of whole payloads", head(5, Codec::Int8), 6),
            ("no codec", proto::ParameterBlock { codec: 99, ..head(5, Codec::F32) }, 8),
        ] {
            assert!(landing.begin(&head, length).is_none(), "{label}");
        }
        assert!(landing.begin(&head(5, Codec::Bf16), 4).is_some());
    }

    #[test]
    fn an_answer_that_was_withdrawn_writes_no_more_and_does_not_count_even_if_its_block_is_awaited_again() {
        let (landing, memory) = landing();
        let (old, new) = (bytes([1.5, 2.5]), bytes([3.5, 4.5]));
        landing.await_answer(3, 5, 2..4);
        let mut torn = landing.begin(&head(5, Codec::F32), 8).expect("awaited");
        landing.take(&mut torn, &old[..4]);
        landing.withdraw();
        landing.take(&mut torn, &old[4..6]);
        landing.await_answer(3, 5, 2..4);
        landing.take(&mut torn, &old[6..]);
        assert!(!landing.end(&torn), "its second element never landed");
        assert_eq!(memory.parameters()[2..4], [1.5, 7.0]);
        let mut again = landing.begin(&head(5, Codec::F32), 8).expect("it is awaited");
        landing.take(&mut again, &new);
        assert!(landing.end(&again));
        assert_eq!(memory.parameters()[2..4], [3.5, 4.5]);
    }
}
