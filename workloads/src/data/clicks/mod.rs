//! Clicks: examples of some numbers, some categories and whether somebody clicked. From a seeded
//! [`generator`], which knows how well one can do, or from a file in [`criteo`]'s format.

pub mod criteo;
pub mod generator;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::sync::Arc;

use tch::{Kind, Tensor};

use criteo::Log;
use generator::Generator;
use psjobs_worker::data::Dataset;

/// A source of examples, by number.
#[derive(Clone, Debug)]
pub enum Source {
    Generated(Arc<Generator>),
    Read(Arc<Log>),
}

impl Source {
    /// Numbers in an example.
    #[must_use]
    pub fn numbers(&self) -> usize {
        match self {
            Self::Generated(_) => generator::NUMBERS,
            Self::Read(log) => log.numbers,
        }
    }

    /// Categories in an example.
    #[must_use]
    pub fn categories(&self) -> usize {
        match self {
            Self::Generated(generator) => generator.categories(),
            Self::Read(log) => log.categories,
        }
    }

    /// Writes an example behind those before it; whether it was clicked.
    fn write(&self, example: u64, numbers: &mut Vec<f32>, keys: &mut Vec<u64>) -> bool {
        match self {
            Self::Generated(generator) => {
                let example = generator.example(example);
                numbers.extend(example.numbers);
                keys.extend(example.keys);
                example.clicked
            }
            Self::Read(log) => log.write(example as usize, numbers, keys),
        }
    }
}

/// Some examples of a source.
#[derive(Clone, Debug)]
pub struct Clicks {
    source: Source,
    range: Range<u64>,
}

/// The examples that a step reads.
#[derive(Debug)]
pub struct ClickBatch {
    /// `[b, numbers]`, f32.
    pub numbers: Tensor,
    /// Every key of the batch once.
    pub keys: Vec<u64>,
    /// `[b, categories]`, i64: places in `keys`.
    pub places: Tensor,
    /// `[b]`, f32: 1 where it was clicked.
    pub clicked: Tensor,
}

impl Clicks {
    /// The examples of `source` in `range`.
    #[must_use]
    pub fn new(source: Source, range: Range<u64>) -> Self {
        Self { source, range }
    }

    /// Where they come from.
    #[must_use]
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// The area under the ROC curve of the probabilities that the examples were drawn with: no model does
    /// better, but for luck. `None` for examples that were read.
    #[must_use]
    pub fn best_auc(&self) -> Option<f64> {
        let Source::Generated(generator) = &self.source else { return None };
        let example = |number| {
            let example = generator.example(number);
            (example.probability, example.clicked)
        };
        Some(auc(self.range.clone().map(example).collect()))
    }
}

impl Dataset for Clicks {
    type Batch = ClickBatch;

    fn examples(&self) -> usize {
        (self.range.end - self.range.start) as usize
    }

    fn batch(&self, examples: &[i64]) -> ClickBatch {
        let (mut numbers, mut all, mut clicked) = (Vec::new(), Vec::new(), Vec::new());
        for example in examples {
            let clicks = self.source.write(self.range.start + *example as u64, &mut numbers, &mut all);
            clicked.push(f32::from(u8::from(clicks)));
        }
        let (mut keys, mut known) = (Vec::new(), HashMap::new());
        let place = |key: &u64| match known.entry(*key) {
            Entry::Occupied(place) => *place.get(),
            Entry::Vacant(place) => {
                keys.push(*key);
                *place.insert(keys.len() as i64 - 1)
            }
        };
        let places: Vec<i64> = all.iter().map(place).collect();
        let count = examples.len() as i64;
        ClickBatch {
            numbers: Tensor::from_slice(&numbers).view([count, self.source.numbers() as i64]),
            places: Tensor::from_slice(&places).view([count, self.source.categories() as i64]),
            clicked: Tensor::from_slice(&clicked).to_kind(Kind::Float),
            keys,
        }
    }
}

/// Area under the ROC curve: the chance that an example that was clicked has a higher score than one that
/// was not; equal ones count half. One half where all or none were clicked.
#[must_use]
pub fn auc(mut scored: Vec<(f64, bool)>) -> f64 {
    scored.sort_unstable_by(|(a, _), (b, _)| a.total_cmp(b));
    let (mut below, mut pairs, mut clicked) = (0.0, 0.0, 0.0);
    for equal in scored.chunk_by(|(a, _), (b, _)| a == b) {
        let hits = equal.iter().filter(|(_, clicked)| *clicked).count() as f64;
        let misses = equal.len() as f64 - hits;
        pairs += hits * (below + misses / 2.0);
        below += misses;
        clicked += hits;
    }
    if below * clicked == 0.0 { 0.5 } else { pairs / (below * clicked) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_area_counts_pairs_in_order() {
        let rows = [
            ("in order", vec![(0.1, false), (0.2, false), (0.7, true)], 1.0),
            ("in reverse", vec![(0.9, false), (0.2, true)], 0.0),
            ("one of four pairs wrong", vec![(0.1, false), (0.3, true), (0.4, false), (0.8, true)], 0.75),
            ("equal", vec![(0.5, false), (0.5, true), (0.5, true)], 0.5),
            ("only clicks", vec![(0.5, true)], 0.5),
        ];
        for (label, scored, want) in rows {
            assert!((auc(scored) - want).abs() < 1e-12, "{label}");
        }
    }

    #[test]
    fn a_batch_names_each_key_once() {
        let source = Source::Generated(Arc::new(Generator::new(3, 100)));
        let clicks = Clicks::new(source.clone(), 50..150);
        let batch = clicks.batch(&[0, 7, 7]);
        assert_eq!(batch.numbers.size(), [3, generator::NUMBERS as i64]);
        assert_eq!(batch.places.size(), [3, source.categories() as i64]);
        let places: Vec<i64> = Vec::try_from(batch.places.flatten(0, -1)).expect("1-d");
        let keys: Vec<u64> = places.iter().map(|place| batch.keys[*place as usize]).collect();
        let Source::Generated(generator) = &source else { unreachable!("it was made so") };
        let want: Vec<u64> = [50, 57, 57].iter().flat_map(|n| generator.example(*n).keys).collect();
        assert_eq!(keys, want);
        let mut unique = batch.keys.clone();
        unique.sort_unstable();
        unique.dedup();
        assert_eq!(unique.len(), batch.keys.len());
    }
}
