//! The records of a snapshot: kinds, lengths and checksums here, bodies in [`content`].
//!
//! ```text
//! snapshot magic b"innetmem", version u16 and its complement u16, then records
//! record   kind u32, length u64, body, checksum u32: the CRC-32 (IEEE) of all preceding bytes except
//!          checksums
//!   1 table       its definition ([`TableConfig`]); the records up to the next table belong to it
//!   2 writer      [`content::WriterRecord`]
//!   3 chunk       writer u32 (counted in the order of their records), stream u32, rows u32, firstStep u64, and the chunk as
//!                 the wire has it; in the order of arrival
//!   4 items       40 bytes each, see [`content::ItemRecord`]; in the order of their slots; for the samplers with an
//!                 order, of their insertion or update
//!   5 state       [`content::TableState`]; the table's last record
//!   6 end         empty; the file's last record
//!   7 parameters  a name's newest version, or a dropped name's last one, see [`content::ParametersRecord`]; before the first table
//!   8 memory      the memory's identity, a number; the first record
//! ```
//!
//! Only servers' snapshots have kinds 7 and 8, and open writers. Bodies are JSON unless they are said to be bytes; integers are little endian. A checksum covers
//! the whole file up to it, so a record that is damaged, missing or out of place is found at the record.
//!
//! # Invariant
//!
//! Snapshots are complete and undamaged, or refused: each record's checksum covers everything before it. They hold
//! each table between two pushes, without steps evicted during the write. A server's also hold ids and the writers'
//! sequence numbers, so a push applies once across a restart.

pub mod content;

use std::fmt::Display;
use std::io::{Read, Write};

use bytes::Bytes;
use crc32fast::Hasher;
use serde::Serialize;

use crate::error::{Error, Result};
use base::allocation;
use base::error::OsError;

const MAGIC: [u8; 8] = *b"innetmem";
/// Version of the format.
const VERSION: u16 = 2;

/// Content of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum RecordKind {
    Table = 1,
    Writer = 2,
    Chunk = 3,
    Items = 4,
    State = 5,
    End = 6,
    Parameters = 7,
    Memory = 8,
}

impl RecordKind {
    fn of(number: u32) -> Option<Self> {
        use RecordKind::*;
        [Table, Writer, Chunk, Items, State, End, Parameters, Memory].into_iter().find(|&kind| kind as u32 == number)
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
        self.record(kind, &[&content::to_json(record)?])
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
        // Twice, the second time as its complement: one that is damaged is no later release's.
        let version = u16::from_le_bytes(reader.array()?);
        if u16::from_le_bytes(reader.array()?) != !version {
            return Err(reader.damaged("its format has no number"));
        }
        if version != VERSION {
            return Err(Error::Snapshot {
                reason: format!("it has format {version}, and this release reads format {VERSION}"),
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
