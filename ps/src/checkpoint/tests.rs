//! Checkpoints of small jobs on a real file system.

mod runs;

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use serde_json::json;
use tempfile::TempDir;

use super::format::{FORMAT, MANIFEST, PartEntry, part_name};
use super::{BlockState, Checkpoint, Concluded, Damage, Description, Manifest, PartWriter, WriteError, export, write};
use crate::batch::assigner::Position;
use crate::layout::{Layout, TensorSpec};

const TRAINERS: u32 = 2;

fn tensors(elements: u64) -> Vec<TensorSpec> {
    let tensor = |name: &str, shape: &[u64]| TensorSpec::new(name, shape.into());
    vec![tensor("fc.bias", &[]), tensor("fc.weight", &[elements - 1, 1])]
}

fn description(elements: u64, server: u32, servers: u32, slots: usize) -> Description {
    let layout = Layout::new(&tensors(elements), servers as usize).expect("lays out");
    Description {
        format: FORMAT,
        job: "job-1".into(),
        step: 7,
        server,
        servers,
        trainers: TRAINERS,
        block_elements: layout.block_elements(),
        slots,
        previous: has_previous(slots),
        training: json!({"optimizer": {"type": "Adam", "learningRate": 0.001}, "seed": 1}),
        tensors: tensors(elements),
    }
}

/// Parts with one slot hold previous values too, others do not.
fn has_previous(slots: usize) -> bool {
    slots == 1
}

/// Returns the state of a job for these elements of the flat space; no two values are equal.
fn state(range: std::ops::Range<usize>, slots: usize) -> BlockState {
    let column = |column: usize| range.clone().map(|i| (i * 10 + column) as f32 + 0.5).collect();
    BlockState {
        values: column(0),
        slots: (1..=slots).map(column).collect(),
        previous: if has_previous(slots) { column(slots + 1) } else { Vec::new() },
        updates: 5,
        version: 6,
        next_steps: vec![7, 8],
    }
}

fn write_part(folder: &Path, description: &Description) -> PartEntry {
    let layout = description.layout().expect("lays out");
    let mut part = PartWriter::create(folder, description).expect("creates");
    for block in part.blocks().to_vec() {
        part.put(&state(layout.range(block), description.slots)).expect("writes");
    }
    part.finish().expect("finishes")
}

fn write_checkpoint(folder: &Path, elements: u64, servers: u32, slots: usize) {
    let parts = (0..servers).map(|server| write_part(folder, &description(elements, server, servers, slots)));
    commit(folder, parts.collect());
}

fn commit(folder: &Path, parts: Vec<PartEntry>) {
    let (concluded, dealt) = (Concluded::new(), Position::default());
    let manifest = Manifest { format: FORMAT, job: "job-1".into(), step: 7, parts, rows: Vec::new(), concluded, dealt };
    write::commit(folder, &manifest).expect("commits");
}

/// Opens a checkpoint and reads all of it.
fn read_all(folder: &Path) -> Result<BlockState, Damage> {
    let checkpoint = Checkpoint::open(folder)?;
    checkpoint.read(0..checkpoint.layout().elements())
}

fn folder() -> TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

#[test]
fn a_checkpoint_is_even_if_all_blocks_have_the_same_gradients() {
    for (version, next_steps, is_even) in [(6, vec![7, 8], true), (5, vec![7, 8], false), (6, vec![6, 8], false)] {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        let parts = (0..2).map(|server| {
            let description = description(12, server, 2, 1);
            let layout = description.layout().expect("lays out");
            let mut part = PartWriter::create(folder, &description).expect("creates");
            for block in part.blocks().to_vec() {
                let state = state(layout.range(block), 1);
                let other = BlockState { version, next_steps: next_steps.clone(), ..state.clone() };
                part.put(if server == 1 { &other } else { &state }).expect("writes");
            }
            part.finish().expect("finishes")
        });
        commit(folder, parts.collect());
        let checkpoint = Checkpoint::open(folder).expect("is whole");
        assert_eq!(checkpoint.is_even(), is_even, "{version} {next_steps:?}");
        assert_eq!(checkpoint.steps_held(), next_steps, "the block that is least far decides");
    }
}

#[test]
fn what_was_written_is_read_whatever_the_number_of_servers() {
    for (elements, slots) in [(2, 0), (5, 1), (1000, 2), (600_000, 1)] {
        for servers in [1, 2, 3, 7] {
            let folder = folder();
            write_checkpoint(folder.path(), elements, servers, slots);
            let checkpoint = Checkpoint::open(folder.path()).expect("opens");
            for readers in [1, 2, 3, 5] {
                let layout = Layout::new(&checkpoint.description().tensors, readers).expect("lays out");
                for block in 0..layout.blocks() {
                    let range = layout.range(block);
                    let found = checkpoint.read(range.clone()).expect("reads");
                    assert!(found == state(range, slots), "{elements} elements, {servers} to {readers}, block {block}");
                }
                for server in 0..readers as u32 {
                    let ranges: Vec<_> = layout.owned_by(server).map(|block| layout.range(block)).collect();
                    let found = checkpoint.read_all(&ranges).expect("reads");
                    let want: Vec<_> = ranges.into_iter().map(|range| state(range, slots)).collect();
                    assert!(found == want, "{elements} elements, {servers} to {readers}, server {server}");
                }
            }
        }
    }
}

#[test]
fn other_servers_read_few_runs_where_their_blocks_lie_together() {
    // Eight blocks.
    const ELEMENTS: u64 = 8 * crate::layout::BLOCK_ELEMENTS as u64;
    for (servers, readers, want) in [(4, 4, 1), (4, 2, 2), (4, 1, 4), (3, 1, 3), (1, 2, 4)] {
        let folder = folder();
        write_checkpoint(folder.path(), ELEMENTS, servers, 0);
        let checkpoint = Checkpoint::open(folder.path()).expect("opens");
        let layout = Layout::new(&checkpoint.description().tensors, readers).expect("lays out");
        let mut ranges: Vec<_> = layout.owned_by(0).map(|block| layout.range(block)).collect();
        ranges.sort_by_key(|range| checkpoint.part_with(range));
        assert_eq!(checkpoint.runs(&ranges).count(), want, "{servers} to {readers}");
        let found = checkpoint.read_all(&ranges).expect("reads");
        let wanted: Vec<_> = ranges.into_iter().map(|range| state(range, 0)).collect();
        assert!(found == wanted, "{servers} to {readers}");
    }
}

#[test]
fn trainers_that_a_job_has_no_longer_do_not_count_as_concluded() {
    let folder = folder();
    write_checkpoint(folder.path(), 12, 1, 0);
    let open = || Checkpoint::open(folder.path()).expect("opens");
    let concluded = Concluded::from([(0, 7), (2, 8), (3, 8)]);
    let manifest = Manifest { concluded: concluded.clone(), ..open().manifest().clone() };
    write::amend(folder.path(), &manifest).expect("amends");
    assert_eq!(open().concluded(4), concluded);
    assert_eq!(open().concluded(2), Concluded::from([(0, 7)]), "two of two have not concluded");
}

#[test]
fn elements_of_several_blocks_are_as_far_as_the_furthest() {
    let folder = folder();
    let description = description(10, 0, 1, 0);
    let mut part =
        PartWriter::create(folder.path(), &Description { servers: 2, block_elements: 5, ..description.clone() })
            .expect("creates");
    part.put(&BlockState { version: 3, updates: 1, next_steps: vec![4, 9], ..state(0..5, 0) }).expect("writes");
    let first = part.finish().expect("finishes");
    let second = Description { server: 1, servers: 2, block_elements: 5, ..description };
    let mut part = PartWriter::create(folder.path(), &second).expect("creates");
    part.put(&BlockState { version: 2, updates: 2, next_steps: vec![5, 8], ..state(5..10, 0) }).expect("writes");
    let parts = vec![first, part.finish().expect("finishes")];
    commit(folder.path(), parts);

    let found = Checkpoint::open(folder.path()).expect("opens").read(3..7).expect("reads");
    assert_eq!(found.values, state(3..7, 0).values);
    assert_eq!((found.version, found.updates, found.next_steps), (3, 2, vec![5, 9]));
}

#[test]
fn every_flipped_bit_is_noticed_and_the_file_named() {
    let folder = folder();
    write_checkpoint(folder.path(), 6, 2, 1);
    let whole = read_all(folder.path()).expect("reads");
    assert_eq!(whole, state(0..6, 1));
    for name in [part_name(0, 2), part_name(1, 2), MANIFEST.to_owned()] {
        let path = folder.path().join(&name);
        let bytes = fs::read(&path).expect("reads");
        for place in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[place] ^= 1 << (place % 8);
            fs::write(&path, &damaged).expect("writes");
            let error = read_all(folder.path()).expect_err("noticed").to_string();
            assert!(error.contains(folder.path().to_str().expect("text")), "{name} byte {place}: {error}");
        }
        fs::write(&path, bytes).expect("writes");
    }
    assert_eq!(read_all(folder.path()).expect("reads"), whole);
}

#[test]
fn every_other_length_is_noticed() {
    let folder = folder();
    write_checkpoint(folder.path(), 6, 2, 1);
    for name in [part_name(0, 2), part_name(1, 2), MANIFEST.to_owned()] {
        let path = folder.path().join(&name);
        let bytes = fs::read(&path).expect("reads");
        // The manifest's last byte is the end of its line.
        for length in 0..bytes.len() - 1 {
            fs::write(&path, &bytes[..length]).expect("writes");
            read_all(folder.path()).expect_err("cut short");
        }
        fs::write(&path, [&bytes[..], b"x"].concat()).expect("writes");
        read_all(folder.path()).expect_err("too long");
        fs::remove_file(&path).expect("removes");
        let error = read_all(folder.path()).expect_err("missing").to_string();
        assert!(error.contains(&name), "{error}");
        fs::write(&path, bytes).expect("writes");
    }
}

#[test]
fn foreign_files_are_named_before_memory_is_taken_for_what_they_claim() {
    let header = |json: &str| [&(json.len() as u64).to_le_bytes()[..], json.as_bytes()].concat();
    let huge = description(6, 0, 1, 0);
    let huge = Description { block_elements: 1 << 18, tensors: tensors(1 << 34), ..huge };
    let huge = json!({"__metadata__": {"psjobs": serde_json::to_string(&huge).expect("JSON")}}).to_string();
    let newer = Description { format: FORMAT + 1, ..description(6, 0, 1, 0) };
    let newer = json!({"__metadata__": {"psjobs": serde_json::to_string(&newer).expect("JSON")}}).to_string();
    for (label, bytes, want) in [
        ("an endless header", [&u64::MAX.to_le_bytes()[..], b"{}"].concat(), "a header of 18446744073709551615 bytes"),
        ("text", b"not a checkpoint at all".to_vec(), "a header of"),
        ("another safetensors file", header(r#"{"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#), "not a part"),
        ("a type of number that no part has", header(r#"{"w":{"dtype":"I8","shape":[0],"data_offsets":[0,0]}}"#), "I8"),
        ("deeply nested", header(&"[".repeat(100_000)), "cannot be read"),
        ("64 GiB of parameters", header(&huge), "more parameters than it has bytes"),
        ("another version", header(&newer), "format 2, this version reads format 1"),
    ] {
        let folder = folder();
        write_checkpoint(folder.path(), 6, 1, 0);
        let path = folder.path().join(part_name(0, 1));
        fs::write(&path, &bytes).expect("writes");
        let manifest = fs::read_to_string(folder.path().join(MANIFEST)).expect("reads");
        let mut manifest: Manifest = serde_json::from_str(&manifest).expect("parses");
        manifest.parts[0].bytes = bytes.len() as u64;
        write::commit(folder.path(), &manifest).expect("commits");
        let error = Checkpoint::open(folder.path()).expect_err(label);
        let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        assert!(format!("{error}: {source}").contains(want), "{label}: {error}: {source}");
    }
}

#[test]
fn parts_of_two_checkpoints_do_not_make_one() {
    let (folder, elsewhere) = (folder(), folder());
    write_checkpoint(folder.path(), 6, 2, 0);
    let other = Description { step: 8, ..description(6, 1, 2, 0) };
    let stranger = write_part(elsewhere.path(), &other);
    fs::copy(elsewhere.path().join(&stranger.file), folder.path().join(&stranger.file)).expect("copies");
    let error = Checkpoint::open(folder.path()).expect_err("not the part of the manifest").to_string();
    assert!(error.contains("checksum"), "{error}");
    let parts = vec![write_part(elsewhere.path(), &description(6, 0, 2, 0)), stranger];
    commit(folder.path(), parts);
    let error = Checkpoint::open(folder.path()).expect_err("two steps").to_string();
    assert!(error.contains("ps-00001-of-00002.safetensors is a part of another checkpoint"), "{error}");
}

#[test]
fn a_writer_that_stops_halfway_leaves_what_was_there() {
    let folder = folder();
    write_checkpoint(folder.path(), 1000, 1, 1);
    let before = read_all(folder.path()).expect("reads");
    let mut part = PartWriter::create(folder.path(), &description(1000, 0, 1, 1)).expect("creates");
    part.put(&state(0..1000, 1)).expect("writes");
    assert_eq!(fs::read_dir(folder.path()).expect("reads").count(), 3, "the new part has a temporary name");
    drop(part);
    assert_eq!(fs::read_dir(folder.path()).expect("reads").count(), 2);
    assert_eq!(read_all(folder.path()).expect("reads"), before);
}

#[test]
fn two_processes_that_write_one_part_do_not_write_into_one_file() {
    let folder = folder();
    let description = description(1000, 0, 1, 1);
    let mut writers = [0, 1].map(|_| PartWriter::create(folder.path(), &description).expect("creates"));
    writers[0].put(&state(0..1000, 1)).expect("writes");
    writers[1].put(&BlockState { values: vec![9.0; 1000], ..state(0..1000, 1) }).expect("writes");
    let [old, new] = writers;
    let entry = new.finish().expect("finishes");
    commit(folder.path(), vec![entry]);
    let error = old.finish().expect_err("the checkpoint is complete").to_string();
    assert!(error.contains("ps-00000-of-00001.safetensors") && error.contains("is complete"), "{error}");
    assert_eq!(read_all(folder.path()).expect("reads").values, [9.0; 1000]);
    assert_eq!(fs::read_dir(folder.path()).expect("reads").count(), 2, "the part and the manifest");
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let folder = folder();
    let file = folder.path().join("a-file");
    fs::write(&file, "").expect("writes");
    let error = PartWriter::create(file.join("step"), &description(6, 0, 1, 0)).expect_err("not a folder");
    assert!(matches!(error, WriteError::Io { .. }) && error.to_string().contains("a-file"), "{error}");
}

#[test]
fn the_exported_model_is_what_other_programs_read() {
    let folder = folder();
    write_checkpoint(folder.path(), 600_000, 2, 2);
    let checkpoint = Checkpoint::open(folder.path()).expect("opens");
    let path = export::export(&checkpoint, folder.path()).expect("exports");
    assert_eq!(path, folder.path().join("model.safetensors"));
    let bytes = fs::read(path).expect("reads");
    let model = safetensors::SafeTensors::deserialize(&bytes).expect("a safetensors file");
    assert_eq!(model.len(), 2);
    let values = |name: &str| -> Vec<f32> {
        let data = model.tensor(name).expect("is there").data();
        data.as_chunks::<4>().0.iter().map(|n| f32::from_le_bytes(*n)).collect()
    };
    let want = state(0..600_000, 0).values;
    assert_eq!(model.tensor("fc.bias").expect("is there").shape(), [0_usize; 0]);
    assert_eq!(model.tensor("fc.weight").expect("is there").shape(), [599_999, 1]);
    assert_eq!(values("fc.bias"), want[..1]);
    assert!(values("fc.weight") == want[1..]);
}

#[test]
fn tensors_of_one_name_cannot_be_exported() {
    let folder = folder();
    let tensors = vec![TensorSpec::new("w", vec![3]); 2];
    let twins = Description { tensors, ..description(6, 0, 1, 0) };
    let parts = vec![write_part(folder.path(), &twins)];
    commit(folder.path(), parts);
    let checkpoint = Checkpoint::open(folder.path()).expect("opens");
    let error = export::export(&checkpoint, folder.path()).expect_err("two of one name").to_string();
    assert!(error.contains("names of their own"), "{error}");
}

proptest! {
    /// Whatever a damaged disk or a foreign program leaves there: an error, or what was written (a
    /// manifest may be spaced otherwise), no panic.
    #[test]
    fn any_bytes_are_read_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), at in 0..2000_usize) {
        let folder = folder();
        write_checkpoint(folder.path(), 6, 1, 1);
        let written = read_all(folder.path()).expect("undamaged");
        for name in [part_name(0, 1), MANIFEST.to_owned()] {
            let path = folder.path().join(name);
            let before = fs::read(&path).expect("reads");
            let mut after = before.clone();
            let at = at.min(after.len());
            let end = (at + bytes.len()).min(after.len());
            after.splice(at..end, bytes.clone());
            fs::write(&path, &after).expect("writes");
            if let Ok(found) = read_all(folder.path()) {
                prop_assert_eq!(&found, &written);
            }
            fs::write(&path, before).expect("writes");
        }
    }
}
