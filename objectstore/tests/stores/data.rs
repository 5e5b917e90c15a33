//! A data set in a bucket is the one in a folder, also behind a store that throttles and breaks connections; one that changes
//! is an error.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parquet::data_type::{DoubleType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use psjobs_data::{DataError, DataSet, Expected, Fields, Kind as Number, Settings};

use crate::between::Between;
use crate::store::{self, Kind, Store};

/// Numbers in an example of the large data set, so that a few hundred are some pieces.
const WIDE: usize = 16_384;
/// Faults that the large data set is read through.
const FAULTS: u32 = 40;

fn put(store: &Store, name: &str, bytes: &[u8]) {
    let folder = store.folder("data");
    let (unfinished, file) = (folder.join(format!("{name}.tmp")), folder.join(name));
    folder.disk().create_unnamed(&unfinished).expect("creates").write_at(bytes, 0).expect("writes");
    folder.disk().rename(&unfinished, &file).expect("sends");
}

fn csv(rows: std::ops::Range<usize>) -> Vec<u8> {
    rows.map(|row| format!("{row},{},{}\n", row * 2, row % 3)).collect::<String>().into_bytes()
}

fn safetensors(rows: usize, width: usize) -> Vec<u8> {
    let (inputs, end) = (rows * width * 4, rows * width * 4 + rows * 8);
    let header = format!(
        r#"{{"inputs":{{"dtype":"F32","shape":[{rows},{width}],"data_offsets":[0,{inputs}]}},"targets":{{"dtype":"I64","shape":[{rows}],"data_offsets":[{inputs},{end}]}}}}"#
    );
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    (0..rows * width).for_each(|number| bytes.extend((number as f32).to_le_bytes()));
    (0..rows as i64).for_each(|row| bytes.extend(row.to_le_bytes()));
    bytes
}

/// Rows of `x`, a DOUBLE, and `y`, an INT64, in row groups of 128.
fn parquet(rows: std::ops::Range<i64>) -> Vec<u8> {
    let schema = parse_message_type("message examples { REQUIRED DOUBLE x; REQUIRED INT64 y; }").expect("a schema");
    let properties = Arc::new(WriterProperties::builder().build());
    let mut writer = SerializedFileWriter::new(Vec::new(), Arc::new(schema), properties).expect("begins");
    let all: Vec<i64> = rows.collect();
    for rows in all.chunks(128) {
        let mut group = writer.next_row_group().expect("begins");
        let mut x = group.next_column().expect("a column").expect("there are two");
        let halves: Vec<f64> = rows.iter().map(|row| *row as f64 / 2.0).collect();
        x.typed::<DoubleType>().write_batch(&halves, None, None).expect("writes");
        x.close().expect("ends");
        let mut y = group.next_column().expect("a column").expect("there are two");
        y.typed::<Int64Type>().write_batch(rows, None, None).expect("writes");
        y.close().expect("ends");
        group.close().expect("ends");
    }
    writer.into_inner().expect("ends")
}

fn open(place: &str, variables: Vec<(String, String)>, settings: &Settings) -> Result<DataSet, DataError> {
    let column = |name: &str, kind, fields| Expected { name: name.to_owned(), kind, shape: None, fields };
    let expected = [column("inputs", Number::F32, Fields::AllButLast), column("targets", Number::I64, Fields::Last)];
    DataSet::open_with(place, &expected, settings, variables)
}

fn settings(cache: &Path, bytes: u64) -> Settings {
    Settings { cache: Some(bytes), cache_dir: Some(cache.to_owned()), memory: 0 }
}

#[test]
fn a_data_set_in_a_bucket_is_the_one_in_a_folder() {
    for store in store::all() {
        for (name, parts) in [
            ("csv", [csv(0..3000), csv(3000..3007)]),
            ("safetensors", [safetensors(500, 7), safetensors(3, 7)]),
            ("parquet", [parquet(0..1000), parquet(1000..1003)]),
        ] {
            let (folder, cache) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
            for (number, part) in parts.iter().enumerate() {
                put(&store, &format!("{name}/part-{number}.{name}"), part);
                fs::write(folder.path().join(format!("part-{number}.{name}")), part).expect("writes");
            }
            let settings = settings(cache.path(), 1 << 20);
            let local = open(&format!("file://{}", folder.path().display()), Vec::new(), &settings).expect("local");
            let url = store.url(&format!("data/{name}"));
            let remote = open(&url, store.variables(), &settings).expect("remote");
            assert_eq!(remote.examples(), local.examples(), "{url}");
            let numbers: Vec<i64> = (0..local.examples() as i64).rev().step_by(7).collect();
            for numbers in numbers.chunks(32) {
                let want = local.read(numbers).expect("local");
                assert_eq!(remote.read(numbers).expect("remote"), want, "{url}");
            }
        }
    }
}

#[test]
fn images_in_a_bucket_are_those_of_a_folder() {
    for store in store::all() {
        let (folder, cache) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
        for number in 0..40_usize {
            let (class, bytes) = (["dog", "cat"][number % 2], vec![number as u8; 3000 + 700 * number]);
            let name = format!("{class}/{number}.png");
            fs::create_dir_all(folder.path().join(class)).expect("creates");
            fs::write(folder.path().join(&name), &bytes).expect("writes");
            put(&store, &format!("images/{name}"), &bytes);
        }
        let settings = settings(cache.path(), 1 << 20);
        let local = DataSet::open(&folder.path().display().to_string(), &[], &settings).expect("local");
        let remote = DataSet::open_with(&store.url("data/images"), &[], &settings, store.variables()).expect("remote");
        assert_eq!((remote.classes(), remote.examples()), (local.classes(), local.examples()));
        for numbers in [[0, 39, 20], [7, 7, 1]] {
            let said = |data: &DataSet| {
                let files = data.read_files(&numbers).expect("reads");
                files.into_iter().map(|file| (file.bytes, file.class)).collect::<Vec<_>>()
            };
            assert_eq!(said(&remote), said(&local));
        }
    }
}

#[test]
fn an_object_that_changes_while_a_job_reads_it_is_named() {
    for store in store::all() {
        let cache = tempfile::tempdir().expect("a folder");
        put(&store, "a.csv", &csv(0..50));
        let data = open(&store.url("data"), store.variables(), &settings(cache.path(), 0)).expect("well formed");
        data.read(&[49]).expect("reads");
        // As long, and other numbers.
        let other: Vec<u8> = csv(0..50).into_iter().map(|byte| if byte == b'1' { b'2' } else { byte }).collect();
        put(&store, "a.csv", &other);
        let error = data.read(&[49]).expect_err("it is another object");
        let named = format!("{} has changed", store.url("data/a.csv"));
        assert!(error.is_input() && error.to_string().contains(&named), "{error}");
    }
}

#[test]
fn a_bucket_that_is_missing_is_named_in_the_words_of_the_store() {
    let Some(store) = Store::start(Kind::S3) else { return };
    let cache = tempfile::tempdir().expect("a folder");
    let error = open("s3://other/data", store.variables(), &settings(cache.path(), 0)).expect_err("it is missing");
    let text = error.with_causes();
    assert!(text.contains("s3://other/data") && text.contains("create the bucket"), "{text}");
}

#[test]
fn a_store_that_fails_now_and_then_gives_the_right_numbers_or_an_error() {
    let Some(store) = Store::start(Kind::S3) else { return };
    let cache = tempfile::tempdir().expect("a folder");
    put(&store, "large.safetensors", &safetensors(300, WIDE));
    let between = Between::start(store.address, 11);
    let open = || open(&store.url("data"), store.variables_at(between.address), &settings(cache.path(), 0));
    let data = (0..20).find_map(|_| open().ok()).expect("one of twenty attempts succeeds");
    let (mut read, mut failed) = (0, 0);
    while between.faults.load(Ordering::SeqCst) < FAULTS {
        assert!(read + failed < 2000, "the faults do not come");
        let row = (read * 97 + 13) % 300;
        match data.read(&[row]) {
            Ok(table) => {
                let numbers = (0..WIDE).map(|number| (row as usize * WIDE + number) as f32);
                let want = [psjobs_data::Values::F32(numbers.collect()), psjobs_data::Values::I64(vec![row])];
                assert!(table.columns == want, "row {row}");
                read += 1;
            }
            Err(error) => {
                assert!(!error.is_input(), "{error}");
                failed += 1;
            }
        }
    }
    between.active.store(false, Ordering::SeqCst);
    assert!(read > 10 * failed, "{failed} of {} reads failed", read + failed);
    eprintln!("{FAULTS} faults, {read} examples, {failed} could not be read");
}
