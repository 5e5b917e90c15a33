//! The checkpoints in a folder, from what the shell prints of it. The layout is in docs/checkpoints.md.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::ensure;
use serde_json::Value;

/// Prints the records of runs and the manifests of the folder `$1`, each in a line behind its time and path. Prints nothing
/// if there is no such folder.
pub const PRINT: &str = r#"if cd "$1" 2>/dev/null; then
for file in run-*/run.json run-*/step-*/manifest.json; do
if [ -f "$file" ]; then printf '%s %s ' "$(stat -c %Y "$file")" "$file"; tr -d '\n' < "$file"; echo; fi
done; fi"#;

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

/// Returns the checkpoints of what [`PRINT`] printed, the newest run and step first. A file that is being written or was
/// removed meanwhile is left out.
///
/// # Errors
/// If a manifest names a file outside its folder.
pub fn parse(printed: &str) -> anyhow::Result<Vec<Checkpoint>> {
    let (mut runs, mut found) = (BTreeMap::new(), Vec::new());
    for line in printed.lines() {
        let mut words = line.splitn(3, ' ');
        let (Some(time), Some(path), Some(text)) = (words.next(), words.next(), words.next()) else { continue };
        let (Ok(written), Ok(object)) = (time.parse::<i64>(), serde_json::from_str::<Value>(text)) else { continue };
        let Some((folder, name)) = path.rsplit_once('/') else { continue };
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

    use anyhow::Context as _;

    use super::*;

    const PART: &str = r#"{"file": "ps-00000-of-00001.safetensors", "bytes": 96, "crc32": 1}"#;

    /// Writes files into a folder, prints it as the pod does, and parses that.
    fn parsed(files: &[(&str, &str)]) -> anyhow::Result<Vec<Checkpoint>> {
        let volume = tempfile::tempdir().expect("a folder");
        for (path, text) in files {
            let path = volume.path().join("mnist").join(path);
            std::fs::create_dir_all(path.parent().context("a folder")?)?;
            std::fs::write(path, text)?;
        }
        let printed = Command::new("sh").args(["-c", PRINT, "sh", "mnist"]).current_dir(volume.path()).output()?;
        assert!(printed.status.success(), "{printed:?}");
        parse(&String::from_utf8(printed.stdout)?)
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
}
