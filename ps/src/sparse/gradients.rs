//! Gradients of a table's rows in which each key comes once: what a push is made into, and what the
//! trainers' pushes of one step are added up in.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::key::KeyState;

/// One gradient for each key, in the order in which the keys came first.
#[derive(Clone, Debug, Default)]
pub struct Gradients {
    places: HashMap<u64, usize, KeyState>,
    keys: Vec<u64>,
    /// A row for each key.
    values: Vec<f32>,
}

impl Gradients {
    /// Adds the little-endian row of a key.
    pub fn add_bytes(&mut self, key: u64, row: &[[u8; 4]]) {
        self.add_row(key, row.iter().map(|value| f32::from_le_bytes(*value)));
    }

    /// Adds all of `other`, whose rows are `width` wide.
    pub fn add(&mut self, other: &Self, width: usize) {
        if self.keys.is_empty() {
            self.clone_from(other);
            return;
        }
        for (key, row) in other.rows(width) {
            self.add_row(key, row.iter().copied());
        }
    }

    /// Divides all by the number of trainers that gave.
    pub fn divide(&mut self, contributors: usize) {
        let contributors = contributors as f32;
        self.values.iter_mut().for_each(|value| *value /= contributors);
    }

    /// The keys with their rows, `width` wide.
    pub fn rows(&self, width: usize) -> impl Iterator<Item = (u64, &[f32])> {
        self.keys.iter().copied().zip(self.values.chunks_exact(width))
    }

    /// The keys, and the values of their rows one behind the other.
    pub fn as_slices(&self) -> (&[u64], &[f32]) {
        (&self.keys, &self.values)
    }

    fn add_row(&mut self, key: u64, row: impl ExactSizeIterator<Item = f32>) {
        match self.places.entry(key) {
            Entry::Occupied(place) => {
                let start = place.get() * row.len();
                self.values[start..].iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
            }
            Entry::Vacant(place) => {
                place.insert(self.keys.len());
                self.keys.push(key);
                self.values.extend(row);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(rows: &[(u64, [f32; 2])]) -> Gradients {
        let mut gradients = Gradients::default();
        for (key, row) in rows {
            gradients.add_bytes(*key, &row.map(f32::to_le_bytes));
        }
        gradients
    }

    #[test]
    fn a_key_that_comes_again_is_added_and_the_others_stay_in_place() {
        let mut sum = of(&[(7, [1.0, 2.0]), (3, [10.0, 20.0]), (7, [0.5, 0.25])]);
        let rows: Vec<_> = sum.rows(2).collect();
        assert_eq!(rows, [(7, &[1.5, 2.25][..]), (3, &[10.0, 20.0][..])]);
        sum.add(&of(&[(9, [4.0, 4.0]), (3, [2.0, 2.0])]), 2);
        sum.divide(2);
        let rows: Vec<_> = sum.rows(2).collect();
        assert_eq!(rows, [(7, &[0.75, 1.125][..]), (3, &[6.0, 11.0][..]), (9, &[2.0, 2.0][..])]);
    }

    #[test]
    fn adding_to_nothing_changes_no_bit() {
        let mut sum = Gradients::default();
        sum.add(&of(&[(1, [-0.0, 1e-40])]), 2);
        sum.add(&Gradients::default(), 2);
        let (_, row) = sum.rows(2).next().expect("one row");
        assert_eq!(row.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), [(-0.0_f32).to_bits(), 1e-40_f32.to_bits()]);
    }
}
