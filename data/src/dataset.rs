//! A data set whose examples are read by their numbers, in any order, through a bounded cache.
//!
//! Tables of safetensors on this machine are read in place, and so are images. All others are read in pieces: a piece is
//! fetched once, its rows are written to the disk cache as they lie in memory, and from there every example is one short
//! read, whatever its file looked like.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::{env, fmt, fs, io};

use bytes::Bytes;
use parking_lot::Mutex;

use crate::csv;
use crate::disk_cache::{self, DiskCache};
use crate::error::DataError;
use crate::fetcher::Fetcher;
use crate::index::{Contents, Index, PIECE, Piece};
use crate::lru::Lru;
use crate::place::{self, File, Place};
use crate::safetensors::Tensor;
use crate::schema::{Column, Expected, Table};

/// Files that are open at the same time: of pieces, or of the data set itself.
const OPEN: u64 = 512;
/// Bytes of pieces in memory unless said otherwise.
pub const MEMORY: u64 = 256 << 20;

/// The bounds of what a data set keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Bytes of pieces on disk; `None` takes 10 GiB, or half of the free space if that is less.
    pub cache: Option<u64>,
    /// The folder of these; `None` takes the user's cache folder, or that of temporary files if it cannot be made.
    pub cache_dir: Option<PathBuf>,
    /// Bytes of pieces in memory, and bytes that are fetched at the same time.
    pub memory: u64,
}

/// A data set; clones share all of it.
#[derive(Clone)]
pub struct DataSet {
    inner: Arc<Inner>,
    fetcher: Option<Arc<Fetcher>>,
}

/// The file of an example: an image, usually.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExampleFile {
    /// Its name, as messages have it.
    pub name: String,
    pub bytes: Bytes,
    /// The number of its class.
    pub class: u32,
}

struct Inner {
    place: Place,
    index: Index,
    /// Pieces whose rows are in memory, or whose files are.
    memory: Mutex<Lru<usize, Bytes>>,
    /// Open files: of pieces, or of the data set if it is read in place.
    open: Mutex<Lru<usize, Arc<fs::File>>>,
    disk: Option<DiskCache>,
    /// True if the disk cannot be written; that was logged.
    disk_failed: Mutex<bool>,
    /// True if all pieces together fit into memory.
    fits: bool,
}

/// A piece, or the place of one.
#[derive(Clone, Debug)]
enum Held {
    Memory(Bytes),
    File(Arc<fs::File>),
}

impl fmt::Debug for DataSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (place, examples) = (self.inner.place.shown(), self.examples());
        f.debug_struct("DataSet").field("place", &place).field("examples", &examples).finish_non_exhaustive()
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self { cache: None, cache_dir: None, memory: MEMORY }
    }
}

impl Settings {
    /// Returns the folder of the cache, and the one that takes its place if it cannot be made: as given, without another one;
    /// else in the user's cache folder, or among the temporary files.
    fn folders(&self) -> (PathBuf, Option<PathBuf>) {
        let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let users = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
        let temporary = env::temp_dir().join("psjobs-pieces");
        match (&self.cache_dir, users) {
            (Some(folder), _) => (folder.clone(), None),
            (None, Some(users)) => (users.join("psjobs").join("pieces"), Some(temporary)),
            (None, None) => (temporary, None),
        }
    }
}

/// Opens the cache in a folder, or if that cannot be made in the other one.
///
/// # Errors
/// If neither can be used; with the reason of the first one.
fn open_cache(folder: PathBuf, other: Option<PathBuf>, limit: Option<u64>) -> Result<DiskCache, DataError> {
    DiskCache::open(folder.clone(), limit).or_else(|source| {
        let opened = other.and_then(|other| DiskCache::open(other, limit).ok());
        if opened.is_some() {
            tracing::warn!(folder = %folder.display(), error = %source, "this folder cannot be the cache");
        }
        opened.ok_or(DataError::Cache { folder, source })
    })
}

impl DataSet {
    /// Looks at the files of `place`: a path, `file:///FOLDER`, or the URL of a bucket, for which the environment has the
    /// credentials. Of tables it reads the columns that are `expected`.
    ///
    /// # Errors
    /// If a file cannot be read, is damaged or of another schema; or if the cache cannot be used.
    pub fn open(place: &str, expected: &[Expected], settings: &Settings) -> Result<Self, DataError> {
        Self::open_with(place, expected, settings, env::vars())
    }

    /// As [`DataSet::open`], with the credentials of an object store among `variables`.
    ///
    /// # Errors
    /// As [`DataSet::open`].
    pub fn open_with(
        place: &str,
        expected: &[Expected],
        settings: &Settings,
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, DataError> {
        Self::open_in_pieces(Place::open(place, variables)?, expected, settings, PIECE)
    }

    /// As [`DataSet::open`], in pieces of about `piece` bytes.
    fn open_in_pieces(place: Place, expected: &[Expected], settings: &Settings, piece: u64) -> Result<Self, DataError> {
        let in_place = !place.is_bucket() && place.list()?.first().is_some_and(is_read_in_place);
        let disk = match in_place {
            true => None,
            false => {
                let (folder, other) = settings.folders();
                Some(open_cache(folder, other, settings.cache)?)
            }
        };
        let index = Index::make(&place, expected, disk.as_ref(), piece)?;
        let inner = Inner::new(place, index, disk, settings.memory);
        inner.say();
        let inner = Arc::new(inner);
        let fetched = inner.clone();
        let fetch = move |piece| fetched.fetch(piece).map(drop);
        let fetcher = (!in_place).then(|| Arc::new(Fetcher::start(settings.memory, Arc::new(fetch))));
        Ok(Self { inner, fetcher })
    }

    /// Number of examples.
    #[must_use]
    pub fn examples(&self) -> usize {
        self.inner.index.examples as usize
    }

    /// The columns of tables, in the order in which they were expected; none if examples are files.
    #[must_use]
    pub fn columns(&self) -> &[Column] {
        &self.inner.index.layout.columns
    }

    /// The names of the classes if examples are files in a folder for each class.
    #[must_use]
    pub fn classes(&self) -> Option<&[String]> {
        match &self.inner.index.contents {
            Contents::Images { classes, .. } => Some(classes),
            _ => None,
        }
    }

    /// Reads the examples of a table, in this order.
    ///
    /// # Errors
    /// If there is no such example, or its file cannot be read, has changed or is damaged.
    pub fn read(&self, examples: &[i64]) -> Result<Table, DataError> {
        let inner = &*self.inner;
        let mut table = Table::zeros(&inner.index.layout, examples.len());
        if let (Contents::Safetensors(tensors), None) = (&inner.index.contents, &self.fetcher) {
            inner.read_in_place(tensors, examples, &mut table)?;
            return Ok(table);
        }
        let size = inner.index.layout.row;
        let mut record = vec![0; size];
        self.each(examples, |held, row, at| {
            let begin = row as usize * size;
            match held {
                Held::Memory(bytes) => record.copy_from_slice(&bytes[begin..begin + size]),
                Held::File(file) => file.read_exact_at(&mut record, begin as u64)?,
            }
            table.put(&inner.index.layout, at, &record);
            Ok(())
        })?;
        Ok(table)
    }

    /// Reads the files of examples, in this order, if examples are files.
    ///
    /// # Errors
    /// If there is no such example, or its file cannot be read or has changed.
    pub fn read_files(&self, examples: &[i64]) -> Result<Vec<ExampleFile>, DataError> {
        let inner = &*self.inner;
        let Contents::Images { class_of, .. } = &inner.index.contents else {
            return Err(DataError::unfit(inner.place.shown(), "its examples are rows of tables, and not files"));
        };
        let mut found: Vec<Bytes> = vec![Bytes::new(); examples.len()];
        if self.fetcher.is_none() {
            for (bytes, example) in found.iter_mut().zip(examples) {
                let file = &inner.index.files[inner.locate(*example)?.0];
                *bytes = inner.place.read(file, 0..file.bytes)?;
            }
        } else {
            self.each(examples, |held, _, at| {
                found[at] = match held {
                    Held::Memory(bytes) => bytes.clone(),
                    Held::File(file) => {
                        let mut bytes = vec![0; file.metadata()?.len() as usize];
                        file.read_exact_at(&mut bytes, 0)?;
                        bytes.into()
                    }
                };
                Ok(())
            })?;
        }
        let with_class = |(bytes, example): (Bytes, &i64)| {
            let number = inner.index.pieces[inner.locate(*example)?.0].file;
            let name = inner.place.shown_file(&inner.index.files[number]);
            Ok::<_, DataError>(ExampleFile { name, bytes, class: class_of[number] })
        };
        found.into_iter().zip(examples).map(with_class).collect()
    }

    /// Begins to fetch what examples need that will be read later.
    pub fn will_read(&self, examples: &[i64]) {
        let Some(fetcher) = &self.fetcher else { return };
        let piece = |example: &i64| self.inner.locate(*example).ok().map(|(piece, _)| piece);
        let mut pieces: Vec<usize> = examples.iter().filter_map(piece).collect();
        pieces.sort_unstable();
        pieces.dedup();
        pieces.retain(|piece| !self.inner.has(*piece));
        fetcher.ask(pieces.into_iter().map(|piece| (piece, self.inner.cost(piece))), false);
    }

    /// Gives each example's piece, its row in the piece, and its place among `examples` to `take`, piece by piece; those that
    /// are missing are fetched together.
    fn each(
        &self,
        examples: &[i64],
        mut take: impl FnMut(&Held, u64, usize) -> io::Result<()>,
    ) -> Result<(), DataError> {
        let inner = &*self.inner;
        let mut by_piece: BTreeMap<usize, Vec<(u64, usize)>> = BTreeMap::new();
        for (at, example) in examples.iter().enumerate() {
            let (piece, row) = inner.locate(*example)?;
            by_piece.entry(piece).or_default().push((row, at));
        }
        let missing: Vec<usize> = by_piece.keys().copied().filter(|piece| !inner.has(*piece)).collect();
        if let Some(fetcher) = &self.fetcher {
            fetcher.ask(missing.iter().map(|piece| (*piece, inner.cost(*piece))), true);
        }
        for (piece, rows) in by_piece {
            let held = self.held(piece)?;
            for (row, at) in rows {
                take(&held, row, at).map_err(|source| inner.unreadable(piece, source))?;
            }
        }
        Ok(())
    }

    /// Finds a piece, and waits for it if it is on its way.
    fn held(&self, piece: usize) -> Result<Held, DataError> {
        if let Some(fetcher) = &self.fetcher {
            fetcher.wait(piece)?;
        }
        match self.inner.find(piece)? {
            Some(held) => Ok(held),
            // It was removed at once, because the cache is small.
            None => self.inner.fetch(piece).map(Held::Memory),
        }
    }
}

/// Returns true for files of this machine from which one example is read as fast as from the cache.
fn is_read_in_place(file: &File) -> bool {
    matches!(file.extension().as_str(), "safetensors" | "png" | "jpg" | "jpeg" | "bmp")
}

impl Inner {
    fn new(place: Place, index: Index, disk: Option<DiskCache>, memory: u64) -> Self {
        let mut inner = Self {
            place,
            index,
            memory: Mutex::new(Lru::new(memory)),
            open: Mutex::new(Lru::new(OPEN)),
            disk,
            disk_failed: Mutex::new(false),
            fits: false,
        };
        inner.fits = inner.all_bytes() <= memory;
        inner
    }

    fn all_bytes(&self) -> u64 {
        (0..self.index.pieces.len()).map(|piece| self.bytes(piece)).sum()
    }

    fn say(&self) {
        let (examples, files, bytes) = (self.index.examples, self.index.files.len(), self.all_bytes());
        tracing::info!(place = %self.place.shown(), examples, files, bytes, "the data set is indexed");
        if let Some(limit) = self.disk.as_ref().map(DiskCache::limit).filter(|limit| *limit < bytes) {
            tracing::warn!(
                bytes,
                limit,
                "the disk cache is smaller than the data set, so pieces are fetched more than once an epoch; \
                 give a larger --data-cache"
            );
        }
    }

    fn locate(&self, example: i64) -> Result<(usize, u64), DataError> {
        let found = u64::try_from(example).ok().and_then(|example| self.index.locate(example));
        found.ok_or_else(|| {
            let problem = format!("it has {} examples, and none with the number {example}", self.index.examples);
            DataError::unfit(self.place.shown(), problem)
        })
    }

    /// Bytes of a piece as it is kept.
    fn bytes(&self, piece: usize) -> u64 {
        let piece = &self.index.pieces[piece];
        match self.index.contents {
            Contents::Images { .. } => self.index.files[piece.file].bytes,
            _ => piece.rows * self.index.layout.row as u64,
        }
    }

    /// Bytes of memory that fetching a piece takes, about: as it comes, and as it is kept.
    fn cost(&self, piece: usize) -> u64 {
        2 * self.bytes(piece)
    }

    /// The name of a piece in the cache. It says all on which the bytes depend.
    fn key(&self, piece: usize) -> String {
        let Piece { file, row, rows, .. } = self.index.pieces[piece];
        let file = &self.index.files[file];
        let (place, columns) = (self.place.shown(), &self.index.layout.columns);
        format!("piece 1\n{place}\n{}\n{}\n{}\n{row} {rows}\n{columns:?}", file.name, file.bytes, file.tag)
    }

    fn has(&self, piece: usize) -> bool {
        self.memory.lock().contains(&piece)
            || self.open.lock().contains(&piece)
            || self.disk.as_ref().is_some_and(|disk| disk.contains(&self.key(piece)))
    }

    /// Finds a piece in memory or on disk.
    fn find(&self, piece: usize) -> Result<Option<Held>, DataError> {
        if let Some(bytes) = self.memory.lock().get(&piece) {
            return Ok(Some(Held::Memory(bytes)));
        }
        let open = self.open.lock().get(&piece);
        let file = match open {
            Some(file) => {
                // One that was removed is read this time, and then closed, so that the disk has its bytes back.
                if !disk_cache::note_use(&file) {
                    self.open.lock().remove(&piece);
                }
                file
            }
            None => {
                let opened = self.disk.as_ref().and_then(|disk| disk.get(&self.key(piece), Some(self.bytes(piece))));
                let Some(file) = opened.map(Arc::new) else { return Ok(None) };
                self.open.lock().put(piece, file.clone(), 1);
                file
            }
        };
        if !self.fits {
            return Ok(Some(Held::File(file)));
        }
        let mut bytes = vec![0; self.bytes(piece) as usize];
        file.read_exact_at(&mut bytes, 0).map_err(|source| self.unreadable(piece, source))?;
        let bytes = Bytes::from(bytes);
        self.memory.lock().put(piece, bytes.clone(), bytes.len() as u64);
        Ok(Some(Held::Memory(bytes)))
    }

    fn unreadable(&self, piece: usize, source: io::Error) -> DataError {
        let file = self.place.shown_file(&self.index.files[self.index.pieces[piece].file]);
        DataError::Read { file: format!("a cached piece of {file}"), source }
    }

    /// Fetches a piece and keeps it, in memory and on disk.
    fn fetch(&self, number: usize) -> Result<Bytes, DataError> {
        let bytes = self.load(&self.index.pieces[number])?;
        match self.disk.as_ref().map(|disk| disk.put(&self.key(number), &bytes)) {
            // Open files of pieces that were removed would keep their bytes on the disk.
            Some(Ok(true)) => self.open.lock().retain(|file| disk_cache::is_linked(file)),
            Some(Err(error)) => {
                let mut failed = self.disk_failed.lock();
                if !*failed {
                    tracing::warn!(%error, "the disk cache cannot be written, so pieces are fetched again and again");
                }
                *failed = true;
            }
            Some(Ok(false)) | None => {}
        }
        self.memory.lock().put(number, bytes.clone(), bytes.len() as u64);
        Ok(bytes)
    }

    /// Reads a piece from its file, and brings it into the form in which it is kept.
    fn load(&self, piece: &Piece) -> Result<Bytes, DataError> {
        let (file, row) = (&self.index.files[piece.file], self.index.layout.row);
        let unfit = |problem: String| DataError::unfit(self.place.shown_file(file), problem);
        let room = || {
            let bytes = usize::try_from(piece.rows).ok().and_then(|rows| rows.checked_mul(row));
            bytes.and_then(|bytes| place::zeros(bytes).ok()).ok_or_else(|| {
                let rows = piece.rows;
                unfit(format!("there is no memory for {rows} rows of {row} bytes; write row groups of fewer rows"))
            })
        };
        match &self.index.contents {
            Contents::Images { .. } => self.place.read(file, 0..file.bytes),
            Contents::Csv { files, targets } => {
                let marks = &files[piece.file];
                let (begin, line) = marks.at(piece.row).unwrap_or((0, 1));
                let end = marks.at(piece.row + piece.rows).map_or(file.bytes, |(end, _)| end);
                let mut rows = room()?;
                let text = self.place.read(file, begin..end)?;
                csv::parse(&text, line, targets, row, &mut rows).map_err(unfit)?;
                Ok(rows.into())
            }
            Contents::Parquet { files, targets } => {
                let footer = &files[piece.file];
                let mut parts = Vec::new();
                for range in footer.ranges(piece.number, targets) {
                    parts.push((range.start, self.place.read(file, range)?));
                }
                let mut rows = room()?;
                footer.decode(file.bytes, piece.number, parts, targets, row, &mut rows).map_err(unfit)?;
                Ok(rows.into())
            }
            Contents::Safetensors(files) => {
                let mut rows = room()?;
                let layout = &self.index.layout;
                for ((tensor, column), offset) in files[piece.file].iter().zip(&layout.columns).zip(&layout.offsets) {
                    let size = (column.elements() * tensor.dtype.bytes()) as u64;
                    let begin = tensor.begin + piece.row * size;
                    let found = self.place.read(file, begin..begin + piece.rows * size)?;
                    let place = *offset..*offset + column.bytes();
                    for (number, into) in rows.chunks_exact_mut(row).enumerate() {
                        let from = &found[number * size as usize..(number + 1) * size as usize];
                        let at = piece.row + number as u64;
                        convert(tensor, column, from, &mut into[place.clone()], at).map_err(unfit)?;
                    }
                }
                Ok(rows.into())
            }
        }
    }

    /// Reads examples from the files themselves.
    fn read_in_place(&self, tensors: &[Vec<Tensor>], examples: &[i64], table: &mut Table) -> Result<(), DataError> {
        let mut raw = Vec::new();
        for (at, example) in examples.iter().enumerate() {
            let (piece, row) = self.locate(*example)?;
            let Piece { file: number, row: first, .. } = self.index.pieces[piece];
            let (file, row) = (&self.index.files[number], first + row);
            let known = self.open.lock().get(&number);
            let opened = match known {
                Some(opened) => opened,
                None => {
                    let opened = Arc::new(self.place.open_file(file)?);
                    self.open.lock().put(number, opened.clone(), 1);
                    opened
                }
            };
            let columns = &self.index.layout.columns;
            for ((tensor, column), values) in tensors[number].iter().zip(columns).zip(&mut table.columns) {
                let into = &mut values.bytes_mut()[at * column.bytes()..(at + 1) * column.bytes()];
                let size = column.elements() * tensor.dtype.bytes();
                let begin = tensor.begin + row * size as u64;
                let refuse = |source| DataError::Read { file: self.place.shown_file(file), source };
                if tensor.dtype.is(column.kind) {
                    opened.read_exact_at(into, begin).map_err(refuse)?;
                } else {
                    raw.resize(size, 0);
                    opened.read_exact_at(&mut raw, begin).map_err(refuse)?;
                    let converted = convert(tensor, column, &raw, into, row);
                    converted.map_err(|problem| DataError::unfit(self.place.shown_file(file), problem))?;
                }
            }
        }
        Ok(())
    }
}

fn convert(tensor: &Tensor, column: &Column, from: &[u8], into: &mut [u8], row: u64) -> Result<(), String> {
    let converted = tensor.dtype.convert(from, column.kind, into);
    converted.map_err(|found| format!("tensor {}, row {row} has {found}, expected {}", column.name, column.kind))
}

#[cfg(test)]
mod tests;
