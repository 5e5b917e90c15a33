//! Counters of the tables of one server, for metrics.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::TableSpec;
use super::shard::Holding;

/// Counters of a server's tables.
#[derive(Debug)]
pub struct Counts {
    tables: Vec<(String, TableCells)>,
    not_finite: AtomicU64,
}

#[derive(Debug, Default)]
struct TableCells {
    rows: AtomicU64,
    bytes: AtomicU64,
    evicted: AtomicU64,
    pulled: AtomicU64,
    pushed: AtomicU64,
}

/// One table, at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TableCounts {
    /// Name of the table.
    pub table: String,
    /// Rows held now.
    pub rows: u64,
    /// Bytes that they take with their optimizer state and their index.
    pub bytes: u64,
    /// Rows that went because they were too many or unused.
    pub evicted: u64,
    /// Keys pulled so far.
    pub pulled: u64,
    /// Keys pushed so far.
    pub pushed: u64,
}

impl TableCounts {
    /// Adds the counters of the same table in another shard.
    pub(crate) fn add(&mut self, other: &Self) {
        self.rows += other.rows;
        self.bytes += other.bytes;
        self.evicted += other.evicted;
        self.pulled += other.pulled;
        self.pushed += other.pushed;
    }
}

impl Counts {
    pub(super) fn new(specs: &[TableSpec]) -> Self {
        let tables = specs.iter().map(|spec| (spec.name.clone(), TableCells::default())).collect();
        Self { tables, not_finite: AtomicU64::new(0) }
    }

    /// A shard holds `now` of a table, where it held `before`.
    pub(super) fn holds(&self, table: usize, before: Holding, now: Holding) {
        let cells = &self.tables[table].1;
        for (cell, before, now) in [
            (&cells.rows, before.rows, now.rows),
            (&cells.bytes, before.bytes, now.bytes),
            (&cells.evicted, before.evicted, now.evicted),
        ] {
            // Wraps where it is less, and so subtracts.
            cell.fetch_add(now.wrapping_sub(before), Relaxed);
        }
    }

    /// So many keys of a table were pulled.
    pub(super) fn pulls(&self, table: usize, keys: usize) {
        self.tables[table].1.pulled.fetch_add(keys as u64, Relaxed);
    }

    /// So many keys of a table were pushed.
    pub(super) fn pushes(&self, table: usize, keys: usize) {
        self.tables[table].1.pushed.fetch_add(keys as u64, Relaxed);
    }

    /// A push had NaN or infinity.
    pub(super) fn left_out(&self) {
        self.not_finite.fetch_add(1, Relaxed);
    }

    /// The tables as they are now.
    pub fn tables(&self) -> impl Iterator<Item = TableCounts> {
        self.tables.iter().map(|(name, cells)| TableCounts {
            table: name.clone(),
            rows: cells.rows.load(Relaxed),
            bytes: cells.bytes.load(Relaxed),
            evicted: cells.evicted.load(Relaxed),
            pulled: cells.pulled.load(Relaxed),
            pushed: cells.pushed.load(Relaxed),
        })
    }

    /// Pushes with NaN or infinity.
    pub fn not_finite(&self) -> u64 {
        self.not_finite.load(Relaxed)
    }
}
