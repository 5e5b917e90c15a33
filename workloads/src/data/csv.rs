//! Tables of numbers as comma-separated values: one example a line, all lines of equal length, with or
//! without a line of names first. No quotes: a number needs none.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A rectangular table of finite numbers, row by row.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// The names of the columns, where the first line has names.
    pub names: Option<Vec<String>>,
    pub columns: usize,
    pub values: Vec<f32>,
}

/// Why a file is no table.
#[derive(Debug, thiserror::Error)]
pub enum CsvError {
    #[error("cannot read {}; check that it is there and readable", file.display())]
    Read { file: PathBuf, source: io::Error },
    #[error("{}, line {line}: {problem}; correct the line, or remove it", file.display())]
    Row { file: PathBuf, line: usize, problem: String },
    #[error("{} holds no row of numbers; write one example a line, separated by commas", .0.display())]
    Empty(PathBuf),
}

impl Table {
    /// Reads `file`.
    ///
    /// # Errors
    /// If it cannot be read, or a line does not fit; the error names the line.
    pub fn open(file: &Path) -> Result<Self, CsvError> {
        let text = fs::read(file).map_err(|source| CsvError::Read { file: file.to_owned(), source })?;
        parse(&String::from_utf8_lossy(&text)).map_err(|fault| match fault {
            Fault::Row(line, problem) => CsvError::Row { file: file.to_owned(), line, problem },
            Fault::Empty => CsvError::Empty(file.to_owned()),
        })
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.values.len() / self.columns
    }
}

enum Fault {
    /// The line, counted from 1, and what is wrong with it.
    Row(usize, String),
    Empty,
}

fn parse(text: &str) -> Result<Table, Fault> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut lines = text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty()).peekable();
    let fields = |line: &str| line.split(',').map(|field| field.trim().to_owned()).collect::<Vec<_>>();
    let first = fields(lines.peek().ok_or(Fault::Empty)?.0);
    let columns = first.len();
    // A line of names has no number in it; one that has some is a row with a fault.
    let names = first.iter().all(|field| field.parse::<f32>().is_err()).then_some(first);
    if names.is_some() {
        lines.next();
    }
    let mut values = Vec::new();
    for (line, number) in lines {
        let before = values.len();
        for (field, column) in line.split(',').map(str::trim).zip(1..) {
            match field.parse::<f32>() {
                Ok(value) if value.is_finite() => values.push(value),
                _ => return Err(Fault::Row(number, format!("column {column} is {field:?}, expected a number"))),
            }
        }
        let found = values.len() - before;
        if found != columns {
            return Err(Fault::Row(number, format!("it has {found} columns, the first line has {columns}")));
        }
    }
    if values.is_empty() { Err(Fault::Empty) } else { Ok(Table { names, columns, values }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(contents: &[u8]) -> Result<Table, CsvError> {
        let folder = tempfile::tempdir().expect("temporary folder");
        let file = folder.path().join("table.csv");
        fs::write(&file, contents).expect("written");
        Table::open(&file)
    }

    #[test]
    fn a_table_reads_the_same_with_names_blank_lines_and_other_line_ends() {
        let plain = open(b"1,2.5,-3e1\n4,5,6\n").expect("well formed");
        assert_eq!((plain.columns, plain.rows(), &plain.names), (3, 2, &None));
        assert_eq!(plain.values, [1.0, 2.5, -30.0, 4.0, 5.0, 6.0]);
        let named = open("\u{feff}a, b ,c\r\n1, 2.5 ,-3e1\r\n\r\n4,5,6".as_bytes()).expect("well formed");
        assert_eq!(named.values, plain.values);
        assert_eq!(named.names, Some(vec!["a".into(), "b".into(), "c".into()]));
    }

    #[test]
    fn a_bad_row_is_named_with_file_line_and_column() {
        for (contents, want) in [
            (&b"a,b\n1,2\n3,x\n"[..], "table.csv, line 3: column 2 is \"x\", expected a number"),
            (b"1,2\n\n3\n", "table.csv, line 3: it has 1 columns, the first line has 2"),
            (b"1,2\n3,4,5\n", "line 2: it has 3 columns"),
            (b"1,2\n3,\n", "line 2: column 2 is \"\""),
            (b"1,2\n3,NaN\n", "line 2: column 2 is \"NaN\""),
            (b"1,b\n3,4\n", "line 1: column 2 is \"b\""),
            (b"a,b\n", "holds no row"),
            (b"", "holds no row"),
            (b"\xff\xfe\x00,1\n2,3\n", "line 1: column 1"),
        ] {
            let error = open(contents).expect_err(want).to_string();
            assert!(error.contains(want), "{want}: {error}");
        }
        let error = Table::open(Path::new("/no/such.csv")).expect_err("missing").to_string();
        assert!(error.contains("/no/such.csv"), "{error}");
    }
}
