//! A file that is written before it is sent: small ones in memory, others in a temporary file of the system.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use bytes::Bytes;
use parking_lot::Mutex;

/// Bytes of a file that stays in memory.
const IN_MEMORY: u64 = 256 << 10;

/// The contents of a file that is not sent yet, or not for good.
#[derive(Debug)]
pub struct Spool(Mutex<Content>);

#[derive(Debug)]
enum Content {
    Memory(Vec<u8>),
    /// A file without a name, and its length.
    File(File, u64),
}

impl Default for Spool {
    fn default() -> Self {
        Self(Mutex::new(Content::Memory(Vec::new())))
    }
}

impl Spool {
    pub fn bytes(&self) -> u64 {
        match &*self.0.lock() {
            Content::Memory(bytes) => bytes.len() as u64,
            Content::File(_, bytes) => *bytes,
        }
    }

    /// Writes all of `bytes`.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut content = self.0.lock();
        let end = offset + bytes.len() as u64;
        if let Content::Memory(held) = &*content
            && end > IN_MEMORY
        {
            let file = temporary()?;
            file.write_all_at(held, 0).map_err(no_room)?;
            *content = Content::File(file, held.len() as u64);
        }
        match &mut *content {
            Content::Memory(held) => {
                if held.len() < end as usize {
                    held.resize(end as usize, 0);
                }
                held[offset as usize..end as usize].copy_from_slice(bytes);
            }
            Content::File(file, length) => {
                file.write_all_at(bytes, offset).map_err(no_room)?;
                *length = end.max(*length);
            }
        }
        Ok(())
    }

    /// Returns `length` bytes, or fewer at the end.
    pub fn read(&self, offset: u64, length: u64) -> io::Result<Bytes> {
        let content = self.0.lock();
        let end = (offset + length).min(match &*content {
            Content::Memory(held) => held.len() as u64,
            Content::File(_, length) => *length,
        });
        let begin = offset.min(end);
        match &*content {
            Content::Memory(held) => Ok(Bytes::copy_from_slice(&held[begin as usize..end as usize])),
            Content::File(file, _) => {
                let mut bytes = vec![0; (end - begin) as usize];
                file.read_exact_at(&mut bytes, begin)?;
                Ok(bytes.into())
            }
        }
    }
}

fn temporary() -> io::Result<File> {
    tempfile::tempfile().map_err(no_room)
}

/// Says what a temporary file lacks.
fn no_room(error: io::Error) -> io::Error {
    let text = "the temporary folder, where a file lies until it is sent to the store";
    let advice =
        "it needs room for this server's part of a checkpoint; TMPDIR names another one, in a pod mount an emptyDir";
    // A full disk here is no full disk where checkpoints are.
    io::Error::other(format!("{text} ({}): {error}; {advice}", std::env::temp_dir().display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_large_files_hold_what_is_written_in_any_order() {
        for scale in [1_u64, 100_000] {
            let spool = Spool::default();
            let piece = |value: u8| vec![value; scale as usize];
            for (value, place) in [(1, 0), (3, 2), (2, 1), (9, 2)] {
                spool.write_at(&piece(value), place * scale).expect("writes");
            }
            assert_eq!(spool.bytes(), 3 * scale);
            assert_eq!(spool.read(0, u64::from(u32::MAX)).expect("reads"), [piece(1), piece(2), piece(9)].concat());
            assert_eq!(spool.read(scale, scale).expect("reads"), piece(2));
            assert_eq!(spool.read(3 * scale, 5).expect("reads"), "");
            assert_eq!(matches!(&*spool.0.lock(), Content::File(..)), scale > 1);
        }
    }
}
