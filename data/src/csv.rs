//! CSV: numbers parted by commas, one example a line, with or without a line of names first. No quotes: a number needs none.
//! A first pass marks where a row begins at least every 1,024 rows; later a piece is read from one of these marks to another.

use serde::{Deserialize, Serialize};

use crate::schema::{Kind, Number};

/// Rows from one mark to the next, at most.
const EVERY: u64 = 1024;
/// A first line of more bytes is no line of a table; it is kept until its end to look at its fields.
const LONGEST_FIRST: usize = 16 << 20;

/// The rows of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Marks {
    /// The names of the fields, where the first line has names.
    pub names: Option<Vec<String>>,
    /// Fields of the first line.
    pub fields: usize,
    pub rows: u64,
    /// The first row and some of those behind it: the row, its first byte, and its line, counted from 1.
    pub marks: Vec<(u64, u64, u64)>,
}

impl Marks {
    /// Returns the first byte and the line of a row; `None` if it has no mark.
    #[must_use]
    pub fn at(&self, row: u64) -> Option<(u64, u64)> {
        let found = self.marks.binary_search_by_key(&row, |(row, ..)| *row).ok()?;
        let (_, begin, line) = self.marks[found];
        Some((begin, line))
    }

    /// Cuts the rows of a file of `file` bytes into pieces from mark to mark: of at most `piece` bytes of text, and as many of
    /// rows, each of which takes `row`. From one mark to the next is the smallest piece. Returns the rows of each.
    #[must_use]
    pub fn cut(&self, file: u64, row: usize, piece: u64) -> Vec<u64> {
        let Some(&(first, first_byte, _)) = self.marks.first() else { return Vec::new() };
        let ends = self.marks[1..].iter().map(|(row, begin, _)| (*row, *begin)).chain([(self.rows, file)]);
        let (mut begin, mut last) = ((first, first_byte), (first, first_byte));
        let mut pieces = Vec::new();
        for end in ends {
            let (rows, text) = (end.0 - begin.0, end.1 - begin.1);
            if last.0 > begin.0 && (text > piece || rows.saturating_mul(row as u64) > piece) {
                pieces.push(last.0 - begin.0);
                begin = last;
            }
            last = end;
        }
        pieces.push(last.0 - begin.0);
        pieces
    }
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
    /// Bytes after which the next row is marked.
    piece: u64,
}

impl Scan {
    /// Begins a pass that marks a row at least every `piece` bytes, or with the first row that begins behind them.
    #[must_use]
    pub fn new(piece: u64) -> Self {
        let first = Some(Vec::new());
        Self { found: Marks::default(), at: 0, start: 0, line: 1, is_blank: true, first, piece }
    }

    /// Takes the next bytes.
    ///
    /// # Errors
    /// If the first line is too long for one; the text says so.
    pub fn take(&mut self, bytes: &[u8]) -> Result<(), String> {
        for byte in bytes {
            self.at += 1;
            if *byte == b'\n' {
                self.end_line();
                continue;
            }
            self.is_blank &= byte.is_ascii_whitespace();
            if let Some(first) = &mut self.first {
                if first.len() == LONGEST_FIRST {
                    let most = LONGEST_FIRST >> 20;
                    return Err(format!("its first line has more than {most} MiB; write one example a line"));
                }
                first.push(*byte);
            }
        }
        Ok(())
    }

    fn end_line(&mut self) {
        if !self.is_blank && !self.is_names() {
            let row = self.found.rows;
            let is_due = |(last, begin, _): &(u64, u64, u64)| row - last >= EVERY || self.start - begin >= self.piece;
            if self.found.marks.last().is_none_or(is_due) {
                self.found.marks.push((row, self.start, self.line));
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

    /// Marks of a pass that reads so many bytes at once.
    fn scan(text: &str, read: usize, piece: u64) -> Marks {
        let mut scan = Scan::new(piece);
        text.as_bytes().chunks(read).for_each(|bytes| scan.take(bytes).expect("lines"));
        scan.end()
    }

    #[test]
    fn rows_are_counted_with_names_blank_lines_and_other_line_ends() {
        let named = |names: &[&str]| Some(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
        for (text, names, rows, marks) in [
            ("1,2\n3,4\n", None, 2, vec![(0, 0, 1)]),
            ("1,2\n3,4", None, 2, vec![(0, 0, 1)]),
            ("\u{feff}a, b\r\n\r\n1,2\r\n \n3,4\r\n\r\n", named(&["a", "b"]), 2, vec![(0, 11, 3)]),
            ("a,b\n", named(&["a", "b"]), 0, vec![]),
            ("", None, 0, vec![]),
            ("\n\n1,b\n", None, 1, vec![(0, 2, 3)]),
        ] {
            let found = scan(text, 3, 1000);
            assert_eq!((found.names, found.rows, found.marks), (names, rows, marks), "{text:?}");
        }
    }

    #[test]
    fn long_rows_are_marked_before_there_are_1024() {
        for (piece, marks) in [
            (1, vec![(0, 0, 1), (1, 4, 2), (2, 9, 4), (3, 13, 5)]),
            (8, vec![(0, 0, 1), (2, 9, 4)]),
            (100, vec![(0, 0, 1)]),
        ] {
            assert_eq!(scan("1,2\n3,4\n\n5,6\n7,8\n", 5, piece).marks, marks, "{piece} bytes");
        }
        let many = scan(&"1\n".repeat(2049), 100, 1 << 20);
        assert_eq!(many.marks, [(0, 0, 1), (1024, 2048, 1025), (2048, 4096, 2049)]);
        assert_eq!((many.at(1024), many.at(1025)), (Some((2048, 1025)), None));
    }

    #[test]
    fn pieces_are_bounded_as_text_and_as_rows() {
        let marks = Marks {
            names: None,
            fields: 1,
            rows: 35,
            marks: vec![(0, 5, 2), (10, 25, 12), (20, 45, 22), (30, 65, 32)],
        };
        for (row, piece, want) in [
            (1, 100, &[35][..]),
            (1, 40, &[20, 15]),
            (1, 39, &[10, 10, 15]),
            (1, 1, &[10, 10, 10, 5]),
            (8, 160, &[20, 15]),
            (8, 159, &[10, 10, 15]),
            (usize::MAX, 1 << 20, &[10, 10, 10, 5]),
        ] {
            assert_eq!(marks.cut(75, row, piece), want, "rows of {row} bytes, {piece} bytes");
        }
        assert_eq!(Marks::default().cut(75, 1, 1), [0; 0]);
    }

    #[test]
    fn a_first_line_without_end_is_refused() {
        let mut scan = Scan::new(1 << 20);
        let part = vec![b'1'; LONGEST_FIRST];
        scan.take(&part).expect("it may end here");
        assert!(scan.take(b"1").is_err_and(|why| why.contains("more than 16 MiB")));
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
        fn a_piece_between_marks_has_the_rows_of_the_file(
            rows in 1_u64..5000,
            read in 1_usize..700,
            piece in prop::sample::select(vec![100_u64, 3000, 1 << 20]),
            blank in 0_u64..50,
        ) {
            let line = |row: u64| format!("{row},{}\n{}", row * 2, if row % 50 < blank { "\n" } else { "" });
            let text: String = (0..rows).map(line).collect();
            let found = scan(&text, read, piece);
            prop_assert_eq!(found.rows, rows);
            let targets = [None, Some((0, Kind::I64))];
            let file = text.len() as u64;
            let pieces = found.cut(file, 8, piece);
            prop_assert_eq!(pieces.iter().sum::<u64>(), rows);
            let mut row = 0;
            for count in pieces {
                let (begin, line) = found.at(row).expect("pieces begin at marks");
                let end = found.at(row + count).map_or(file, |(end, _)| end);
                let mut into = vec![0; count as usize * 8];
                parse(&text.as_bytes()[begin as usize..end as usize], line, &targets, 8, &mut into).expect("well formed");
                let first = i64::from_le_bytes(into[..8].try_into().expect("eight bytes"));
                prop_assert_eq!(first as u64, row * 2);
                row += count;
            }
        }
    }
}
