//! A file on its way from the pod: a line with its length, its bytes, and from an object store a line with their checksum. It
//! gets its name when all of that has come and is right.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::io::{AsyncBufRead, AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _};

/// Pause between two lines about a long copy.
const PROGRESS: Duration = Duration::from_secs(2);
/// Bytes that are read at once.
const PIECE: usize = 1 << 20;
/// More letters than the line with the length has, and than that with the checksum.
const LONGEST_LINE: u64 = 32;

/// Why a file is not there.
#[derive(Debug)]
pub enum Failure {
    /// It has come only in part, or wrong. The other side may have said why.
    Torn(String),
    /// It cannot be written here.
    Here(anyhow::Error),
}

/// A file that has not come as a whole yet, beside the one that it becomes. It goes when it is dropped.
struct Part {
    path: PathBuf,
    is_kept: bool,
}

impl Part {
    fn keep(mut self, file: &Path) -> anyhow::Result<()> {
        fs::rename(&self.path, file).with_context(|| format!("cannot name the file {}", file.display()))?;
        self.is_kept = true;
        Ok(())
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if !self.is_kept {
            fs::remove_file(&self.path).ok();
        }
    }
}

/// Writes what comes to `file`, which is then there as a whole or not at all, and returns its size. `has_checksum` says that a
/// line with the CRC-32 follows. Dropped before its end it leaves nothing.
///
/// # Errors
/// See [`Failure`].
pub async fn receive(
    stream: &mut (impl AsyncBufRead + Unpin),
    file: &Path,
    has_checksum: bool,
) -> Result<u64, Failure> {
    let broke = |error: std::io::Error| Failure::Torn(format!("the connection broke: {error}; try again"));
    let here = |error: std::io::Error, part: &Path| {
        Failure::Here(anyhow::Error::new(error).context(format!("cannot write {}", part.display())))
    };
    let mut line = Vec::new();
    (&mut *stream).take(LONGEST_LINE).read_until(b'\n', &mut line).await.map_err(broke)?;
    let size = std::str::from_utf8(&line).ok().and_then(|line| line.strip_suffix('\n')?.parse::<u64>().ok());
    let size = size.ok_or_else(|| Failure::Torn("the file cannot be read in the pod".into()))?;

    let part = Part { path: file.with_added_extension("part"), is_kept: false };
    let mut out =
        fs::File::create(&part.path).map(tokio::fs::File::from_std).map_err(|error| here(error, &part.path))?;
    let mut buffer = vec![0; PIECE];
    let (mut copied, mut sum, mut shown) = (0, crc32fast::Hasher::new(), Instant::now());
    while copied < size {
        let most = (size - copied).min(PIECE as u64) as usize;
        let count = stream.read(&mut buffer[..most]).await.map_err(broke)?;
        if count == 0 {
            return Err(Failure::Torn(format!("the connection broke after {copied} of {size} bytes; try again")));
        }
        sum.update(&buffer[..count]);
        out.write_all(&buffer[..count]).await.map_err(|error| here(error, &part.path))?;
        copied += count as u64;
        if shown.elapsed() > PROGRESS {
            eprintln!("{} of {} MB", copied / 1_000_000, size / 1_000_000);
            shown = Instant::now();
        }
    }
    let mut rest = Vec::new();
    (&mut *stream).take(LONGEST_LINE).read_to_end(&mut rest).await.map_err(broke)?;
    check_end(&rest, has_checksum.then(|| sum.finalize())).map_err(Failure::Torn)?;
    // The last piece is still on its way, and `sync_all` does not say if it failed.
    out.flush().await.map_err(|error| here(error, &part.path))?;
    out.sync_all().await.map_err(|error| here(error, &part.path))?;
    part.keep(file).map_err(Failure::Here)?;
    Ok(size)
}

/// Checks what follows the bytes of a file: its checksum in a line, or nothing.
fn check_end(rest: &[u8], checksum: Option<u32>) -> Result<(), String> {
    let want = checksum.map(|checksum| format!("{checksum:08x}\n")).unwrap_or_default();
    match rest {
        rest if rest == want.as_bytes() => Ok(()),
        rest if rest.len() < want.len() => {
            Err("the connection broke before the checksum of the file came; try again".into())
        }
        _ if want.is_empty() => Err("more bytes came than the file had: it is being written; try again".into()),
        _ => Err("the checksum of the file is not that of what came; try again".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_file_is_there_as_a_whole_or_not_at_all() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("model.safetensors");
        for (stream, has_checksum, said) in [
            ("9\n123456789cbf43926\n", true, ""),
            ("9\n123456789", false, ""),
            ("0\n00000000\n", true, ""),
            ("9\n12345678", true, "after 8 of 9 bytes"),
            ("9\n12345678", false, "after 8 of 9 bytes"),
            ("9\n123456789", true, "before the checksum"),
            ("9\n123456789cbf43926", true, "before the checksum"),
            ("9\n123456780cbf43926\n", true, "the checksum of the file is not"),
            ("9\n123456789cbf43926\nmore", true, "the checksum of the file is not"),
            ("9\n1234567890", false, "more bytes came"),
            ("", true, "cannot be read in the pod"),
            ("9", true, "cannot be read in the pod"),
            ("sh: not found\n", true, "cannot be read in the pod"),
        ] {
            let received = receive(&mut stream.as_bytes(), &file, has_checksum).await;
            let there = fs::read_dir(folder.path()).expect("the folder").count();
            match received {
                Ok(size) => {
                    assert!(said.is_empty(), "{stream:?} was taken");
                    assert_eq!(fs::read(&file).expect("written").len() as u64, size, "{stream:?}");
                    assert_eq!(there, 1, "{stream:?}: nothing but the file");
                    fs::remove_file(&file).expect("it is there");
                }
                Err(Failure::Torn(text)) => {
                    assert!(!said.is_empty() && text.contains(said), "{stream:?}: {text}");
                    assert_eq!(there, 0, "{stream:?} left something");
                }
                Err(Failure::Here(error)) => panic!("{stream:?}: {error:#}"),
            }
        }
    }

    #[tokio::test]
    async fn a_file_that_cannot_be_written_names_its_place() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("missing/model");
        let Err(Failure::Here(error)) = receive(&mut &b"1\nx"[..], &file, false).await else { panic!("no folder") };
        assert!(format!("{error:#}").contains("missing/model.part: No such file"), "{error:#}");
    }

    #[tokio::test]
    async fn a_file_whose_last_piece_has_no_room_is_not_taken_as_whole() {
        let folder = tempfile::tempdir().expect("a folder");
        std::os::unix::fs::symlink("/dev/full", folder.path().join("model.part")).expect("a link");
        let received = receive(&mut &b"1\nx"[..], &folder.path().join("model"), false).await;
        let Err(Failure::Here(error)) = &received else { panic!("{received:?}") };
        assert!(format!("{error:#}").contains("model.part: No space left"), "{error:#}");
        assert_eq!(fs::read_dir(folder.path()).expect("the folder").count(), 0);
    }
}
