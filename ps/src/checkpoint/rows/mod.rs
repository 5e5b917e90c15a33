//! The rows of sparse tables in a checkpoint: for each server one safetensors file, `rows-00000-of-00002.safetensors`,
//! beside its part. For every table it holds `NAME.keys`, `.used` and `.updates` `[n]`, `.values` and `.slot.0` and so
//! on `[n, width]`, so that other programs can read them; then a checksum for each [`GROUP`] of rows of a table, over
//! its numbers in all of those.

mod plan;
mod read;
#[cfg(test)]
mod tests;
mod write;

pub use plan::{RowsDescription, rows_name};
pub use read::RowsPart;
pub(crate) use write::write;

/// Rows that are read and written at once, and have one checksum.
const GROUP: usize = 4096;

/// Some rows of one table, by column.
#[derive(Debug, Default)]
struct Group {
    keys: Vec<u64>,
    used: Vec<u64>,
    updates: Vec<u64>,
    /// Values, then slots, of a row each.
    numbers: Vec<f32>,
}

impl Group {
    fn clear(&mut self) {
        self.keys.clear();
        self.used.clear();
        self.updates.clear();
        self.numbers.clear();
    }
}
