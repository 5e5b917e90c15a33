//! The disk in memory answers as the system's does, and forgets what it should.

use std::io;
use std::path::Path;
use std::time::Duration;

use psjobs_ps::checkpoint::Disk as Storage;
use psjobs_ps::checkpoint::disk::Files;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::{Disk, DiskFault, FOLDER, Host, Mount};

const HOST: Host = Host::Server(0, 0);

/// A disk and its first process, outside of a job.
fn disk() -> (Disk, Mount) {
    let (disk, _) = Disk::new(1);
    (disk.clone(), Mount { disk, host: HOST })
}

fn at(name: &str) -> std::path::PathBuf {
    Path::new(FOLDER).join(name)
}

fn write(files: &dyn Files, path: &Path, bytes: &[u8], flush: bool) -> io::Result<()> {
    let file = files.create(path)?;
    file.write_at(bytes, 0)?;
    if flush { file.flush() } else { Ok(()) }
}

fn read(files: &dyn Files, path: &Path) -> io::Result<Vec<u8>> {
    let file = files.open(path)?;
    let mut bytes = vec![0; file.bytes()? as usize];
    file.read_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// Does one operation in `root`; its answer, in words.
fn operate(files: &dyn Files, root: &Path, chance: &mut ChaCha8Rng) -> String {
    let folders = ["x", "x/y", "z"].map(|name| root.join(name));
    let names = ["a", "b", "x/a", "x/y/a"].map(|name| root.join(name));
    let draw = |chance: &mut ChaCha8Rng| names[chance.random_range(0..names.len())].clone();
    let folder = &folders[chance.random_range(0..folders.len())];
    let (file, parent) = (draw(chance), chance.random_range(0..2));
    let other = file.with_file_name(["a", "b"][parent]);
    let kind = |error: io::Error| error.kind();
    match chance.random_range(0..9) {
        0 => format!("{:?}", files.create_folder(folder).map_err(kind)),
        1 => format!("{:?}", files.create_folders(folder).map_err(kind)),
        2 => format!("{:?}", files.remove_folder(folder).map_err(kind)),
        3 => format!("{:?}", write(files, &file, &[chance.random(); 3], true).map_err(kind)),
        4 => format!("{:?}", files.remove_file(&file).map_err(kind)),
        5 => format!("{:?}", files.rename(&file, &other).map_err(kind)),
        6 => format!("{:?}", read(files, &file).map_err(kind)),
        7 => format!("{:?}", files.exists(&file).map_err(kind)),
        _ => {
            let names = files.names(folder).map(|mut names| {
                names.sort();
                names
            });
            format!("{:?} {:?}", names.map_err(kind), files.flush_folder(folder).map_err(kind))
        }
    }
}

#[tokio::test]
async fn it_answers_as_the_systems_disk_does() {
    let folder = tempfile::tempdir().expect("a folder");
    let (_, mount) = disk();
    let (mut one, mut other) = (ChaCha8Rng::seed_from_u64(3), ChaCha8Rng::seed_from_u64(3));
    for nth in 0..3000 {
        let found = operate(&mount, Path::new(FOLDER), &mut one);
        let want = operate(&*Storage::System, folder.path(), &mut other);
        assert_eq!(found, want, "operation {nth}");
    }
}

#[tokio::test]
async fn what_is_not_flushed_goes_with_its_machine_and_the_rest_stays() {
    let mut lost = [0; 4];
    for seed in 0..40 {
        let (disk, _) = Disk::new(seed);
        let mount = Mount { disk: disk.clone(), host: HOST };
        write(&mount, &at("whole"), &[7; 100], true).expect("writes");
        write(&mount, &at("contents"), &[7; 100], false).expect("writes");
        write(&mount, &at("growing"), &[7; 100], true).expect("writes");
        let growing = mount.open(&at("growing")).expect("it is there");
        growing.write_at(&[7; 100], 100).expect("writes");
        mount.flush_folder(Path::new(FOLDER)).expect("flushes");
        write(&mount, &at("name"), &[7; 100], true).expect("writes");
        mount.rename(&at("whole"), &at("renamed")).expect("renames");
        disk.volume().kill(HOST);
        mount.exists(&at("whole")).expect_err("the process is gone");
        let after = Mount { disk, host: Host::Server(0, 1) };
        let (old, new) = (read(&after, &at("whole")).ok(), read(&after, &at("renamed")).ok());
        assert!(old.is_some() != new.is_some(), "it has one of its names");
        assert_eq!(old.as_ref().or(new.as_ref()), Some(&vec![7; 100]));
        let grown = read(&after, &at("growing")).expect("its name was flushed");
        assert_eq!(grown[..100], [7; 100], "what was flushed of a file stays when it grows");
        let losses = [
            grown != [7; 200],
            read(&after, &at("contents")).expect("its name was flushed") != [7; 100],
            read(&after, &at("name")).is_err(),
            old.is_some(),
        ];
        losses.into_iter().zip(&mut lost).for_each(|(is_lost, lost)| *lost += u32::from(is_lost));
    }
    assert!(lost.iter().all(|lost| (10..=40).contains(lost)), "{lost:?} of 40");
}

#[tokio::test]
async fn each_fault_refuses_what_it_says_until_it_is_mended() {
    let (disk, mount) = disk();
    write(&mount, &at("old"), &[1; 8], true).expect("writes");
    let (mut number, slow) = (0, DiskFault::Slow(Duration::from_secs(1)));
    let mut operations = || {
        number += 1;
        let name = at(&format!("{number}"));
        let wrote = write(&mount, &name, &[1; 8], true);
        let answers = [
            wrote,
            mount.rename(&at("old"), &at("old")),
            read(&mount, &at("old")).map(drop),
            mount.flush_folder(Path::new(FOLDER)),
        ];
        answers.map(|answer| answer.err().and_then(|error| error.raw_os_error()).unwrap_or(0))
    };
    for (fault, want) in [
        (DiskFault::Full, [28, 0, 0, 0]),
        (DiskFault::Write, [5, 0, 0, 0]),
        (DiskFault::Flush, [5, 0, 0, 5]),
        (DiskFault::Rename, [0, 5, 0, 0]),
        (DiskFault::Read, [0, 0, 5, 0]),
        (DiskFault::Denied, [13; 4]),
        (DiskFault::Stale, [116; 4]),
        (slow, [0; 4]),
    ] {
        disk.volume().break_disk(Some(0), fault);
        disk.volume().break_disk(Some(1), DiskFault::Stale);
        assert_eq!(operations(), want, "{fault:?}");
        disk.volume().mend(Some(0), fault);
        assert_eq!(operations(), [0; 4], "{fault:?}, mended");
    }
}
