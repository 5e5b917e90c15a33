//! The checkpoints in a folder, from what the pod prints of it. The layout is in docs/checkpoints.md.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, ensure};
use serde_json::Value;

/// A complete checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checkpoint {
    pub run: u32,
    pub step: u64,
    /// Name and unique id of the job whose run it is.
    pub job: String,
    pub uid: String,
    /// Servers that wrote it.
    pub servers: usize,
    /// Unix time of its completion, seconds.
    pub written: i64,
    /// Its folder, `run-00001/step-000000001234`.
    pub folder: String,
    /// Names and sizes of its parts in bytes.
    pub files: Vec<(String, u64)>,
}

impl Checkpoint {
    /// Returns the size of all parts.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Returns the folder of its run.
    pub fn run_folder(&self) -> &str {
        self.folder.split('/').next().unwrap_or_default()
    }
}

/// A record of a run or a manifest: when it was written, where it is in the folder, and its text as JSON.
type Found = (i64, String, Value);

/// Returns the checkpoints of what the shell has printed of a volume, the newest run and step first. A file that is being
/// written or was removed meanwhile is left out.
///
/// # Errors
/// If a manifest names a file outside its folder.
pub fn of_lines(printed: &str) -> anyhow::Result<Vec<Checkpoint>> {
    let found = |line: &str| -> Option<Found> {
        let mut words = line.splitn(3, ' ');
        let (time, path, text) = (words.next()?, words.next()?, words.next()?);
        Some((time.parse().ok()?, path.to_owned(), serde_json::from_str(text).ok()?))
    };
    checkpoints(printed.lines().filter_map(found))
}

/// Returns the checkpoints of what `psjobs-worker store list` has printed, in the same order.
///
/// # Errors
/// If the text has come only in part, or a manifest names a file outside its folder.
pub fn of_json(printed: &str) -> anyhow::Result<Vec<Checkpoint>> {
    let listed: Value = serde_json::from_str(printed).context("the list of files has come only in part; try again")?;
    let files = listed["files"].as_array().context("the pod has printed no list of files")?;
    let found = |file: &Value| -> Option<Found> {
        Some((file["written"].as_i64()?, file["path"].as_str()?.to_owned(), file["contents"].clone()))
    };
    checkpoints(files.iter().filter_map(found))
}

fn checkpoints(files: impl Iterator<Item = Found>) -> anyhow::Result<Vec<Checkpoint>> {
    let (mut runs, mut found) = (BTreeMap::new(), Vec::new());
    for (written, path, object) in files {
        let Some((folder, name)) = path.rsplit_once('/').filter(|(folder, _)| !folder.contains("..")) else { continue };
        if name == "run.json" {
            runs.insert(folder.to_owned(), object);
        } else if let Some(checkpoint) = checkpoint(folder, written, &object) {
            for (file, _) in &checkpoint.files {
                let is_plain = Path::new(file).file_name().is_some_and(|name| name == file.as_str());
                ensure!(is_plain, "the manifest in {folder} names {file:?}, which is no file beside it");
            }
            found.push(checkpoint);
        }
    }
    for checkpoint in &mut found {
        let record = runs.get(checkpoint.run_folder());
        let field = |name: &str| record.and_then(|record| record[name].as_str()).unwrap_or_default().to_owned();
        (checkpoint.job, checkpoint.uid) = (field("job"), field("uid"));
    }
    found.sort_by_key(|checkpoint| std::cmp::Reverse((checkpoint.run, checkpoint.step)));
    Ok(found)
}

fn checkpoint(folder: &str, written: i64, manifest: &Value) -> Option<Checkpoint> {
    let run = folder.split('/').next()?.strip_prefix("run-")?.parse().ok()?;
    let part = |part: &Value| Some((part["file"].as_str()?.to_owned(), part["bytes"].as_u64()?));
    let parts: Vec<_> = manifest["parts"].as_array()?.iter().map(part).collect::<Option<_>>()?;
    let rows = manifest["rows"].as_array().into_iter().flatten().map(part).collect::<Option<Vec<_>>>()?;
    let (step, servers) = (manifest["step"].as_u64()?, parts.len());
    let files = parts.into_iter().chain(rows).collect();
    Some(Checkpoint { run, step, servers, written, folder: folder.to_owned(), files, ..Checkpoint::default() })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::reader::place::PRINT_FOLDER;

    const PART: &str = r#"{"file": "ps-00000-of-00001.safetensors", "bytes": 96, "crc32": 1}"#;

    /// Writes files into a folder, prints it as the pod does, and parses that.
    fn parsed(files: &[(&str, &str)]) -> anyhow::Result<Vec<Checkpoint>> {
        let volume = tempfile::tempdir().expect("a folder");
        for (path, text) in files {
            let path = volume.path().join("mnist").join(path);
            std::fs::create_dir_all(path.parent().context("a folder")?)?;
            std::fs::write(path, text)?;
        }
        let printed =
            Command::new("sh").args(["-c", PRINT_FOLDER, "sh", "mnist"]).current_dir(volume.path()).output()?;
        assert!(printed.status.success(), "{printed:?}");
        of_lines(&String::from_utf8(printed.stdout)?)
    }

    #[test]
    fn complete_checkpoints_are_found_with_their_jobs_the_newest_first() {
        let rows =
            format!(r#"{{"format": 1, "step": 20, "parts": [{PART}], "rows": [{{"file": "rows", "bytes": 4}}]}}"#);
        let found = parsed(&[
            ("run-00001/run.json", "{\n  \"uid\": \"u1\", \"job\": \"mnist\"\n}\n"),
            ("run-00001/step-000000000003/manifest.json", &format!("{{\"step\": 3,\n \"parts\": [{PART}]}}")),
            ("run-00002/run.json", r#"{"uid": "u2", "job": "again"}"#),
            ("run-00002/step-000000000020/manifest.json", &rows),
            ("run-00002/step-000000000030/ps-00000-of-00001.safetensors", "no manifest yet"),
            ("run-00002/step-000000000031/manifest.json", "{\"step\": 31, \"par"),
        ]);
        let found = found.expect("nothing is wrong");
        let ids: Vec<_> =
            found.iter().map(|c| (c.run, c.step, c.job.as_str(), c.uid.as_str(), c.servers, c.bytes())).collect();
        assert_eq!(ids, [(2, 20, "again", "u2", 1, 100), (1, 3, "mnist", "u1", 1, 96)]);
        assert!(found[0].written > 1_600_000_000 && found[0].run_folder() == "run-00002", "{:?}", found[0]);
        assert_eq!(parsed(&[]).expect("no folder is no error"), []);
    }

    #[test]
    fn a_manifest_that_names_a_file_elsewhere_is_refused() {
        let outside = r#"{"step": 1, "parts": [{"file": "../../evil", "bytes": 1}]}"#;
        let error = parsed(&[("run-00001/step-000000000001/manifest.json", outside)]).expect_err("outside");
        assert!(error.to_string().contains("../../evil"), "{error}");
    }

    #[test]
    fn what_a_store_lists_is_read_as_a_whole() {
        let manifest = format!(r#"{{"step": 3, "parts": [{PART}]}}"#);
        let file =
            |path: &str, text: &str| format!(r#"{{"path": "{path}", "written": 1700000000, "contents": {text}}}"#);
        let files = [
            file("run-00001/run.json", r#"{"uid": "u1", "job": "mnist"}"#),
            file("run-00001/step-000000000003/manifest.json", &manifest),
            file("run-00001/step-000000000004/manifest.json", "[]"),
        ];
        let printed = format!(r#"{{"files": [{}]}}"#, files.join(", "));
        let found = of_json(&printed).expect("nothing is wrong");
        let [only] = &found[..] else { panic!("{found:?}") };
        assert_eq!((only.run, only.step, only.job.as_str(), only.written), (1, 3, "mnist", 1_700_000_000));
        let torn = of_json(&printed[..printed.len() - 2]).expect_err("it is torn");
        assert!(torn.to_string().contains("only in part"), "{torn}");
        let outside = manifest.replace("ps-00000-of-00001.safetensors", "../evil");
        let outside = format!(r#"{{"files": [{}]}}"#, file("run-00001/step-000000000003/manifest.json", &outside));
        assert!(of_json(&outside).expect_err("outside").to_string().contains("../evil"));
    }
}
