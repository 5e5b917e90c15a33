//! A step's batch in micro-batches (`spec.training.batch.microBatches`): the gradient of each is computed alone, so that activations
//! take the memory of one.

use tch::Tensor;

use crate::data::{Dataset, ReadError};

/// The batch of a step.
#[derive(Debug)]
pub struct MicroBatches<B> {
    /// All but the last one.
    pub before: Vec<MicroBatch<B>>,
    pub last: MicroBatch<B>,
}

/// Examples that are computed together.
#[derive(Debug)]
pub struct MicroBatch<B> {
    pub batch: B,
    /// How many they are.
    pub examples: usize,
}

impl<B> MicroBatches<B> {
    /// Reads `examples`, `most` of them for each micro-batch; the last one may have fewer.
    ///
    /// # Errors
    /// If an example cannot be read.
    pub fn read<D: Dataset<Batch = B>>(data: &D, examples: &[i64], most: usize) -> Result<Self, ReadError> {
        let read = |examples: &[i64]| data.read(examples).map(|batch| MicroBatch { batch, examples: examples.len() });
        let most = most.max(1);
        let (before, last) = examples.split_at(examples.len().saturating_sub(1) / most * most);
        Ok(Self { before: before.chunks(most).map(read).collect::<Result<_, _>>()?, last: read(last)? })
    }
}

/// The losses of a step's micro-batches. A GPU may still compute them.
#[derive(Debug, Default)]
pub struct Losses(Vec<(Tensor, usize)>);

impl Losses {
    /// Adds the mean loss of so many examples.
    pub fn add(&mut self, loss: &Tensor, examples: usize) {
        self.0.push((loss.detach(), examples));
    }

    /// Returns the mean of all examples, when it is computed.
    #[must_use]
    pub fn mean(&self) -> f64 {
        let sum: f64 = self.0.iter().map(|(loss, examples)| loss.double_value(&[]) * *examples as f64).sum();
        sum / self.0.iter().map(|(_, examples)| examples).sum::<usize>() as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives the numbers of the examples.
    struct Numbers;

    impl Dataset for Numbers {
        type Batch = Vec<i64>;

        fn examples(&self) -> usize {
            100
        }

        fn batch(&self, examples: &[i64]) -> Vec<i64> {
            examples.to_vec()
        }
    }

    #[test]
    fn every_example_is_in_one_micro_batch_and_none_has_more_than_the_most() {
        for (examples, most, want) in [
            (8, 8, &[8][..]),
            (8, 2, &[2, 2, 2, 2]),
            (7, 2, &[2, 2, 2, 1]),
            (9, 2, &[2, 2, 2, 2, 1]),
            (1, 2, &[1]),
            (3, 1, &[1, 1, 1]),
            (0, 2, &[0]),
        ] {
            let examples: Vec<i64> = (10..10 + examples).collect();
            let MicroBatches { before, last } = MicroBatches::read(&Numbers, &examples, most).expect("it reads");
            let all: Vec<MicroBatch<Vec<i64>>> = before.into_iter().chain([last]).collect();
            assert_eq!(all.iter().map(|part| part.examples).collect::<Vec<_>>(), want, "{examples:?}");
            assert!(all.iter().all(|part| part.batch.len() == part.examples));
            assert_eq!(all.into_iter().flat_map(|part| part.batch).collect::<Vec<_>>(), examples);
        }
    }

    #[test]
    fn the_loss_of_a_step_is_the_mean_of_its_examples() {
        let mut losses = Losses::default();
        losses.add(&Tensor::from(0.1_f32), 7);
        assert_eq!(losses.mean(), f64::from(0.1_f32), "of one batch to the last bit");
        losses.add(&Tensor::from(0.5_f32), 1);
        assert!((losses.mean() - (0.7 + 0.5) / 8.0).abs() < 1e-7);
    }
}
