//! The bodies of a snapshot's records, to bytes and back: JSON, except chunks and items, which are binary. Numbers from a file are checked where
//! they are used (`table/restore.rs`); here only the form of a body is.

use bytes::{Buf, Bytes};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::table::counters::SavedCounts;
use crate::table::writers::WriterIdentity;

/// The body of a record in JSON.
pub fn to_json(record: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(record).map_err(|error| Error::Internal(error.to_string()))
}

/// The record of a body in JSON; the error says what is wrong with it.
pub fn from_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, String> {
    serde_json::from_slice(body).map_err(|error| error.to_string())
}

/// A writer of chunks, or an open one. Chunks name it by the number of its record in the table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WriterRecord {
    pub identity: WriterIdentity,
    /// Of a writer that is open, in the snapshot of a server: its progress at the save point of the snapshot.
    pub open: Option<OpenRecord>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpenRecord {
    /// The writer's number, chosen by the client.
    pub number: u64,
    pub epoch: u32,
    pub last_sequence: u64,
    /// Steps the table has taken from it.
    pub steps: u64,
    /// The next step of each stream.
    pub next_steps: Vec<u64>,
}

/// Head of a chunk's record; rows and blobs follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkRecord {
    /// Number of its writer's record.
    pub writer: u32,
    pub stream: u32,
    pub rows: u32,
    /// The stream's number of the first row.
    pub first_step: u64,
}

impl ChunkRecord {
    const BYTES: usize = 20;

    pub fn to_bytes(self) -> Vec<u8> {
        let numbers = [self.writer, self.stream, self.rows].into_iter().flat_map(u32::to_le_bytes);
        numbers.chain(self.first_step.to_le_bytes()).collect()
    }

    /// The head, and the rows and blobs after it.
    pub fn from_bytes(mut body: Bytes) -> Result<(Self, Bytes), String> {
        if body.len() < Self::BYTES {
            return Err(format!("a chunk of {} bytes", body.len()));
        }
        let [writer, stream, rows] = std::array::from_fn(|_| body.get_u32_le());
        let head = ChunkRecord { writer, stream, rows, first_step: body.get_u64_le() };
        Ok((head, body))
    }
}

/// An item, its fields in this order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ItemRecord {
    /// Number of the record of the chunk that holds its first row.
    pub chunk: u32,
    /// Its first row, counted in that chunk.
    pub first_row: u32,
    pub before: u16,
    pub after: u16,
    pub times_sampled: u32,
    /// Steps the table had taken when it was inserted.
    pub born: u64,
    /// Before the exponent; 1 with a sampler that does not keep priorities.
    pub priority: f64,
    /// The id by which clients know it.
    pub id: u64,
}

impl ItemRecord {
    pub const BYTES: usize = 40;

    pub fn write(&self, out: &mut Vec<u8>) {
        out.extend(self.chunk.to_le_bytes());
        out.extend(self.first_row.to_le_bytes());
        out.extend(self.before.to_le_bytes());
        out.extend(self.after.to_le_bytes());
        out.extend(self.times_sampled.to_le_bytes());
        out.extend(self.born.to_le_bytes());
        out.extend(self.priority.to_le_bytes());
        out.extend(self.id.to_le_bytes());
    }

    pub fn read_all(body: Bytes) -> Result<impl Iterator<Item = Self>, String> {
        if !body.len().is_multiple_of(Self::BYTES) {
            return Err(format!("items of {} bytes", body.len()));
        }
        let mut rest = body;
        Ok(std::iter::from_fn(move || {
            rest.has_remaining().then(|| ItemRecord {
                chunk: rest.get_u32_le(),
                first_row: rest.get_u32_le(),
                before: rest.get_u16_le(),
                after: rest.get_u16_le(),
                times_sampled: rest.get_u32_le(),
                born: rest.get_u64_le(),
                priority: rest.get_f64_le(),
                id: rest.get_u64_le(),
            })
        }))
    }
}

/// Numbers of a table beside its chunks and items.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableState {
    /// Oldest chunks of the snapshot, evicted while it was written.
    pub evicted_chunks: u64,
    /// Inserted items, as the rate limiter counts them.
    pub limiter_inserted: u64,
    /// Sampled items, as the rate limiter counts them.
    pub limiter_sampled: u64,
    /// The largest priority ever held, before the exponent; 0 while none was above zero.
    pub max_priority: f64,
    /// Random samples made, on which the sequence of random numbers depends.
    pub samples: u64,
    pub counters: SavedCounts,
    /// By which readers of the table go on: only in the snapshot of a server, which also keeps the items' ids.
    pub served: Option<ServedTable>,
}

impl TableState {
    /// The numbers that are counts.
    pub fn counts(&self) -> impl Iterator<Item = u64> {
        let others = [self.evicted_chunks, self.limiter_inserted, self.limiter_sampled, self.samples];
        let end = self.served.map(|served| served.end);
        self.counters.all().chain(others).chain(end)
    }
}

/// What clients of a server know of a table, see [`ReadPosition`](crate::replay::ReadPosition).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServedTable {
    pub number: u16,
    /// Number of the chunk that arrives next.
    pub end: u64,
}

/// The newest version of a name, or the last one of a dropped name. In bytes: the length of the JSON (u32), the JSON, the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParametersRecord {
    pub version: u64,
    pub name: String,
    /// Number and version of its last puts, the newest last.
    pub puts: Vec<(u64, u64)>,
    /// The safetensors file; empty for a dropped name.
    #[serde(skip)]
    pub file: Bytes,
}

impl ParametersRecord {
    pub fn is_dropped(&self) -> bool {
        self.file.is_empty()
    }

    pub fn from_bytes(mut body: Bytes) -> Result<Self, String> {
        let length = body.try_get_u32_le().ok().map(|length| length as usize);
        let length = length.filter(|&length| length <= body.len()).ok_or("parameters that are cut off")?;
        let record: ParametersRecord = from_json(&body.split_to(length))?;
        Ok(ParametersRecord { file: body, ..record })
    }
}
