//! Where everything stands in a file of rows. Pure: it follows from the description.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::GROUP;
use crate::checkpoint::format::{
    Dtype, FORMAT, Header, HeaderError, KEY, MAX_REPLICAS, MAX_SLOTS, PREFIX, encode, entries,
};
use crate::sparse::{Clock, TableSpec};

/// File name of a server's rows.
#[must_use]
pub fn rows_name(server: u32, servers: u32) -> String {
    format!("rows-{server:05}-of-{servers:05}.safetensors")
}

/// The description of a file of rows, stored in the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RowsDescription {
    /// [`FORMAT`].
    pub format: u32,
    /// Unique id of the job that wrote it.
    pub job: String,
    /// Steps that the checkpoint is known by.
    pub step: u64,
    /// Server that wrote it.
    pub server: u32,
    /// Servers of the job: the number of such files.
    pub servers: u32,
    /// Slots of optimizer state for each number of a row.
    pub slots: usize,
    /// The job's tables.
    pub tables: Vec<TableSpec>,
    /// The servers train the dense layers, not the trainers.
    #[serde(default)]
    pub servers_train_layers: bool,
    /// By table: rows in this file.
    pub rows: Vec<u64>,
    /// By task of the server: how far it was.
    pub(crate) clocks: Vec<Clock>,
}

/// Where everything stands in a file of rows.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RowsPlan {
    /// Length prefix and header.
    pub header: Vec<u8>,
    /// By table.
    pub tables: Vec<TablePlan>,
    /// Offset of the checksums.
    pub checksums_at: u64,
    /// Groups of all tables.
    pub groups: u64,
}

/// Where one table's rows stand.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TablePlan {
    pub rows: u64,
    pub width: u64,
    /// Offsets of keys, uses and updates.
    pub counts_at: [u64; 3],
    /// Offsets of values and of each slot.
    pub numbers_at: Vec<u64>,
    /// Its first group among those of all tables.
    pub first_group: u64,
}

impl RowsPlan {
    /// The file of `description`, which has `limit` bytes at most.
    pub fn new(description: &RowsDescription, limit: u64) -> Result<Self, HeaderError> {
        let RowsDescription { format, server, servers, slots, tables, rows, clocks, .. } = description;
        let error = |text: String| Err(HeaderError::new(text));
        if *format != FORMAT {
            return error(format!("it has format {format}, this version reads format {FORMAT}"));
        }
        let trainers = clocks.iter().map(|clock| clock.next_steps.len()).max().unwrap_or(0);
        let most = MAX_REPLICAS as usize;
        if server >= servers || *servers > MAX_REPLICAS || *slots > MAX_SLOTS || clocks.len().max(trainers) > most {
            return error(format!("it claims to be of server {server} of {servers}, with {slots} slots"));
        }
        TableSpec::validate(tables).map_err(|e| HeaderError::new(e.to_string()))?;
        if rows.len() != tables.len() {
            return error(format!("it counts the rows of {} tables and has {}", rows.len(), tables.len()));
        }
        // Before anything is multiplied: no file has more rows than bytes.
        if rows.iter().any(|rows| *rows > limit / 24) {
            return error("it describes more rows than it has bytes".to_owned());
        }
        let counts = ["keys", "used", "updates"];
        let mut sections = Vec::new();
        for (TableSpec { name, .. }, rows) in tables.iter().zip(rows) {
            sections.extend(counts.map(|column| (format!("{name}.{column}"), Dtype::U64, vec![*rows])));
        }
        for (TableSpec { name, width, .. }, rows) in tables.iter().zip(rows) {
            let columns = (0..*slots).map(|slot| format!("slot.{slot}"));
            let columns = std::iter::once("values".to_owned()).chain(columns);
            sections.extend(columns.map(|column| (format!("{name}.{column}"), Dtype::F32, vec![*rows, *width as u64])));
        }
        let groups: Vec<u64> = rows.iter().map(|rows| rows.div_ceil(GROUP as u64)).collect();
        sections.push(("checksums".to_owned(), Dtype::U32, vec![groups.iter().sum()]));
        let sections = entries(sections);
        let metadata = serde_json::to_string(description).expect("a description is JSON");
        let header = Header { metadata: BTreeMap::from([(KEY.into(), metadata)]), tensors: sections };
        let bytes = encode(&header);
        let at = |name: String| bytes.len() as u64 + header.tensors[&name].data_offsets[0];
        let plan = |(place, (spec, rows)): (usize, (&TableSpec, &u64))| TablePlan {
            rows: *rows,
            width: spec.width as u64,
            counts_at: counts.map(|column| at(format!("{}.{column}", spec.name))),
            numbers_at: std::iter::once(at(format!("{}.values", spec.name)))
                .chain((0..*slots).map(|slot| at(format!("{}.slot.{slot}", spec.name))))
                .collect(),
            first_group: groups[..place].iter().sum(),
        };
        let tables = tables.iter().zip(rows).enumerate().map(plan).collect();
        let checksums_at = at("checksums".to_owned());
        Ok(Self { tables, checksums_at, groups: groups.iter().sum(), header: bytes })
    }

    /// Reads the header of a file of `file_bytes`, without its length prefix.
    pub fn parse(json: &[u8], file_bytes: u64) -> Result<(RowsDescription, Self), HeaderError> {
        let description: RowsDescription = Header::described(json)?;
        let plan = Self::new(&description, file_bytes)?;
        if plan.header[PREFIX..] != *json {
            return Err(HeaderError::new("its tensors are not those of its description"));
        }
        Ok((description, plan))
    }

    /// Length of the file.
    pub fn file_bytes(&self) -> u64 {
        self.checksums_at + 4 * self.groups
    }
}
