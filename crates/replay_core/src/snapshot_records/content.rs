//! The bodies of a snapshot's records, to bytes and back. Numbers from a file are checked where they are used
//! (`table/restore.rs`); here only the length of a body is.

use bytes::{Buf, Bytes, TryGetError};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamRecord {
    pub window_before: u16,
    pub window_after: u16,
    /// Number of the stream in its writer.
    pub number: u32,
    pub writer: String,
}

impl StreamRecord {
    const HEAD_BYTES: usize = 8;

    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::HEAD_BYTES + self.writer.len());
        bytes.extend(self.window_before.to_le_bytes());
        bytes.extend(self.window_after.to_le_bytes());
        bytes.extend(self.number.to_le_bytes());
        bytes.extend(self.writer.as_bytes());
        bytes
    }

    pub fn from_bytes(mut body: Bytes) -> Result<Self, String> {
        if body.len() < Self::HEAD_BYTES {
            return Err(format!("a stream of {} bytes", body.len()));
        }
        Ok(StreamRecord {
            window_before: body.get_u16_le(),
            window_after: body.get_u16_le(),
            number: body.get_u32_le(),
            writer: String::from_utf8(body.into()).map_err(|_| "a writer's name that is not UTF-8".to_owned())?,
        })
    }
}

/// Head of a chunk's record; rows and blobs follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkRecord {
    /// Number of its stream's record.
    pub stream: u32,
    pub rows: u32,
    /// The stream's number of the first row.
    pub first_step: u64,
}

impl ChunkRecord {
    const BYTES: usize = 16;

    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.stream.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.rows.to_le_bytes());
        bytes[8..].copy_from_slice(&self.first_step.to_le_bytes());
        bytes
    }

    /// The head, and the rows and blobs after it.
    pub fn from_bytes(mut body: Bytes) -> Result<(Self, Bytes), String> {
        if body.len() < Self::BYTES {
            return Err(format!("a chunk of {} bytes", body.len()));
        }
        let head = ChunkRecord { stream: body.get_u32_le(), rows: body.get_u32_le(), first_step: body.get_u64_le() };
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
}

impl ItemRecord {
    pub const BYTES: usize = 32;

    pub fn write(&self, out: &mut Vec<u8>) {
        out.extend(self.chunk.to_le_bytes());
        out.extend(self.first_row.to_le_bytes());
        out.extend(self.before.to_le_bytes());
        out.extend(self.after.to_le_bytes());
        out.extend(self.times_sampled.to_le_bytes());
        out.extend(self.born.to_le_bytes());
        out.extend(self.priority.to_le_bytes());
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
            })
        }))
    }
}

/// Numbers of a table beside its chunks and items: 64 bits each, in this order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TableState {
    /// Oldest chunks of the snapshot, evicted while it was written.
    pub evicted_chunks: u64,
    /// Inserted items, as the rate limiter counts them.
    pub limiter_inserted: u64,
    /// Sampled items, as the rate limiter counts them.
    pub limiter_sampled: u64,
    /// Bits of the largest priority ever held, before the exponent; 0 while none was above zero.
    pub max_priority: u64,
    /// Random samples made, on which the sequence of random numbers depends.
    pub samples: u64,
    /// The table's counters, in the order of `TableCounters::all`.
    pub counters: [u64; Self::COUNTERS],
}

impl TableState {
    pub const COUNTERS: usize = 11;
    const NUMBERS: usize = 5 + Self::COUNTERS;

    /// The numbers that are counts: all but the largest priority, which is 0 here.
    pub fn counts(self) -> impl Iterator<Item = u64> {
        let max_priority = 0;
        TableState { max_priority, ..self }.numbers()
    }

    fn numbers(self) -> impl Iterator<Item = u64> {
        [self.evicted_chunks, self.limiter_inserted, self.limiter_sampled, self.max_priority, self.samples]
            .into_iter()
            .chain(self.counters)
    }

    pub fn to_bytes(self) -> Vec<u8> {
        self.numbers().flat_map(u64::to_le_bytes).collect()
    }

    pub fn from_bytes(mut body: Bytes) -> Result<Self, String> {
        if body.len() != 8 * Self::NUMBERS {
            return Err(format!("a table's state of {} bytes", body.len()));
        }
        Ok(TableState {
            evicted_chunks: body.get_u64_le(),
            limiter_inserted: body.get_u64_le(),
            limiter_sampled: body.get_u64_le(),
            max_priority: body.get_u64_le(),
            samples: body.get_u64_le(),
            counters: std::array::from_fn(|_| body.get_u64_le()),
        })
    }
}

/// What readers of a table know of it, see [`ReadPosition`](crate::replay::ReadPosition). 64 bits each, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadingRecord {
    /// The table's number.
    pub number: u16,
    /// Number of the chunk that arrives next.
    pub end: u64,
    /// The writer's number of each stream record.
    pub writers: Vec<u64>,
}

impl ReadingRecord {
    pub fn to_bytes(&self) -> Vec<u8> {
        let numbers = [self.number.into(), self.end].into_iter().chain(self.writers.iter().copied());
        numbers.flat_map(u64::to_le_bytes).collect()
    }

    pub fn from_bytes(body: Bytes) -> Result<Self, String> {
        match read_numbers(body)?[..] {
            [number, end, ref writers @ ..] => Ok(ReadingRecord {
                number: number.try_into().map_err(|_| format!("a table of number {number}"))?,
                end,
                writers: writers.to_vec(),
            }),
            _ => Err("numbers for readers that end too early".to_owned()),
        }
    }
}

/// The newest version of a name, or the last one of a dropped name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParametersRecord {
    pub version: u64,
    pub name: String,
    /// Number and version of its last puts, the newest last.
    pub puts: Vec<(u64, u64)>,
    /// The safetensors file; empty for a dropped name.
    pub file: Bytes,
}

impl ParametersRecord {
    /// Whether the name was dropped.
    pub fn is_dropped(&self) -> bool {
        self.file.is_empty()
    }

    /// Everything but the file, which follows.
    pub fn head(&self) -> Vec<u8> {
        let mut bytes = self.version.to_le_bytes().to_vec();
        bytes.extend((self.name.len() as u32).to_le_bytes());
        bytes.extend((self.puts.len() as u32).to_le_bytes());
        bytes.extend(self.name.as_bytes());
        for (id, version) in &self.puts {
            bytes.extend(id.to_le_bytes());
            bytes.extend(version.to_le_bytes());
        }
        bytes
    }

    pub fn from_bytes(mut body: Bytes) -> Result<Self, String> {
        let version = get(&mut body, Bytes::try_get_u64_le)?;
        let name_bytes = get(&mut body, Bytes::try_get_u32_le)?;
        let puts = get(&mut body, Bytes::try_get_u32_le)?;
        let name = text(&mut body, name_bytes)?;
        let put = |_| {
            let id = get(&mut body, Bytes::try_get_u64_le)?;
            Ok((id, get(&mut body, Bytes::try_get_u64_le)?))
        };
        Ok(ParametersRecord { version, name, puts: (0..puts).map(put).collect::<Result<_, String>>()?, file: body })
    }
}

/// An open writer, as of the moment of the snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriterRecord {
    /// Its number, chosen by the client.
    pub number: u64,
    pub last_sequence: u64,
    /// Steps the table has taken from it.
    pub steps: u64,
    pub epoch: u32,
    pub window_before: u16,
    pub window_after: u16,
    pub name: String,
    pub streams: Vec<WriterStream>,
}

/// A stream of a writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriterStream {
    pub next_step: u64,
    /// Number of its stream record; [`Self::WITHOUT_CHUNKS`] if the snapshot has no chunk of it.
    pub record: u32,
}

impl WriterStream {
    pub const WITHOUT_CHUNKS: u32 = u32::MAX;
}

impl WriterRecord {
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(36 + self.name.len() + 12 * self.streams.len());
        bytes.extend(self.number.to_le_bytes());
        bytes.extend(self.last_sequence.to_le_bytes());
        bytes.extend(self.steps.to_le_bytes());
        bytes.extend(self.epoch.to_le_bytes());
        bytes.extend(self.window_before.to_le_bytes());
        bytes.extend(self.window_after.to_le_bytes());
        bytes.extend((self.name.len() as u32).to_le_bytes());
        bytes.extend(self.name.as_bytes());
        for stream in &self.streams {
            bytes.extend(stream.next_step.to_le_bytes());
            bytes.extend(stream.record.to_le_bytes());
        }
        bytes
    }

    pub fn from_bytes(mut body: Bytes) -> Result<Self, String> {
        let mut writer = WriterRecord {
            number: get(&mut body, Bytes::try_get_u64_le)?,
            last_sequence: get(&mut body, Bytes::try_get_u64_le)?,
            steps: get(&mut body, Bytes::try_get_u64_le)?,
            epoch: get(&mut body, Bytes::try_get_u32_le)?,
            window_before: get(&mut body, Bytes::try_get_u16_le)?,
            window_after: get(&mut body, Bytes::try_get_u16_le)?,
            name: String::new(),
            streams: Vec::new(),
        };
        let name_bytes = get(&mut body, Bytes::try_get_u32_le)?;
        writer.name = text(&mut body, name_bytes)?;
        while body.has_remaining() {
            writer.streams.push(WriterStream {
                next_step: get(&mut body, Bytes::try_get_u64_le)?,
                record: get(&mut body, Bytes::try_get_u32_le)?,
            });
        }
        Ok(writer)
    }
}

/// Reads a number from the front of the body.
fn get<T>(body: &mut Bytes, number: impl FnOnce(&mut Bytes) -> Result<T, TryGetError>) -> Result<T, String> {
    number(body).map_err(|_| "a record that ends too early".to_owned())
}

fn text(body: &mut Bytes, length: u32) -> Result<String, String> {
    if length as usize > body.len() {
        return Err("a name that is cut off".to_owned());
    }
    String::from_utf8(body.split_to(length as usize).into()).map_err(|_| "a name that is not UTF-8".to_owned())
}

/// Numbers of 64 bits: the ids of an ids record, for example.
pub fn read_numbers(mut body: Bytes) -> Result<Vec<u64>, String> {
    if !body.len().is_multiple_of(8) {
        return Err(format!("numbers of {} bytes", body.len()));
    }
    let count = body.len() / 8;
    Ok((0..count).map(|_| body.get_u64_le()).collect())
}
