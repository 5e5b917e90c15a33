//! Reading a server's rows. As with the parts, nothing in the file is believed before a checksum says so.

use std::path::{Path, PathBuf};

use super::plan::{RowsDescription, RowsPlan};
use super::{GROUP, Group};
use crate::checkpoint::disk::{Disk, OpenFile};
use crate::checkpoint::format::{PREFIX, PartEntry};
use crate::checkpoint::read::{Damage, open_described, read_at};
use crate::checkpoint::write::table_checksum;
use crate::sparse::Row;

/// One server's rows; verified when read.
#[derive(Debug)]
pub struct RowsPart {
    path: PathBuf,
    file: Box<dyn OpenFile>,
    description: RowsDescription,
    plan: RowsPlan,
    checksums: Vec<u32>,
}

impl RowsPart {
    /// Opens the file that a manifest names.
    ///
    /// # Errors
    /// If it is not the one that was written.
    pub fn open(disk: &Disk, path: &Path, entry: &PartEntry) -> Result<Self, Damage> {
        let (file, header) = open_described(disk, path, entry.bytes)?;
        let parsed = RowsPlan::parse(&header[PREFIX..], entry.bytes);
        let (description, plan) = parsed.map_err(|source| Damage::Header { file: path.to_owned(), source })?;
        if plan.file_bytes() != entry.bytes {
            return Err(Damage::Length { file: path.to_owned(), expected: plan.file_bytes(), found: entry.bytes });
        }
        let checksums = read_at(&*file, path, plan.checksums_at, 4 * plan.groups)?;
        if table_checksum(&plan.header, &[], &checksums) != entry.crc32 {
            return Err(Damage::Bytes {
                file: path.to_owned(),
                what: "its header or its checksums do not match their own".into(),
            });
        }
        let checksums = checksums.as_chunks::<4>().0.iter().map(|n| u32::from_le_bytes(*n)).collect();
        Ok(Self { path: path.to_owned(), file, description, plan, checksums })
    }

    /// Returns the description in the file.
    #[must_use]
    pub fn description(&self) -> &RowsDescription {
        &self.description
    }

    /// Hands on every row of a table, as it is in the file.
    ///
    /// # Errors
    /// If what was read does not match its checksum, or `each` says so.
    ///
    /// # Panics
    /// If there is no such table.
    pub(crate) fn read<E: From<Damage>>(
        &self,
        table: usize,
        mut each: impl FnMut(Row<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let plan = &self.plan.tables[table];
        let stride = plan.width as usize * plan.numbers_at.len();
        let mut group = Group::default();
        for (number, first) in (0..plan.rows).step_by(GROUP).enumerate() {
            self.read_group(table, first, number, &mut group)?;
            for (place, numbers) in group.numbers.chunks_exact(stride).enumerate() {
                let (key, used, updates) = (group.keys[place], group.used[place], group.updates[place]);
                each(Row { key, used, updates, numbers })?;
            }
        }
        Ok(())
    }

    fn read_group(&self, table: usize, first: u64, number: usize, group: &mut Group) -> Result<(), Damage> {
        let plan = &self.plan.tables[table];
        let rows = (plan.rows - first).min(GROUP as u64);
        let mut hasher = crc32fast::Hasher::new();
        let mut column = |at: u64, bytes: u64| {
            let bytes = read_at(&*self.file, &self.path, at, bytes)?;
            hasher.update(&bytes);
            Ok::<_, Damage>(bytes)
        };
        group.clear();
        for (counts, at) in [&mut group.keys, &mut group.used, &mut group.updates].into_iter().zip(plan.counts_at) {
            let bytes = column(at + 8 * first, 8 * rows)?;
            counts.extend(bytes.as_chunks::<8>().0.iter().map(|n| u64::from_le_bytes(*n)));
        }
        let (width, columns) = (plan.width as usize, plan.numbers_at.len());
        group.numbers.resize(rows as usize * width * columns, 0.0);
        for (place, at) in plan.numbers_at.iter().enumerate() {
            let bytes = column(at + 4 * plan.width * first, 4 * plan.width * rows)?;
            let of_rows = bytes.as_chunks::<4>().0.chunks_exact(width);
            for (row, numbers) in group.numbers.chunks_exact_mut(width * columns).zip(of_rows) {
                let into = &mut row[place * width..][..width];
                into.iter_mut().zip(numbers).for_each(|(into, number)| *into = f32::from_le_bytes(*number));
            }
        }
        if hasher.finalize() != self.checksums[plan.first_group as usize + number] {
            let table = &self.description.tables[table].name;
            let what = format!("rows {first} to {} of table {table} do not match their checksum", first + rows - 1);
            return Err(Damage::Bytes { file: self.path.clone(), what });
        }
        Ok(())
    }
}
