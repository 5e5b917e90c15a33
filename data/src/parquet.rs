//! Parquet: the footer says which row groups there are; a row group is a piece. Fields are single numbers. This file alone
//! knows the crate `parquet`, and needs of it the footer and the readers of pages and columns.

use std::ops::Range;
use std::sync::Arc;

use bytes::{Buf as _, Bytes};
use parquet::basic::{ConvertedType, LogicalType, Type};
use parquet::column::reader::{ColumnReader, get_column_reader};
use parquet::errors::ParquetError;
use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader};
use parquet::file::reader::{ChunkReader, Length, SerializedPageReader};
use parquet::schema::types::ColumnDescriptor;

use crate::csv::Targets;
use crate::schema::Number;

/// Bytes at the end of a file that are read first: most footers are in them.
pub const TAIL: u64 = 64 << 10;
/// Bytes at the end of a file that say how long the footer is.
const END: usize = 8;

/// The footer of a file.
#[derive(Clone, Debug)]
pub struct Footer(Arc<ParquetMetaData>);

/// A field of a file: its name and its type, as Parquet names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    pub name: String,
    pub found: String,
    /// True if it is a number, one in each row.
    pub is_number: bool,
}

/// Parts of a file that were read.
struct Held {
    file: u64,
    /// Where each part begins, and its bytes.
    parts: Vec<(u64, Bytes)>,
}

/// Returns the bytes at the end of a file that the footer takes, of the last bytes.
///
/// # Errors
/// If it is no Parquet file that can be read; the text says why.
pub fn footer_bytes(tail: &[u8], file: u64) -> Result<u64, String> {
    let end = tail.len().checked_sub(END).map(|begin| &tail[begin..]);
    let Some(&[a, b, c, d, ref mark @ ..]) = end else {
        return Err("it is too short for a Parquet file".to_owned());
    };
    let length = u64::from(u32::from_le_bytes([a, b, c, d])) + END as u64;
    match mark {
        b"PAR1" if length <= file => Ok(length),
        b"PARE" => Err("it is encrypted; write it without encryption".to_owned()),
        _ => Err("it does not end as a Parquet file; write it anew".to_owned()),
    }
}

impl Footer {
    /// Reads the footer in the last bytes of a file of so many bytes.
    ///
    /// # Errors
    /// If it is damaged.
    pub fn read(tail: Bytes, file: u64) -> Result<Self, String> {
        let held = Held { file, parts: vec![(file - tail.len() as u64, tail)] };
        let read = ParquetMetaDataReader::new().parse_and_finish(&held).map_err(|error| error.to_string());
        let found = read.and_then(|found| check(&found, file).map(|()| found));
        found.map(|found| Self(Arc::new(found))).map_err(|why| format!("its footer is damaged ({why}); write it anew"))
    }

    /// The fields, in the order in which they are written.
    #[must_use]
    pub fn fields(&self) -> Vec<Field> {
        let schema = self.0.file_metadata().schema_descr();
        (0..schema.num_columns()).map(|number| field(&schema.column(number))).collect()
    }

    /// The rows of each row group.
    #[must_use]
    pub fn groups(&self) -> Vec<u64> {
        self.0.row_groups().iter().map(|group| group.num_rows() as u64).collect()
    }

    /// The bytes of the fields that are wanted, in the order of the fields.
    #[must_use]
    pub fn ranges(&self, group: usize, targets: &Targets) -> Vec<Range<u64>> {
        let group = self.0.row_group(group);
        let wanted = targets.iter().enumerate().filter(|(_, target)| target.is_some());
        let range = |field: usize| {
            let (begin, length) = group.column(field).byte_range();
            begin..begin + length
        };
        wanted.map(|(field, _)| range(field)).collect()
    }

    /// Reads a row group, whose bytes were read as [`Footer::ranges`] says, into rows of `row` bytes.
    ///
    /// # Errors
    /// If it is damaged, or a number does not fit; the text says where.
    pub fn decode(
        &self,
        file: u64,
        group: usize,
        parts: Vec<(u64, Bytes)>,
        targets: &Targets,
        row: usize,
        into: &mut [u8],
    ) -> Result<(), String> {
        let held = Arc::new(Held { file, parts });
        let (group, rows) = (self.0.row_group(group), into.len() / row);
        let schema = self.0.file_metadata().schema_descr();
        for (field, target) in targets.iter().enumerate() {
            let Some((begin, kind)) = target else { continue };
            let described = schema.column(field);
            let name = described.name().to_owned();
            let is_unsigned = is_unsigned(&described);
            let pages = SerializedPageReader::new(held.clone(), group.column(field), rows, None);
            let pages = pages.map_err(|error| format!("column {name} cannot be read ({error})"))?;
            let reader = get_column_reader(described, Box::new(pages));
            let numbers = numbers(reader, rows, is_unsigned).map_err(|problem| format!("column {name} {problem}"))?;
            for (at, (number, row)) in numbers.into_iter().zip(into.chunks_exact_mut(row)).enumerate() {
                let put = kind.put(number, &mut row[*begin..*begin + kind.bytes()]);
                put.ok_or_else(|| format!("column {name}, row {at} of its row group is {number:?}, expected {kind}"))?;
            }
        }
        Ok(())
    }
}

/// Refuses a footer whose numbers of rows are below 0, or whose columns lie outside a file of so many bytes: all that comes
/// later relies on them, and the crate `parquet` panics.
fn check(found: &ParquetMetaData, file: u64) -> Result<(), String> {
    for (number, group) in found.row_groups().iter().enumerate() {
        let rows = group.num_rows();
        if rows < 0 {
            return Err(format!("row group {number} has {rows} rows"));
        }
        for column in group.columns() {
            let begin = column.dictionary_page_offset().unwrap_or(column.data_page_offset());
            let length = column.compressed_size();
            let end = begin.checked_add(length).and_then(|end| u64::try_from(end).ok());
            if begin < 0 || length < 0 || end.is_none_or(|end| end > file) {
                let name = column.column_path().string();
                let place = format!("{length} bytes from {begin} on");
                return Err(format!("column {name} of row group {number} has {place}, the file has {file}"));
            }
        }
    }
    Ok(())
}

/// Returns true for integers without a sign.
fn is_unsigned(described: &ColumnDescriptor) -> bool {
    let is_logical = matches!(described.logical_type_ref(), Some(LogicalType::Integer(integer)) if !integer.is_signed);
    is_logical || described.converted_type() == ConvertedType::UINT_32
}

fn field(described: &ColumnDescriptor) -> Field {
    let physical = described.physical_type();
    let converted = described.converted_type();
    let logical = described.logical_type_ref();
    let is_integer = matches!(logical, Some(LogicalType::Integer(_)));
    let found = match (converted, logical) {
        // Times of nanoseconds, for instance, have no converted type.
        (ConvertedType::NONE, Some(logical)) if !is_integer => format!("{physical} ({logical:?})"),
        (ConvertedType::NONE, _) => physical.to_string(),
        _ => format!("{physical} ({converted})"),
    };
    let has_sign = physical != Type::INT64 || !is_unsigned(described);
    let is_plain = matches!(
        converted,
        ConvertedType::NONE
            | ConvertedType::INT_8
            | ConvertedType::INT_16
            | ConvertedType::INT_32
            | ConvertedType::INT_64
            | ConvertedType::UINT_8
            | ConvertedType::UINT_16
            | ConvertedType::UINT_32
    );
    let is_typed = matches!(physical, Type::BOOLEAN | Type::INT32 | Type::INT64 | Type::FLOAT | Type::DOUBLE);
    let repeats = described.max_rep_level() > 0;
    let found = if repeats { format!("a list of {found}") } else { found };
    let is_number = is_plain && is_typed && has_sign && (logical.is_none() || is_integer) && !repeats;
    Field { name: described.path().string(), found, is_number }
}

/// Reads all values of a column, one in each row.
fn numbers(reader: ColumnReader, rows: usize, is_unsigned: bool) -> Result<Vec<Number>, String> {
    /// Reads with one of the readers, which differ in their types alone.
    macro_rules! read {
        ($reader:ident, $number:expr) => {{
            let mut reader = $reader;
            let (mut values, mut levels) = (Vec::new(), Vec::new());
            let read = reader.read_records(rows, Some(&mut levels), None, &mut values);
            let (found, _, _) = read.map_err(|error| format!("cannot be read ({error})"))?;
            (found, values.into_iter().map($number).collect::<Vec<Number>>())
        }};
    }
    let (found, numbers) = match reader {
        ColumnReader::BoolColumnReader(reader) => read!(reader, |value: bool| Number::Int(value.into())),
        ColumnReader::Int32ColumnReader(reader) => read!(reader, |value: i32| {
            Number::Int(if is_unsigned { i64::from(value as u32) } else { i64::from(value) })
        }),
        ColumnReader::Int64ColumnReader(reader) => read!(reader, Number::Int),
        ColumnReader::FloatColumnReader(reader) => read!(reader, |value: f32| Number::Float(value.into())),
        ColumnReader::DoubleColumnReader(reader) => read!(reader, Number::Float),
        _ => return Err("has no numbers".to_owned()),
    };
    match () {
        () if found != rows => Err(format!("has {found} of {rows} rows in a row group; write the file anew")),
        () if numbers.len() != rows => {
            Err(format!("is empty in {} of {rows} rows of a row group; fill them in", rows - numbers.len()))
        }
        () => Ok(numbers),
    }
}

impl Held {
    /// Returns what is held from `begin` on, to the end of its part.
    fn rest(&self, begin: u64) -> Result<Bytes, ParquetError> {
        let part = self.parts.iter().find(|(at, bytes)| (*at..*at + bytes.len() as u64).contains(&begin));
        let missing = || ParquetError::EOF(format!("byte {begin} is in no part that was described"));
        let (at, bytes) = part.ok_or_else(missing)?;
        Ok(bytes.slice((begin - at) as usize..))
    }
}

impl Length for Held {
    fn len(&self) -> u64 {
        self.file
    }
}

impl ChunkReader for Held {
    type T = bytes::buf::Reader<Bytes>;

    fn get_read(&self, start: u64) -> Result<Self::T, ParquetError> {
        Ok(self.rest(start)?.reader())
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        let held = self.rest(start)?;
        match held.len() >= length {
            true => Ok(held.slice(..length)),
            false => Err(ParquetError::EOF(format!("{length} bytes from {start} on are not all there"))),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::Path;

    use parquet::data_type::{DoubleType, Int64Type};
    use parquet::file::metadata::ParquetMetaDataWriter;
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;
    use parquet::schema::types::SchemaDescriptor;

    use super::*;
    use crate::schema::Kind;

    /// Writes rows of `x`, a DOUBLE, and `y`, an INT64, or with `swapped` an INT64 and a DOUBLE, in row groups of `group`.
    pub fn write(file: &Path, rows: &[(f64, i64)], group: usize, swapped: bool) {
        let types = if swapped { ["INT64", "DOUBLE"] } else { ["DOUBLE", "INT64"] };
        let message = format!("message examples {{ OPTIONAL {} x; REQUIRED {} y; }}", types[0], types[1]);
        let schema = Arc::new(parse_message_type(&message).expect("a schema"));
        let properties = Arc::new(WriterProperties::builder().build());
        let into = std::fs::File::create(file).expect("creates");
        let mut writer = SerializedFileWriter::new(into, schema, properties).expect("begins");
        for rows in rows.chunks(group) {
            let xs: Vec<f64> = rows.iter().map(|row| row.0).collect();
            let ys: Vec<i64> = rows.iter().map(|row| row.1).collect();
            let levels = vec![1_i16; rows.len()];
            let mut group = writer.next_row_group().expect("begins");
            for (number, levels) in [Some(&levels[..]), None].into_iter().enumerate() {
                let mut column = group.next_column().expect("a column").expect("there are two");
                match (number == 0) != swapped {
                    true => column.typed::<DoubleType>().write_batch(&xs, levels, None).expect("writes"),
                    false => column.typed::<Int64Type>().write_batch(&ys, levels, None).expect("writes"),
                };
                column.close().expect("ends");
            }
            group.close().expect("ends");
        }
        writer.close().expect("ends");
    }

    #[test]
    fn row_groups_are_read_by_their_bytes_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("x.parquet");
        let rows: Vec<_> = (0..250_i64).map(|row| (row as f64 / 4.0, row * row)).collect();
        write(&path, &rows, 100, false);
        let bytes = Bytes::from(std::fs::read(&path).expect("reads"));
        let file = bytes.len() as u64;
        let length = footer_bytes(&bytes[bytes.len() - 8..], file).expect("Parquet");
        let footer = Footer::read(bytes.slice((file - length) as usize..), file).expect("well formed");
        assert_eq!(footer.groups(), [100, 100, 50]);
        let fields = footer.fields();
        assert_eq!(fields.iter().map(|field| &*field.found).collect::<Vec<_>>(), ["DOUBLE", "INT64"]);
        let targets = [Some((0, Kind::F32)), Some((4, Kind::I64))];
        let ranges = footer.ranges(2, &targets);
        let parts =
            ranges.into_iter().map(|range| (range.start, bytes.slice(range.start as usize..range.end as usize)));
        let mut into = vec![0; 50 * 12];
        footer.decode(file, 2, parts.collect(), &targets, 12, &mut into).expect("well formed");
        let last = &into[49 * 12..];
        assert_eq!(last[..4], (249.0_f32 / 4.0).to_le_bytes());
        assert_eq!(last[4..], (249_i64 * 249).to_le_bytes());
    }

    #[test]
    fn a_footer_that_does_not_fit_its_file_is_refused() {
        const FILE: i64 = 10_000;
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("x.parquet");
        write(&path, &[(1.0, 2), (3.0, 4)], 2, false);
        let bytes = Bytes::from(std::fs::read(&path).expect("reads"));
        let footer = Footer::read(bytes, FILE as u64).expect("well formed").0;
        let read = |rows, dictionary, begin, length| {
            let group = footer.row_group(0).clone();
            let mut columns = group.columns().to_vec();
            let column = columns[1].clone().into_builder().set_dictionary_page_offset(dictionary);
            let column = column.set_data_page_offset(begin).set_total_compressed_size(length);
            columns[1] = column.build().expect("a column");
            let group = group.into_builder().set_num_rows(rows).set_column_metadata(columns).build();
            let changed = ParquetMetaData::new(footer.file_metadata().clone(), vec![group.expect("a row group")]);
            let mut written = Vec::new();
            ParquetMetaDataWriter::new(&mut written, &changed).finish().expect("writes");
            Footer::read(written.into(), FILE as u64).map(|footer| footer.groups())
        };
        for (rows, dictionary, begin, length) in [
            (2, None, 4, 100),
            (0, None, 0, 0),
            (2, None, 4, FILE - 4),
            (2, Some(4), 50, 100),
            (i64::MAX, None, 4, 100),
        ] {
            assert_eq!(read(rows, dictionary, begin, length), Ok(vec![rows as u64]), "{begin}, {length}");
        }
        for (rows, dictionary, begin, length) in [
            (-1, None, 4, 100),
            (2, None, -1, 100),
            (2, Some(-1), 4, 100),
            (2, None, 4, -1),
            (2, None, 4, FILE - 3),
            (2, None, FILE + 1, 0),
            (2, None, 4, i64::MAX / 2),
            (2, None, i64::MAX, i64::MAX / 2),
        ] {
            let error = read(rows, dictionary, begin, length).expect_err("it does not fit");
            assert!(error.contains("row group 0 has") && error.contains("write it anew"), "{begin}, {length}: {error}");
        }
    }

    #[test]
    fn times_and_large_integers_without_a_sign_are_no_numbers() {
        for (field, found, is_number) in [
            ("INT64 x", "INT64", true),
            ("INT64 x (INTEGER(64,true))", "INT64 (INT_64)", true),
            ("INT32 x (INTEGER(32,false))", "INT32 (UINT_32)", true),
            ("INT32 x (INTEGER(8,true))", "INT32 (INT_8)", true),
            ("INT64 x (INTEGER(64,false))", "INT64 (UINT_64)", false),
            ("INT64 x (TIMESTAMP(MILLIS,true))", "INT64 (TIMESTAMP_MILLIS)", false),
            ("INT64 x (TIMESTAMP(NANOS,true))", "NANOS", false),
            ("INT64 x (TIME(NANOS,true))", "NANOS", false),
            ("INT32 x (DATE)", "INT32 (DATE)", false),
            ("BYTE_ARRAY x (UTF8)", "BYTE_ARRAY (UTF8)", false),
        ] {
            let schema = parse_message_type(&format!("message examples {{ REQUIRED {field}; }}")).expect("a schema");
            let described = super::field(&SchemaDescriptor::new(Arc::new(schema)).column(0));
            assert!(described.found.contains(found), "{field}: {}", described.found);
            assert_eq!(described.is_number, is_number, "{field}");
        }
    }

    #[test]
    fn other_files_are_refused() {
        for (tail, said) in [
            (&b"PAR1"[..], "too short"),
            (b"\x10\0\0\0PARE", "encrypted"),
            (b"\x10\0\0\0PAR2", "does not end as"),
            (b"\xff\xff\0\0PAR1", "does not end as"),
        ] {
            assert!(footer_bytes(tail, 1000).is_err_and(|why| why.contains(said)), "{said}");
        }
    }
}
