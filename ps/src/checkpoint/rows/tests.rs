use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use psjobs_api::Training;

use super::*;
use crate::checkpoint::Disk;
use crate::checkpoint::format::{FORMAT, PartEntry};
use crate::checkpoint::read::Damage;
use crate::sparse::{Clock, Plan, Row, Shard, ShardState, TableSpec};
use crate::training_rules::TrainingRules;

type Rows = BTreeMap<u64, (u64, u64, Vec<f32>)>;

const SLOTS: usize = 2;

fn description() -> RowsDescription {
    RowsDescription {
        format: FORMAT,
        job: "job".into(),
        step: 7,
        server: 1,
        servers: 2,
        slots: SLOTS,
        tables: vec![TableSpec::new("user", 3, 0.5), TableSpec::new("item.b", 1, 0.0)],
        servers_train_layers: false,
        rows: Vec::new(),
        clocks: Vec::new(),
    }
}

/// Two tasks' rows: of the first table more than two groups, of the second some, of each task others.
fn states() -> Vec<ShardState> {
    let mut training = Training::default();
    training.optimizer.kind = psjobs_api::training::OptimizerKind::Adam;
    let rules = Arc::new(TrainingRules::new(&training, 2, &[]));
    let state = |task: u64| {
        let specs = description().tables.into();
        let mut shard = Shard::<()>::new(&Plan { specs, rules: rules.clone(), trainers: 2, seed: 1, shards: 2 });
        for (table, count, width) in [(0, 5_000, 3), (1, 10, 1)] {
            for key in (task..2 * count).step_by(2) {
                let numbers: Vec<f32> = (0..width * (1 + SLOTS)).map(|i| key as f32 + i as f32 * 0.1).collect();
                shard.insert(table, Row { key, used: key * 3, updates: key + 1, numbers: &numbers });
            }
        }
        shard.resume([&Clock { next_steps: vec![7, 8 + task], requests: 40 }]);
        shard.state()
    };
    vec![state(0), state(1)]
}

fn read(path: &Path, entry: &PartEntry) -> Result<[Rows; 2], Damage> {
    let part = RowsPart::open(&Disk::System, path, entry)?;
    let mut tables = [Rows::new(), Rows::new()];
    for (table, rows) in tables.iter_mut().enumerate() {
        part.read(table, |row| {
            rows.insert(row.key, (row.used, row.updates, row.numbers.to_vec()));
            Ok::<_, Damage>(())
        })?;
    }
    Ok(tables)
}

#[test]
fn rows_come_back_with_all_that_is_known_of_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let entry = write(&folder.path().into(), description(), &states()).expect("writes");
    let path = folder.path().join(&entry.file);
    assert_eq!(entry.file, "rows-00001-of-00002.safetensors");
    assert_eq!(entry.bytes, fs::metadata(&path).expect("a file").len());
    let [users, items] = read(&path, &entry).expect("whole");
    assert_eq!((users.len(), items.len()), (10_000, 20));
    assert_eq!(items[&3], (9, 4, vec![3.0, 3.1, 3.2]));
    assert_eq!(users[&9_999].2.len(), 9);
    let clocks = &RowsPart::open(&Disk::System, &path, &entry).expect("whole").description().clocks.clone();
    assert_eq!(clocks[1], Clock { next_steps: vec![7, 9], requests: 40 });
    // Other programs can read it.
    let bytes = fs::read(&path).expect("a file");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    assert_eq!(tensors.tensor("user.slot.1").expect("the last slot").shape(), [10_000, 3]);
}

#[test]
fn no_byte_of_a_file_can_change_unnoticed() {
    let folder = tempfile::tempdir().expect("a folder");
    let entry = write(&folder.path().into(), description(), &states()).expect("writes");
    let path = folder.path().join(&entry.file);
    let whole = fs::read(&path).expect("a file");
    for place in (0..whole.len()).step_by(4_099).chain(0..40).chain(whole.len() - 20..whole.len()) {
        let mut bytes = whole.clone();
        bytes[place] ^= 4;
        fs::write(&path, bytes).expect("written");
        assert!(read(&path, &entry).is_err(), "byte {place} of {}", whole.len());
    }
    for length in [0, 7, 100, whole.len() - 1] {
        fs::write(&path, &whole[..length]).expect("written");
        assert!(matches!(read(&path, &entry), Err(Damage::Length { .. })), "{length} bytes");
    }
}

#[test]
fn a_description_that_contradicts_itself_is_refused() {
    let good = RowsDescription { rows: vec![2, 0], ..description() };
    assert!(plan::RowsPlan::new(&good, 10_000).is_ok());
    let rows = [
        (RowsDescription { format: 9, ..good.clone() }, "format 9"),
        (RowsDescription { server: 2, ..good.clone() }, "server 2 of 2"),
        (RowsDescription { slots: 999, ..good.clone() }, "999 slots"),
        (RowsDescription { tables: Vec::new(), ..good.clone() }, "0 tables"),
        (RowsDescription { rows: vec![1], ..good.clone() }, "1 tables and has 2"),
        (RowsDescription { rows: vec![u64::MAX, 1], ..good }, "more rows than it has bytes"),
    ];
    for (description, want) in rows {
        let error = plan::RowsPlan::new(&description, 10_000).expect_err(want).to_string();
        assert!(error.contains(want), "{want}: {error}");
    }
}
