//! Sparse tables: rows of f32 by 64-bit key, for embeddings too large for one machine. A key's hash
//! says which server and which task of it has the row ([`key`]); a task owns its [`shard`] alone, so
//! nothing is locked. Rows cost memory from their first gradient on ([`rows`]).

mod counts;
mod gradients;
mod idle;
pub mod key;
mod layer_requests;
mod local;
mod owner;
mod place;
mod refill;
mod replica;
mod rows;
mod shard;
mod tables;

pub use counts::{Counts, TableCounts};
pub use local::Local;
pub use place::Place;
pub use tables::{Pull, Push, Tables, TablesError};

pub(crate) use rows::Row;
pub(crate) use shard::{Clock, ShardState};
#[cfg(test)]
pub(crate) use shard::{Plan, Shard};

use serde::{Deserialize, Serialize};

use crate::proto;

/// The longest message with rows or gradients: about 800,000 rows of 16 numbers.
pub(crate) const MAX_MESSAGE: usize = 64 * 1024 * 1024;
/// The widest row.
const WIDEST: usize = 65_536;
/// The most tables of a job.
const MOST_TABLES: usize = 1024;

/// One table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TableSpec {
    /// Name, unique in the job.
    pub name: String,
    /// Numbers in a row.
    pub width: usize,
    /// Rows begin with values drawn evenly from -bound to bound.
    pub initial_bound: f32,
    /// Rows that the table may hold over all servers; 0: no limit.
    pub max_rows: u64,
    /// Steps after which an unused row is evicted; 0: never.
    pub idle_steps: u64,
    /// Milliseconds after which an unused row is evicted; 0: never.
    pub idle_ms: u64,
}

/// Tables that cannot be.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SpecError {
    /// None at all, or too many.
    #[error("{0} tables were given; a job has 1 to {MOST_TABLES}")]
    Count(usize),
    /// It cannot stand in a metric's label or a log.
    #[error("{0:?} is no name for a table; write 1 to 63 of A-Z, a-z, 0-9, '.', '_' and '-'")]
    Name(String),
    /// Two of one name.
    #[error("there are two tables named {0:?}; give each a name of its own")]
    Twice(String),
    /// No row can be like this.
    #[error("table {name:?} has rows of {width} numbers; write 1 to {WIDEST}")]
    Width {
        /// The table.
        name: String,
        /// Its width.
        width: usize,
    },
    /// No values can be drawn from this.
    #[error("table {name:?} begins with values up to {bound}; write a number of at least 0")]
    Bound {
        /// The table.
        name: String,
        /// Its bound.
        bound: f32,
    },
}

impl TableSpec {
    /// Describes the first difference between the tables of the job and those of a trainer.
    pub(crate) fn difference(job: &[Self], trainer: &[Self]) -> Option<String> {
        if job.len() != trainer.len() {
            return Some(format!("the job has {}, the trainer {}", job.len(), trainer.len()));
        }
        let (job, trainer) = job.iter().zip(trainer).find(|(job, trainer)| job != trainer)?;
        Some(format!("the job has {job:?}, the trainer {trainer:?}"))
    }

    /// A table whose rows stay.
    #[must_use]
    pub fn new(name: impl Into<String>, width: usize, initial_bound: f32) -> Self {
        Self { name: name.into(), width, initial_bound, max_rows: 0, idle_steps: 0, idle_ms: 0 }
    }

    /// Checks the tables of a job.
    ///
    /// # Errors
    /// The first thing that cannot be.
    pub fn validate(tables: &[Self]) -> Result<(), SpecError> {
        if tables.is_empty() || tables.len() > MOST_TABLES {
            return Err(SpecError::Count(tables.len()));
        }
        let plain = |letter: char| letter.is_ascii_alphanumeric() || "._-".contains(letter);
        for (place, Self { name, width, initial_bound, .. }) in tables.iter().enumerate() {
            if !(1..=63).contains(&name.len()) || !name.chars().all(plain) {
                return Err(SpecError::Name(name.clone()));
            }
            if tables[..place].iter().any(|before| before.name == *name) {
                return Err(SpecError::Twice(name.clone()));
            }
            if !(1..=WIDEST).contains(width) {
                return Err(SpecError::Width { name: name.clone(), width: *width });
            }
            if !(initial_bound.is_finite() && *initial_bound >= 0.0) {
                return Err(SpecError::Bound { name: name.clone(), bound: *initial_bound });
            }
        }
        Ok(())
    }
}

impl From<proto::TableSpec> for TableSpec {
    fn from(spec: proto::TableSpec) -> Self {
        let proto::TableSpec { name, width, initial_bound, max_rows, idle_steps, idle_ms } = spec;
        Self { name, width: width as usize, initial_bound, max_rows, idle_steps, idle_ms }
    }
}

impl From<&TableSpec> for proto::TableSpec {
    fn from(spec: &TableSpec) -> Self {
        let TableSpec { name, width, initial_bound, max_rows, idle_steps, idle_ms } = spec.clone();
        // A width that does not fit is refused by the server, as too wide.
        let width = u32::try_from(width).unwrap_or(u32::MAX);
        Self { name, width, initial_bound, max_rows, idle_steps, idle_ms }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_that_cannot_be_are_named() {
        let good = TableSpec::new("user", 16, 0.05);
        let rows = [
            ("none", vec![], "0 tables"),
            ("quoted", vec![TableSpec { name: "a\"b".into(), ..good.clone() }], "is no name"),
            ("nameless", vec![TableSpec { name: String::new(), ..good.clone() }], "is no name"),
            ("twice", vec![good.clone(), good.clone()], "two tables named \"user\""),
            ("no width", vec![TableSpec { width: 0, ..good.clone() }], "\"user\" has rows of 0 numbers"),
            ("too wide", vec![TableSpec { width: 65_537, ..good.clone() }], "65537"),
            ("NaN", vec![TableSpec { initial_bound: f32::NAN, ..good.clone() }], "up to NaN"),
            ("negative", vec![TableSpec { initial_bound: -1.0, ..good.clone() }], "up to -1"),
        ];
        for (label, tables, want) in rows {
            let error = TableSpec::validate(&tables).expect_err(label).to_string();
            assert!(error.contains(want), "{label}: {error}");
        }
        TableSpec::validate(&[good]).expect("a good one");
    }

    #[test]
    fn other_tables_are_reported_with_both_sides() {
        let table = |name: &str, width| TableSpec::new(name, width, 0.1);
        let job = [table("user", 16), table("item", 16)];
        assert_eq!(TableSpec::difference(&job, &job), None);
        assert_eq!(TableSpec::difference(&job, &job[..1]).as_deref(), Some("the job has 2, the trainer 1"));
        let found = TableSpec::difference(&job, &[table("user", 16), table("item", 8)]).expect("another width");
        assert!(found.contains("width: 16") && found.contains("width: 8") && found.contains("item"), "{found}");
    }
}
