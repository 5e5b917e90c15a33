//! A data set gives what its files have, whatever their format, their number and the size of the cache.

use std::fs;
use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::parquet::tests::write as write_parquet;
use crate::schema::{Fields, Kind, Values};

/// Inputs of two numbers and a target.
type Row = ([f32; 2], i64);

fn expected() -> [Expected; 2] {
    let column = |name: &str, kind, fields| Expected { name: name.into(), kind, shape: None, fields };
    [column("inputs", Kind::F32, Fields::AllButLast), column("targets", Kind::I64, Fields::Last)]
}

fn write_csv(file: &Path, rows: &[Row]) {
    let lines = rows.iter().map(|([a, b], y)| format!("{a},{b},{y}\n"));
    fs::write(file, lines.collect::<String>()).expect("writes");
}

fn write_safetensors(file: &Path, rows: &[Row]) {
    let (count, inputs) = (rows.len(), rows.len() * 8);
    let end = inputs + count * 4;
    let header = format!(
        r#"{{"inputs":{{"dtype":"F32","shape":[{count},2],"data_offsets":[0,{inputs}]}},"targets":{{"dtype":"I32","shape":[{count}],"data_offsets":[{inputs},{end}]}}}}"#
    );
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    rows.iter().for_each(|(x, _)| bytes.extend(x.iter().flat_map(|x| x.to_le_bytes())));
    rows.iter().for_each(|(_, y)| bytes.extend((*y as i32).to_le_bytes()));
    fs::write(file, bytes).expect("writes");
}

fn open(folder: &Path, settings: &Settings) -> Result<DataSet, DataError> {
    DataSet::open_with(&folder.display().to_string(), &expected(), settings, [])
}

fn open_in_pieces(folder: &Path, settings: &Settings, piece: u64) -> DataSet {
    let place = Place::open(&folder.display().to_string(), []).expect("a place");
    DataSet::open_in_pieces(place, &expected(), settings, piece).expect("well formed")
}

fn settings(cache: &Path, bytes: u64, memory: u64) -> Settings {
    Settings { cache: Some(bytes), cache_dir: Some(cache.to_owned()), memory }
}

fn rows(table: &Table) -> Vec<Row> {
    match &table.columns[..] {
        [Values::F32(inputs), Values::I64(targets)] => {
            inputs.chunks_exact(2).map(|x| [x[0], x[1]]).zip(targets.iter().copied()).collect()
        }
        other => panic!("inputs and targets, not {other:?}"),
    }
}

fn row(number: usize) -> Row {
    ([number as f32 / 8.0, -(number as f32)], number as i64 * 3)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn examples_read_by_number_are_those_of_the_files(
        shards in prop::collection::vec(1_usize..3000, 1..5),
        wanted in prop::collection::vec(any::<prop::sample::Index>(), 1..60),
        cache in prop::sample::select(vec![0_u64, 40_000, 1 << 20]),
        memory in prop::sample::select(vec![0_u64, 30_000, 1 << 20]),
        piece in prop::sample::select(vec![500_u64, 20_000, PIECE]),
        is_csv in any::<bool>(),
    ) {
        let (folder, pieces) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
        let mut all = Vec::new();
        for (number, count) in shards.iter().enumerate() {
            let rows: Vec<Row> = (all.len()..all.len() + count).map(row).collect();
            let end = if is_csv { "csv" } else { "safetensors" };
            let file = folder.path().join(format!("part-{number}.{end}"));
            if is_csv { write_csv(&file, &rows) } else { write_safetensors(&file, &rows) }
            all.extend(rows);
        }
        let data = open_in_pieces(folder.path(), &settings(pieces.path(), cache, memory), piece);
        prop_assert_eq!(data.examples(), all.len());
        prop_assert!(!is_csv || piece > 500 || all.len() < 500 || data.inner.index.pieces.len() > shards.len());
        for wanted in wanted.chunks(20) {
            let numbers: Vec<i64> = wanted.iter().map(|index| index.index(all.len()) as i64).collect();
            data.will_read(&numbers);
            let found = rows(&data.read(&numbers).expect("reads"));
            let want: Vec<Row> = numbers.iter().map(|number| all[*number as usize]).collect();
            prop_assert_eq!(found, want);
        }
    }
}

#[test]
fn pieces_that_are_open_take_no_more_of_the_disk_than_the_cache_may() {
    const CACHE: u64 = 40_000;
    let (folder, pieces) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let all: Vec<Row> = (0..10_000).map(row).collect();
    write_csv(&folder.path().join("a.csv"), &all);
    // A row has 16 bytes; no piece stays in memory.
    let data = open_in_pieces(folder.path(), &settings(pieces.path(), CACHE, 0), 10_000);
    assert!(data.inner.index.pieces.len() > 10, "many times the cache");
    for _ in 0..2 {
        for number in (0..10_000).step_by(100) {
            assert_eq!(rows(&data.read(&[number]).expect("reads")), [all[number as usize]]);
            let open = (0..data.inner.index.pieces.len()).filter_map(|piece| data.inner.open.lock().get(&piece));
            let bytes: u64 = open.map(|file| file.metadata().expect("a file").len()).sum();
            assert!(bytes <= CACHE, "{bytes} bytes are open");
        }
    }
}

#[test]
fn another_folder_takes_the_place_of_one_that_cannot_be_made_if_none_was_named() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("file"), "").expect("writes");
    let (below, other) = (folder.path().join("file/pieces"), folder.path().join("other"));
    open_cache(below.clone(), Some(other.clone()), Some(1)).expect("the other one");
    assert!(other.is_dir());
    for other in [None, Some(below.clone())] {
        let error = open_cache(below.clone(), other, Some(1)).expect_err("it cannot be made").to_string();
        assert!(error.contains("file/pieces cannot be used"), "{error}");
    }
    let named = Settings { cache_dir: Some(below.clone()), ..Settings::default() };
    assert_eq!(named.folders(), (below, None));
    let (folder, other) = Settings::default().folders();
    assert_eq!(folder.ends_with("psjobs/pieces"), other.is_some(), "without a user's folder there is one alone");
}

#[test]
fn row_groups_of_parquet_are_read_and_another_schema_is_named() {
    let (folder, pieces) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let written: Vec<(f64, i64)> = (0..500_i64).map(|number| (number as f64 / 2.0, number)).collect();
    write_parquet(&folder.path().join("a.parquet"), &written[..300], 128, false);
    write_parquet(&folder.path().join("b.parquet"), &written[300..], 128, false);
    let data = open(folder.path(), &settings(pieces.path(), 1 << 20, 1 << 10)).expect("well formed");
    let table = data.read(&[499, 0, 299, 300]).expect("reads");
    assert_eq!(table.columns, [Values::F32(vec![249.5, 0.0, 149.5, 150.0]), Values::I64(vec![499, 0, 299, 300])]);
    write_parquet(&folder.path().join("c.parquet"), &written[..10], 128, true);
    let error =
        open(folder.path(), &settings(pieces.path(), 1 << 20, 1 << 10)).expect_err("another schema").to_string();
    for said in ["c.parquet", "column x", "expected x DOUBLE, as in a.parquet", "found x INT64"] {
        assert!(error.contains(said), "{said}: {error}");
    }
}

#[test]
fn another_process_finds_the_pieces_of_the_first_one() {
    let (folder, pieces) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let all: Vec<Row> = (0..3000).map(row).collect();
    write_csv(&folder.path().join("a.csv"), &all);
    let open = || open(folder.path(), &settings(pieces.path(), 1 << 20, 0)).expect("well formed");
    let (first, second) = (open(), open());
    assert_eq!(rows(&first.read(&[2999, 5]).expect("reads")), [all[2999], all[5]]);
    assert!(second.inner.has(0), "it is on the disk");
    assert_eq!(rows(&second.read(&[7]).expect("reads")), [all[7]]);
    for entry in fs::read_dir(pieces.path()).expect("lists") {
        fs::remove_file(entry.expect("an entry").path()).expect("removes");
    }
    assert_eq!(rows(&open().read(&[7]).expect("it is fetched again")), [all[7]]);
}

#[test]
fn a_file_that_changes_while_it_is_read_is_named() {
    for end in ["csv", "safetensors"] {
        let (folder, pieces) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
        let (file, all) = (folder.path().join(format!("a.{end}")), (0..100).map(row).collect::<Vec<Row>>());
        let write = |rows: &[Row]| if end == "csv" { write_csv(&file, rows) } else { write_safetensors(&file, rows) };
        write(&all);
        let data = open(folder.path(), &settings(pieces.path(), 1 << 20, 0)).expect("well formed");
        write(&all[..50]);
        let error = data.read(&[99]).expect_err("it is another file");
        assert!(error.is_input() && error.to_string().contains(&format!("a.{end} has changed")), "{error}");
    }
}

#[test]
fn images_are_read_with_the_numbers_of_their_classes() {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, text) in [("dog/b.png", "1"), ("cat/z.png", "2"), ("cat/a.png", "3")] {
        let file = folder.path().join(name);
        fs::create_dir_all(file.parent().expect("a folder")).expect("creates");
        fs::write(file, text).expect("writes");
    }
    let data = DataSet::open(&folder.path().display().to_string(), &[], &Settings::default()).expect("well formed");
    assert_eq!(data.classes().expect("classes"), ["cat", "dog"]);
    let found = data.read_files(&[2, 0]).expect("reads");
    assert_eq!(
        found.iter().map(|file| (&*file.bytes, file.class)).collect::<Vec<_>>(),
        [(&b"1"[..], 1), (&b"3"[..], 0)]
    );
    assert!(found[0].name.ends_with("dog/b.png"), "{}", found[0].name);
    let error = data.read_files(&[3]).expect_err("there are three").to_string();
    assert!(error.contains("none with the number 3"), "{error}");
}

#[test]
fn a_data_set_that_does_not_fit_is_refused_with_its_file() {
    let refused = |files: &[(&str, &str)]| {
        let (folder, pieces) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
        for (name, text) in files {
            fs::write(folder.path().join(name), text).expect("writes");
        }
        let data = open(folder.path(), &settings(pieces.path(), 1 << 20, 0));
        data.and_then(|data| data.read(&[0]).map(drop)).expect_err("it does not fit").to_string()
    };
    for (files, said) in [
        (&[][..], "there is no file below it"),
        (&[("a.txt", "1")], "a.txt: unknown kind of file"),
        (&[("a.csv", "1,2\n"), ("b.parquet", "x")], "it holds a.csv and b.parquet"),
        (&[("a.csv", "1,2\n"), ("b.csv", "1,2,3\n")], "b.csv: its first line has 3 columns, that of a.csv has 2"),
        (&[("a.csv", "x,y\n1,2\n"), ("b.csv", "x,z\n1,2\n")], "its first line has 2 columns (x, z)"),
        (&[("a.csv", "1\n2\n")], "expected columns of f32"),
        (&[("a.csv", "1,2\n1,0.5\n")], "a.csv: line 2: column 2 is \"0.5\", expected i64"),
        (&[("a.safetensors", "x")], "a.safetensors: it is no safetensors file"),
        (&[("a.parquet", "x")], "a.parquet: it is too short"),
        (&[("a.png", "x")], "it lies in no folder of a class"),
    ] {
        let error = refused(files);
        assert!(error.contains(said), "{said}: {error}");
    }
}
