//! A bucket does what a folder does: the checkpoints of psjobs are written to the store in memory that object_store has for
//! tests, and read back. tests/stores does the same with real stores.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use object_store::chunked::ChunkedStore;
use object_store::memory::InMemory;
use psjobs_ps::checkpoint::disk::Files as _;

use crate::Bucket;

fn bucket() -> Bucket {
    Bucket::new(Arc::new(InMemory::new()), "s3://b").expect("threads")
}

fn contents(bucket: &Bucket, path: &str) -> Vec<u8> {
    let file = bucket.open(Path::new(path)).expect("it is there");
    let mut bytes = vec![0; file.bytes().expect("a length") as usize];
    file.read_at(&mut bytes, 0).expect("reads");
    bytes
}

#[test]
fn a_file_appears_when_it_gets_its_name() {
    let bucket = bucket();
    let [part, name] = ["s3://b/run/x.0123.tmp", "s3://b/run/x"].map(Path::new);
    let file = bucket.create_unnamed(part).expect("creates");
    file.write_at(b"world", 6).expect("writes");
    file.write_at(b"hello,", 0).expect("writes");
    file.flush().expect("flushes");
    assert!(!bucket.exists(name).expect("looks") && !bucket.exists(part).expect("looks"));
    bucket.rename(part, name).expect("names");
    assert_eq!(contents(&bucket, "s3://b/run/x"), b"hello,world");
    assert_eq!(bucket.names(Path::new("s3://b/run")).expect("lists"), ["x"]);
    assert_eq!(bucket.names(Path::new("s3://b")).expect("lists"), ["run"]);
    bucket.remove_file(part).expect("it has its name");
    bucket.remove_folder(Path::new("s3://b/run")).expect("removes");
    assert_eq!(bucket.names(Path::new("s3://b")).expect("lists"), [""; 0]);
    assert_eq!(bucket.open(name).expect_err("it is gone").kind(), ErrorKind::NotFound);
}

#[test]
fn of_two_processes_one_begins_a_folder_and_one_names_a_file() {
    let bucket = bucket();
    let folder = Path::new("s3://b/run-00001");
    bucket.create_folder(folder).expect("it is new");
    assert_eq!(bucket.create_folder(folder).expect_err("it was begun").kind(), ErrorKind::AlreadyExists);
    let names = ["s3://b/m.1.tmp", "s3://b/m.2.tmp"].map(Path::new);
    for (name, text) in names.iter().zip([b"one", b"two"]) {
        bucket.create_unnamed(name).expect("creates").write_at(text, 0).expect("writes");
    }
    bucket.rename_new(names[0], Path::new("s3://b/m")).expect("no process was before");
    let second = bucket.rename_new(names[1], Path::new("s3://b/m"));
    assert_eq!(second.expect_err("the other was before").kind(), ErrorKind::AlreadyExists);
    assert_eq!(contents(&bucket, "s3://b/m"), b"one");
    // An answer that was lost is followed by another attempt.
    bucket.create_unnamed(names[0]).expect("creates").write_at(b"one", 0).expect("writes");
    bucket.rename_new(names[0], Path::new("s3://b/m")).expect("it is its own");
}

#[test]
fn a_part_does_not_appear_beside_the_file_that_makes_its_checkpoint_complete() {
    for bytes in [10, 9_000_000] {
        let bucket = bucket();
        let [part, name, manifest] = ["s3://b/x.0123.tmp", "s3://b/x", "s3://b/manifest.json"].map(Path::new);
        let write =
            |path, bytes| bucket.create_unnamed(path).expect("creates").write_at(&vec![7; bytes], 0).expect("writes");
        write(part, bytes);
        bucket.rename_without(part, name, manifest).expect("nothing is complete");
        write(part, 1);
        bucket.rename(part, manifest).expect("completes");
        write(part, bytes + 1);
        let late = bucket.rename_without(part, name, manifest);
        assert_eq!(late.expect_err("it is complete").kind(), ErrorKind::AlreadyExists);
        assert_eq!(bucket.open(name).and_then(|file| file.bytes()).expect("the first"), bytes as u64);
    }
}

#[test]
fn large_files_go_in_parts_and_are_read_in_pieces() {
    let bucket = bucket();
    let [part, name] = ["s3://b/x.0123.tmp", "s3://b/x"].map(Path::new);
    let bytes: Vec<u8> = (0..21_000_003_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let file = bucket.create_unnamed(part).expect("creates");
    // As a checkpoint is written: several columns grow at once.
    for (at, piece) in bytes.chunks(1_000_000).enumerate().rev() {
        file.write_at(piece, at as u64 * 1_000_000).expect("writes");
    }
    bucket.rename(part, name).expect("sends");
    let file = bucket.open(name).expect("it is there");
    assert_eq!(file.bytes().expect("a length"), bytes.len() as u64);
    for (offset, length) in [(0, 10), (4_194_300, 10), (0, bytes.len()), (20_999_999, 4), (9_000_000, 8_500_000)] {
        let mut found = vec![0; length];
        file.read_at(&mut found, offset as u64).expect("reads");
        assert!(found == bytes[offset..offset + length], "{length} bytes at {offset}");
    }
    let beyond = file.read_at(&mut [0; 2], bytes.len() as u64 - 1);
    assert_eq!(beyond.expect_err("it ends").kind(), ErrorKind::UnexpectedEof);
}

#[test]
fn buffers_are_filled_whatever_the_pieces_that_a_store_sends() {
    let inner = Arc::new(InMemory::new());
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for piece in [1_000, 262_144, 4_000_000] {
        let store = Arc::new(ChunkedStore::new(inner.clone(), piece));
        let bucket = Bucket::new(store, "s3://b").expect("a thread");
        let [part, name] = ["s3://b/x.0123.tmp", "s3://b/x"].map(Path::new);
        bucket.create_unnamed(part).expect("creates").write_at(&bytes, 0).expect("writes");
        bucket.rename(part, name).expect("sends");
        let file = bucket.open(name).expect("it is there");
        let mut found = [vec![0; 1 << 20], vec![0; 1 << 20], Vec::new(), vec![0; 77]];
        let mut buffers: Vec<&mut [u8]> = found.iter_mut().map(Vec::as_mut_slice).collect();
        file.read_all_at(&mut buffers, 3).expect("reads");
        assert!(found.concat() == bytes[3..3 + (2 << 20) + 77], "pieces of {piece} bytes");
        let mut buffers: [&mut [u8]; 2] = [&mut [0; 1], &mut [0; 2]];
        let beyond = file.read_all_at(&mut buffers, bytes.len() as u64 - 2);
        assert_eq!(beyond.expect_err("it ends").kind(), ErrorKind::UnexpectedEof);
    }
}

#[test]
fn a_file_that_is_replaced_while_it_is_read_gives_no_mixture() {
    let bucket = bucket();
    let write = |text: &[u8]| {
        bucket.create_unnamed(Path::new("s3://b/x.tmp")).expect("creates").write_at(text, 0).expect("writes");
        bucket.rename(Path::new("s3://b/x.tmp"), Path::new("s3://b/x")).expect("names");
    };
    write(b"before");
    let file = bucket.open(Path::new("s3://b/x")).expect("it is there");
    write(b"behind");
    file.read_at(&mut [0; 6], 0).expect_err("it is another file");
    assert_eq!(contents(&bucket, "s3://b/x"), b"behind");
}

#[test]
fn a_file_that_grows_is_sent_when_it_is_flushed() {
    let bucket = bucket();
    let path = Path::new("s3://b/metrics/events");
    let file = bucket.create(path).expect("creates");
    assert_eq!(contents(&bucket, "s3://b/metrics/events"), b"", "it is there from the beginning");
    for (text, offset) in [("one", 0), ("two", 3)] {
        file.write_at(text.as_bytes(), offset).expect("writes");
        file.flush().expect("sends");
    }
    assert_eq!(contents(&bucket, "s3://b/metrics/events"), b"onetwo");
    assert!(bucket.grows_by_rewriting());
}

#[test]
fn a_path_of_another_bucket_is_refused() {
    for path in ["s3://other/x", "s3://bx", "/x", "s3://b/../x"] {
        assert_eq!(bucket().exists(Path::new(path)).expect_err(path).kind(), ErrorKind::InvalidInput, "{path}");
    }
}
