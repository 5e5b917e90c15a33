//! Tables in one process, without servers: what a job is compared with. Rows begin with the same values
//! and follow the same rules.

use std::sync::Arc;

use psjobs_api::Training;

use super::gradients::Gradients;
use super::shard::{Plan, Shard};
use super::{SpecError, TableSpec};
use crate::training_rules::TrainingRules;

/// All tables of a training that has one process.
pub struct Local {
    specs: Arc<[TableSpec]>,
    shard: Shard<()>,
}

impl Local {
    /// No rows yet.
    ///
    /// # Errors
    /// If the tables cannot be.
    pub fn new(specs: Vec<TableSpec>, training: &Training) -> Result<Self, SpecError> {
        TableSpec::validate(&specs)?;
        let specs: Arc<[TableSpec]> = specs.into();
        let rules = Arc::new(TrainingRules::new(training, 1, &[]));
        let shard = Shard::new(&Plan { specs: specs.clone(), rules, trainers: 1, seed: training.seed, shards: 1 });
        Ok(Self { specs, shard })
    }

    /// The rows of keys, one behind the other.
    ///
    /// # Panics
    /// If there is no such table.
    pub fn pull(&mut self, table: usize, keys: &[u64]) -> Vec<f32> {
        self.shard.pull(0, table, keys)
    }

    /// Updates rows by the gradients of `step`; of the same step only once.
    ///
    /// # Panics
    /// If there is no such table, or not a row for each key.
    pub fn push(&mut self, step: u64, table: usize, keys: &[u64], values: &[f32]) {
        self.push_all(step, &[(table, keys, values)]);
    }

    /// Updates rows of several tables by the gradients of `step`, each with its keys and a row for each.
    ///
    /// # Panics
    /// As [`Local::push`].
    pub fn push_all<K: AsRef<[u64]>, V: AsRef<[f32]>>(&mut self, step: u64, rows: &[(usize, K, V)]) {
        let mut gradients = vec![Gradients::default(); self.specs.len()];
        for (table, keys, values) in rows {
            let (keys, values) = (keys.as_ref(), values.as_ref());
            let width = self.specs[*table].width;
            assert_eq!(values.len(), keys.len() * width, "a row of table {table} for each key");
            for (key, row) in keys.iter().zip(values.chunks_exact(width)) {
                gradients[*table].add_bytes(*key, bytemuck::cast_slice(row));
            }
        }
        self.shard.push(0, step, Some(gradients), ());
        self.shard.evict(0);
    }

    /// Rows held.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.shard.holdings().map(|held| held.rows).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_trained_in_this_process() {
        let training = Training::default();
        let mut tables = Local::new(vec![TableSpec::new("t", 2, 0.5)], &training).expect("a good one");
        let begun = tables.pull(0, &[7, 8]);
        tables.push(0, 0, &[7], &[1.0, 2.0]);
        let want = [begun[0] - 0.01, begun[1] - 0.02, begun[2], begun[3]];
        assert_eq!((tables.pull(0, &[7, 8]), tables.rows()), (want.to_vec(), 1));
    }
}
