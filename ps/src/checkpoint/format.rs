//! The format of a checkpoint. A part is a safetensors file (8 bytes header length, JSON header, data)
//! that holds the blocks of one server, ascending and without gaps, and describes itself. The
//! manifest binds the parts together and holds their checksums. Pure: bytes in, bytes out.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::BlockState;
use crate::batch::assigner::Position;
use crate::layout::{Layout, LayoutError, TensorSpec};
use crate::proto;

/// Version of the format; readers refuse any other.
pub const FORMAT: u32 = 1;
/// Longest header that is read. That of a model with 100,000 tensors has about 10 MB.
pub const MAX_HEADER: u64 = 64 << 20;
/// Longest manifest that is read.
pub const MAX_MANIFEST: u64 = 1 << 20;
/// Name of the manifest.
pub const MANIFEST: &str = "manifest.json";
/// Bytes in front of a header, which hold its length.
pub const PREFIX: usize = 8;
/// Name of the optimizer of servers whose trainers make steps alone.
pub const LOCAL_STEPS: &str = "of local steps";
/// Key of the description in the header's metadata.
pub(super) const KEY: &str = "psjobs";
/// More servers, trainers or slots than any job has: a description that claims so is damaged.
pub(super) const MAX_REPLICAS: u32 = 1 << 16;
pub(super) const MAX_SLOTS: usize = 16;

/// The description of a part, stored in the part.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Description {
    /// [`FORMAT`].
    pub format: u32,
    /// Unique id of the job that wrote it.
    pub job: String,
    /// Steps done: in Sync those of every trainer, otherwise their mean.
    pub step: u64,
    /// Server that wrote it, and servers of the job.
    pub server: u32,
    /// Servers of the job: the number of parts.
    pub servers: u32,
    /// Trainers of the job.
    pub trainers: u32,
    /// Elements of a full block.
    pub block_elements: usize,
    /// Slots of optimizer state for each element.
    pub slots: usize,
    /// It holds each block's values from before the last update, too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub previous: bool,
    /// `spec.training` as the job had it: optimizer, schedule, consistency, seed.
    pub training: serde_json::Value,
    /// The model's tensors in the order of the flat space.
    pub tensors: Vec<TensorSpec>,
}

impl Description {
    /// Type of the optimizer whose state the slots hold, for instance `Adam`; [`LOCAL_STEPS`] where trainers have that.
    #[must_use]
    pub fn optimizer(&self) -> &str {
        if self.training.get("local").is_some() {
            return LOCAL_STEPS;
        }
        self.training.pointer("/optimizer/type").and_then(serde_json::Value::as_str).unwrap_or("unknown")
    }

    /// How the model was cut.
    ///
    /// # Errors
    /// If the tensors cannot be laid out.
    pub fn layout(&self) -> Result<Layout, LayoutError> {
        Layout::new(&self.tensors, self.servers as usize)
    }
}

/// Trainers that have sent their last step, and how many steps each has done.
pub type Concluded = BTreeMap<u32, u64>;

/// Marks a checkpoint as complete.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u32,
    /// Unique id of the job that wrote it.
    pub job: String,
    /// Steps done.
    pub step: u64,
    /// One for each server, in order.
    pub parts: Vec<PartEntry>,
    /// The rows of sparse tables: one for each server, or none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rows: Vec<PartEntry>,
    /// Trainers of which every step is in the parts.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub concluded: Concluded,
    /// In an elastic job: the batches whose gradients are in the parts.
    #[serde(default, skip_serializing_if = "Position::is_beginning")]
    pub dealt: Position,
}

/// How to recognise the part that belongs to a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartEntry {
    /// Name of the file, beside the manifest.
    pub file: String,
    /// Its length.
    pub bytes: u64,
    /// CRC-32 of the header and the tables. The tables hold the checksums of the blocks; of rows the header and the
    /// checksums.
    pub crc32: u32,
}

/// File name of a part.
#[must_use]
pub fn part_name(server: u32, servers: u32) -> String {
    format!("ps-{server:05}-of-{servers:05}.safetensors")
}

/// A header that does not say what it must; the text says what is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct HeaderError(String);

impl HeaderError {
    pub(super) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

/// Key of the metadata in a header.
const METADATA: &str = "__metadata__";

/// A safetensors header.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Header {
    #[serde(rename = "__metadata__", default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    #[serde(flatten)]
    pub tensors: BTreeMap<String, Entry>,
}

impl Header {
    /// Reads the description that a file of ours has in its header, from JSON.
    pub fn described<T: DeserializeOwned>(json: &[u8]) -> Result<T, HeaderError> {
        let header: Self =
            serde_json::from_slice(json).map_err(|e| HeaderError(format!("its header cannot be read: {e}")))?;
        let text = header.metadata.get(KEY).ok_or_else(|| HeaderError::new("it is not a part of a checkpoint"))?;
        serde_json::from_str(text).map_err(|e| HeaderError(format!("its description cannot be read: {e}")))
    }
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Entry {
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    pub data_offsets: [u64; 2],
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Dtype {
    U64,
    F32,
    U32,
}

impl Dtype {
    fn bytes(self) -> u64 {
        match self {
            Self::U64 => 8,
            Self::F32 | Self::U32 => 4,
        }
    }
}

/// Length prefix and header as they stand in a file, padded so that the data begins at a multiple of 8.
pub(super) fn encode(header: &Header) -> Vec<u8> {
    let mut json = serde_json::to_vec(header).expect("a header is JSON");
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut json);
    bytes
}

/// Header entries of tensors that lie one behind the other in this order.
pub(super) fn entries(tensors: Vec<(String, Dtype, Vec<u64>)>) -> BTreeMap<String, Entry> {
    let mut start = 0;
    let place = |(name, dtype, shape): (String, Dtype, Vec<u64>)| {
        let end = start + shape.iter().product::<u64>() * dtype.bytes();
        let entry = Entry { dtype, shape, data_offsets: [start, end] };
        start = end;
        (name, entry)
    };
    tensors.into_iter().map(place).collect()
}

/// Metadata of files for loaders of other projects, which ask for the framework.
pub(super) fn model_metadata() -> BTreeMap<String, String> {
    BTreeMap::from([("format".to_owned(), "pt".to_owned())])
}

/// Length prefix and header of a safetensors file that holds a model: the flat space follows as it is.
///
/// # Errors
/// If two tensors have one name, or one has a name that the format keeps for itself.
pub fn model_header(tensors: &[TensorSpec]) -> Result<Vec<u8>, HeaderError> {
    let list = tensors.iter().map(|tensor| (tensor.name.clone(), Dtype::F32, tensor.shape.clone()));
    let header = Header { metadata: model_metadata(), tensors: entries(list.collect()) };
    if header.tensors.len() < tensors.len() || header.tensors.contains_key(METADATA) {
        return Err(HeaderError(format!("tensors need names of their own, other than {METADATA:?}, to be exported")));
    }
    Ok(encode(&header))
}

/// Where everything stands in a part: tables, then values and slots, then the checksums of the
/// blocks. All of it follows from the description.
#[derive(Clone, Debug, PartialEq)]
pub struct PartPlan {
    layout: Layout,
    /// The blocks in the part, ascending.
    blocks: Vec<u32>,
    elements: u64,
    trainers: u64,
    slots: u64,
    previous: bool,
    /// Length prefix and header.
    header: Vec<u8>,
}

impl PartPlan {
    /// The part of `description.server`.
    ///
    /// # Errors
    /// If the description contradicts itself, or is of another version.
    pub fn new(description: &Description) -> Result<Self, HeaderError> {
        let Description { format, server, servers, trainers, slots, previous, .. } = *description;
        let error = |text: String| Err(HeaderError(text));
        if format != FORMAT {
            return error(format!("it has format {format}, this version reads format {FORMAT}"));
        }
        if server >= servers || servers > MAX_REPLICAS || trainers > MAX_REPLICAS || slots > MAX_SLOTS {
            return error(format!(
                "it claims to be of server {server} of {servers}, with {trainers} trainers and {slots} slots"
            ));
        }
        let layout = description.layout().map_err(|e| HeaderError(e.to_string()))?;
        if layout.block_elements() != description.block_elements {
            let (found, want) = (description.block_elements, layout.block_elements());
            return error(format!("its blocks have {found} elements, this version cuts {want}"));
        }
        let blocks: Vec<u32> = layout.owned_by(server).collect();
        let elements = blocks.iter().map(|block| layout.range(*block).len() as u64).sum();
        let (trainers, slots) = (trainers.into(), slots as u64);
        let mut plan = Self { layout, blocks, elements, trainers, slots, previous, header: Vec::new() };
        let metadata = serde_json::to_string(description).expect("a description is JSON");
        plan.header = encode(&Header { metadata: BTreeMap::from([(KEY.into(), metadata)]), tensors: plan.sections() });
        Ok(plan)
    }

    /// Reads the header of a file of `file_bytes`, without its length prefix: what the part says about
    /// itself, and its plan.
    ///
    /// # Errors
    /// If it is not the header that this version writes for such a part.
    pub fn parse(json: &[u8], file_bytes: u64) -> Result<(Description, Self), HeaderError> {
        let description: Description = Header::described(json)?;
        // The plan takes memory for each block: the file must be long enough to have them.
        let layout = description.layout().map_err(|e| HeaderError(e.to_string()))?;
        let least = (layout.elements() / description.servers.max(1) as usize).saturating_sub(layout.block_elements());
        if least as u64 > file_bytes / 4 {
            return Err(HeaderError::new("it describes more parameters than it has bytes"));
        }
        let plan = Self::new(&description)?;
        if plan.header[PREFIX..] != *json {
            return Err(HeaderError::new("its tensors are not those of its description"));
        }
        Ok((description, plan))
    }

    /// Length prefix and header.
    #[must_use]
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// How the model was cut.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The blocks in the part, ascending.
    #[must_use]
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// Returns whether the state has the lengths of the block at `position`.
    #[must_use]
    pub fn fits(&self, position: usize, state: &BlockState) -> bool {
        let elements = self.layout.range(self.blocks[position]).len();
        state.values.len() == elements
            && state.slots.len() as u64 == self.slots
            && state.slots.iter().all(|slot| slot.len() == elements)
            && state.previous.len() == if self.previous { elements } else { 0 }
            && state.next_steps.len() as u64 == self.trainers
    }

    /// Length of the file.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.checksums_at() + self.checksum_bytes()
    }

    /// Offset in the file of the tables: versions, updates and next steps of every block.
    #[must_use]
    pub fn tables_at(&self) -> u64 {
        self.header.len() as u64
    }

    /// Length of the tables.
    #[must_use]
    pub fn table_bytes(&self) -> u64 {
        8 * self.blocks.len() as u64 * (2 + self.trainers)
    }

    /// Values, slots and previous values of a block.
    #[must_use]
    pub fn columns(&self) -> u64 {
        1 + self.slots + u64::from(self.previous)
    }

    /// Offset in the file of one block's values (`column` 0), of a slot (from 1), or of its previous values (behind the
    /// slots); `position` counts the blocks of the part.
    #[must_use]
    pub fn data_at(&self, position: usize, column: usize) -> u64 {
        let before = column as u64 * self.elements + (position * self.layout.block_elements()) as u64;
        self.tables_at() + self.table_bytes() + 4 * before
    }

    /// Offset in the file of the checksums: for each block that of its values, then of its slots and previous values.
    #[must_use]
    pub fn checksums_at(&self) -> u64 {
        self.tables_at() + self.table_bytes() + 4 * self.elements * self.columns()
    }

    /// Length of the checksums.
    #[must_use]
    pub fn checksum_bytes(&self) -> u64 {
        4 * self.blocks.len() as u64 * self.columns()
    }

    /// The part's tensors, each behind the one before.
    fn sections(&self) -> BTreeMap<String, Entry> {
        let blocks = self.blocks.len() as u64;
        let mut sections = vec![
            ("versions".to_owned(), Dtype::U64, vec![blocks]),
            ("updates".to_owned(), Dtype::U64, vec![blocks]),
            ("next_steps".to_owned(), Dtype::U64, vec![blocks, self.trainers]),
            ("values".to_owned(), Dtype::F32, vec![self.elements]),
        ];
        sections.extend((0..self.slots).map(|slot| (format!("slot.{slot}"), Dtype::F32, vec![self.elements])));
        sections.extend(self.previous.then(|| ("previous".to_owned(), Dtype::F32, vec![self.elements])));
        sections.push(("checksums".to_owned(), Dtype::U32, vec![blocks, self.columns()]));
        entries(sections)
    }
}

impl From<PartEntry> for proto::CheckpointFile {
    fn from(PartEntry { file, bytes, crc32 }: PartEntry) -> Self {
        Self { file, bytes, crc32 }
    }
}

impl From<proto::CheckpointFile> for PartEntry {
    fn from(proto::CheckpointFile { file, bytes, crc32 }: proto::CheckpointFile) -> Self {
        Self { file, bytes, crc32 }
    }
}
