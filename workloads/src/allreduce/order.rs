//! Decides the order of sends and additions in a ring of n. The values are cut into n chunks. Chunk c starts at rank c and
//! is passed on n - 1 times, each rank adding its own values to what came; then the sum goes round as
//! it is. So each element is added up in one order, at any speed of the ranks, and all ranks get the same bits.

use std::ops::Range;

/// One round of a rank: the chunk that it sends to the next rank while it receives another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Round {
    pub send: usize,
    pub receive: usize,
    /// True if the chunk received is added to this rank's own; else it replaces it.
    pub add: bool,
}

/// The rounds of `rank` in a ring of `size`: 2 (size - 1).
pub fn rounds(rank: usize, size: usize) -> impl Iterator<Item = Round> {
    let chunk = move |place: usize| (rank + 2 * size - place) % size;
    let reduce = (0..size - 1).map(move |round| Round { send: chunk(round), receive: chunk(round + 1), add: true });
    let gather =
        (0..size - 1).map(move |round| Round { send: chunk(round + size - 1), receive: chunk(round), add: false });
    reduce.chain(gather)
}

/// The elements of a chunk of `length` values in a ring of `size`; chunks differ by at most one.
#[must_use]
pub fn chunk(number: usize, length: usize, size: usize) -> Range<usize> {
    number * length / size..(number + 1) * length / size
}

/// Computes the ring's result for the ranks' `values` in one process.
///
/// # Panics
/// If there are none, or they differ in length.
#[must_use]
pub fn local_sum(values: &[Vec<f32>]) -> Vec<f32> {
    let (size, length) = (values.len(), values[0].len());
    let mut sum = vec![0.0; length];
    for number in 0..size {
        let range = chunk(number, length, size);
        sum[range.clone()].copy_from_slice(&values[number][range.clone()]);
        for other in 1..size {
            let own = &values[(number + other) % size][range.clone()];
            sum[range.clone()].iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn chunks_cover_all_values_once(length in 0_usize..1000, size in 1_usize..9) {
            let mut end = 0;
            for number in 0..size {
                let chunk = chunk(number, length, size);
                prop_assert_eq!(chunk.start, end);
                prop_assert!(chunk.len() <= length / size + 1);
                end = chunk.end;
            }
            prop_assert_eq!(end, length);
        }

        /// A rank sends in a round the chunk that the next one receives in it.
        #[test]
        fn neighbours_agree_in_every_round(rank in 0_usize..8, size in 2_usize..9) {
            prop_assume!(rank < size);
            for (ours, theirs) in rounds(rank, size).zip(rounds((rank + 1) % size, size)) {
                prop_assert_eq!((ours.send, ours.add), (theirs.receive, theirs.add));
            }
        }

        /// The rounds played out with sets of ranks in place of sums: everybody ends with everything.
        #[test]
        fn after_all_rounds_every_rank_has_every_sum(size in 1_usize..9) {
            let mut held: Vec<Vec<Vec<usize>>> = (0..size).map(|rank| vec![vec![rank]; size]).collect();
            let all: Vec<Vec<Round>> = (0..size).map(|rank| rounds(rank, size).collect()).collect();
            for round in 0..2 * (size - 1) {
                let sent: Vec<Vec<usize>> = (0..size).map(|rank| held[rank][all[rank][round].send].clone()).collect();
                for rank in 0..size {
                    let Round { receive, add, .. } = all[rank][round];
                    let mut came = sent[(rank + size - 1) % size].clone();
                    if add {
                        came.append(&mut held[rank][receive]);
                    }
                    held[rank][receive] = came;
                }
            }
            for chunks in held {
                for (number, chunk) in chunks.into_iter().enumerate() {
                    let order: Vec<usize> = (0..size).map(|other| (number + other) % size).collect();
                    prop_assert_eq!(chunk, order, "the order in which chunk {} is added", number);
                }
            }
        }
    }
}
