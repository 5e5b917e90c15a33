//! The files of a data set: in a folder of this machine, or below the URL of a bucket.

use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use bytes::Bytes;
use psjobs_object_store::{Object, ObjectError, Objects};

use crate::error::DataError;

/// Where a data set is.
#[derive(Debug)]
pub enum Place {
    Folder(PathBuf),
    Bucket(Objects),
}

/// A file as it was found at the start.
#[derive(Clone, Debug)]
pub struct File {
    /// Its name below the place, parted by slashes.
    pub name: String,
    pub bytes: u64,
    /// Another content has another tag: the store's, or the time of the last change.
    pub tag: String,
    source: Source,
}

#[derive(Clone, Debug)]
enum Source {
    Path(PathBuf),
    Object(Object),
}

impl Place {
    /// Reads `place`: a path, `file:///FOLDER` or the URL of a bucket, for which `variables` has the credentials.
    ///
    /// # Errors
    /// If the URL is of no place that is known, or the variables lack something.
    pub fn open(place: &str, variables: impl IntoIterator<Item = (String, String)>) -> Result<Self, DataError> {
        match place.split_once("://") {
            None => Ok(Self::Folder(place.into())),
            Some(("file", path)) if path.starts_with('/') => Ok(Self::Folder(path.into())),
            Some(("s3" | "gs" | "az", _)) => Ok(Self::Bucket(psjobs_object_store::objects(place, variables)?)),
            Some(_) => Err(DataError::Place { place: place.to_owned() }),
        }
    }

    /// Returns true if files are reached over the network.
    #[must_use]
    pub fn is_bucket(&self) -> bool {
        matches!(self, Self::Bucket(_))
    }

    /// The place, as messages name it.
    #[must_use]
    pub fn shown(&self) -> String {
        match self {
            Self::Folder(folder) => folder.display().to_string(),
            Self::Bucket(objects) => objects.url().to_owned(),
        }
    }

    /// A file, as messages name it.
    #[must_use]
    pub fn shown_file(&self, file: &File) -> String {
        match &file.source {
            Source::Path(path) => path.display().to_string(),
            Source::Object(_) if self.shown().ends_with(&format!("/{}", file.name)) => self.shown(),
            Source::Object(_) => format!("{}/{}", self.shown(), file.name),
        }
    }

    /// Lists the files, in the order of their names; without hidden ones, and those by which other programs mark a folder
    /// as complete.
    ///
    /// # Errors
    /// If the place cannot be read.
    pub fn list(&self) -> Result<Vec<File>, DataError> {
        let refuse = |source| DataError::Read { file: self.shown(), source };
        let mut files = match self {
            Self::Folder(folder) => local(folder)?,
            Self::Bucket(objects) => objects.list().map_err(refuse)?.into_iter().map(File::of).collect(),
        };
        files.retain(|file| file.bytes > 0 && !file.name.split('/').any(is_foreign));
        files.retain(|file| file.name.rsplit('/').next() != Some("_SUCCESS"));
        files.sort_by(|one, other| one.name.split('/').cmp(other.name.split('/')));
        Ok(files)
    }

    /// Reads bytes of a file.
    ///
    /// # Errors
    /// If the file has changed, or cannot be read.
    pub fn read(&self, file: &File, range: Range<u64>) -> Result<Bytes, DataError> {
        match (self, &file.source) {
            (Self::Bucket(objects), Source::Object(object)) => {
                objects.read(object, range).map_err(|error| match error {
                    ObjectError::Changed => self.changed(file),
                    ObjectError::Store(source) => DataError::Read { file: self.shown_file(file), source },
                })
            }
            _ => {
                let refuse = |source| DataError::Read { file: self.shown_file(file), source };
                let opened = self.open_file(file)?;
                let mut bytes = zeros((range.end - range.start) as usize).map_err(refuse)?;
                opened.read_exact_at(&mut bytes, range.start).map_err(refuse)?;
                Ok(bytes.into())
            }
        }
    }

    /// Opens a file of this machine.
    ///
    /// # Errors
    /// If the file has changed, cannot be opened, or is not on this machine.
    pub fn open_file(&self, file: &File) -> Result<fs::File, DataError> {
        let refuse = |source| DataError::Read { file: self.shown_file(file), source };
        let Source::Path(path) = &file.source else {
            return Err(refuse(io::Error::other("it is in a bucket")));
        };
        let opened = fs::File::open(path).map_err(refuse)?;
        let now = opened.metadata().map_err(refuse)?;
        if (now.len(), tag(&now)) != (file.bytes, file.tag.clone()) {
            return Err(self.changed(file));
        }
        Ok(opened)
    }

    fn changed(&self, file: &File) -> DataError {
        DataError::Changed { file: self.shown_file(file) }
    }
}

impl File {
    fn of(object: Object) -> Self {
        let (name, tag) = (object.name.clone(), object.tag.clone().unwrap_or_default());
        Self { name, bytes: object.bytes, tag, source: Source::Object(object) }
    }

    /// Its extension, in lower case.
    #[must_use]
    pub fn extension(&self) -> String {
        let end = Path::new(&self.name).extension().unwrap_or_default();
        end.to_string_lossy().to_ascii_lowercase()
    }
}

/// Returns so many bytes, all 0.
///
/// # Errors
/// If there is no memory for them.
pub fn zeros(bytes: usize) -> io::Result<Vec<u8>> {
    let mut room = Vec::new();
    room.try_reserve_exact(bytes)?;
    room.resize(bytes, 0);
    Ok(room)
}

/// Returns true for the names of files and folders that are no part of a data set: hidden ones, and the folder of a file
/// system's own.
fn is_foreign(name: &str) -> bool {
    name.starts_with('.') || name == "lost+found"
}

/// Lists the files below a folder, or the one file. It does not follow hidden entries, which may lead nowhere.
fn local(place: &Path) -> Result<Vec<File>, DataError> {
    let found = look(place)?;
    if !found.is_dir() {
        let name = place.file_name().unwrap_or_default().to_string_lossy().into_owned();
        return Ok(vec![local_file(place, name, &found)]);
    }
    let (mut files, mut folders) = (Vec::new(), vec![(place.to_owned(), String::new())]);
    while let Some((folder, prefix)) = folders.pop() {
        let refuse = |source| DataError::Read { file: folder.display().to_string(), source };
        for entry in fs::read_dir(&folder).map_err(refuse)? {
            let entry = entry.map_err(refuse)?;
            let own = entry.file_name().to_string_lossy().into_owned();
            if is_foreign(&own) {
                continue;
            }
            let (path, name) = (entry.path(), format!("{prefix}{own}"));
            let found = look(&path)?;
            if found.is_dir() {
                folders.push((path, format!("{name}/")));
            } else {
                files.push(local_file(&path, name, &found));
            }
        }
    }
    Ok(files)
}

/// Looks at a file or folder. A link counts as what it leads to.
fn look(path: &Path) -> Result<fs::Metadata, DataError> {
    fs::metadata(path).map_err(|source| DataError::Read { file: path.display().to_string(), source })
}

fn local_file(path: &Path, name: String, found: &fs::Metadata) -> File {
    File { name, bytes: found.len(), tag: tag(found), source: Source::Path(path.to_owned()) }
}

fn tag(found: &fs::Metadata) -> String {
    let since = found.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    since.map(|since| since.as_nanos().to_string()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_listed_by_name_without_hidden_ones() {
        let folder = tempfile::tempdir().expect("a folder");
        for name in ["b/2.png", "b/10.png", "a-x/1.png", "a/1.png", ".git/x.png", "lost+found/1.png", "_SUCCESS"] {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("creates");
            fs::write(path, "x").expect("writes");
        }
        fs::write(folder.path().join("empty.csv"), "").expect("writes");
        std::os::unix::fs::symlink("nowhere", folder.path().join(".link")).expect("links");
        let place = Place::open(&format!("file://{}", folder.path().display()), []).expect("a place");
        let names: Vec<_> = place.list().expect("lists").into_iter().map(|file| file.name).collect();
        assert_eq!(names, ["a/1.png", "a-x/1.png", "b/10.png", "b/2.png"]);
        let one = Place::open(&folder.path().join("a/1.png").display().to_string(), []).expect("a place");
        assert_eq!(one.list().expect("lists")[0].name, "1.png");
    }

    #[test]
    fn a_link_that_leads_nowhere_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::create_dir(folder.path().join("a")).expect("creates");
        std::os::unix::fs::symlink("nowhere", folder.path().join("a/link.csv")).expect("links");
        let place = Place::open(&folder.path().display().to_string(), []).expect("a place");
        let error = place.list().expect_err("it leads nowhere");
        assert!(error.is_input() && error.to_string().ends_with("a/link.csv"), "{error}");
    }

    #[test]
    fn bytes_that_no_memory_holds_are_an_error() {
        assert_eq!(zeros(3).expect("some bytes"), [0; 3]);
        assert_eq!(zeros(usize::MAX).expect_err("too many").kind(), io::ErrorKind::OutOfMemory);
    }

    #[test]
    fn a_file_that_changes_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("x.csv"), "1,2\n").expect("writes");
        let place = Place::open(&folder.path().display().to_string(), []).expect("a place");
        let listed = place.list().expect("lists").remove(0);
        assert_eq!(place.read(&listed, 2..4).expect("reads"), "2\n");
        fs::write(folder.path().join("x.csv"), "1,2\n3,4\n").expect("writes");
        let error = place.read(&listed, 2..4).expect_err("it has changed");
        assert!(error.is_input() && error.to_string().contains("x.csv has changed"), "{error}");
    }

    #[test]
    fn other_places_are_refused() {
        for (place, said) in [
            ("ftp://host/x", "give a folder"),
            ("file://host/x", "file:///FOLDER"),
            ("s3:///x", "the name of the bucket is empty"),
        ] {
            let error = Place::open(place, []).expect_err(place).to_string();
            assert!(error.contains(said), "{place}: {error}");
        }
    }
}
