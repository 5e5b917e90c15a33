//! Clicks from a file in the format of Criteo's public logs: one example a line, its fields parted by
//! tabs: 1 or 0 for clicked or not, then whole numbers, then categories as any text, hexadecimal in
//! theirs. A field may be empty.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use psjobs_ps::sparse::key::mix;

/// Numbers and categories in an example of Criteo's.
pub const NUMBERS: usize = 13;
pub const CATEGORIES: usize = 26;

/// Examples in memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Log {
    pub numbers: usize,
    pub categories: usize,
    values: Vec<f32>,
    keys: Vec<u64>,
    clicked: Vec<bool>,
}

/// Why a file is no log of clicks.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    #[error("cannot read {}; check that it is there and readable", file.display())]
    Read { file: PathBuf, source: io::Error },
    #[error("{}, line {line}: {problem}; correct the line, or remove it", file.display())]
    Row { file: PathBuf, line: usize, problem: String },
    #[error(
        "{} holds {found} examples, of which {held_out} are to be held out; use a longer file or a smaller --held-out",
        file.display()
    )]
    TooFew { file: PathBuf, found: usize, held_out: usize },
}

impl Log {
    /// Reads `file`, whose lines have so many numbers and categories.
    ///
    /// # Errors
    /// If it cannot be read, or a line does not fit; the error names the line.
    pub fn open(file: &Path, numbers: usize, categories: usize) -> Result<Self, LogError> {
        let unreadable = |source| LogError::Read { file: file.to_owned(), source };
        let mut log = Self { numbers, categories, values: Vec::new(), keys: Vec::new(), clicked: Vec::new() };
        let reader = BufReader::new(File::open(file).map_err(unreadable)?);
        for (line, bytes) in (1..).zip(reader.split(b'\n')) {
            let bytes = bytes.map_err(unreadable)?;
            let text = String::from_utf8_lossy(bytes.strip_suffix(b"\r").unwrap_or(&bytes));
            if !text.is_empty() {
                log.add(&text).map_err(|problem| LogError::Row { file: file.to_owned(), line, problem })?;
            }
        }
        Ok(log)
    }

    /// Number of examples.
    #[must_use]
    pub fn len(&self) -> usize {
        self.clicked.len()
    }

    /// Returns true if there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.clicked.is_empty()
    }

    /// Writes an example behind those before it; whether it was clicked.
    pub(super) fn write(&self, example: usize, numbers: &mut Vec<f32>, keys: &mut Vec<u64>) -> bool {
        numbers.extend_from_slice(&self.values[example * self.numbers..][..self.numbers]);
        keys.extend_from_slice(&self.keys[example * self.categories..][..self.categories]);
        self.clicked[example]
    }

    fn add(&mut self, line: &str) -> Result<(), String> {
        let fields: Vec<&str> = line.split('\t').collect();
        let want = 1 + self.numbers + self.categories;
        if fields.len() != want {
            let (numbers, categories) = (self.numbers, self.categories);
            return Err(format!(
                "it has {} fields, expected {want}: clicked or not, {numbers} numbers and {categories} categories, \
                 parted by tabs",
                fields.len()
            ));
        }
        let clicked = match fields[0] {
            "0" => false,
            "1" => true,
            other => return Err(format!("the first field is {other:?}, expected 1 (clicked) or 0")),
        };
        let (numbers, categories) = fields[1..].split_at(self.numbers);
        let numbers = (2..).zip(numbers).map(|(column, field)| number(column, field)).collect::<Result<Vec<_>, _>>()?;
        self.values.extend(numbers);
        self.keys.extend((0..).zip(categories).map(|(category, text)| key(category, text)));
        self.clicked.push(clicked);
        Ok(())
    }
}

/// Counts grow by powers: their logarithm is what one can add up. Criteo's few below 0 mean none.
fn number(column: usize, field: &str) -> Result<f32, String> {
    if field.is_empty() {
        return Ok(0.0);
    }
    match field.parse::<f32>() {
        Ok(value) if value.is_finite() => Ok(value.max(0.0).ln_1p()),
        _ => Err(format!("field {column} is {field:?}, expected a number")),
    }
}

/// A text's key: the category in the upper byte, a hash of the text below.
fn key(category: u64, text: &str) -> u64 {
    let hash = text.bytes().fold(mix(category), |hash, byte| mix(hash ^ u64::from(byte)));
    category << 56 | hash >> 8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(text: &str) -> Result<Log, LogError> {
        let folder = tempfile::tempdir().expect("temporary folder");
        let file = folder.path().join("clicks.tsv");
        std::fs::write(&file, text).expect("written");
        Log::open(&file, 2, 3)
    }

    #[test]
    fn a_log_is_read_with_empty_fields_and_other_line_ends() {
        let log = open("1\t3\t\t68fd1e64\t\tx\r\n\n0\t-2\t0\t68fd1e64\tx\t\n").expect("well formed");
        assert_eq!((log.len(), &log.clicked[..]), (2, &[true, false][..]));
        let (mut numbers, mut keys) = (Vec::new(), Vec::new());
        assert!(log.write(0, &mut numbers, &mut keys));
        assert!(!log.write(1, &mut numbers, &mut keys));
        assert_eq!(numbers, [3.0_f32.ln_1p(), 0.0, 0.0, 0.0]);
        assert_eq!(keys[0], keys[3], "one text in one category");
        assert_ne!(keys[2], keys[4], "one text in two categories");
        assert_eq!(keys.iter().map(|key| key >> 56).collect::<Vec<_>>(), [0, 1, 2, 0, 1, 2]);
    }

    #[test]
    fn a_bad_row_is_named_with_file_and_line() {
        for (text, want) in [
            ("1\t1\t1\ta\tb\tc\n1\t1\n", "clicks.tsv, line 2: it has 2 fields, expected 6"),
            ("2\t1\t1\ta\tb\tc\n", "line 1: the first field is \"2\""),
            ("\n0\t1\tx\ta\tb\tc\n", "line 2: field 3 is \"x\", expected a number"),
            ("0\t1\tinf\ta\tb\tc\n", "line 1: field 3 is \"inf\""),
        ] {
            let error = open(text).expect_err(want).to_string();
            assert!(error.contains(want), "{want}: {error}");
        }
        let error = Log::open(Path::new("/no/such.tsv"), 2, 3).expect_err("missing").to_string();
        assert!(error.contains("/no/such.tsv"), "{error}");
    }
}
