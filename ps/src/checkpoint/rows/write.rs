//! Writing a server's rows, from snapshots of its tasks.

use super::plan::{RowsDescription, RowsPlan, TablePlan, rows_name};
use super::{GROUP, Group};
use crate::checkpoint::disk::Folder;
use crate::checkpoint::format::PartEntry;
use crate::checkpoint::write::{Temporary, WriteError, create_folder, table_checksum};
use crate::sparse::ShardState;

/// Writes the rows of all tasks of a server to `folder`, which is made if need be. `description` need not count them.
///
/// # Errors
/// If the file cannot be written; nothing is left behind then.
pub(crate) fn write(
    folder: &Folder,
    description: RowsDescription,
    states: &[ShardState],
) -> Result<PartEntry, WriteError> {
    let rows = |table: usize| states.iter().flat_map(move |state| state.tables[table].rows());
    let description = RowsDescription {
        rows: (0..description.tables.len()).map(|table| rows(table).count() as u64).collect(),
        clocks: states.iter().map(|state| state.clock.clone()).collect(),
        ..description
    };
    let plan = RowsPlan::new(&description, u64::MAX)?;
    create_folder(folder)?;
    let name = rows_name(description.server, description.servers);
    let file = Temporary::create(folder, &name)?;
    file.write_at(&plan.header, 0)?;
    let mut checksums = Vec::new();
    for (table, place) in plan.tables.iter().enumerate() {
        let (mut rows, mut group, mut done) = (rows(table), Group::default(), 0);
        loop {
            group.clear();
            for row in rows.by_ref().take(GROUP) {
                group.keys.push(row.key);
                group.used.push(row.used);
                group.updates.push(row.updates);
                group.numbers.extend_from_slice(row.numbers);
            }
            if group.keys.is_empty() {
                break;
            }
            checksums.push(put(&file, place, &group, done)?);
            done += group.keys.len() as u64;
        }
    }
    let checksums: Vec<u8> = checksums.iter().flat_map(|n: &u32| n.to_le_bytes()).collect();
    file.write_at(&checksums, plan.checksums_at)?;
    file.keep_part()?;
    Ok(PartEntry { file: name, bytes: plan.file_bytes(), crc32: table_checksum(&plan.header, &[], &checksums) })
}

/// Writes rows from the `first` of their table on; their checksum.
fn put(file: &Temporary, table: &TablePlan, group: &Group, first: u64) -> Result<u32, WriteError> {
    let mut hasher = crc32fast::Hasher::new();
    let mut column = |bytes: &[u8], at: u64| {
        hasher.update(bytes);
        file.write_at(bytes, at)
    };
    for (counts, at) in [&group.keys, &group.used, &group.updates].into_iter().zip(table.counts_at) {
        column(&counts.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>(), at + 8 * first)?;
    }
    let (width, stride) = (table.width as usize, table.width as usize * table.numbers_at.len());
    for (place, at) in table.numbers_at.iter().enumerate() {
        let of_rows = group.numbers.chunks_exact(stride).flat_map(|row| &row[place * width..][..width]);
        let bytes = of_rows.flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>();
        column(&bytes, at + 4 * table.width * first)?;
    }
    Ok(hasher.finalize())
}
