//! Reads the series of all sources while they grow.

use std::collections::BTreeMap;
use std::io;

use super::Source;
use super::event_file::{Record, first_record};
use super::writer::{Entry, event_files};
use crate::checkpoint::Folder;
use crate::checkpoint::disk::{OpenFile, names};

/// The most bytes that are read at once. No record is as long.
const PIECE: u64 = 8 << 20;

/// The series in a folder, each read up to some place.
#[derive(Debug)]
pub struct SeriesReader {
    folder: Folder,
    places: BTreeMap<Source, Place>,
}

/// How far a source's series was read.
#[derive(Clone, Debug, Default)]
struct Place {
    /// Name of the event file.
    file: String,
    /// Bytes of it that were read.
    offset: u64,
}

impl SeriesReader {
    /// Describes the series in `folder`, of which nothing was read yet. It need not exist.
    #[must_use]
    pub fn new(folder: Folder) -> Self {
        Self { folder, places: BTreeMap::new() }
    }

    /// Returns the folder of the series.
    #[must_use]
    pub fn folder(&self) -> &Folder {
        &self.folder
    }

    /// Gives `take` what was written since the last call, in the order of each source. A record that is not whole yet is left
    /// for the next call. Waits for the disk.
    ///
    /// # Errors
    /// If a folder or file cannot be read. The next call goes on behind what `take` was given.
    pub fn read(&mut self, mut take: impl FnMut(Source, Entry)) -> io::Result<()> {
        let names = names(self.folder.disk(), &self.folder)?;
        let mut sources: Vec<_> = names.iter().filter_map(|name| Source::of_folder(name.to_str()?)).collect();
        sources.sort_unstable();
        for source in sources {
            let place = self.places.entry(source).or_default();
            read_source(&self.folder.folder(&source.to_string()), place, |entry| take(source, entry))?;
        }
        Ok(())
    }
}

fn read_source(folder: &Folder, place: &mut Place, mut take: impl FnMut(Entry)) -> io::Result<()> {
    let disk = folder.disk();
    let begun = place.file.clone();
    for name in event_files(folder)?.into_iter().skip_while(|name| *name < begun) {
        if name != place.file {
            *place = Place { file: name, offset: 0 };
        }
        let path = folder.join(&place.file);
        let mut read = || read_file(&*disk.open(&path)?, &mut place.offset, PIECE, &mut take);
        match read() {
            // A file that was replaced while it was read.
            Err(_) if disk.grows_by_rewriting() => read()?,
            outcome => outcome?,
        }
    }
    Ok(())
}

/// Reads the whole records of a file from `offset` on, at most `piece` bytes at once, and leaves `offset` behind them.
fn read_file(file: &dyn OpenFile, offset: &mut u64, piece: u64, take: &mut impl FnMut(Entry)) -> io::Result<()> {
    let end = file.bytes()?;
    while *offset < end {
        let mut bytes = vec![0; piece.min(end - *offset) as usize];
        file.read_at(&mut bytes, *offset)?;
        let mut rest = bytes.as_slice();
        while let Some((record, behind)) = first_record(rest) {
            *offset += (rest.len() - behind.len()) as u64;
            rest = behind;
            match record {
                Record::Point(point) => take(Entry::Point(point)),
                Record::Restart(step) => take(Entry::Rewind(step.saturating_sub(1))),
                Record::Other => {}
            }
        }
        if rest.len() == bytes.len() {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};
    use std::io::Write as _;
    use std::path::Path;

    use super::*;
    use crate::series::event_file::Point;
    use crate::series::writer::SeriesWriter;

    fn loss(step: u64) -> Entry {
        Entry::Point(Point { step, unix_seconds: 1.0, values: [("loss".to_owned(), step as f32)].into() })
    }

    fn read(reader: &mut SeriesReader) -> Vec<(Source, Entry)> {
        let mut found = Vec::new();
        reader.read(|source, entry| found.push((source, entry))).expect("readable");
        found
    }

    fn writer(folder: &Path, process: u64) -> SeriesWriter {
        SeriesWriter::new(Folder::from(folder), process)
    }

    #[test]
    fn each_record_is_read_once_as_it_comes() {
        let scratch = tempfile::tempdir().expect("a folder");
        let mut reader = SeriesReader::new(Folder::from(&scratch.path().join("metrics")));
        assert!(read(&mut reader).is_empty(), "there is no folder yet");
        let mut first = writer(reader.folder(), 1);
        first.append(Source::Trainer(3), &[loss(1), loss(2)]).expect("written");
        let of = |step| (Source::Trainer(3), loss(step));
        assert_eq!(read(&mut reader), [of(1), of(2)]);
        assert!(read(&mut reader).is_empty());
        first.append(Source::Trainer(3), &[loss(3), Entry::Rewind(1), loss(2)]).expect("written");
        first.append(Source::Job, &[loss(9)]).expect("written");
        writer(reader.folder(), 2).append(Source::Trainer(3), &[loss(3)]).expect("written");
        let back = (Source::Trainer(3), Entry::Rewind(1));
        assert_eq!(read(&mut reader), [(Source::Job, loss(9)), of(3), back, of(2), of(3)]);
    }

    #[test]
    fn a_record_is_read_when_it_is_whole() {
        let scratch = tempfile::tempdir().expect("a folder");
        let (whole, growing) = (scratch.path().join("whole"), scratch.path().join("growing"));
        writer(&whole, 1).append(Source::Job, &[loss(1), loss(2)]).expect("written");
        let name = event_files(&Folder::from(&whole.join("job"))).expect("readable").remove(0);
        let bytes = fs::read(whole.join("job").join(&name)).expect("readable");
        let mut reader = SeriesReader::new(Folder::from(&growing));
        fs::create_dir_all(growing.join("job")).expect("a folder");
        let mut file =
            OpenOptions::new().create(true).append(true).open(growing.join("job").join(&name)).expect("a file");
        let mut found = Vec::new();
        for byte in bytes.chunks(1) {
            file.write_all(byte).expect("written");
            found.append(&mut read(&mut reader));
        }
        assert_eq!(found, [(Source::Job, loss(1)), (Source::Job, loss(2))]);
    }

    #[test]
    fn a_file_is_read_in_pieces() {
        let scratch = tempfile::tempdir().expect("a folder");
        let losses: Vec<_> = (1..40).map(loss).collect();
        writer(scratch.path(), 1).append(Source::Job, &losses).expect("written");
        let folder = Folder::from(&scratch.path().join("job"));
        let name = event_files(&folder).expect("readable").remove(0);
        let path = folder.join(&name);
        for (label, torn, piece, wanted) in [
            ("all at once", 0, PIECE, 39),
            ("pieces that end in a record", 0, 101, 39),
            ("a last record that is torn", 3, 101, 38),
            ("pieces that are shorter than a record", 0, 10, 0),
        ] {
            let bytes = fs::read(&path).expect("readable");
            fs::write(&path, &bytes[..bytes.len() - torn]).expect("writable");
            let (mut offset, mut found) = (0, Vec::new());
            let file = folder.disk().open(&path).expect("readable");
            read_file(&*file, &mut offset, piece, &mut |entry| found.push(entry)).expect(label);
            assert_eq!(found, losses[..wanted], "{label}");
            fs::write(&path, bytes).expect("writable");
        }
    }
}
