//! The trained model out of a checkpoint, as one safetensors file: the tensors under the names and
//! in the shapes that the trainers gave, without optimizer state.

use std::path::PathBuf;

use super::disk::Folder;
use super::format::{Dtype, Header, encode, entries, model_header, model_metadata};
use super::read::{Checkpoint, Damage};
use super::write::{Temporary, WriteError};

/// Name of the exported model.
pub const MODEL: &str = "model.safetensors";
/// Name of the exported sparse tables.
pub const TABLES: &str = "tables.safetensors";
/// Bytes of a column that are written at once.
const PIECE: usize = 1 << 20;

/// The model could not be exported.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Read(#[from] Damage),
    /// The file cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Writes the model in `checkpoint` to `folder`, one block in memory at a time. The file that is
/// there already is replaced when the new one is complete.
///
/// # Errors
/// If the checkpoint is damaged or the file cannot be written.
pub fn export(checkpoint: &Checkpoint, folder: impl Into<Folder>) -> Result<PathBuf, ExportError> {
    let folder = folder.into();
    let header = model_header(&checkpoint.description().tensors).map_err(WriteError::from)?;
    let file = Temporary::create(&folder, MODEL)?;
    file.write_at(&header, 0)?;
    let layout = checkpoint.layout();
    for block in 0..layout.blocks() {
        let range = layout.range(block);
        let offset = header.len() + range.start * 4;
        let values = checkpoint.read(range)?.values;
        file.write_at(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>(), offset as u64)?;
    }
    file.keep()?;
    Ok(folder.join(MODEL))
}

/// Writes the rows of the sparse tables in `checkpoint`, if it has any, to `folder`: of each table `NAME.keys` `[n]` and
/// `NAME.values` `[n, width]`, in no order that means anything.
///
/// # Errors
/// If the checkpoint is damaged or the file cannot be written.
pub fn export_tables(checkpoint: &Checkpoint, folder: &Folder) -> Result<Option<PathBuf>, ExportError> {
    let Some(first) = checkpoint.rows().first() else { return Ok(None) };
    let tables = &first.description().tables;
    let rows = |table: usize| checkpoint.rows().iter().map(|part| part.description().rows[table]).sum::<u64>();
    let keys = |place: usize| (format!("{}.keys", tables[place].name), Dtype::U64, vec![rows(place)]);
    let values = |place: usize| {
        (format!("{}.values", tables[place].name), Dtype::F32, vec![rows(place), tables[place].width as u64])
    };
    let sections = entries((0..tables.len()).map(keys).chain((0..tables.len()).map(values)).collect());
    let header = Header { metadata: model_metadata(), tensors: sections };
    let bytes = encode(&header);
    let file = Temporary::create(folder, TABLES)?;
    file.write_at(&bytes, 0)?;
    for (table, spec) in tables.iter().enumerate() {
        let column = |name: &str| {
            let at = bytes.len() as u64 + header.tensors[&format!("{}.{name}", spec.name)].data_offsets[0];
            Column { file: &file, at, bytes: Vec::new() }
        };
        let (mut keys, mut values) = (column("keys"), column("values"));
        for part in checkpoint.rows() {
            part.read(table, |row| {
                keys.put(&row.key.to_le_bytes())?;
                row.numbers[..spec.width].iter().try_for_each(|value| values.put(&value.to_le_bytes()))?;
                Ok::<_, ExportError>(())
            })?;
        }
        keys.flush()?;
        values.flush()?;
    }
    file.keep()?;
    Ok(Some(folder.join(TABLES)))
}

/// One tensor of a file, written from its beginning to its end.
struct Column<'a> {
    file: &'a Temporary,
    at: u64,
    bytes: Vec<u8>,
}

impl Column<'_> {
    fn put(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        self.bytes.extend_from_slice(bytes);
        if self.bytes.len() >= PIECE { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<(), WriteError> {
        self.file.write_at(&self.bytes, self.at)?;
        self.at += self.bytes.len() as u64;
        self.bytes.clear();
        Ok(())
    }
}
