//! Whatever files lie in a checkpoint's folder: it is read, or its damage is named. Checksums are set right before,
//! so that what is behind them is reached too.
#![no_main]

use std::cell::LazyCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use libfuzzer_sys::fuzz_target;
use psjobs_ps::batch::assigner::Position;
use psjobs_ps::checkpoint::format::{FORMAT, MANIFEST, Manifest, PREFIX, PartEntry, PartPlan, part_name};
use psjobs_ps::checkpoint::{Checkpoint, export};
use tempfile::TempDir;

thread_local! {
    static FOLDER: LazyCell<TempDir> = LazyCell::new(|| {
        let memory = Path::new("/dev/shm");
        let place = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        tempfile::tempdir_in(place).expect("a folder")
    });
}

// First byte: whether the rest is a manifest, or a part whose blocks' checksums are left or set right.
fuzz_target!(|input: &[u8]| {
    let [kind, bytes @ ..] = input else { return };
    FOLDER.with(|folder| {
        match kind % 3 {
            0 => put(&folder.path().join(MANIFEST), bytes),
            1 => put_part(folder.path(), bytes.to_vec(), false),
            _ => put_part(folder.path(), bytes.to_vec(), true),
        }
        let Ok(checkpoint) = Checkpoint::open(folder.path()) else { return };
        let layout = checkpoint.layout().clone();
        for block in 0..layout.blocks() {
            let range = layout.range(block);
            if let Ok(state) = checkpoint.read(range.clone()) {
                assert_eq!(state.values.len(), range.len());
                assert!(state.slots.iter().all(|slot| slot.len() == range.len()));
                assert_eq!(state.next_steps.len(), checkpoint.description().trainers as usize);
            }
        }
        // Names that two tensors share, for instance, are refused here.
        let _ = export::export(&checkpoint, folder.path());
    });
});

fn put(file: &Path, bytes: &[u8]) {
    fs::write(file, bytes).expect("the folder can be written");
}

/// Writes the part of the only server, and the manifest that it fits.
fn put_part(folder: &Path, mut bytes: Vec<u8>, repair: bool) {
    let plan = plan_of(&bytes);
    if let Some((slots, plan)) = plan.as_ref().filter(|_| repair) {
        set_checksums(&mut bytes, *slots, plan);
    }
    let crc32 = plan.map_or(0, |(_, plan)| {
        let (tables, checksums) = (plan.tables_at() as usize, plan.checksums_at() as usize);
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&bytes[..tables + plan.table_bytes() as usize]);
        hasher.update(&bytes[checksums..]);
        hasher.finalize()
    });
    let file = part_name(0, 1);
    let entry = PartEntry { file: file.clone(), bytes: bytes.len() as u64, crc32 };
    // The job and step that the seeds have.
    let manifest = Manifest {
        format: FORMAT,
        job: "job".into(),
        step: 7,
        parts: vec![entry],
        rows: Vec::new(),
        concluded: BTreeMap::new(),
        dealt: Position::default(),
    };
    put(&folder.join(file), &bytes);
    put(&folder.join(MANIFEST), &serde_json::to_vec(&manifest).expect("a manifest is JSON"));
}

/// The slots and plan of a part that has the length it says.
fn plan_of(bytes: &[u8]) -> Option<(usize, PartPlan)> {
    let header = u64::from_le_bytes(*bytes.first_chunk::<PREFIX>()?) as usize;
    let json = bytes.get(PREFIX..PREFIX.checked_add(header)?)?;
    let (description, plan) = PartPlan::parse(json, bytes.len() as u64).ok()?;
    (plan.file_bytes() == bytes.len() as u64).then_some((description.slots, plan))
}

fn set_checksums(bytes: &mut [u8], slots: usize, plan: &PartPlan) {
    let mut at = plan.checksums_at() as usize;
    for (position, block) in plan.blocks().iter().enumerate() {
        let length = 4 * plan.layout().range(*block).len();
        for column in 0..=slots {
            let start = plan.data_at(position, column) as usize;
            let checksum = crc32fast::hash(&bytes[start..start + length]);
            bytes[at..at + 4].copy_from_slice(&checksum.to_le_bytes());
            at += 4;
        }
    }
}
