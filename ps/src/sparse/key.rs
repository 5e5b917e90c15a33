//! Derives from a key its server, its task there, and the initial values of its row.

use std::hash::{BuildHasherDefault, Hasher};

use crate::splitmix::{GOLDEN, finalize};

/// Spreads keys that lie close together: what splitmix64 gives first from this state.
#[must_use]
pub fn mix(key: u64) -> u64 {
    finalize(key.wrapping_add(GOLDEN))
}

/// The server, of `servers`, that has the key's row: by the upper half of its hash.
#[must_use]
pub fn server(key: u64, servers: u32) -> u32 {
    (((mix(key) >> 32) * u64::from(servers)) >> 32) as u32
}

/// The task, of `shards`, on that server: by the lower half.
#[must_use]
pub(super) fn shard(key: u64, shards: usize) -> usize {
    (((mix(key) & 0xffff_ffff) * shards as u64) >> 32) as usize
}

/// Fills a row with the values that it begins with, evenly from -bound to bound. `origin` is the
/// table's, see [`origin`].
pub(super) fn initial(origin: u64, key: u64, bound: f32, row: &mut [f32]) {
    let start = mix(origin ^ mix(key));
    for (place, value) in (0_u64..).zip(row) {
        // The upper 24 bits fill an f32's mantissa: every value is exact.
        let fraction = (mix(start.wrapping_add(place.wrapping_mul(GOLDEN))) >> 40) as f32 / (1_u64 << 24) as f32;
        *value = bound * (2.0 * fraction - 1.0);
    }
}

/// Where the initial values of the `table`th table come from.
pub(super) fn origin(seed: u64, table: usize) -> u64 {
    mix(mix(seed) ^ table as u64)
}

/// For maps: not the hash that keys are dealt out by, of which all keys of a task share bits.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = mix(self.0 ^ u64::from(*byte));
        }
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = mix(!key);
    }
}

/// For maps by key.
pub(super) type KeyState = BuildHasherDefault<KeyHasher>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_keys_are_dealt_out_evenly() {
        for (servers, shards) in [(1, 1), (2, 4), (3, 7)] {
            let mut counts = vec![0_u32; servers as usize * shards];
            for key in 0..100_000 {
                counts[server(key, servers) as usize * shards + shard(key, shards)] += 1;
            }
            let mean = 100_000.0 / counts.len() as f64;
            for count in &counts {
                let off = (f64::from(*count) - mean).abs() / mean;
                assert!(off < 0.05, "{servers} servers, {shards} shards: {counts:?}");
            }
        }
    }

    /// Other clients compute it too.
    #[test]
    fn the_server_of_a_key_is_part_of_the_protocol() {
        // splitmix64 from state 0 gives these first.
        assert_eq!(mix(0), 0xe220_a839_7b1d_cdaf);
        assert_eq!(mix(GOLDEN), 0x6e78_9e6a_a1b9_65f4);
        assert_eq!([0, 1, 2, 3, u64::MAX].map(|key| server(key, 2)), [1, 1, 1, 0, 1]);
    }

    #[test]
    fn rows_begin_evenly_within_their_bound_and_each_its_own_way() {
        let row = |seed, table, key| {
            let mut row = [0.0; 1000];
            initial(origin(seed, table), key, 0.05, &mut row);
            row
        };
        let one = row(1, 0, 7);
        assert_eq!(one, row(1, 0, 7));
        for other in [row(2, 0, 7), row(1, 1, 7), row(1, 0, 8)] {
            assert_ne!(one, other);
        }
        let (mean, most) = (one.iter().sum::<f32>() / 1000.0, one.iter().fold(0.0_f32, |most, v| most.max(v.abs())));
        assert!(mean.abs() < 0.005 && most <= 0.05 && most > 0.049, "mean {mean}, most {most}");
        let mut zeros = [1.0; 4];
        initial(9, 9, 0.0, &mut zeros);
        assert_eq!(zeros, [0.0; 4]);
    }
}
