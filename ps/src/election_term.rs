//! Numbers of the terms in which trainers elect the leader of a shard (`server::state::election`).
//!
//! When both holders of a shard were lost at once and its blocks are filled anew, leaders of before count no more: what they
//! had given to trainers is in no copy. The upper half of a term says how often the two servers had been replaced when the
//! shard was filled, so that terms of before are smaller than all that follow.

/// Bits of a term that count the elections since the shard was filled.
const ELECTIONS: u32 = 32;

/// Returns the term with which a shard begins that is filled when its two servers have been replaced so often in all; 0, the
/// term of leaders that no trainer has elected, if they have not been.
pub const fn first(replacements: u64) -> u64 {
    replacements << ELECTIONS
}

/// Returns whether a leader of `term` led before both holders were lost, as far as one that leads in `other` knows.
pub const fn is_of_lost_copies(term: u64, other: u64) -> bool {
    term >> ELECTIONS < other >> ELECTIONS
}
