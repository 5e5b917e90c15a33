//! Reads the examples of one file, a CSV or safetensors.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use tch::{Kind, TchError, Tensor};

use super::csv::{CsvError, Table};

/// Why a file cannot be used as examples.
#[derive(Debug, thiserror::Error)]
pub enum LabelledError {
    #[error(transparent)]
    Csv(#[from] CsvError),
    #[error("cannot read {}; check that it is there and readable", file.display())]
    Read { file: PathBuf, source: io::Error },
    #[error("cannot read {}: {}; write it anew, or remove it", file.display(), first_line(source))]
    Damaged { file: PathBuf, source: TchError },
    #[error("{}: {problem}", file.display())]
    Unfit { file: PathBuf, problem: String },
    #[error("{}: unknown kind of file; give a .csv, a .safetensors or a folder", .0.display())]
    Unknown(PathBuf),
}

/// Cuts off the back trace that follows in an error of libtorch.
fn first_line(error: &TchError) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

/// Reads inputs, f32, and targets, f32 or whole numbers, of one file.
pub(super) fn read(file: &Path) -> Result<(Tensor, Tensor), LabelledError> {
    if let Err(source) = std::fs::metadata(file) {
        return Err(LabelledError::Read { file: file.to_owned(), source });
    }
    let (inputs, targets) = match extension(file).as_str() {
        "csv" => from_csv(file)?,
        "safetensors" => safetensors(file, ["inputs", "targets"])?.into(),
        _ => return Err(LabelledError::Unknown(file.to_owned())),
    };
    let count = |tensor: &Tensor| tensor.size().first().copied().unwrap_or(0);
    if count(&inputs) == 0 || count(&inputs) != count(&targets) {
        let (inputs, targets) = (inputs.size(), targets.size());
        let problem =
            format!("inputs have the shape {inputs:?} and targets {targets:?}; both need as many rows, at least one");
        return Err(LabelledError::Unfit { file: file.to_owned(), problem });
    }
    let targets = targets.to_kind(if targets.is_floating_point() { Kind::Float } else { Kind::Int64 });
    Ok((inputs.to_kind(Kind::Float), targets))
}

fn from_csv(file: &Path) -> Result<(Tensor, Tensor), LabelledError> {
    let table = Table::open(file)?;
    if table.columns < 2 {
        let problem = "it has one column; write the inputs first and the target in the last column".into();
        return Err(LabelledError::Unfit { file: file.to_owned(), problem });
    }
    let columns = table.columns as i64;
    let all = Tensor::from_slice(&table.values).reshape([-1, columns]);
    Ok((all.narrow(1, 0, columns - 1).contiguous(), all.select(1, columns - 1).contiguous()))
}

/// Reads the tensors of these names.
pub(super) fn safetensors<const N: usize>(file: &Path, wanted: [&str; N]) -> Result<[Tensor; N], LabelledError> {
    let read = Tensor::read_safetensors(file);
    let read = read.map_err(|source| LabelledError::Damaged { file: file.to_owned(), source })?;
    let tensors: BTreeMap<String, Tensor> = read.into_iter().collect();
    if !wanted.iter().all(|name| tensors.contains_key(*name)) {
        let names = tensors.keys().cloned().collect::<Vec<_>>().join(", ");
        let problem = format!("it holds {names}; save the examples as `{}`", wanted.join("` and `"));
        return Err(LabelledError::Unfit { file: file.to_owned(), problem });
    }
    Ok(wanted.map(|name| tensors[name].shallow_clone()))
}

/// Returns the extension in lower case.
pub(super) fn extension(file: &Path) -> String {
    file.extension().unwrap_or_default().to_string_lossy().to_ascii_lowercase()
}
