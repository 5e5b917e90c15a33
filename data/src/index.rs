//! The index of a data set, made once at the start: its files, how many examples each has, and in which pieces they are
//! read. Examples are numbered from 0 in the order of the files' names.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use parking_lot::Mutex;

use crate::csv::{Marks, Scan};
use crate::disk_cache::DiskCache;
use crate::error::DataError;
use crate::parquet::{self, Footer};
use crate::place::{File, Place};
use crate::safetensors::{self, Tensor};
use crate::schema::{Column, Expected, Fields, Kind, Layout};

/// Bytes of a piece's rows, about: few enough that the first batches, which need many pieces, come soon; enough that a
/// data set of gigabytes has no more pieces than a process may have open files.
pub const PIECE: u64 = 8 << 20;
/// Bytes of a CSV file that the first pass reads at once.
const PASS: u64 = 8 << 20;
/// Files that are looked at in parallel: most of the time goes by waiting for a store.
const PARALLEL: usize = 8;

/// The formats, by the extensions of their files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Safetensors,
    Csv,
    Parquet,
    /// A file for each example, in a folder for each class.
    Images,
}

/// A run of examples that are read together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The number of its file.
    pub file: usize,
    /// Its first example, of all.
    pub first: u64,
    /// Its first row, of its file.
    pub row: u64,
    pub rows: u64,
    /// Its number in its file: the row group, or a count.
    pub number: usize,
}

/// The contents of each file, as far as they are looked at once.
#[derive(Debug)]
pub enum Contents {
    /// The tensors of each file, in the order of the columns.
    Safetensors(Vec<Vec<Tensor>>),
    Csv {
        files: Vec<Marks>,
        targets: Vec<Option<(usize, Kind)>>,
    },
    Parquet {
        files: Vec<Footer>,
        targets: Vec<Option<(usize, Kind)>>,
    },
    Images {
        classes: Vec<String>,
        class_of: Vec<u32>,
    },
}

/// All of a data set but the examples themselves.
#[derive(Debug)]
pub struct Index {
    pub files: Vec<File>,
    pub contents: Contents,
    /// The row of an example; without columns for images.
    pub layout: Layout,
    pub pieces: Vec<Piece>,
    pub examples: u64,
}

impl Format {
    fn of(file: &File) -> Option<Self> {
        Some(match file.extension().as_str() {
            "safetensors" => Self::Safetensors,
            "csv" => Self::Csv,
            "parquet" => Self::Parquet,
            "png" | "jpg" | "jpeg" | "bmp" => Self::Images,
            _ => return None,
        })
    }
}

/// Finds the one format of the files.
///
/// # Errors
/// If there is no file, one of an unknown format, or two formats.
fn format(place: &str, files: &[File]) -> Result<Format, DataError> {
    let Some(first) = files.first() else {
        let problem =
            "there is no file below it; write .safetensors, .csv or .parquet files, or a folder for each class";
        return Err(DataError::unfit(place, problem));
    };
    let mut found = None;
    for file in files {
        let format = Format::of(file).ok_or_else(|| {
            let problem =
                "unknown kind of file; a data set is .safetensors, .csv or .parquet files, or folders of .png, .jpg or .bmp";
            DataError::unfit(format!("{place}: {}", file.name), problem)
        })?;
        if *found.get_or_insert(format) != format {
            let problem = format!("it holds {} and {}; put files of one kind into a folder", first.name, file.name);
            return Err(DataError::unfit(place, problem));
        }
    }
    found.ok_or_else(|| DataError::unfit(place, "there is no file below it"))
}

impl Index {
    /// Looks at all files. `cache` keeps what a pass over a CSV file has found; `piece` is the bytes of a piece, about: [`PIECE`]
    /// but in tests.
    ///
    /// # Errors
    /// If a file cannot be read, is damaged or of another schema; the error names it.
    pub fn make(
        place: &Place,
        expected: &[Expected],
        cache: Option<&DiskCache>,
        piece: u64,
    ) -> Result<Self, DataError> {
        let files = place.list()?;
        let (contents, layout, rows) = match format(&place.shown(), &files)? {
            Format::Safetensors => of_safetensors(place, &files, expected, piece)?,
            Format::Csv => of_csv(place, &files, expected, cache, piece)?,
            Format::Parquet => of_parquet(place, &files, expected)?,
            Format::Images => of_images(place, &files)?,
        };
        if layout.row == 0 && !matches!(contents, Contents::Images { .. }) {
            return Err(DataError::unfit(place.shown(), "its examples have no numbers"));
        }
        let mut pieces = Vec::new();
        let mut first = 0;
        for (file, rows) in rows.into_iter().enumerate() {
            if !fits(first, &rows, layout.row) {
                let problem = "it says that it has more rows than any machine holds; write it anew";
                return Err(DataError::unfit(place.shown_file(&files[file]), problem));
            }
            let mut row = 0;
            for (number, rows) in rows.into_iter().enumerate() {
                if rows > 0 {
                    pieces.push(Piece { file, first, row, rows, number });
                }
                first += rows;
                row += rows;
            }
        }
        if first == 0 {
            return Err(DataError::unfit(place.shown(), "its files hold no example"));
        }
        Ok(Self { files, contents, layout, pieces, examples: first })
    }

    /// Returns the piece of an example, and its row in the piece; `None` if there is no such example.
    #[must_use]
    pub fn locate(&self, example: u64) -> Option<(usize, u64)> {
        locate(&self.pieces, self.examples, example)
    }
}

fn locate(pieces: &[Piece], examples: u64, example: u64) -> Option<(usize, u64)> {
    let piece = pieces.partition_point(|piece| piece.first <= example).checked_sub(1)?;
    (example < examples).then(|| (piece, example - pieces[piece].first))
}

/// Returns true if `rows` more rows of `row` bytes, in pieces, behind `first` others can be counted in bytes, also twice.
fn fits(first: u64, rows: &[u64], row: usize) -> bool {
    let rows = rows.iter().try_fold(first, |sum, rows| sum.checked_add(*rows));
    let bytes = rows.and_then(|rows| rows.checked_mul((row as u64).max(1)));
    bytes.is_some_and(|bytes| i64::try_from(bytes).is_ok())
}

/// Cuts rows into pieces of so many rows.
fn cut(rows: u64, each: u64) -> Vec<u64> {
    (0..rows).step_by(each as usize).map(|begin| each.min(rows - begin)).collect()
}

/// Rows of a piece of `piece` bytes whose rows have so many; all where they have none.
fn rows_of_piece(piece: u64, row: usize) -> u64 {
    piece.checked_div(row as u64).map_or(u64::MAX, |rows| rows.max(1))
}

/// Contents, the layout of a row, and of each file the rows of its pieces.
type Looked = (Contents, Layout, Vec<Vec<u64>>);

fn of_safetensors(place: &Place, files: &[File], expected: &[Expected], piece: u64) -> Result<Looked, DataError> {
    let headers = in_parallel(files, |file| {
        let unfit = |problem: String| DataError::unfit(place.shown_file(file), problem);
        let first = place.read(file, 0..8.min(file.bytes))?;
        let length = safetensors::header_bytes(&first, file.bytes);
        let length = length.ok_or_else(|| unfit("it is no safetensors file, or cut off; write it anew".into()))?;
        let header = place.read(file, 8..8 + length)?;
        safetensors::tensors(&header, file.bytes).map_err(unfit)
    })?;
    let (mut all, mut rows) = (Vec::new(), Vec::new());
    let mut columns: Option<Vec<Column>> = None;
    for (file, tensors) in files.iter().zip(&headers) {
        let (mine, found) = of_header(place, file, tensors, expected)?;
        let known = columns.get_or_insert_with(|| found.clone());
        if let Some((want, found)) = known.iter().zip(&found).find(|(want, found)| want != found) {
            return Err(DataError::Column {
                file: place.shown_file(file),
                column: found.name.clone(),
                expected: format!("the shape {:?} for each example, as in {}", want.shape, files[0].name),
                found: format!("{:?}", found.shape),
            });
        }
        let counts: BTreeSet<u64> = mine.iter().map(|tensor| tensor.shape[0]).collect();
        let Some(count) = counts.first().copied().filter(|_| counts.len() == 1) else {
            let problem = format!("its tensors have {counts:?} rows; each needs one for every example");
            return Err(DataError::unfit(place.shown_file(file), problem));
        };
        all.push(mine);
        rows.push(count);
    }
    let layout = Layout::new(columns.unwrap_or_default());
    let each = rows_of_piece(piece, layout.row);
    Ok((Contents::Safetensors(all), layout, rows.into_iter().map(|count| cut(count, each)).collect()))
}

fn of_header(
    place: &Place,
    file: &File,
    tensors: &BTreeMap<String, Tensor>,
    expected: &[Expected],
) -> Result<(Vec<Tensor>, Vec<Column>), DataError> {
    let find = |expected: &Expected| {
        safetensors::column(tensors, expected).map_err(|(wanted, found)| DataError::Column {
            file: place.shown_file(file),
            column: expected.name.clone(),
            expected: wanted,
            found,
        })
    };
    let found: Vec<(Tensor, Column)> = expected.iter().map(find).collect::<Result<_, _>>()?;
    Ok(found.into_iter().unzip())
}

fn of_csv(
    place: &Place,
    files: &[File],
    expected: &[Expected],
    cache: Option<&DiskCache>,
    piece: u64,
) -> Result<Looked, DataError> {
    let marks = in_parallel(files, |file| marks(place, file, cache, piece))?;
    let first = &marks[0];
    for (file, marks) in files.iter().zip(&marks) {
        let differs = marks.rows > 0 && (marks.fields, &marks.names) != (first.fields, &first.names);
        if differs {
            let problem = format!(
                "its first line has {} columns{}, that of {} has {}{}; write it anew, or take it out of the folder",
                marks.fields,
                named(marks),
                files[0].name,
                first.fields,
                named(first)
            );
            return Err(DataError::unfit(place.shown_file(file), problem));
        }
    }
    let numbered = || (1..=first.fields).map(|number| number.to_string()).collect();
    let names = first.names.clone().unwrap_or_else(numbered);
    let (layout, targets) = assign(&names, expected).map_err(|(column, expected)| DataError::Column {
        file: place.shown_file(&files[0]),
        column,
        expected,
        found: format!("the columns {}", names.join(", ")),
    })?;
    let rows = files.iter().zip(&marks).map(|(file, marks)| marks.cut(file.bytes, layout.row, piece)).collect();
    Ok((Contents::Csv { files: marks, targets }, layout, rows))
}

fn named(marks: &Marks) -> String {
    marks.names.as_ref().map(|names| format!(" ({})", names.join(", "))).unwrap_or_default()
}

/// Passes over a CSV file, or takes what an earlier pass has found.
fn marks(place: &Place, file: &File, cache: Option<&DiskCache>, piece: u64) -> Result<Marks, DataError> {
    let key = format!("csv 2\n{}\n{}\n{}\n{}", place.shown(), file.name, file.bytes, file.tag);
    let known = cache.and_then(|cache| cache.get(&key, None));
    if let Some(known) = known.and_then(|file| serde_json::from_reader(std::io::BufReader::new(file)).ok()) {
        return Ok(known);
    }
    let mut scan = Scan::new(piece);
    for begin in (0..file.bytes).step_by(PASS as usize) {
        let read = place.read(file, begin..(begin + PASS).min(file.bytes))?;
        scan.take(&read).map_err(|problem| DataError::unfit(place.shown_file(file), problem))?;
    }
    let found = scan.end();
    if let (Some(cache), Ok(text)) = (cache, serde_json::to_vec(&found)) {
        // The next process passes over it again.
        drop(cache.put(&key, &text));
    }
    Ok(found)
}

fn of_parquet(place: &Place, files: &[File], expected: &[Expected]) -> Result<Looked, DataError> {
    let footers = in_parallel(files, |file| {
        let unfit = |problem: String| DataError::unfit(place.shown_file(file), problem);
        let tail = place.read(file, file.bytes.saturating_sub(parquet::TAIL)..file.bytes)?;
        let length = parquet::footer_bytes(&tail, file.bytes).map_err(unfit)?;
        let footer = match length <= tail.len() as u64 {
            true => tail,
            false => place.read(file, file.bytes - length..file.bytes)?,
        };
        Footer::read(footer, file.bytes).map_err(unfit)
    })?;
    let schema = footers[0].fields();
    let names: Vec<String> = schema.iter().map(|field| field.name.clone()).collect();
    let (layout, targets) = assign(&names, expected).map_err(|(column, expected)| DataError::Column {
        file: place.shown_file(&files[0]),
        column,
        expected,
        found: format!("the columns {}", names.join(", ")),
    })?;
    for (file, footer) in files.iter().zip(&footers) {
        let found = footer.fields();
        let refuse = |column: &str, expected: String, found: String| {
            Err(DataError::Column { file: place.shown_file(file), column: column.to_owned(), expected, found })
        };
        for (number, want) in schema.iter().enumerate().filter(|(number, _)| targets[*number].is_some()) {
            let as_in = || format!("{} {}, as in {}", want.name, want.found, files[0].name);
            match found.get(number) {
                None => return refuse(&want.name, as_in(), format!("{} columns", found.len())),
                Some(field) if field.name != want.name || field.found != want.found => {
                    return refuse(&want.name, as_in(), format!("{} {}", field.name, field.found));
                }
                Some(field) if !field.is_number => {
                    let expected = "a number (BOOLEAN, INT32, INT64, FLOAT or DOUBLE)".to_owned();
                    return refuse(&want.name, expected, field.found.clone());
                }
                Some(_) => {}
            }
        }
        if found.len() != schema.len() {
            let (column, more) = match found.get(schema.len()) {
                Some(field) => (field.name.clone(), "one more"),
                None => (schema[found.len()].name.clone(), "one less"),
            };
            return refuse(&column, format!("{} columns, as in {}", schema.len(), files[0].name), more.to_owned());
        }
    }
    let rows = footers.iter().map(Footer::groups).collect();
    Ok((Contents::Parquet { files: footers, targets }, layout, rows))
}

/// Columns of a table of numbers: the layout, and where each field goes.
type Assigned = (Layout, Vec<Option<(usize, Kind)>>);

/// Assigns the fields of a table to the columns that are expected.
///
/// # Errors
/// If fields are missing; with the column and what was expected.
fn assign(names: &[String], expected: &[Expected]) -> Result<Assigned, (String, String)> {
    let last = names.len().saturating_sub(1);
    let mut fields_of = Vec::new();
    let mut columns = Vec::new();
    for Expected { name, kind, shape, fields } in expected {
        let found: Vec<usize> = match fields {
            Fields::Named => names.iter().position(|field| field == name).into_iter().collect(),
            Fields::AllButLast => (0..last).collect(),
            Fields::Last => (last..names.len()).collect(),
        };
        let inner = match (shape, fields) {
            (Some(shape), _) => shape.clone(),
            (None, Fields::AllButLast) => vec![found.len()],
            (None, _) => Vec::new(),
        };
        let column = Column { name: name.clone(), kind: *kind, shape: inner };
        if found.is_empty() || found.len() != column.elements() {
            let wanted = match fields {
                Fields::Named => format!("a column {name} of {kind}"),
                Fields::AllButLast if shape.is_some() => {
                    format!("{} columns of {kind} and one more", column.elements())
                }
                Fields::AllButLast => format!("columns of {kind}, and the target in the last one"),
                Fields::Last => format!("a last column of {kind}"),
            };
            return Err((name.clone(), wanted));
        }
        fields_of.push(found);
        columns.push(column);
    }
    let layout = Layout::new(columns);
    let mut targets = vec![None; names.len()];
    for ((fields, column), offset) in fields_of.iter().zip(&layout.columns).zip(&layout.offsets) {
        for (number, field) in fields.iter().enumerate() {
            targets[*field] = Some((offset + number * column.kind.bytes(), column.kind));
        }
    }
    Ok((layout, targets))
}

/// Classes are the folders, numbered in the order of their names.
fn of_images(place: &Place, files: &[File]) -> Result<Looked, DataError> {
    let class = |file: &File| match file.name.split('/').collect::<Vec<_>>()[..] {
        [class, _] => Ok(class.to_owned()),
        _ => Err(DataError::unfit(
            place.shown_file(file),
            "it lies in no folder of a class; put every image into the folder of its class",
        )),
    };
    let named: Vec<String> = files.iter().map(class).collect::<Result<_, _>>()?;
    let classes: BTreeSet<String> = named.iter().cloned().collect();
    let numbers: BTreeMap<&String, u32> = classes.iter().zip(0..).collect();
    let class_of = named.iter().map(|name| numbers[name]).collect();
    let contents = Contents::Images { classes: classes.iter().cloned().collect(), class_of };
    Ok((contents, Layout::new(Vec::new()), vec![vec![1]; files.len()]))
}

/// Looks at files on some threads. Returns what was found in their order, or the error of one.
fn in_parallel<T: Send>(
    files: &[File],
    look: impl Fn(&File) -> Result<T, DataError> + Sync,
) -> Result<Vec<T>, DataError> {
    let next = AtomicUsize::new(0);
    let found: Mutex<BTreeMap<usize, Result<T, DataError>>> = Mutex::default();
    thread::scope(|scope| {
        for _ in 0..PARALLEL.min(files.len()) {
            scope.spawn(|| {
                while let number = next.fetch_add(1, Ordering::Relaxed)
                    && let Some(file) = files.get(number)
                {
                    let looked = look(file);
                    if looked.is_err() {
                        // The others end with the file they look at.
                        next.store(files.len(), Ordering::Relaxed);
                    }
                    found.lock().insert(number, looked);
                }
            });
        }
    });
    found.into_inner().into_values().collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn expected(name: &str, kind: Kind, shape: Option<Vec<usize>>, fields: Fields) -> Expected {
        Expected { name: name.into(), kind, shape, fields }
    }

    #[test]
    fn fields_go_to_the_columns_that_are_expected() {
        let names = ["a", "b", "c", "y"].map(String::from);
        let inputs = |shape| expected("inputs", Kind::F32, shape, Fields::AllButLast);
        let targets = expected("targets", Kind::I64, None, Fields::Last);
        let (layout, assigned) = assign(&names, &[inputs(None), targets.clone()]).expect("they fit");
        assert_eq!((layout.row, &layout.columns[0].shape[..], layout.columns[1].elements()), (20, &[3][..], 1));
        let f32 = |offset| Some((offset, Kind::F32));
        assert_eq!(assigned, [f32(0), f32(4), f32(8), Some((12, Kind::I64))]);
        let named = expected("b", Kind::U8, None, Fields::Named);
        let (layout, assigned) = assign(&names, &[named]).expect("it is there");
        assert_eq!((layout.row, assigned), (1, vec![None, Some((0, Kind::U8)), None, None]));
        for (names, wanted, said) in [
            (&names[..], inputs(Some(vec![2, 2])), "4 columns of f32"),
            (&names[3..], inputs(None), "the target in the last one"),
            (&names[..], expected("z", Kind::F32, None, Fields::Named), "a column z of f32"),
            (&[], targets, "a last column"),
        ] {
            let (column, error) = assign(names, std::slice::from_ref(&wanted)).expect_err(said);
            assert!(column == wanted.name && error.contains(said), "{error}");
        }
    }

    #[test]
    fn pieces_are_of_some_mebibytes() {
        assert_eq!(rows_of_piece(PIECE, 3140), PIECE / 3140);
        assert_eq!(rows_of_piece(PIECE, 1 << 30), 1);
        assert_eq!(cut(10, 4), [4, 4, 2]);
        assert_eq!(cut(0, 4), [0; 0]);
        assert_eq!(cut(1 << 62, rows_of_piece(PIECE, 0)), [1_u64 << 62], "rows without numbers");
    }

    #[test]
    fn rows_that_no_machine_holds_are_refused() {
        let most = i64::MAX as u64;
        for (first, rows, row, want) in [
            (0, &[][..], 4, true),
            (10, &[5, 5], 4, true),
            (0, &[most / 4], 4, true),
            (1, &[most / 4], 4, false),
            (0, &[most / 4, 1], 4, false),
            (0, &[most, most, most], 1, false),
            (0, &[most], usize::MAX, false),
            (0, &[most], 0, true),
        ] {
            assert_eq!(fits(first, rows, row), want, "{rows:?} of {row} bytes behind {first}");
        }
    }

    proptest! {
        #[test]
        fn every_example_is_in_one_piece(rows in prop::collection::vec(1_u64..9, 1..20)) {
            let mut first = 0;
            let pieces: Vec<Piece> = rows.iter().map(|rows| {
                first += rows;
                Piece { file: 0, first: first - rows, row: 0, rows: *rows, number: 0 }
            }).collect();
            let located: Vec<_> = (0..first).map(|example| locate(&pieces, first, example)).collect();
            let want = rows.iter().enumerate().flat_map(|(piece, rows)| (0..*rows).map(move |row| Some((piece, row))));
            prop_assert_eq!(located, want.collect::<Vec<_>>());
            prop_assert_eq!(locate(&pieces, first, first), None);
        }
    }
}
