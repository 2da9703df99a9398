//! Bytes of files and of the command line: snapshots, parameters, addresses, configurations.

use std::fmt::{Debug, Display};
use std::io;
use std::str::FromStr;
use std::sync::{Arc, LazyLock};

use bolero::TypeGenerator;
use bytes::Bytes;
use crc32fast::Hasher;

use crate::allocations;
use crate::calls::ledger::{Step, pack, table_config};
use base::wait::Wait;
use replay_client::Namespace;
use replay_core::memory::{Memory, MemoryLimits};
use replay_core::replay::{ChunkHead, NewItem, OpenWriter, PushBody, Replay, SampleRequest};
use replay_core::schema::TableConfig;
use replay_core::snapshot;
use replay_link::error::Error;
use replay_link::stack::Address;
use replay_server::config::ServerConfig;
use replay_wire::ErrorCode;

/// Limit of a memory that a snapshot is restored into.
const MEMORY: u64 = 8 << 20;

/// A change of a snapshot. Numbers count modulo what is there.
#[derive(Debug, Clone, TypeGenerator)]
pub enum Edit {
    /// Another byte in the body of a record.
    Byte(u8, u16, u8),
    /// Another number of four bytes.
    Word(u8, u16, u32),
    /// Bytes are added.
    Insert(u8, u16, Vec<u8>),
    /// The end of a body is cut off.
    Cut(u8, u16),
    /// A record is removed.
    Remove(u8),
    /// A record is written twice.
    Repeat(u8),
    /// Two records change places.
    Swap(u8, u8),
    /// Another kind of record.
    Kind(u8, #[generator(0..12u8)] u8),
}

/// A snapshot as its records, to be sealed again after changes.
#[derive(Clone)]
struct Records {
    head: Vec<u8>,
    /// Kinds and bodies.
    records: Vec<(u32, Vec<u8>)>,
}

/// Magic and version.
const HEAD: usize = 12;

impl Records {
    fn read(snapshot: &[u8]) -> Records {
        let (head, mut rest) = snapshot.split_at(HEAD);
        let mut records = Vec::new();
        while let Some((kind, after)) = rest.split_first_chunk() {
            let (length, after) = after.split_first_chunk().expect("a length");
            let length = u64::from_le_bytes(*length) as usize;
            let (body, after) = after.split_at(length);
            records.push((u32::from_le_bytes(*kind), body.to_vec()));
            rest = &after[4..];
        }
        Records { head: head.to_vec(), records }
    }

    fn write(&self) -> Vec<u8> {
        let mut sum = Hasher::new();
        sum.update(&self.head);
        let mut bytes = self.head.clone();
        for (kind, body) in &self.records {
            let mut record = kind.to_le_bytes().to_vec();
            record.extend((body.len() as u64).to_le_bytes());
            record.extend(body);
            sum.update(&record);
            bytes.extend(record);
            bytes.extend(sum.clone().finalize().to_le_bytes());
        }
        bytes
    }

    fn edit(&mut self, edit: &Edit) {
        let count = self.records.len();
        if count == 0 {
            return;
        }
        let at = |record: u8| usize::from(record) % count;
        match *edit {
            Edit::Byte(record, position, value) => {
                self.overwrite(at(record), position, &[value]);
            }
            Edit::Word(record, position, value) => {
                self.overwrite(at(record), position, &value.to_le_bytes());
            }
            Edit::Insert(record, position, ref bytes) => {
                let body = &mut self.records[at(record)].1;
                let position = usize::from(position) % (body.len() + 1);
                body.splice(position..position, bytes.iter().copied());
            }
            Edit::Cut(record, position) => {
                let body = &mut self.records[at(record)].1;
                body.truncate(usize::from(position) % (body.len() + 1));
            }
            Edit::Remove(record) => drop(self.records.remove(at(record))),
            Edit::Repeat(record) => {
                let repeated = self.records[at(record)].clone();
                self.records.insert(at(record), repeated);
            }
            Edit::Swap(one, other) => self.records.swap(at(one), at(other)),
            Edit::Kind(record, kind) => self.records[at(record)].0 = kind.into(),
        }
    }

    fn overwrite(&mut self, record: usize, position: u16, bytes: &[u8]) {
        let body = &mut self.records[record].1;
        let position = usize::from(position) % (body.len() + 1);
        for (old, new) in body[position..].iter_mut().zip(bytes) {
            *old = *new;
        }
    }
}

/// A snapshot of a server with two tables, an open writer in each, and parameters.
static SNAPSHOT: LazyLock<Records> = LazyLock::new(|| {
    let memory = memory();
    let replay: &dyn Replay = &*memory;
    let wait = Wait::forever();
    for (generation, (table, kind)) in [("one", 0), ("two", 9)].into_iter().enumerate() {
        let config = table_config(table, kind, 64);
        replay.create_table(&config, &wait).expect("a table");
        let open = OpenWriter {
            writer: 1,
            name: "writer 1".into(),
            server: None,
            streams: 1,
            window_before: 1,
            window_after: 1,
        };
        let mut writer = replay.open_writer(table, open, &wait).expect("a writer");
        for first in [0, 8] {
            let body = push(generation as u16 + 1, first);
            writer.push(body, &wait).expect("a valid push");
        }
    }
    let policy = Bytes::from_static(b"\x02\0\0\0\0\0\0\0{}");
    replay.put_parameters("policy", policy, &wait).expect("parameters");
    let mut bytes = Vec::new();
    snapshot::save_server(&memory, &mut bytes).expect("a snapshot");
    let records = Records::read(&bytes);
    assert_eq!(records.write(), bytes, "the format of snapshots as this target knows it");
    records
});

/// Eight steps, with items whose windows are there.
fn push(generation: u16, first: u32) -> PushBody {
    let step = Step { writer: 1, stream: 0, number: first };
    let packed = pack(generation, step, 8);
    PushBody {
        chunks: vec![ChunkHead {
            stream: 0,
            rows: 8,
            first_step: first.into(),
            bytes: packed.len() as u32,
            version: 0,
        }],
        items: (first + 1..first + 7)
            .map(|anchor| NewItem {
                anchor: anchor.into(),
                stream: 0,
                before: 1,
                after: 1,
                priority: Some(anchor as f32),
            })
            .collect(),
        payload: packed.into(),
    }
}

fn memory() -> Arc<Memory> {
    Memory::new(MemoryLimits { max_bytes: MEMORY, receive_bytes: 0, seed: Some(1), ..MemoryLimits::default() })
}

/// Restores a changed snapshot. It is refused as a whole, or what it says can be sampled and saved.
///
/// # Panics
/// When a refused snapshot leaves something, or reading takes more memory than the tables may have.
pub fn restore(edits: &[Edit]) {
    let mut records = SNAPSHOT.clone();
    edits.iter().for_each(|edit| records.edit(edit));
    let bytes = records.write();
    let memory = memory();
    let limit = 2 * MEMORY + 4 * bytes.len() as u64;
    let restore = || snapshot::restore(&memory, bytes.as_slice(), bytes.len() as u64);
    if let Err(error) = allocations::within(limit, "a snapshot", restore) {
        let error = Error::from(error);
        assert_ne!(error.code(), ErrorCode::Internal, "{error}");
        assert!(memory.tables().is_empty(), "a table of a refused snapshot");
        assert_eq!(memory.stats()["reserved_bytes"], 0);
        return;
    }
    for table in memory.tables() {
        let request = SampleRequest {
            count: 8,
            before: 1,
            after: 1,
            allow_short: true,
            min_probability: true,
            share: None,
            definition: 0,
            lease_ms: 0,
        };
        let replay: &dyn Replay = &*memory;
        // A table without items has nothing to sample.
        let _ = replay.sample(&table.config().name, &request, &Wait::until(Some(std::time::Instant::now())));
    }
    snapshot::save_server(&memory, io::sink()).expect("what was restored can be saved");
}

/// Stores the bytes as parameters. What is stored comes back.
///
/// # Panics
/// When it does not, or checking them takes more memory than they have.
pub fn parameters(input: &[u8]) {
    let memory = memory();
    let bytes = Bytes::copy_from_slice(input);
    let limit = 64 * input.len() as u64 + (16 << 10);
    let put = || memory.parameters().put("policy", 0, bytes.clone());
    match allocations::within(limit, "parameters", put) {
        Ok(version) => {
            let found = memory.parameters().get("policy", 0).expect("parameters");
            assert_eq!((found.version, found.bytes), (version, bytes));
        }
        Err(error) => {
            let error = Error::from(error);
            assert_ne!(error.code(), ErrorCode::Internal, "{error}");
            assert!(memory.parameters().list().is_empty());
        }
    }
}

/// Reads a text as everything that users write: what is accepted reads the same again, as it is shown.
///
/// # Panics
/// When it does not.
pub fn texts(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else {
        return;
    };
    shown_as_read::<Address>(text);
    if let Ok(namespace) = Namespace::from_str(text) {
        assert_eq!(namespace.to_string(), text);
    }
    if let Ok(config) = ServerConfig::from_toml(text, "server.toml", toml::Table::new()) {
        let shown = toml::to_string(&config).expect("a configuration is TOML");
        let again = ServerConfig::from_toml(&shown, "server.toml", toml::Table::new());
        // As texts: a setting may be NaN, until it is validated.
        let again = toml::to_string(&again.expect("its own text"));
        assert_eq!(again.expect("a configuration is TOML"), shown);
    }
    if let Ok(config) = toml::from_str::<TableConfig>(text)
        && config.validate().is_ok()
    {
        let made = memory().create_table(&config).map_err(Error::from);
        let internal = |error: &Error| error.code() == ErrorCode::Internal;
        assert!(!made.err().as_ref().is_some_and(internal));
    }
}

fn shown_as_read<T: FromStr + Display + Debug + PartialEq>(text: &str) {
    if let Ok(value) = T::from_str(text) {
        let again = T::from_str(&value.to_string()).ok();
        assert_eq!(again, Some(value));
    }
}
