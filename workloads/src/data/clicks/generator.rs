//! Clicks drawn from a model that is known: every number and every value of a category has an effect
//! on the chance of a click, and some pairs of categories have one together. Values are drawn as in
//! real logs, few often and most hardly ever (Zipf). All of it follows from the seed and the example's
//! number, so nothing is stored, whatever the number of keys.

use psjobs_ps::sparse::key::mix;

/// Numbers in an example.
pub const NUMBERS: usize = 8;
/// Bits of a key that hold the value; those above say the category.
const VALUE_BITS: u32 = 48;
/// The largest category of all.
pub const MOST_KEYS: u64 = 1 << VALUE_BITS;
/// Log-odds of a click where nothing speaks for or against it.
const BIAS: f64 = -1.2;

/// The model that clicks are drawn from.
#[derive(Clone, Debug)]
pub struct Generator {
    seed: u64,
    /// Values of each category; the first has the most.
    values: Vec<u64>,
}

/// One example.
#[derive(Clone, Debug, PartialEq)]
pub struct Example {
    pub numbers: [f32; NUMBERS],
    /// One for each category.
    pub keys: Vec<u64>,
    /// Chance of the click.
    pub probability: f64,
    pub clicked: bool,
}

impl Generator {
    /// Categories with `keys` values, a tenth of that, a hundredth and so on, down to ten.
    #[must_use]
    pub fn new(seed: u64, keys: u64) -> Self {
        let smaller = |values: &u64| Some(values / 10).filter(|values| *values >= 10);
        let values = std::iter::successors(Some(keys.clamp(10, MOST_KEYS)), smaller).collect();
        Self { seed, values }
    }

    /// Categories in an example.
    #[must_use]
    pub fn categories(&self) -> usize {
        self.values.len()
    }

    /// Keys that there are in all.
    #[must_use]
    pub fn keys(&self) -> u64 {
        self.values.iter().sum()
    }

    /// Example `number`.
    #[must_use]
    pub fn example(&self, number: u64) -> Example {
        let mut random = Stream::new(mix(self.seed) ^ mix(number));
        let numbers = std::array::from_fn(|_| random.normal() as f32);
        let keys: Vec<u64> = (0..).zip(&self.values).map(|(category, values)| random.key(category, *values)).collect();
        let probability = 1.0 / (1.0 + (-self.log_odds(&numbers, &keys)).exp());
        Example { numbers, keys, probability, clicked: random.uniform() < probability }
    }

    fn log_odds(&self, numbers: &[f32; NUMBERS], keys: &[u64]) -> f64 {
        let effect = |of: u64, which: u64| Stream::new(mix(self.seed ^ 0xc11c) ^ mix(of) ^ which).normal();
        let numbers = (0..).zip(numbers).map(|(place, value)| 0.25 * effect(place, 1 << 62) * f64::from(*value));
        let alone = keys.iter().map(|key| 0.5 * effect(*key, 0));
        let together = keys.windows(2).map(|pair| 0.3 * effect(pair[0], 1) * effect(pair[1], 1));
        BIAS + numbers.chain(alone).chain(together).sum::<f64>()
    }
}

/// Random numbers that follow from where they start.
struct Stream {
    state: u64,
}

impl Stream {
    fn new(start: u64) -> Self {
        Self { state: mix(start) }
    }

    /// From 0 up to 1.
    fn uniform(&mut self) -> f64 {
        self.state = mix(self.state);
        (self.state >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Mean 0, deviation 1, nearly normal: the sum of four even ones. Several of these are drawn for
    /// every key of an example, so they should cost little.
    fn normal(&mut self) -> f64 {
        self.state = mix(self.state);
        let sum: u64 = (0..4).map(|part| (self.state >> (16 * part)) & 0xffff).sum();
        (sum as f64 / 65_536.0 - 2.0) * 3.0_f64.sqrt()
    }

    /// Value v with a chance of about 1 / v.
    fn key(&mut self, category: u64, values: u64) -> u64 {
        let value = (self.uniform() * (values as f64 + 1.0).ln()).exp() as u64 - 1;
        category << VALUE_BITS | value.min(values - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Clicks, Source};
    use super::*;

    #[test]
    fn examples_follow_from_seed_and_number() {
        let generator = Generator::new(1, 100_000_000);
        assert_eq!((generator.categories(), generator.keys()), (8, 111_111_110));
        assert_eq!(generator.example(5), generator.example(5));
        assert_ne!(generator.example(5), generator.example(6));
        assert_ne!(generator.example(5), Generator::new(2, 100_000_000).example(5));
        for (category, key) in generator.example(5).keys.into_iter().enumerate() {
            assert_eq!(key >> VALUE_BITS, category as u64);
            assert!(key & (MOST_KEYS - 1) < generator.values[category]);
        }
    }

    #[test]
    fn there_are_clicks_to_learn_from_and_a_best_that_is_not_perfect() {
        let generator = Generator::new(1, 1_000_000);
        let clicked = (0..10_000).filter(|number| generator.example(*number).clicked).count();
        assert!((1_000..6_000).contains(&clicked), "{clicked} of 10,000");
        let best = Clicks::new(Source::Generated(std::sync::Arc::new(generator)), 0..10_000).best_auc();
        let best = best.expect("it was generated");
        assert!((0.7..0.95).contains(&best), "{best}");
    }
}
