//! The records of a snapshot, to bytes and back: kinds, lengths, checksums and bodies. Numbers from a file are checked where they are used
//! (`table/restore.rs`); here only the form of a body is.
//!
//! ```text
//! snapshot magic b"innetmem", version u16 and its complement u16, then records
//! record   kind u32, length u64, body, checksum u32: the CRC-32 (IEEE) of all preceding bytes except
//!          checksums
//!   1 table       its definition ([`TableConfig`]); the records up to the next table belong to it
//!   2 writer      [`WriterRecord`]
//!   3 old chunk   of format 2: kind 9 without its version, which is unknown
//!   4 items       40 bytes each, see [`ItemRecord`]; in the order of their slots; for the samplers with an
//!                 order, of their insertion or update
//!   5 state       [`TableState`]; the table's last record
//!   6 end         empty; the file's last record
//!   7 parameters  a name's newest version, or a dropped name's last one, see [`ParametersRecord`]; before the first table
//!   8 memory      the memory's identity, a number; the first record
//!   9 chunk       version u64, writer u32 (counted in the order of their records), stream u32, rows u32, firstStep u64, and the
//!                 chunk as the wire has it; in the order of arrival
//! ```
//!
//! Only servers' snapshots have kind 8, open writers, and files of parameters: others have the versions of parameters that tables name. Bodies are JSON unless they are said to be bytes; integers are little endian. A checksum covers
//! the whole file up to it, so a record that is damaged, missing or out of place is found at the record.
//!
//! # Invariant
//!
//! Snapshots are complete and undamaged, or refused: each record's checksum covers everything before it. They hold
//! each table between two pushes, without steps evicted during the write. A server's also hold ids and the writers'
//! sequence numbers, so a push applies once across a restart.

use std::fmt::Display;
use std::io::{Read, Write};

use bytes::{Buf, Bytes};
use crc32fast::Hasher;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use base::allocation;
use base::system::OsError;

use crate::error::{Error, Result};
use crate::table::counters::SavedCounts;
use crate::table::writers::WriterIdentity;

const MAGIC: [u8; 8] = *b"innetmem";
/// Version of the format.
const VERSION: u16 = 3;
/// Earliest version that is read, too.
const OLDEST_VERSION: u16 = 2;

/// Content of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum RecordKind {
    Table = 1,
    Writer = 2,
    OldChunk = 3,
    Items = 4,
    State = 5,
    End = 6,
    Parameters = 7,
    Memory = 8,
    Chunk = 9,
}

impl RecordKind {
    fn of(number: u32) -> Option<Self> {
        use RecordKind::*;
        let all = [Table, Writer, OldChunk, Items, State, End, Parameters, Memory, Chunk];
        all.into_iter().find(|&kind| kind as u32 == number)
    }
}

/// CRC of all preceding bytes except checksums: a CRC over its own value is the same whatever came before.
fn checksum(sum: &Hasher) -> [u8; 4] {
    sum.clone().finalize().to_le_bytes()
}

pub struct RecordWriter<W> {
    out: W,
    sum: Hasher,
}

impl<W: Write> RecordWriter<W> {
    /// Begins a snapshot.
    ///
    /// # Errors
    /// [`Error::Io`], as every method.
    pub fn new(out: W) -> Result<Self> {
        let mut writer = RecordWriter { out, sum: Hasher::new() };
        writer.put(&MAGIC)?;
        writer.put(&VERSION.to_le_bytes())?;
        writer.put(&(!VERSION).to_le_bytes())?;
        Ok(writer)
    }

    /// Writes a record whose body is these parts, one after the other.
    pub fn record(&mut self, kind: RecordKind, parts: &[&[u8]]) -> Result<()> {
        let length: u64 = parts.iter().map(|part| part.len() as u64).sum();
        self.put(&(kind as u32).to_le_bytes())?;
        self.put(&length.to_le_bytes())?;
        for part in parts {
            self.put(part)?;
        }
        let checksum = checksum(&self.sum);
        self.write(&checksum)
    }

    /// Writes a record whose body is JSON.
    pub fn json(&mut self, kind: RecordKind, record: &impl Serialize) -> Result<()> {
        self.record(kind, &[&to_json(record)?])
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.sum.update(bytes);
        self.write(bytes)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let written = self.out.write_all(bytes);
        Ok(written.map_err(OsError::of("the snapshot cannot be written"))?)
    }
}

pub struct RecordReader<R> {
    from: R,
    /// Remaining bytes of the file, which bound every allocation.
    left: u64,
    sum: Hasher,
}

impl<R: Read> RecordReader<R> {
    /// Begins with a snapshot of `bytes` bytes.
    ///
    /// # Errors
    /// [`Error::Snapshot`] when the file is no snapshot of this format, [`Error::Io`] when it cannot be read.
    pub fn new(from: R, bytes: u64) -> Result<Self> {
        let mut reader = RecordReader { from, left: bytes, sum: Hasher::new() };
        if reader.array()? != MAGIC {
            return Err(reader.damaged("it is no snapshot of a replay memory"));
        }
        // Twice, the second time as its complement: a damaged number is not that of a later release.
        let version = u16::from_le_bytes(reader.array()?);
        if u16::from_le_bytes(reader.array()?) != !version {
            return Err(reader.damaged("its format has no number"));
        }
        if !(OLDEST_VERSION..=VERSION).contains(&version) {
            return Err(Error::Snapshot {
                reason: format!(
                    "it has format {version}, and this release reads formats {OLDEST_VERSION} to {VERSION}"
                ),
                newer: version > VERSION,
            });
        }
        Ok(reader)
    }

    /// The next record, its checksum checked.
    ///
    /// # Errors
    /// [`Error::Snapshot`] when the file ends before it or it is damaged, [`Error::Io`] when it cannot be read.
    pub fn next(&mut self) -> Result<(RecordKind, Bytes)> {
        let kind = u32::from_le_bytes(self.array()?);
        let length = u64::from_le_bytes(self.array()?);
        let body = self.take(length)?;
        let expected = checksum(&self.sum);
        if self.read(expected.len() as u64)? != expected {
            return Err(self.damaged("the checksum does not agree"));
        }
        let kind =
            RecordKind::of(kind).ok_or_else(|| self.damaged(format!("it has a record of unknown kind {kind}")))?;
        Ok((kind, body.into()))
    }

    /// # Errors
    /// [`Error::Snapshot`] when something follows.
    pub fn finish(&self) -> Result<()> {
        if self.left > 0 {
            return Err(self.damaged(format!("{} bytes follow its end", self.left)));
        }
        Ok(())
    }

    /// The error for a damaged file.
    pub fn damaged(&self, reason: impl Display) -> Error {
        Error::Snapshot { reason: reason.to_string(), newer: false }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let bytes = self.take(N as u64)?;
        Ok(bytes.try_into().expect("as many as were asked for"))
    }

    fn take(&mut self, length: u64) -> Result<Vec<u8>> {
        let bytes = self.read(length)?;
        self.sum.update(&bytes);
        Ok(bytes)
    }

    fn read(&mut self, length: u64) -> Result<Vec<u8>> {
        if length > self.left {
            return Err(self.damaged("it is cut off, or damaged"));
        }
        self.left -= length;
        let mut bytes = allocation::zeros("a record of the snapshot", length as usize)?.into_vec();
        self.from.read_exact(&mut bytes).map_err(OsError::of("the snapshot cannot be read"))?;
        Ok(bytes)
    }
}

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
    /// [`ChunkHead::version`](crate::replay::ChunkHead::version).
    pub version: u64,
}

impl ChunkRecord {
    /// Bytes without the version.
    const BYTES: usize = 20;

    pub fn to_bytes(self) -> Vec<u8> {
        let numbers = [self.writer, self.stream, self.rows].into_iter().flat_map(u32::to_le_bytes);
        self.version.to_le_bytes().into_iter().chain(numbers).chain(self.first_step.to_le_bytes()).collect()
    }

    /// The head, and the rows and blobs after it. A chunk of format 2 `has_version` 0.
    pub fn from_bytes(mut body: Bytes, has_version: bool) -> Result<(Self, Bytes), String> {
        if body.len() < Self::BYTES + if has_version { size_of::<u64>() } else { 0 } {
            return Err(format!("a chunk of {} bytes", body.len()));
        }
        let version = if has_version { body.get_u64_le() } else { 0 };
        let [writer, stream, rows] = std::array::from_fn(|_| body.get_u32_le());
        let head = ChunkRecord { writer, stream, rows, first_step: body.get_u64_le(), version };
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
    /// The histogram `sample_lag`, see [`Histogram::saved`](base::histogram::Histogram::saved); empty without a value.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sample_lag: Vec<u64>,
    /// By which readers of the table go on: only in the snapshot of a server, which also keeps the items' ids.
    pub served: Option<ServedTable>,
}

impl TableState {
    /// The numbers that are counts.
    pub fn counts(&self) -> impl Iterator<Item = u64> {
        let others = [self.evicted_chunks, self.limiter_inserted, self.limiter_sampled, self.samples];
        let end = self.served.map(|served| served.end);
        self.counters.all().chain(others).chain(end).chain(self.sample_lag.iter().copied())
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
