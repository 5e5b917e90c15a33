//! The rows of one table in one task: a map from key to place, and the places in chunks that never
//! move. Memory grows with the rows that there are, not with the keys that there could be. A [`Snapshot`] shares
//! the chunks: one that changes while it is held is copied first.

use std::collections::HashMap;
use std::sync::Arc;

use psjobs_arithmetic::optimizer::Optimizer;
use psjobs_arithmetic::parameter_group::ParameterGroup;

use super::key::KeyState;

/// Floats of a chunk, about: large enough that chunks do not count, small enough not to waste one.
const CHUNK: usize = 16 * 1024;

/// Rows of `width` values, each with its optimizer state behind it.
pub struct Rows {
    width: usize,
    /// Floats of a place: values and slots.
    stride: usize,
    rows_per_chunk: usize,
    places: HashMap<u64, u32, KeyState>,
    chunks: Vec<Arc<[f32]>>,
    /// By place.
    heads: Vec<Head>,
    free: Vec<u32>,
}

/// The metadata of a row.
#[derive(Clone, Copy, Debug, Default)]
struct Head {
    key: u64,
    /// When it was used last, in the caller's count.
    used: u64,
    /// Updates so far; 0 marks a place that is free.
    updates: u64,
}

/// A row as it was at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Row<'a> {
    pub key: u64,
    /// When it was used last, in the count of its task's requests.
    pub used: u64,
    /// Updates so far; at least 1.
    pub updates: u64,
    /// Its values, then each slot of its optimizer state.
    pub numbers: &'a [f32],
}

/// All rows of a table in one task, at one moment.
#[derive(Clone, Debug)]
pub struct Snapshot {
    stride: usize,
    rows_per_chunk: usize,
    heads: Vec<Head>,
    chunks: Vec<Arc<[f32]>>,
}

impl Snapshot {
    /// The rows, in no order that means anything.
    pub fn rows(&self) -> impl Iterator<Item = Row<'_>> {
        let there = self.heads.iter().enumerate().filter(|(_, head)| head.updates > 0);
        there.map(|(place, &Head { key, used, updates })| {
            let start = place % self.rows_per_chunk * self.stride;
            let numbers = &self.chunks[place / self.rows_per_chunk][start..start + self.stride];
            Row { key, used, updates, numbers }
        })
    }

    /// Bytes that they take at most, without those of their map.
    pub fn bytes(&self) -> u64 {
        (self.heads.len() * (size_of::<Head>() + self.stride * size_of::<f32>())) as u64
    }
}

impl Rows {
    /// No rows yet; each will have `width` values and as many for each of `slots`.
    pub fn new(width: usize, slots: usize) -> Self {
        let stride = width * (1 + slots);
        Self {
            width,
            stride,
            rows_per_chunk: (CHUNK / stride).max(1),
            places: HashMap::default(),
            chunks: Vec::new(),
            heads: Vec::new(),
            free: Vec::new(),
        }
    }

    /// Rows that there are.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Bytes that rows and their map take.
    pub fn bytes(&self) -> usize {
        self.chunks.len() * self.rows_per_chunk * self.stride * size_of::<f32>()
            + self.heads.capacity() * size_of::<Head>()
            + self.places.capacity() * (size_of::<(u64, u32)>() + 1)
    }

    /// The values of a key's row, if it has one; it counts as used at `now`.
    pub fn read(&mut self, key: u64, now: u64) -> Option<&[f32]> {
        let place = *self.places.get(&key)? as usize;
        self.heads[place].used = now;
        let start = place % self.rows_per_chunk * self.stride;
        Some(&self.chunks[place / self.rows_per_chunk][start..start + self.width])
    }

    /// Updates the key's row by `gradient`; one that is not there is made, and begins with what
    /// `initial` writes.
    pub fn update(
        &mut self,
        key: u64,
        gradient: &[f32],
        (optimizer, factor): (&Optimizer, f64),
        now: u64,
        initial: impl FnOnce(&mut [f32]),
    ) {
        let place = match self.places.get(&key) {
            Some(place) => *place as usize,
            None => self.make(key, initial),
        };
        let head = &mut self.heads[place];
        head.used = now;
        head.updates += 1;
        let updates = head.updates;
        let start = place % self.rows_per_chunk * self.stride;
        let row = &mut Arc::make_mut(&mut self.chunks[place / self.rows_per_chunk])[start..start + self.stride];
        let (values, slots) = row.split_at_mut(self.width);
        let slots = slots.chunks_exact_mut(self.width);
        optimizer.update(values, bytemuck::cast_slice(gradient), slots, (factor, &ParameterGroup::default()), updates);
    }

    /// All rows as they are. What is copied now is what is known of each beside its numbers.
    pub fn snapshot(&self) -> Snapshot {
        let Self { stride, rows_per_chunk, heads, chunks, .. } = self;
        Snapshot { stride: *stride, rows_per_chunk: *rows_per_chunk, heads: heads.clone(), chunks: chunks.clone() }
    }

    /// Puts back a row of a snapshot, of a table of the same width and slots.
    pub fn insert(&mut self, row: Row) {
        let place = match self.places.get(&row.key) {
            Some(place) => *place as usize,
            None => self.make(row.key, |_| {}),
        };
        self.heads[place] = Head { key: row.key, used: row.used, updates: row.updates };
        self.numbers(place).copy_from_slice(row.numbers);
    }

    /// Removes rows that were last used at `until` or before; returns their keys.
    pub fn evict_unused(&mut self, until: u64) -> Vec<u64> {
        let old = |head: &Head| head.updates > 0 && head.used <= until;
        let gone: Vec<u32> = (0..).zip(&self.heads).filter(|(_, head)| old(head)).map(|(place, _)| place).collect();
        gone.iter().map(|place| self.remove(*place)).collect()
    }

    /// Removes the rows that were used longest ago, if there are more than `most`; returns their keys. A
    /// sixteenth of them goes at once, so that the search for them is rare.
    pub fn evict_down_to(&mut self, most: usize) -> Vec<u64> {
        if self.len() <= most {
            return Vec::new();
        }
        let count = self.len() - (most - most / 16);
        let there = (0..).zip(&self.heads).filter(|(_, head)| head.updates > 0);
        let mut oldest: Vec<(u64, u32)> = there.map(|(place, head)| (head.used, place)).collect();
        oldest.select_nth_unstable(count - 1);
        oldest[..count].iter().map(|(_, place)| self.remove(*place)).collect()
    }

    /// Removes the row of a key, if it has one.
    pub fn evict(&mut self, key: u64) {
        if let Some(place) = self.places.get(&key).copied() {
            self.remove(place);
        }
    }

    fn make(&mut self, key: u64, initial: impl FnOnce(&mut [f32])) -> usize {
        let place = self.free.pop().unwrap_or_else(|| {
            let place = u32::try_from(self.heads.len()).expect("memory ends before four billion rows of one task");
            self.heads.push(Head::default());
            if self.heads.len() > self.chunks.len() * self.rows_per_chunk {
                self.chunks.push(vec![0.0; self.rows_per_chunk * self.stride].into());
            }
            place
        });
        self.places.insert(key, place);
        let place = place as usize;
        self.heads[place] = Head { key, used: 0, updates: 0 };
        let width = self.width;
        let row = self.numbers(place);
        initial(&mut row[..width]);
        row[width..].fill(0.0);
        place
    }

    /// Values and slots of a place.
    fn numbers(&mut self, place: usize) -> &mut [f32] {
        let start = place % self.rows_per_chunk * self.stride;
        &mut Arc::make_mut(&mut self.chunks[place / self.rows_per_chunk])[start..start + self.stride]
    }

    /// Frees a place; returns the key whose row was there.
    fn remove(&mut self, place: u32) -> u64 {
        let head = std::mem::take(&mut self.heads[place as usize]);
        self.places.remove(&head.key);
        self.free.push(place);
        head.key
    }
}

#[cfg(test)]
mod tests {
    use psjobs_api::training;

    use super::*;

    fn sgd() -> Optimizer {
        Optimizer::new(&training::Optimizer { learning_rate: 1.0, ..training::Optimizer::default() })
    }

    fn filled(keys: std::ops::Range<u64>) -> Rows {
        let (mut rows, sgd) = (Rows::new(4, 0), sgd());
        for key in keys {
            rows.update(key, &[1.0; 4], (&sgd, 1.0), key, |row| row.fill(key as f32));
        }
        rows
    }

    #[test]
    fn a_row_is_made_by_its_first_gradient() {
        let mut rows = filled(0..10_000);
        assert_eq!(rows.len(), 10_000);
        assert_eq!(rows.read(9_999, 0), Some(&[9_998.0; 4][..]));
        assert_eq!(rows.read(10_000, 0), None);
    }

    #[test]
    fn the_rows_used_longest_ago_go_and_their_places_are_used_again() {
        let mut rows = filled(0..1_000);
        rows.read(0, 5_000);
        assert_eq!(rows.evict_down_to(160).len(), 850, "a sixteenth more than had to");
        assert_eq!(rows.len(), 150);
        assert!(rows.read(0, 5_001).is_some(), "it was read of late");
        assert!(rows.read(850, 5_001).is_none() && rows.read(851, 5_001).is_some());
        assert!(rows.evict_down_to(160).is_empty());
        let sgd = sgd();
        for key in 2_000..2_850 {
            rows.update(key, &[1.0; 4], (&sgd, 1.0), key, |row| row.fill(0.5));
        }
        assert_eq!((rows.len(), rows.heads.len()), (1_000, 1_000));
        assert_eq!(rows.read(2_100, 0), Some(&[-0.5; 4][..]), "nothing of its place's last row is left");
    }

    #[test]
    fn unused_rows_go_by_the_time_of_their_last_use() {
        let mut rows = filled(0..100);
        rows.read(10, 200);
        assert_eq!(rows.evict_unused(49).len(), 49);
        assert!(rows.read(10, 201).is_some() && rows.read(49, 201).is_none() && rows.read(50, 201).is_some());
        assert!(rows.evict_unused(49).is_empty());
    }

    #[test]
    fn a_snapshot_stays_as_it_was_and_gives_the_rows_back() {
        let (mut rows, sgd) = (filled(0..10_000), sgd());
        rows.evict_unused(99);
        let snapshot = rows.snapshot();
        rows.update(500, &[1.0; 4], (&sgd, 1.0), 0, |_| unreachable!("it is there"));
        rows.update(50, &[1.0; 4], (&sgd, 1.0), 0, |row| row.fill(0.0));
        let of_500 = snapshot.rows().find(|row| row.key == 500).expect("it was there");
        assert_eq!((of_500.updates, of_500.numbers), (1, &[499.0; 4][..]));
        let mut restored = Rows::new(4, 0);
        snapshot.rows().for_each(|row| restored.insert(row));
        assert_eq!(restored.len(), 9_900);
        assert_eq!(restored.read(9_999, 0), Some(&[9_998.0; 4][..]));
        assert!(restored.read(50, 0).is_none() && rows.read(50, 0).is_some());
    }

    #[test]
    fn a_hundred_million_possible_keys_cost_what_the_touched_ones_cost() {
        let (mut rows, sgd) = (Rows::new(16, 1), sgd());
        for key in (0..100_000_000).step_by(1_000) {
            rows.update(key, &[1.0; 16], (&sgd, 1.0), 0, |row| row.fill(0.0));
        }
        assert_eq!(rows.len(), 100_000);
        let (touched, all) = (100_000 * 2 * 16 * 4, 100_000_000_usize * 2 * 16 * 4);
        assert!(rows.bytes() < 2 * touched && rows.bytes() < all / 100, "{} bytes", rows.bytes());
    }
}
