//! The trained model out of a checkpoint, as one safetensors file: the tensors under the names and
//! in the shapes that the trainers gave, without optimizer state.

use std::path::{Path, PathBuf};

use super::format::model_header;
use super::read::{Checkpoint, Damage};
use super::write::{Temporary, WriteError};

/// Name of the exported model.
pub const MODEL: &str = "model.safetensors";

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
pub fn export(checkpoint: &Checkpoint, folder: &Path) -> Result<PathBuf, ExportError> {
    let header = model_header(&checkpoint.description().tensors).map_err(WriteError::from)?;
    let file = Temporary::create(folder, MODEL)?;
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
