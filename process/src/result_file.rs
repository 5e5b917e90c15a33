//! The file that takes a process's result.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use psjobs_api::ReplicaResult;

/// Writes `result` to `path`. A new file appears whole, by rename. One that is there already is
/// written in place: in a pod it is a mount (the termination message), which cannot be replaced.
///
/// # Errors
/// If the file cannot be written.
pub fn write(path: &Path, result: &ReplicaResult) -> io::Result<()> {
    let json = result.to_json();
    if path.exists() {
        return fs::write(path, json);
    }
    let mut part = path.as_os_str().to_owned();
    part.push(format!(".{}.part", std::process::id()));
    let mut file = File::create(&part)?;
    file.write_all(json.as_bytes())?;
    file.sync_all()?;
    fs::rename(&part, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_result_replaces_what_the_file_held() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("result");
        for steps in [7, 8] {
            let result = ReplicaResult { steps, ..ReplicaResult::default() };
            write(&path, &result).expect("written");
            let text = fs::read_to_string(&path).expect("there");
            assert_eq!(ReplicaResult::parse(&text), Some(result));
        }
        assert_eq!(fs::read_dir(folder.path()).expect("folder").count(), 1, "no part is left");
    }

    #[test]
    fn a_folder_that_is_not_there_is_an_error() {
        assert!(write(Path::new("/no/such/folder/result"), &ReplicaResult::default()).is_err());
    }
}
