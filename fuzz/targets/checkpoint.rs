//! Whatever files lie in a checkpoint's folder: it is read, or its damage is named. Checksums are set right before,
//! so that what is behind them is reached too.
#![no_main]

use std::cell::LazyCell;
use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::Path;

use libfuzzer_sys::fuzz_target;
use psjobs_ps::batch::assigner::Position;
use psjobs_ps::checkpoint::format::{FORMAT, MANIFEST, Manifest, PREFIX, PartEntry, PartPlan, part_name};
use psjobs_ps::checkpoint::rows::{RowsDescription, rows_name};
use psjobs_ps::checkpoint::{Checkpoint, Folder, export};
use tempfile::TempDir;

/// The seed of a part. A part or rows that an input does not give are those of the seeds, so that an input that fails
/// fails again whatever inputs came before.
const PART: &[u8] = include_bytes!("../seeds/checkpoint/part");
/// The seed of rows.
const ROWS: &[u8] = include_bytes!("../seeds/checkpoint/rows");

thread_local! {
    static FOLDER: LazyCell<TempDir> = LazyCell::new(|| {
        let memory = Path::new("/dev/shm");
        let place = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        tempfile::tempdir_in(place).expect("a folder")
    });
}

// First byte: whether the rest is a manifest, or a part or rows, whose checksums are left or set right.
fuzz_target!(|input: &[u8]| {
    let [kind, bytes @ ..] = input else { return };
    let kind = kind % 5;
    let mut part = if matches!(kind, 1 | 2) { bytes } else { &PART[1..] }.to_vec();
    let mut rows = if matches!(kind, 3 | 4) { bytes } else { &ROWS[1..] }.to_vec();
    FOLDER.with(|folder| {
        let folder = folder.path();
        let part_entry = part_entry(&mut part, kind == 2);
        // A part that has other slots than the seed's is not refused because of the seed's rows.
        let rows_entry = (kind > 2).then(|| rows_entry(&mut rows, kind == 4));
        put(&folder.join(part_name(0, 1)), &part);
        put(&folder.join(rows_name(0, 1)), &rows);
        match kind {
            0 => put(&folder.join(MANIFEST), bytes),
            _ => put(&folder.join(MANIFEST), &manifest(part_entry, rows_entry)),
        }
        let Ok(checkpoint) = Checkpoint::open(folder) else { return };
        read_blocks(&checkpoint, kind == 2);
        let _ = checkpoint.is_even();
        // Names that two tensors share, for instance, are refused here.
        let _ = export::export(&checkpoint, folder);
        export_tables(&checkpoint, &folder.into(), &rows, kind == 4);
    });
});

fn put(file: &Path, bytes: &[u8]) {
    fs::write(file, bytes).expect("the folder can be written");
}

/// Reads every block; none is damaged where the checksums are `right`.
fn read_blocks(checkpoint: &Checkpoint, right: bool) {
    let (layout, description) = (checkpoint.layout(), checkpoint.description());
    for block in 0..layout.blocks() {
        let range = layout.range(block);
        match checkpoint.read(range.clone()) {
            Ok(state) => {
                assert_eq!(state.values.len(), range.len());
                assert_eq!(state.slots.len(), description.slots);
                assert!(state.slots.iter().all(|slot| slot.len() == range.len()));
                assert_eq!(state.previous.len(), if description.previous { range.len() } else { 0 });
                assert_eq!(state.next_steps.len(), description.trainers as usize);
            }
            Err(damage) => assert!(!right, "{damage}"),
        }
    }
}

/// Exports the tables, which get the keys and values of the file `rows`; none is damaged where the checksums are
/// `right`.
fn export_tables(checkpoint: &Checkpoint, folder: &Folder, rows: &[u8], right: bool) {
    let exported = match export::export_tables(checkpoint, folder) {
        Ok(Some(file)) => fs::read(file).expect("it was written"),
        Ok(None) => return,
        Err(error) => {
            assert!(!right, "{error}");
            return;
        }
    };
    let description = checkpoint.rows()[0].description();
    for (table, rows_of_table) in description.tables.iter().zip(&description.rows) {
        for (column, bytes_of_row) in [("keys", 8), ("values", 4 * table.width)] {
            let name = format!("{}.{column}", table.name);
            let found = tensor(&exported, &name).expect("every table is exported");
            assert_eq!(found.len(), *rows_of_table as usize * bytes_of_row, "{name}");
            assert!(Some(found) == tensor(rows, &name), "{name} is not what the rows have");
        }
    }
}

/// The manifest that the part and the rows of the only server fit, as JSON.
fn manifest(part: PartEntry, rows: Option<PartEntry>) -> Vec<u8> {
    // The job and step that the seeds have.
    let manifest = Manifest {
        format: FORMAT,
        job: "job".into(),
        step: 7,
        parts: vec![part],
        rows: rows.into_iter().collect(),
        concluded: BTreeMap::new(),
        dealt: Position::default(),
    };
    serde_json::to_vec(&manifest).expect("a manifest is JSON")
}

/// The entry of a part, whose blocks' checksums are set right before if `repair`.
fn part_entry(bytes: &mut [u8], repair: bool) -> PartEntry {
    let plan = plan_of(bytes);
    if let Some(plan) = plan.as_ref().filter(|_| repair) {
        set_checksums(bytes, plan);
    }
    let crc32 = plan.map_or(0, |plan| {
        let (tables, checksums) = (plan.tables_at() as usize, plan.checksums_at() as usize);
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&bytes[..tables + plan.table_bytes() as usize]);
        hasher.update(&bytes[checksums..]);
        hasher.finalize()
    });
    PartEntry { file: part_name(0, 1), bytes: bytes.len() as u64, crc32 }
}

/// The plan of a part that has the length it says.
fn plan_of(bytes: &[u8]) -> Option<PartPlan> {
    let header = u64::from_le_bytes(*bytes.first_chunk::<PREFIX>()?) as usize;
    let json = bytes.get(PREFIX..PREFIX.checked_add(header)?)?;
    let (_, plan) = PartPlan::parse(json, bytes.len() as u64).ok()?;
    (plan.file_bytes() == bytes.len() as u64).then_some(plan)
}

fn set_checksums(bytes: &mut [u8], plan: &PartPlan) {
    let mut at = plan.checksums_at() as usize;
    for (position, block) in plan.blocks().iter().enumerate() {
        let length = 4 * plan.layout().range(*block).len();
        for column in 0..plan.columns() as usize {
            let start = plan.data_at(position, column) as usize;
            let checksum = crc32fast::hash(&bytes[start..start + length]);
            bytes[at..at + 4].copy_from_slice(&checksum.to_le_bytes());
            at += 4;
        }
    }
}

/// The entry of a file of rows, whose checksums are set right before if `repair`.
fn rows_entry(bytes: &mut [u8], repair: bool) -> PartEntry {
    let crc32 = Header::of(bytes).and_then(|header| {
        if repair {
            set_rows_checksums(bytes, &header)?;
        }
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&bytes[..header.end]);
        hasher.update(bytes.get(header.tensor("checksums")?)?);
        Some(hasher.finalize())
    });
    PartEntry { file: rows_name(0, 1), bytes: bytes.len() as u64, crc32: crc32.unwrap_or(0) }
}

/// Sets one checksum for each table that has rows, because an input is too short for a second group of rows of a table;
/// `None` if the header does not say where.
fn set_rows_checksums(bytes: &mut [u8], header: &Header) -> Option<()> {
    let description = header.json.pointer("/__metadata__/psjobs")?.as_str()?;
    let description: RowsDescription = serde_json::from_str(description).ok()?;
    let mut at = header.tensor("checksums")?.start;
    for (table, _) in description.tables.iter().zip(&description.rows).filter(|(_, rows)| **rows > 0) {
        let columns = ["keys", "used", "updates", "values"].map(str::to_owned).into_iter();
        let mut hasher = crc32fast::Hasher::new();
        for column in columns.chain((0..description.slots).map(|slot| format!("slot.{slot}"))) {
            hasher.update(bytes.get(header.tensor(&format!("{}.{column}", table.name))?)?);
        }
        bytes.get_mut(at..)?.first_chunk_mut::<4>()?.copy_from_slice(&hasher.finalize().to_le_bytes());
        at += 4;
    }
    Some(())
}

/// The header of a safetensors file.
struct Header {
    json: serde_json::Value,
    /// Where the data begins.
    end: usize,
}

impl Header {
    fn of(bytes: &[u8]) -> Option<Self> {
        let length = u64::from_le_bytes(*bytes.first_chunk::<PREFIX>()?) as usize;
        let end = PREFIX.checked_add(length)?;
        let json = serde_json::from_slice(bytes.get(PREFIX..end)?).ok()?;
        Some(Self { json, end })
    }

    /// Where a tensor should be; the file may be shorter.
    fn tensor(&self, name: &str) -> Option<Range<usize>> {
        let offsets = self.json.get(name)?.get("data_offsets")?;
        let at = |place: usize| self.end.checked_add(offsets.get(place)?.as_u64()? as usize);
        Some(at(0)?..at(1)?)
    }
}

/// The bytes of a tensor in a safetensors file.
fn tensor<'a>(bytes: &'a [u8], name: &str) -> Option<&'a [u8]> {
    bytes.get(Header::of(bytes)?.tensor(name)?)
}
