//! Reading a checkpoint. Nothing in a file is believed: lengths are compared before memory is
//! taken for them, and every byte that is used has passed a checksum.

use std::io::{self, ErrorKind};
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::disk::{Disk, Folder, OpenFile};
use super::format::{
    Description, FORMAT, HeaderError, MANIFEST, MAX_HEADER, MAX_MANIFEST, Manifest, PREFIX, PartEntry, PartPlan,
    part_name,
};
use super::rows::{RowsDescription, RowsPart, rows_name};
use super::write::table_checksum;
use super::{BlockState, Concluded};
use crate::batch::assigner::Position;
use crate::layout::Layout;

/// Why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Damage {
    /// A file is not there or cannot be read.
    #[error("cannot read {}: {source}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// The system's words.
        source: io::Error,
    },
    /// A file is shorter or longer than it was when it was written.
    #[error("{} has {found} bytes instead of {expected}: it was cut short or replaced", file.display())]
    Length {
        /// The file.
        file: PathBuf,
        /// Length that it must have.
        expected: u64,
        /// Its length.
        found: u64,
    },
    /// Bytes are not what was written.
    #[error("{} is damaged: {what}", file.display())]
    Bytes {
        /// The file.
        file: PathBuf,
        /// The bytes and their fault.
        what: String,
    },
    /// A part is of another program, or of another version.
    #[error("{} is not usable", file.display())]
    Header {
        /// The file.
        file: PathBuf,
        /// The fault.
        source: HeaderError,
    },
    /// The manifest is not one, or does not fit the parts.
    #[error("{} is not usable: {problem}", file.display())]
    Manifest {
        /// The file.
        file: PathBuf,
        /// The fault.
        problem: String,
    },
}

impl Damage {
    /// Returns whether the fault is in what was written, so that reading it again cannot help. A part that is missing
    /// beside its manifest and a file that is cut short are; any other error of the system may pass, and a manifest
    /// that is missing may be one that this machine does not see.
    #[must_use]
    pub fn is_proved(&self) -> bool {
        match self {
            Self::Read { file, source } => match source.kind() {
                ErrorKind::UnexpectedEof => true,
                ErrorKind::NotFound => file.file_name().is_some_and(|name| name != MANIFEST),
                _ => false,
            },
            Self::Length { .. } | Self::Bytes { .. } | Self::Header { .. } | Self::Manifest { .. } => true,
        }
    }
}

/// A complete checkpoint whose descriptions and tables are whole. Blocks are verified when read.
#[derive(Debug)]
pub struct Checkpoint {
    folder: Folder,
    manifest: Manifest,
    parts: Vec<Part>,
    rows: Vec<RowsPart>,
}

impl Checkpoint {
    /// Opens the checkpoint in `folder`.
    ///
    /// # Errors
    /// The first thing that is wrong with it.
    pub fn open(folder: impl Into<Folder>) -> Result<Self, Damage> {
        let folder = folder.into();
        let manifest = read_manifest(folder.disk(), &folder.join(MANIFEST))?;
        Self::open_parts(folder, manifest)
    }

    /// Opens the checkpoint in `folder` that this manifest is about to complete.
    ///
    /// # Errors
    /// The first thing that is wrong with it.
    pub fn open_parts(folder: Folder, manifest: Manifest) -> Result<Self, Damage> {
        let disk = folder.disk();
        let parts = manifest.parts.iter().map(|entry| Part::open(disk, &folder.join(&entry.file), entry));
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        let rows = manifest.rows.iter().map(|entry| RowsPart::open(disk, &folder.join(&entry.file), entry));
        let rows = rows.collect::<Result<Vec<_>, _>>()?;
        let checkpoint = Self { folder, manifest, parts, rows };
        checkpoint.check()?;
        Ok(checkpoint)
    }

    /// Where it is.
    #[must_use]
    pub fn folder(&self) -> &Folder {
        &self.folder
    }

    /// Returns the description of the job; `server` is 0.
    #[must_use]
    pub fn description(&self) -> &Description {
        &self.parts[0].description
    }

    /// Returns the manifest, which marks the checkpoint as complete.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns those of a job's `trainers` of which every step is in it. The job may have had more when it was written.
    #[must_use]
    pub fn concluded(&self, trainers: u32) -> Concluded {
        self.manifest.concluded.range(..trainers).map(|(trainer, steps)| (*trainer, *steps)).collect()
    }

    /// Returns, for an elastic job, the batches whose gradients are in it.
    #[must_use]
    pub fn dealt(&self) -> &Position {
        &self.manifest.dealt
    }

    /// The rows of sparse tables: a file of each server, or none.
    #[must_use]
    pub fn rows(&self) -> &[RowsPart] {
        &self.rows
    }

    /// How the model was cut when it was written.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        self.parts[0].plan.layout()
    }

    /// Returns whether all blocks have the same gradients, and rows too, where the servers train both. In one that was written
    /// while trainers were at work, some may have gradients of a step that others lack.
    #[must_use]
    pub fn is_even(&self) -> bool {
        let mut blocks = self.parts.iter().flat_map(Part::extents);
        let first = blocks.next();
        let rows = self.rows.iter().map(RowsPart::description).filter(|rows| rows.servers_train_layers);
        let mut clocks = rows.flat_map(|rows| &rows.clocks);
        blocks.all(|block| Some(block) == first)
            && clocks.all(|clock| first.is_none_or(|(_, next_steps)| clock.next_steps == next_steps))
    }

    /// Returns, by trainer index, how many steps of each trainer it holds: no restart from here makes them again. Of a job
    /// whose trainers train the layers beside the servers' tables, the steps in the rows count.
    #[must_use]
    pub fn steps_held(&self) -> Vec<u64> {
        let mut least: Vec<Option<u64>> = Vec::new();
        let mut take = |next_steps: &[u64]| {
            least.resize(least.len().max(next_steps.len()), None);
            for (held, next) in least.iter_mut().zip(next_steps) {
                *held = Some(held.map_or(*next, |held| held.min(*next)));
            }
        };
        let rows = self.rows.iter().map(RowsPart::description);
        if rows.clone().all(|rows| rows.servers_train_layers) {
            self.parts.iter().flat_map(Part::extents).for_each(|(_, next_steps)| take(next_steps));
        }
        rows.flat_map(|rows| &rows.clocks).for_each(|clock| take(&clock.next_steps));
        least.into_iter().map(Option::unwrap_or_default).collect()
    }

    /// The state of the elements `range` of the flat space, whatever blocks they were in. Where they
    /// were in several, the furthest of them decides about versions and steps, so that no gradient is
    /// applied twice.
    ///
    /// # Errors
    /// If what was read does not match its checksum.
    ///
    /// # Panics
    /// If the model has fewer elements.
    pub fn read(&self, range: Range<usize>) -> Result<BlockState, Damage> {
        let layout = self.layout();
        assert!(range.end <= layout.elements(), "{range:?} of {} elements", layout.elements());
        if let Some(block) = self.block_of(&range) {
            return self.part(block).read(block);
        }
        let first = range.start / layout.block_elements();
        let last = range.end.div_ceil(layout.block_elements());
        let mut state = BlockState::default();
        for block in first as u32..last as u32 {
            let whole = layout.range(block);
            let wanted = range.start.max(whole.start) - whole.start..range.end.min(whole.end) - whole.start;
            state.append(self.part(block).read(block)?, wanted);
        }
        Ok(state)
    }

    /// Reads several ranges, each as [`Checkpoint::read`] does. Ranges that are whole blocks, and lie one behind the other in
    /// their part, are read at once, and nothing is read ahead: the caller may read others meanwhile.
    ///
    /// # Errors
    /// As [`Checkpoint::read`].
    ///
    /// # Panics
    /// As [`Checkpoint::read`].
    pub fn read_all(&self, ranges: &[Range<usize>]) -> Result<Vec<BlockState>, Damage> {
        let mut states = Vec::with_capacity(ranges.len());
        for run in self.runs(ranges) {
            let blocks: Vec<u32> = run.iter().filter_map(|range| self.block_of(range)).collect();
            match blocks.first() {
                Some(first) => states.extend(self.part(*first).read_run(&blocks, Asked::AtOnce)?),
                // A range that is no block follows none.
                None => states.push(self.read(run[0].clone())?),
            }
        }
        Ok(states)
    }

    /// Returns the ranges by runs: in each, whole blocks that lie one behind the other in their part, or one range alone.
    pub(super) fn runs<'a>(&self, ranges: &'a [Range<usize>]) -> impl Iterator<Item = &'a [Range<usize>]> {
        let servers = self.parts.len() as u32;
        ranges.chunk_by(move |one, other| {
            self.block_of(one).zip(self.block_of(other)).is_some_and(|(one, other)| other == one + servers)
        })
    }

    /// Returns the block that has exactly these elements, if there is one.
    fn block_of(&self, range: &Range<usize>) -> Option<u32> {
        let block = (range.start / self.layout().block_elements()) as u32;
        Some(block).filter(|block| !range.is_empty() && self.layout().range(*block) == *range)
    }

    /// Returns the server whose part has the first of these elements.
    #[must_use]
    pub fn part_with(&self, range: &Range<usize>) -> u32 {
        self.layout().owner((range.start / self.layout().block_elements()) as u32)
    }

    fn part(&self, block: u32) -> &Part {
        &self.parts[self.layout().owner(block) as usize]
    }

    /// The parts must be of one checkpoint, and all of it.
    fn check(&self) -> Result<(), Damage> {
        let Manifest { job, step, parts, rows, .. } = &self.manifest;
        for (server, part) in self.parts.iter().enumerate() {
            let want = Description {
                job: job.clone(),
                step: *step,
                server: server as u32,
                servers: parts.len() as u32,
                ..self.parts[0].description.clone()
            };
            if part.description != want {
                return Err(self.not_usable(format!("{} is a part of another checkpoint", parts[server].file)));
            }
        }
        for (server, of_server) in self.rows.iter().enumerate() {
            let found = of_server.description();
            let want = RowsDescription {
                job: job.clone(),
                step: *step,
                server: server as u32,
                servers: parts.len() as u32,
                slots: self.parts[0].description.slots,
                tables: self.rows[0].description().tables.clone(),
                ..found.clone()
            };
            if *found != want {
                return Err(self.not_usable(format!("{} is a part of another checkpoint", rows[server].file)));
            }
        }
        Ok(())
    }

    fn not_usable(&self, problem: String) -> Damage {
        Damage::Manifest { file: self.folder.join(MANIFEST), problem }
    }
}

impl BlockState {
    fn append(&mut self, other: Self, range: Range<usize>) {
        let furthest = |a: &mut u64, b: u64| *a = (*a).max(b);
        self.values.extend_from_slice(&other.values[range.clone()]);
        self.slots.resize(other.slots.len(), Vec::new());
        self.slots.iter_mut().zip(other.slots).for_each(|(slot, more)| slot.extend_from_slice(&more[range.clone()]));
        self.previous.extend_from_slice(other.previous.get(range).unwrap_or_default());
        furthest(&mut self.updates, other.updates);
        furthest(&mut self.version, other.version);
        self.next_steps.resize(other.next_steps.len(), 0);
        self.next_steps.iter_mut().zip(other.next_steps).for_each(|(step, more)| furthest(step, more));
    }
}

/// Reads a manifest, at most [`MAX_MANIFEST`] of it.
fn read_manifest(disk: &Disk, file: &Path) -> Result<Manifest, Damage> {
    let not_usable = |problem| Damage::Manifest { file: file.to_owned(), problem };
    let (handle, bytes) = open(disk, file)?;
    if bytes > MAX_MANIFEST {
        return Err(not_usable(format!("it has {bytes} bytes, more than any manifest")));
    }
    let json = read_at(&*handle, file, 0, bytes)?;
    let manifest: Manifest = serde_json::from_slice(&json).map_err(|e| not_usable(e.to_string()))?;
    if manifest.format != FORMAT {
        return Err(not_usable(format!("it has format {}, this version reads format {FORMAT}", manifest.format)));
    }
    let servers = manifest.parts.len() as u32;
    let named_right = (0..servers).zip(&manifest.parts).all(|(server, part)| part.file == part_name(server, servers));
    let rows_right = (0..).zip(&manifest.rows).all(|(server, rows)| rows.file == rows_name(server, servers))
        && (manifest.rows.is_empty() || manifest.rows.len() == servers as usize);
    if servers == 0 || !named_right || !rows_right {
        return Err(not_usable("its parts are not those of servers 0 to n".into()));
    }
    Ok(manifest)
}

/// How a caller asks for blocks.
#[derive(Clone, Copy)]
enum Asked {
    /// One after the other, so that a disk whose requests take long may ask for the next one ahead of its time.
    InTurn,
    /// Several at the same time.
    AtOnce,
}

/// One server's file.
#[derive(Debug)]
struct Part {
    path: PathBuf,
    file: Box<dyn OpenFile>,
    description: Description,
    plan: PartPlan,
    /// Versions and updates by position, then the next steps.
    tables: Vec<u64>,
    checksums: Vec<u32>,
}

impl Part {
    fn open(disk: &Disk, path: &Path, entry: &PartEntry) -> Result<Self, Damage> {
        let (file, header) = open_described(disk, path, entry.bytes)?;
        let (description, plan) = PartPlan::parse(&header[PREFIX..], entry.bytes)
            .map_err(|source| Damage::Header { file: path.to_owned(), source })?;
        if plan.file_bytes() != entry.bytes {
            return Err(Damage::Length { file: path.to_owned(), expected: plan.file_bytes(), found: entry.bytes });
        }
        let tables = read_at(&*file, path, plan.tables_at(), plan.table_bytes())?;
        let checksums = read_at(&*file, path, plan.checksums_at(), plan.checksum_bytes())?;
        if table_checksum(&header, &tables, &checksums) != entry.crc32 {
            return Err(Damage::Bytes {
                file: path.to_owned(),
                what: "its header or its tables do not match their checksum".into(),
            });
        }
        let tables = tables.as_chunks::<8>().0.iter().map(|n| u64::from_le_bytes(*n)).collect();
        let checksums = checksums.as_chunks::<4>().0.iter().map(|n| u32::from_le_bytes(*n)).collect();
        Ok(Self { path: path.to_owned(), file, description, plan, tables, checksums })
    }

    /// Returns version and next steps of each block.
    fn extents(&self) -> impl Iterator<Item = (u64, &[u64])> {
        let (blocks, trainers) = (self.plan.blocks().len(), self.description.trainers as usize);
        let next_steps = self.tables[2 * blocks..].chunks_exact(trainers.max(1));
        self.tables[..blocks].iter().copied().zip(next_steps)
    }

    fn read(&self, block: u32) -> Result<BlockState, Damage> {
        Ok(self.read_run(&[block], Asked::InTurn)?.remove(0))
    }

    /// Reads blocks that lie one behind the other in the part: of each column all of them at once.
    fn read_run(&self, run: &[u32], asked: Asked) -> Result<Vec<BlockState>, Damage> {
        let (blocks, trainers) = (self.plan.blocks().len(), self.description.trainers as usize);
        let first = self.plan.blocks().binary_search(&run[0]).expect("the part's server owns the block");
        let tables = |position: usize| BlockState {
            version: self.tables[position],
            updates: self.tables[blocks + position],
            next_steps: self.tables[2 * blocks + position * trainers..][..trainers].to_vec(),
            ..BlockState::default()
        };
        let mut states: Vec<BlockState> = (first..first + run.len()).map(tables).collect();
        for column in 0..self.plan.columns() as usize {
            for (state, numbers) in states.iter_mut().zip(self.read_column(column, first, run, asked)?) {
                match column {
                    0 => state.values = numbers,
                    _ if column > self.description.slots => state.previous = numbers,
                    _ => state.slots.push(numbers),
                }
            }
        }
        Ok(states)
    }

    /// Reads a column of blocks into the vectors that the blocks keep, without a copy.
    fn read_column(&self, column: usize, first: usize, run: &[u32], asked: Asked) -> Result<Vec<Vec<f32>>, Damage> {
        let layout = self.plan.layout();
        let mut read: Vec<Vec<f32>> = run.iter().map(|block| vec![0.0; layout.range(*block).len()]).collect();
        let mut bytes: Vec<&mut [u8]> = read.iter_mut().map(|numbers| bytemuck::cast_slice_mut(numbers)).collect();
        let offset = self.plan.data_at(first, column);
        let filled = match (asked, &mut bytes[..]) {
            (Asked::InTurn, [one]) => self.file.read_at(one, offset),
            (_, all) => self.file.read_all_at(all, offset),
        };
        filled.map_err(|source| Damage::Read { file: self.path.clone(), source })?;
        for ((position, block), bytes) in (first..).zip(run).zip(&bytes) {
            if crc32fast::hash(bytes) != self.checksums[position * self.plan.columns() as usize + column] {
                let what = match column {
                    0 => "the values".to_owned(),
                    _ if column > self.description.slots => "the previous values".to_owned(),
                    _ => format!("slot {}", column - 1),
                };
                return Err(Damage::Bytes {
                    file: self.path.clone(),
                    what: format!("{what} of block {block} do not match their checksum"),
                });
            }
        }
        if cfg!(target_endian = "big") {
            read.iter_mut().flatten().for_each(|number| *number = f32::from_le_bytes(number.to_ne_bytes()));
        }
        Ok(read)
    }
}

/// Opens a file that describes itself and must have so many bytes; its length prefix and header.
pub(super) fn open_described(disk: &Disk, path: &Path, expected: u64) -> Result<(Box<dyn OpenFile>, Vec<u8>), Damage> {
    let (file, found) = open(disk, path)?;
    if found != expected || found < PREFIX as u64 {
        return Err(Damage::Length { file: path.to_owned(), expected, found });
    }
    let mut prefix = [0; PREFIX];
    prefix.copy_from_slice(&read_at(&*file, path, 0, PREFIX as u64)?);
    let header_bytes = u64::from_le_bytes(prefix);
    if header_bytes > MAX_HEADER.min(found - PREFIX as u64) {
        let what = format!("a header of {header_bytes} bytes in a file of {found}");
        return Err(Damage::Bytes { file: path.to_owned(), what });
    }
    let header = read_at(&*file, path, 0, PREFIX as u64 + header_bytes)?;
    Ok((file, header))
}

fn open(disk: &Disk, path: &Path) -> Result<(Box<dyn OpenFile>, u64), Damage> {
    let read = |source| Damage::Read { file: path.to_owned(), source };
    let file = disk.open(path).map_err(read)?;
    let bytes = file.bytes().map_err(read)?;
    Ok((file, bytes))
}

/// `bytes` must not exceed the file's length.
pub(super) fn read_at(file: &dyn OpenFile, path: &Path, offset: u64, bytes: u64) -> Result<Vec<u8>, Damage> {
    let mut buffer = vec![0; bytes as usize];
    file.read_at(&mut buffer, offset).map_err(|source| Damage::Read { file: path.to_owned(), source })?;
    Ok(buffer)
}
