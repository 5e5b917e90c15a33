//! CSV: numbers parted by commas, one example a line, with or without a line of names first. No quotes: a number needs none.
//! A first pass finds where every 1,024th row begins; later a piece is read from one of these marks to another.

use serde::{Deserialize, Serialize};

use crate::schema::{Kind, Number};

/// Rows from one mark to the next.
pub const EVERY: u64 = 1024;

/// The rows of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Marks {
    /// The names of the fields, where the first line has names.
    pub names: Option<Vec<String>>,
    /// Fields of the first line.
    pub fields: usize,
    pub rows: u64,
    /// First byte and line, counted from 1, of every 1,024th row.
    pub marks: Vec<(u64, u64)>,
}

/// The pass over a file, which takes its bytes from the first to the last.
#[derive(Debug)]
pub struct Scan {
    found: Marks,
    /// The next byte.
    at: u64,
    /// The first byte of the line, its number, and whether it has something in it.
    start: u64,
    line: u64,
    is_blank: bool,
    /// The line, until the first one with something in it is over.
    first: Option<Vec<u8>>,
}

impl Default for Scan {
    fn default() -> Self {
        Self { found: Marks::default(), at: 0, start: 0, line: 1, is_blank: true, first: Some(Vec::new()) }
    }
}

impl Scan {
    /// Takes the next bytes.
    pub fn take(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.at += 1;
            if *byte == b'\n' {
                self.end_line();
                continue;
            }
            self.is_blank &= byte.is_ascii_whitespace();
            if let Some(first) = &mut self.first {
                first.push(*byte);
            }
        }
    }

    fn end_line(&mut self) {
        if !self.is_blank && !self.is_names() {
            if self.found.rows.is_multiple_of(EVERY) {
                self.found.marks.push((self.start, self.line));
            }
            self.found.rows += 1;
        }
        if let Some(first) = &mut self.first {
            first.clear();
        }
        self.start = self.at;
        self.line += 1;
        self.is_blank = true;
    }

    /// Looks at the first line that is not blank: one of names has no number in it.
    fn is_names(&mut self) -> bool {
        let Some(first) = self.first.take() else { return false };
        let text = String::from_utf8_lossy(&first);
        let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
        let fields: Vec<String> = text.split(',').map(|field| field.trim().to_owned()).collect();
        self.found.fields = fields.len();
        let is_names = fields.iter().all(|field| field.parse::<f32>().is_err());
        self.found.names = is_names.then_some(fields);
        is_names
    }

    /// Ends the pass.
    #[must_use]
    pub fn end(mut self) -> Marks {
        if !self.is_blank {
            self.end_line();
        }
        self.found
    }
}

/// Where a field of a row goes: the first byte of its number in the row, and its type. `None` if nobody wants it.
pub type Targets = [Option<(usize, Kind)>];

/// Reads the rows of a piece, whose first line has the number `line`, into rows of `row` bytes.
///
/// # Errors
/// If a line does not fit; the text names it.
pub fn parse(bytes: &[u8], mut line: u64, targets: &Targets, row: usize, into: &mut [u8]) -> Result<(), String> {
    let text = String::from_utf8_lossy(bytes);
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let mut rows = into.chunks_exact_mut(row);
    for text in text.lines() {
        if !text.trim().is_empty() {
            let Some(into) = rows.next() else { return Err(format!("line {line}: it is more than there were")) };
            parse_row(text, targets, into).map_err(|problem| format!("line {line}: {problem}"))?;
        }
        line += 1;
    }
    match rows.next() {
        None => Ok(()),
        Some(_) => Err(format!("line {line}: rows are missing behind it")),
    }
}

fn parse_row(text: &str, targets: &Targets, into: &mut [u8]) -> Result<(), String> {
    let mut count = 0;
    for (field, target) in text.split(',').map(str::trim).zip(targets.iter().map(Some).chain(std::iter::repeat(None))) {
        count += 1;
        if let Some(Some((begin, kind))) = target {
            let into = &mut into[*begin..*begin + kind.bytes()];
            put(field, *kind, into).ok_or_else(|| format!("column {count} is {field:?}, expected {kind}"))?;
        }
    }
    match count == targets.len() {
        true => Ok(()),
        false => Err(format!("it has {count} columns, the first line of the data set has {}", targets.len())),
    }
}

fn put(field: &str, kind: Kind, into: &mut [u8]) -> Option<()> {
    if kind == Kind::F32 {
        // Rounded once.
        let value = field.parse::<f32>().ok().filter(|value| value.is_finite())?;
        into.copy_from_slice(&value.to_le_bytes());
        return Some(());
    }
    let number = match field.parse::<i64>() {
        Ok(whole) => Number::Int(whole),
        Err(_) => Number::Float(field.parse::<f64>().ok()?),
    };
    kind.put(number, into)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn scan(text: &str, piece: usize) -> Marks {
        let mut scan = Scan::default();
        text.as_bytes().chunks(piece).for_each(|bytes| scan.take(bytes));
        scan.end()
    }

    #[test]
    fn rows_are_counted_with_names_blank_lines_and_other_line_ends() {
        let named = |names: &[&str]| Some(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
        for (text, names, rows, marks) in [
            ("1,2\n3,4\n", None, 2, vec![(0, 1)]),
            ("1,2\n3,4", None, 2, vec![(0, 1)]),
            ("\u{feff}a, b\r\n\r\n1,2\r\n \n3,4\r\n\r\n", named(&["a", "b"]), 2, vec![(11, 3)]),
            ("a,b\n", named(&["a", "b"]), 0, vec![]),
            ("", None, 0, vec![]),
            ("\n\n1,b\n", None, 1, vec![(2, 3)]),
        ] {
            let found = scan(text, 3);
            assert_eq!((found.names, found.rows, found.marks), (names, rows, marks), "{text:?}");
        }
    }

    #[test]
    fn a_bad_row_is_named_with_line_and_column() {
        let targets = [Some((0, Kind::F32)), Some((4, Kind::I64))];
        for (text, said) in [
            ("1,2\n3,x\n", "line 8: column 2 is \"x\", expected i64"),
            ("1,2\n\n3,0.5\n", "line 9: column 2 is \"0.5\""),
            ("1,2\n3,4,5\n", "line 8: it has 3 columns, the first line of the data set has 2"),
            ("1,2\n3\n", "line 8: it has 1 columns"),
            ("inf,2\n3,4\n", "line 7: column 1 is \"inf\""),
            ("1,2\n", "line 8: rows are missing"),
            ("1,2\n3,4\n5,6\n", "line 9: it is more"),
        ] {
            let error = parse(text.as_bytes(), 7, &targets, 12, &mut [0; 24]).expect_err(said);
            assert!(error.starts_with(said), "{text:?}: {error}");
        }
    }

    proptest! {
        #[test]
        fn a_piece_between_marks_has_the_rows_of_the_file(rows in 1_u64..5000, piece in 1_usize..700, blank in 0_u64..50) {
            let line = |row: u64| format!("{row},{}\n{}", row * 2, if row % 50 < blank { "\n" } else { "" });
            let text: String = (0..rows).map(line).collect();
            let found = scan(&text, piece);
            prop_assert_eq!(found.rows, rows);
            let targets = [None, Some((0, Kind::I64))];
            for (number, (begin, line)) in found.marks.iter().enumerate() {
                let end = found.marks.get(number + 1).map_or(text.len() as u64, |(end, _)| *end);
                let count = EVERY.min(rows - number as u64 * EVERY) as usize;
                let mut into = vec![0; count * 8];
                parse(&text.as_bytes()[*begin as usize..end as usize], *line, &targets, 8, &mut into).expect("well formed");
                let first = i64::from_le_bytes(into[..8].try_into().expect("eight bytes"));
                prop_assert_eq!(first as u64, number as u64 * EVERY * 2);
            }
        }
    }
}
