//! `psjobs-worker store`: lists and reads what a job keeps in a folder or an object store. `kubectl psjob` runs it in a pod that
//! has the credentials of the store, and takes what it prints.

use std::io::{self, ErrorKind, Write};
use std::path::Path;
use std::time::UNIX_EPOCH;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use psjobs_api::ReplicaResult;
use psjobs_object_store as object_store;
use psjobs_ps::checkpoint::disk::OpenFile;
use psjobs_ps::checkpoint::format::{MANIFEST, MAX_MANIFEST};
use psjobs_ps::checkpoint::runs::RUN;
use psjobs_ps::checkpoint::{Disk, Folder};
use serde_json::{Value, json};

use crate::{Failure, variables};

/// Bytes of a file that are read at once. Of an object the next ones are on their way meanwhile.
const PIECE: u64 = 8 << 20;

/// Arguments of `store`.
#[derive(Clone, Debug, Args)]
pub struct StoreArgs {
    #[command(subcommand)]
    command: StoreCommand,
}

#[derive(Clone, Debug, Subcommand)]
enum StoreCommand {
    /// Prints the records of runs and the manifests of complete checkpoints in a job's folder, as JSON
    List {
        /// The folder, or its URL in an object store, as s3://BUCKET/FOLDER, gs:// or az://
        folder: String,
    },
    /// Writes a file to standard output: a line with its length, its bytes, a line with their CRC-32
    Read {
        /// The file, or its URL in an object store
        file: String,
    },
}

/// Does what the arguments say.
///
/// # Errors
/// [`Failure::Input`] if the place is none, or the environment does not say how to reach it; [`Failure::Work`] with the words of
/// the store if it cannot be read.
pub fn run(args: &StoreArgs) -> Result<ReplicaResult, Failure> {
    let (StoreCommand::List { folder: place } | StoreCommand::Read { file: place }) = &args.command;
    let folder = object_store::folder(place, variables()).map_err(Failure::input)?;
    let mut out = io::stdout().lock();
    let done = match &args.command {
        StoreCommand::List { .. } => list(&folder).and_then(|listed| writeln!(out, "{listed}").map_err(Into::into)),
        StoreCommand::Read { .. } => read(&folder, &mut out),
    };
    done.map(|()| ReplicaResult::default()).map_err(Failure::Work)
}

/// Returns the records of runs and the manifests in a job's folder, each with its path in the folder and the time of its
/// writing in seconds since 1970. One that is removed meanwhile, or is no JSON, is left out.
///
/// # Errors
/// If the folder cannot be read; one that does not exist has nothing.
fn list(folder: &Folder) -> anyhow::Result<Value> {
    let mut files = Vec::new();
    for run in folders(folder, "run-")? {
        let in_run = folder.folder(&run);
        files.extend(listed(&in_run, RUN, &run)?);
        for step in folders(&in_run, "step-")? {
            files.extend(listed(&in_run.folder(&step), MANIFEST, &format!("{run}/{step}"))?);
        }
    }
    Ok(json!({ "files": files }))
}

/// Returns the names in a folder that begin so, sorted.
fn folders(folder: &Folder, begin: &str) -> anyhow::Result<Vec<String>> {
    let names = match folder.disk().names(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
        names => names.with_context(|| format!("cannot list {}", folder.display()))?,
    };
    let names = names.into_iter().filter_map(|name| name.into_string().ok());
    let mut found: Vec<_> = names.filter(|name| name.starts_with(begin)).collect();
    found.sort();
    Ok(found)
}

/// Returns the file `name` of the folder at `path`, if it is there.
fn listed(folder: &Folder, name: &str, path: &str) -> anyhow::Result<Option<Value>> {
    let file = folder.join(name);
    let found = match contents(folder.disk(), &file) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        found => found.with_context(|| format!("cannot read {}", file.display()))?,
    };
    let (written, bytes) = found;
    let Ok(contents) = serde_json::from_slice::<Value>(&bytes) else { return Ok(None) };
    Ok(Some(json!({ "path": format!("{path}/{name}"), "written": written, "contents": contents })))
}

/// Returns when a small file was written, in seconds since 1970, and its bytes.
fn contents(disk: &Disk, file: &Path) -> io::Result<(u64, Vec<u8>)> {
    let open = disk.open(file)?;
    let length = open.bytes()?;
    if length > MAX_MANIFEST {
        return Err(io::Error::new(ErrorKind::InvalidData, format!("{length} bytes are more than one has")));
    }
    let mut bytes = vec![0; length as usize];
    if length > 0 {
        open.read_at(&mut bytes, 0)?;
    }
    let written = disk.modified(file)?;
    Ok((written.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()), bytes))
}

/// Writes a file to `out`, between its length and its checksum.
fn read(file: &Folder, out: &mut impl Write) -> anyhow::Result<()> {
    let open = file.disk().open(file).with_context(|| format!("cannot read {}", file.display()))?;
    let bytes = open.bytes().with_context(|| format!("cannot read {}", file.display()))?;
    send(&*open, bytes, out).with_context(|| format!("cannot send {}", file.display()))
}

fn send(file: &dyn OpenFile, bytes: u64, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "{bytes}")?;
    let mut buffer = vec![0; PIECE.min(bytes) as usize];
    let (mut sum, mut sent) = (crc32fast::Hasher::new(), 0);
    while sent < bytes {
        let piece = &mut buffer[..PIECE.min(bytes - sent) as usize];
        file.read_at(piece, sent)?;
        sum.update(piece);
        out.write_all(piece)?;
        sent += piece.len() as u64;
    }
    writeln!(out, "{:08x}", sum.finalize())?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn records_and_manifests_are_listed_and_nothing_else() {
        let place = tempfile::tempdir().expect("a folder");
        let folder = Folder::from(place.path());
        for (path, text) in [
            ("run-00002/run.json", r#"{"uid": "u2"}"#),
            ("run-00002/step-000000000020/manifest.json", r#"{"step": 20}"#),
            ("run-00002/step-000000000030/ps-00000-of-00001.safetensors", "no manifest yet"),
            ("run-00002/step-000000000031/manifest.json", r#"{"step": 31, "par"#),
            ("run-00002/step-000000000032/manifest.json", ""),
            ("run-00001/run.json", r#"{"uid": "u1"}"#),
            ("run-00001/metrics/trainer-0/events", "a curve"),
            ("model.safetensors", "a model"),
        ] {
            let path = place.path().join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("makes it");
            fs::write(path, text).expect("writes");
        }
        let listed = list(&folder).expect("reads");
        let files = listed["files"].as_array().expect("files");
        let paths: Vec<_> = files.iter().filter_map(|file| file["path"].as_str()).collect();
        assert_eq!(paths, ["run-00001/run.json", "run-00002/run.json", "run-00002/step-000000000020/manifest.json"]);
        assert_eq!(files[2]["contents"], json!({"step": 20}));
        assert!(files[2]["written"].as_u64() > Some(1_600_000_000), "{listed}");
        assert_eq!(list(&folder.folder("missing")).expect("nothing is no error"), json!({"files": []}));
    }

    #[test]
    fn a_file_is_sent_between_its_length_and_its_checksum() {
        let place = tempfile::tempdir().expect("a folder");
        let file = place.path().join("model");
        for (contents, sent) in [("123456789", "9\n123456789cbf43926\n"), ("", "0\n00000000\n")] {
            fs::write(&file, contents).expect("writes");
            let mut out = Vec::new();
            read(&Folder::from(&file), &mut out).expect("reads");
            assert_eq!(out, sent.as_bytes());
        }
        let missing = read(&Folder::from(place.path()).folder("other"), &mut Vec::new()).expect_err("it is not there");
        assert!(format!("{missing:#}").contains("other: No such file"), "{missing:#}");
    }
}
