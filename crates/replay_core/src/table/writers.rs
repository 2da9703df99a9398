//! The writers of a table: sequence numbers that make a push apply once, epochs that fence an older connection off,
//! and the steps of each stream. `expiry` limits their streams.
//!
//! # Invariant
//!
//! Pushes apply as a whole or not at all, and once: the server keeps the last sequence number of each writer. A new
//! connection of a writer fences the older one; a forgotten writer is refused.

mod expiry;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::replay::{OpenWriter, WriterOpened};
use base::allocation::check_size;
use base::system::{self, random_number};

use crate::snapshot_records::{OpenRecord, WriterRecord};
use crate::sync::{Mutex, MutexGuard, lock};

use super::streams::Stream;
use super::waiting::WaitingLine;
pub use expiry::WriterConnection;

/// The constant part of a writer, to which chunks refer when it is gone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WriterIdentity {
    /// Display name, for errors and logs.
    pub name: String,
    /// Rows before the anchor of its items, at most.
    pub window_before: u16,
    /// Rows after the anchor of its items, at most.
    pub window_after: u16,
    /// A number that no other writer has. Clients know it, so a restart of a server keeps it.
    pub serial: u64,
}

impl WriterIdentity {
    /// A new writer, with a random serial number.
    ///
    /// # Panics
    /// When the operating system has no random numbers.
    pub fn new(name: String, window_before: u16, window_after: u16) -> Arc<Self> {
        let serial = random_number();
        Arc::new(WriterIdentity { name, window_before, window_after, serial })
    }
}

/// One writer. Its lock is held for the whole of a push, with checks and allocations; the insert lock of the table is not.
pub struct TableWriter {
    /// Name and window.
    pub identity: Arc<WriterIdentity>,
    pub streams: Vec<Stream>,
    /// Steps the table has taken from it.
    pub steps: u64,
    blocked: u64,
    waited: Duration,
    epoch: u32,
    last_sequence: u64,
    last_push: LastPush,
    /// Name and version of the parameters that it makes its steps with, as far as they are known: not at first, nor after a restore.
    pub parameters: Option<(String, u64)>,
    /// Its pushes that wait for newer parameters: in the queue of the table other writers would wait behind them.
    pub outdated: Arc<WaitingLine>,
}

impl TableWriter {
    fn new(identity: Arc<WriterIdentity>, streams: Vec<Stream>) -> Self {
        TableWriter {
            identity,
            streams,
            steps: 0,
            blocked: 0,
            waited: Duration::ZERO,
            epoch: 1,
            last_sequence: 0,
            last_push: LastPush::default(),
            parameters: None,
            outdated: Arc::default(),
        }
    }

    /// Whether a push of this epoch and sequence number was applied before. If not, it is the next one. [`Error::Fenced`] for an older epoch,
    /// [`Error::Misuse`] for an unknown epoch or a gap in the sequence numbers.
    pub fn has_applied(&self, epoch: u32, sequence: u64) -> Result<bool> {
        self.check_epoch(epoch)?;
        if sequence > self.last_sequence + 1 {
            return Err(Error::Misuse(format!(
                "writer {:?} sent push {sequence} after push {}",
                self.identity.name, self.last_sequence
            )));
        }
        Ok(sequence <= self.last_sequence)
    }

    /// Counts the wait of a push that was applied; `None` if it did not wait.
    pub fn count_wait(&mut self, waited: Option<Duration>) {
        self.blocked += u64::from(waited.is_some());
        self.waited += waited.unwrap_or_default();
    }

    pub fn applied(&mut self, steps: u64) {
        self.last_sequence += 1;
        self.steps += steps;
        *lock(&self.last_push) = Some(system::now());
    }

    pub fn record(&self, number: u64) -> WriterRecord {
        let open = OpenRecord {
            number,
            epoch: self.epoch,
            last_sequence: self.last_sequence.saturating_sub(base::planted!(OldProgress).into()),
            steps: self.steps,
            next_steps: self.streams.iter().map(|stream| stream.next_step).collect(),
        };
        WriterRecord { identity: WriterIdentity::clone(&self.identity), open: Some(open) }
    }

    fn check_epoch(&self, epoch: u32) -> Result<()> {
        if epoch < self.epoch && !base::planted!(UnfencedWriter) {
            return Err(Error::Fenced { writer: self.identity.name.clone() });
        }
        if epoch > self.epoch {
            return Err(Error::Misuse(format!(
                "writer {:?} is at epoch {}, not {epoch}",
                self.identity.name, self.epoch
            )));
        }
        Ok(())
    }
}

/// Time of a writer's last push that was applied, readable while another one is.
type LastPush = Arc<Mutex<Option<Instant>>>;

struct KnownWriter {
    identity: Arc<WriterIdentity>,
    writer: Arc<Mutex<TableWriter>>,
    streams: u32,
    last_push: LastPush,
    /// `None` from its opening until it is attached. A writer of a snapshot has a connection that has ended.
    connection: Option<Arc<WriterConnection>>,
}

impl KnownWriter {
    fn new(writer: TableWriter, connection: Option<Arc<WriterConnection>>) -> Self {
        KnownWriter {
            identity: writer.identity.clone(),
            streams: writer.streams.len() as u32,
            last_push: writer.last_push.clone(),
            writer: Arc::new(Mutex::new(writer)),
            connection,
        }
    }

    /// Time at which its connection has ended, unless another one has taken it over.
    fn disconnected_since(&self) -> Option<Instant> {
        self.connection.as_ref()?.end_time()
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WriterCounts {
    /// Writers with a connection, or with a channel of this process.
    pub connected: u64,
    /// Writers whose connection has ended, and that another one may take over.
    pub resumable: u64,
    pub streams: u64,
    /// Time since the last push of one of them, if any has pushed.
    pub last_push: Option<Duration>,
}

pub struct Writers {
    table: String,
    begun: Instant,
    entries: Mutex<HashMap<u64, KnownWriter>>,
    /// The writer that was closed or has expired last, and when.
    gone: Mutex<Option<(Arc<WriterIdentity>, Instant)>>,
}

impl Writers {
    pub const MOST_LISTED: usize = 256;
    pub const MAX_NAME_BYTES: usize = 256;

    pub fn new(table: &str) -> Self {
        Writers {
            table: table.to_owned(),
            begun: system::now(),
            entries: Mutex::new(HashMap::new()),
            gone: Mutex::new(None),
        }
    }

    /// Opens a writer, or takes over one that is open under the same number: its epoch rises, which fences the older
    /// connection off. Beyond [`Writers::MOST_STREAMS`], disconnected writers expire.
    ///
    /// # Errors
    /// [`Error::TooLarge`] and [`Error::Streams`] for too many streams, of this writer or of all; [`Error::Misuse`] without a stream, or
    /// when the writer is open with other streams or another window.
    pub fn open(&self, open: &OpenWriter) -> Result<WriterOpened> {
        if open.streams == 0 {
            return Err(Error::Misuse("a writer has at least one stream".into()));
        }
        check_size(
            "a writer, in streams,",
            u64::from(open.streams),
            u64::from(Self::MAX_STREAMS),
            "open several writers",
        )?;
        check_size(
            "a writer's name, in bytes,",
            open.name.len() as u64,
            Self::MAX_NAME_BYTES as u64,
            "give it a shorter name",
        )?;
        let mut entries = lock(&self.entries);
        if let Some(writer) = known(&entries, open.writer) {
            drop(entries);
            return self.take_over(&writer, open);
        }
        self.expire_for(&mut entries, open.streams)?;
        let identity = WriterIdentity::new(open.name.clone(), open.window_before, open.window_after);
        let streams = (0..open.streams).map(|_| Stream::default()).collect();
        entries.insert(open.writer, KnownWriter::new(TableWriter::new(identity, streams), None));
        Ok(WriterOpened { epoch: 1, last_sequence: 0, steps: 0, connected: counts(&entries).connected })
    }

    /// Takes over a writer that was opened before, with the same streams and window. An unknown one is not opened anew ([`Error::Expired`]):
    /// the pushes that it is about to repeat may have been applied already.
    pub fn resume(&self, open: &OpenWriter) -> Result<WriterOpened> {
        let known = known(&lock(&self.entries), open.writer);
        let writer = known.ok_or_else(|| Error::Expired { writer: open.name.clone() })?;
        self.take_over(&writer, open)
    }

    /// Takes a writer over for a new connection, which is attached later; until then none counts as ended.
    fn take_over(&self, writer: &Mutex<TableWriter>, open: &OpenWriter) -> Result<WriterOpened> {
        let mut writer = lock(writer);
        let identity = &writer.identity;
        let have = (writer.streams.len(), identity.window_before, identity.window_after);
        let asked = (open.streams as usize, open.window_before, open.window_after);
        if have != asked {
            return Err(Error::Misuse(format!(
                "writer {:?} is open with (streams, rows before, rows after) {have:?}, asked for {asked:?}",
                identity.name
            )));
        }
        writer.epoch += 1;
        // After the writer, as in `close`.
        let mut entries = lock(&self.entries);
        if let Some(entry) = entries.get_mut(&open.writer) {
            entry.connection = None;
        }
        let (epoch, last_sequence, steps) = (writer.epoch, writer.last_sequence, writer.steps);
        Ok(WriterOpened { epoch, last_sequence, steps, connected: counts(&entries).connected })
    }

    /// The writer of that number, unless it was closed, has expired, or was never opened.
    pub fn get(&self, writer: u64) -> Result<Arc<Mutex<TableWriter>>> {
        let known = known(&lock(&self.entries), writer);
        known.ok_or_else(|| Error::Expired { writer: format!("{writer:#018x}") })
    }

    /// Records the parameters of a writer's next steps; older versions of the same name, and unknown writers, are ignored.
    pub fn has_parameters(&self, writer: u64, name: &str, version: u64) {
        let Ok(found) = self.get(writer) else {
            return;
        };
        let mut writer = lock(&found);
        match &mut writer.parameters {
            Some((of, newest)) if of == name => *newest = version.max(*newest),
            other => *other = Some((name.to_owned(), version)),
        }
        let outdated = writer.outdated.clone();
        drop(writer);
        WaitingLine::wake_first(&[&outdated]);
    }

    /// The lines of pushes that wait for newer parameters.
    pub fn outdated(&self) -> Vec<Arc<WaitingLine>> {
        let writers: Vec<_> = lock(&self.entries).values().map(|known| known.writer.clone()).collect();
        writers.iter().map(|w| lock(w).outdated.clone()).collect()
    }

    /// Notes the connection of a writer, which keeps its streams until that ends. An unknown writer is ignored.
    pub fn attach(&self, writer: u64, connection: &Arc<WriterConnection>) {
        if let Some(entry) = lock(&self.entries).get_mut(&writer) {
            entry.connection = Some(connection.clone());
        }
    }

    /// Forgets a writer; an unknown one is ignored.
    pub fn close(&self, writer: u64, epoch: u32) -> Result<()> {
        let Ok(found) = self.get(writer) else {
            return Ok(());
        };
        // Held until the writer is removed, so that no connection takes over in between.
        let guard = lock(&found);
        guard.check_epoch(epoch)?;
        lock(&self.entries).remove(&writer);
        self.note_gone(guard.identity.clone(), system::now());
        Ok(())
    }

    /// Calls `note` with all writers, those first that have been disconnected longest, while no push of theirs is being applied. No other writer is opened meanwhile.
    pub fn between_pushes<T>(&self, note: impl FnOnce(&[(u64, MutexGuard<'_, TableWriter>)]) -> T) -> T {
        loop {
            let known: Vec<_> = {
                let entries = lock(&self.entries);
                let mut known: Vec<_> = entries.iter().collect();
                known.sort_unstable_by_key(|(number, entry)| {
                    let since = entry.disconnected_since();
                    (since.is_none(), since, **number)
                });
                known.into_iter().map(|(&number, entry)| (number, entry.writer.clone())).collect()
            };
            // A push holds the lock of its writer alone, and takes the insert lock after it: no two threads wait for each other.
            let held: Vec<_> = known.iter().map(|(number, writer)| (*number, lock(writer))).collect();
            // After the writers, as in `close`.
            let entries = lock(&self.entries);
            if entries.len() == held.len() && held.iter().all(|(number, _)| entries.contains_key(number)) {
                return note(&held);
            }
        }
    }

    /// Adds a writer of a snapshot; one that is open under its number stays. It is disconnected from now on: records come in the order in
    /// which writers expire.
    pub fn restore(&self, record: &OpenRecord, identity: Arc<WriterIdentity>, streams: Vec<Stream>) {
        let connection = Arc::<WriterConnection>::default();
        connection.end(system::now());
        let writer = TableWriter {
            steps: record.steps,
            epoch: record.epoch,
            last_sequence: record.last_sequence,
            ..TableWriter::new(identity, streams)
        };
        let entry = KnownWriter::new(writer, Some(connection));
        lock(&self.entries).entry(record.number).or_insert(entry);
    }

    pub fn streams(&self) -> u64 {
        lock(&self.entries).values().map(|known| u64::from(known.streams)).sum()
    }

    pub fn counts(&self) -> WriterCounts {
        counts(&lock(&self.entries))
    }

    /// Numbers of the writers that are connected, as chunks have them.
    pub fn connected_serials(&self) -> HashSet<u64> {
        let entries = lock(&self.entries);
        let connected = entries.values().filter(|known| known.disconnected_since().is_none());
        connected.map(|known| known.identity.serial).collect()
    }

    /// The [`Self::MOST_LISTED`] writers that have waited longest, as [`Table::stats`](super::Table::stats) has them.
    pub fn stats(&self) -> Vec<Value> {
        let now = system::now();
        let known = |known: &KnownWriter| {
            let connected = known.disconnected_since().is_none();
            (known.identity.name.clone(), known.writer.clone(), connected, *lock(&known.last_push))
        };
        // Not under the lock of all: a writer's own is held while it pushes.
        let known: Vec<_> = lock(&self.entries).values().map(known).collect();
        let mut listed: Vec<_> = known.iter().map(|known| (lock(&known.1).waited, known)).collect();
        listed.sort_by(|(one, (name, ..)), (other, (other_name, ..))| other.cmp(one).then(name.cmp(other_name)));
        listed.truncate(Self::MOST_LISTED);
        let listed = listed.iter().map(|(waited, (name, writer, connected, last_push))| {
            let writer = lock(writer);
            json!({
                "name": name,
                "steps": writer.steps,
                "blocked_pushes": writer.blocked,
                "waited_s": waited.as_secs_f64(),
                "connected": connected,
                "last_push_s": last_push.map(|push| now.saturating_duration_since(push).as_secs_f64()),
            })
        });
        listed.collect()
    }

    /// Time without a connected writer, and the name of the last one, if there was any; `None` while one is connected.
    pub fn absence(&self) -> Option<(Duration, Option<String>)> {
        let now = system::now();
        let mut last = lock(&self.gone).clone();
        for known in lock(&self.entries).values() {
            let end = known.disconnected_since()?;
            // By name where several ended at once.
            if last.as_ref().is_none_or(|(of, latest)| (*latest, &of.name) < (end, &known.identity.name)) {
                last = Some((known.identity.clone(), end));
            }
        }
        let since = last.as_ref().map_or(self.begun, |(_, end)| *end);
        Some((now.saturating_duration_since(since), last.map(|(identity, _)| identity.name.clone())))
    }

    /// Notes the end of a writer that is forgotten.
    fn note_gone(&self, identity: Arc<WriterIdentity>, end: Instant) {
        let mut gone = lock(&self.gone);
        if gone.as_ref().is_none_or(|(_, latest)| *latest <= end) {
            *gone = Some((identity, end));
        }
    }
}

fn counts(entries: &HashMap<u64, KnownWriter>) -> WriterCounts {
    let (mut counts, now) = (WriterCounts::default(), system::now());
    for known in entries.values() {
        let age = lock(&known.last_push).map(|push| now.saturating_duration_since(push));
        counts.last_push = counts.last_push.into_iter().chain(age).min();
        match known.disconnected_since() {
            Some(_) => counts.resumable += 1,
            None => counts.connected += 1,
        }
        counts.streams += u64::from(known.streams);
    }
    counts
}

fn known(entries: &HashMap<u64, KnownWriter>, writer: u64) -> Option<Arc<Mutex<TableWriter>>> {
    entries.get(&writer).map(|entry| Arc::clone(&entry.writer))
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn open(writer: u64, streams: u32) -> OpenWriter {
        OpenWriter { writer, name: format!("actor {writer}"), server: None, streams, window_before: 3, window_after: 3 }
    }

    #[test]
    fn sequence_numbers_apply_once_and_in_order() {
        let writers = Writers::new("t");
        writers.open(&open(1, 2)).unwrap();
        let writer = writers.get(1).unwrap();
        let mut writer = lock(&writer);
        assert!(!writer.has_applied(1, 1).unwrap());
        writer.applied(10);
        assert!(writer.has_applied(1, 1).unwrap());
        assert!(writer.has_applied(1, 0).unwrap());
        assert!(!writer.has_applied(1, 2).unwrap());
        assert!(matches!(writer.has_applied(1, 3), Err(Error::Misuse(_))));
        assert!(matches!(writer.has_applied(2, 2), Err(Error::Misuse(_))));
    }

    #[test]
    fn a_newer_connection_fences_the_older_off() {
        let writers = Writers::new("t");
        writers.open(&open(1, 2)).unwrap();
        lock(&writers.get(1).unwrap()).applied(10);
        let again = writers.open(&open(1, 2)).unwrap();
        assert_eq!((again.epoch, again.last_sequence), (2, 1));
        let writer = writers.get(1).unwrap();
        let old = lock(&writer).has_applied(1, 2);
        assert!(matches!(old, Err(Error::Fenced { writer }) if writer == "actor 1"));
        assert!(matches!(writers.close(1, 1), Err(Error::Fenced { .. })));
        assert!(writers.open(&open(1, 3)).is_err());
        writers.close(1, 2).unwrap();
        writers.close(1, 2).unwrap();
        assert!(matches!(writers.get(1), Err(Error::Expired { .. })));
    }

    #[test]
    fn a_writer_that_is_not_known_is_opened_but_not_resumed() {
        let writers = Writers::new("t");
        let unknown = writers.resume(&open(1, 2));
        assert!(matches!(unknown, Err(Error::Expired { writer }) if writer == "actor 1"));
        writers.open(&open(1, 2)).unwrap();
        lock(&writers.get(1).unwrap()).applied(10);
        let again = writers.resume(&open(1, 2)).unwrap();
        assert_eq!((again.epoch, again.last_sequence), (2, 1));
        assert!(writers.resume(&open(1, 3)).is_err());
    }

    #[test]
    fn the_last_writer_is_known_after_its_end() {
        let writers = Writers::new("t");
        let seen = |writers: &Writers| {
            let counts = writers.counts();
            (counts.connected, counts.resumable, writers.absence().map(|(_, last)| last))
        };
        assert_eq!(seen(&writers), (0, 0, Some(None)), "none has been opened");
        assert_eq!(writers.counts().last_push, None);
        let connections = [1, 2].map(|number| {
            let opened = writers.open(&open(number, 1)).unwrap();
            assert_eq!(opened.connected, number);
            let connection = Arc::<WriterConnection>::default();
            writers.attach(number, &connection);
            connection
        });
        assert_eq!(seen(&writers), (2, 0, None));
        assert_eq!(writers.counts().last_push, None, "to open is not to push");
        lock(&writers.get(1).unwrap()).applied(1);
        assert!(writers.counts().last_push.is_some());
        // A refused connection leaves the writer with its own.
        assert!(writers.resume(&open(2, 3)).is_err());
        connections[0].end(Instant::now());
        assert_eq!(seen(&writers), (1, 1, None));
        let listed = writers.stats();
        assert_eq!((&listed[0]["connected"], &listed[1]["connected"]), (&false.into(), &true.into()));
        // One that is closed leaves nothing to resume.
        writers.close(2, 1).unwrap();
        assert_eq!(seen(&writers), (0, 1, Some(Some("actor 2".into()))));
        let connection = Arc::<WriterConnection>::default();
        writers.attach(1, &connection);
        connection.end(Instant::now() + Duration::from_secs(1));
        assert_eq!(seen(&writers), (0, 1, Some(Some("actor 1".into()))));
        assert_eq!(writers.resume(&open(1, 1)).unwrap().connected, 1);
        assert_eq!(seen(&writers), (1, 0, None));
    }
}
