//! The idx files of MNIST and its relatives, plain or gzipped: a magic number, the dimensions as
//! big-endian u32, then one byte per element. Everything is checked before it is used.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::bufread::GzDecoder;

/// Two zero bytes, then 0x08 for unsigned bytes; the number of dimensions follows.
const MAGIC: [u8; 3] = [0, 0, 8];
/// More than any file of this family holds; a damaged header must not make us reserve the memory.
const MAX_ELEMENTS: u64 = 1 << 32;

/// A file's contents: `data` has as many bytes as the product of `dims`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Idx<const DIMS: usize> {
    pub dims: [usize; DIMS],
    pub data: Vec<u8>,
}

/// Why a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum IdxError {
    #[error("neither {} nor {}.gz is there", .0.display(), .0.display())]
    Missing(PathBuf),
    #[error("cannot read {}", file.display())]
    Read { file: PathBuf, source: io::Error },
    #[error("{} is damaged: {problem}", file.display())]
    Damaged { file: PathBuf, problem: String },
}

impl<const DIMS: usize> Idx<DIMS> {
    /// Reads `path`, or `path` with `.gz` appended.
    ///
    /// # Errors
    /// If there is no such file, it cannot be read, or its contents are not what its header says.
    pub fn open(path: &Path) -> Result<Self, IdxError> {
        let packed = path.with_added_extension("gz");
        let (file, gzipped) = if path.exists() { (path, false) } else { (packed.as_path(), true) };
        let reader = match File::open(file) {
            Ok(opened) => BufReader::new(opened),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(IdxError::Missing(path.to_owned())),
            Err(source) => return Err(IdxError::Read { file: file.to_owned(), source }),
        };
        let parsed = if gzipped { parse(GzDecoder::new(reader)) } else { parse(reader) };
        parsed.map_err(|fault| match fault {
            Fault::Damaged(problem) => IdxError::Damaged { file: file.to_owned(), problem },
            Fault::Io(source) => IdxError::Read { file: file.to_owned(), source },
        })
    }
}

enum Fault {
    Damaged(String),
    Io(io::Error),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Damaged("it ends too early".into()),
            io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => Self::Damaged(error.to_string()),
            _ => Self::Io(error),
        }
    }
}

fn parse<const DIMS: usize>(mut reader: impl Read) -> Result<Idx<DIMS>, Fault> {
    let mut magic = [0; 4];
    reader.read_exact(&mut magic)?;
    if magic[..3] != MAGIC || usize::from(magic[3]) != DIMS {
        let [a, b, c, d] = magic;
        let problem = format!("it begins with {a:02x}{b:02x}{c:02x}{d:02x}, expected 000008{DIMS:02x}");
        return Err(Fault::Damaged(problem));
    }
    let mut dims = [0; DIMS];
    let mut elements = 1_u64;
    for dim in &mut dims {
        let mut bytes = [0; 4];
        reader.read_exact(&mut bytes)?;
        let size = u32::from_be_bytes(bytes);
        elements = elements.saturating_mul(u64::from(size));
        *dim = size as usize;
    }
    if elements > MAX_ELEMENTS {
        return Err(Fault::Damaged(format!("its header announces the dimensions {dims:?}, too many to be true")));
    }
    // Grows as data arrives, so that a header that promises too much costs nothing.
    let mut data = Vec::new();
    let read = reader.by_ref().take(elements).read_to_end(&mut data)? as u64;
    if read < elements {
        return Err(Fault::Damaged(format!("it has {read} of the {elements} bytes that its header announces")));
    }
    if reader.read(&mut [0])? != 0 {
        return Err(Fault::Damaged(format!("it has more than the {elements} bytes that its header announces")));
    }
    Ok(Idx { dims, data })
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn bytes(dims: &[u32], data: &[u8]) -> Vec<u8> {
        let mut file = vec![0, 0, 8, dims.len() as u8];
        dims.iter().for_each(|dim| file.extend(dim.to_be_bytes()));
        file.extend(data);
        file
    }

    fn gzip(data: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(data).expect("in memory");
        encoder.finish().expect("in memory")
    }

    fn open(name: &str, contents: &[u8]) -> Result<Idx<2>, IdxError> {
        let folder = tempfile::tempdir().expect("temporary folder");
        std::fs::write(folder.path().join(name), contents).expect("written");
        Idx::open(&folder.path().join("file"))
    }

    #[test]
    fn plain_and_gzipped_files_read_the_same() {
        let file = bytes(&[2, 3], &[1, 2, 3, 4, 5, 6]);
        let want = Idx { dims: [2, 3], data: vec![1, 2, 3, 4, 5, 6] };
        assert_eq!(open("file", &file).expect("plain"), want);
        assert_eq!(open("file.gz", &gzip(&file)).expect("gzipped"), want);
    }

    #[test]
    fn every_damage_is_named_with_the_file() {
        let whole = gzip(&bytes(&[2, 3], &[0; 6]));
        let mut flipped = whole.clone();
        *flipped.last_mut().expect("not empty") ^= 1;
        let mut crc = whole.clone();
        let at = crc.len() - 8;
        crc[at] ^= 1;
        let rows: [(&str, &str, Vec<u8>, &str); 10] = [
            ("empty", "file", vec![], "ends too early"),
            ("header cut", "file", bytes(&[2], &[])[..7].to_vec(), "begins with 00000801"),
            ("dimensions cut", "file", bytes(&[2, 3], &[])[..9].to_vec(), "ends too early"),
            ("another magic", "file", b"\x89PNG\r\n".to_vec(), "begins with 89504e47"),
            ("labels for images", "file", bytes(&[6], &[0; 6]), "begins with 00000801, expected 00000802"),
            ("data cut", "file", bytes(&[2, 3], &[0; 5]), "5 of the 6 bytes"),
            ("data added", "file", bytes(&[2, 3], &[0; 7]), "more than the 6 bytes"),
            ("huge dimensions", "file", bytes(&[u32::MAX, u32::MAX], &[]), "too many"),
            ("gzip cut", "file.gz", whole[..whole.len() - 4].to_vec(), "ends too early"),
            ("gzip checksum", "file.gz", crc, "corrupt"),
        ];
        for (label, name, contents, want) in rows {
            let error = open(name, &contents).expect_err(label).to_string();
            assert!(error.contains(want) && error.contains(name), "{label}: {error}");
        }
        assert!(open("file.gz", &flipped).is_err(), "gzip length");
        assert!(open("file.gz", b"not gzip at all").is_err(), "no gzip");
    }

    #[test]
    fn a_file_that_is_not_there_is_named_with_both_spellings() {
        let error = open("other", &[]).expect_err("missing").to_string();
        assert!(error.contains("/file nor") && error.contains("file.gz"), "{error}");
    }
}
