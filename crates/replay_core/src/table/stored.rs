//! Chunks as the table keeps them, the bytes they hold, and their order of arrival.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use bytes::Bytes;

use crate::budget::{Counted, Reservation};
use crate::chunk::{PackedRows, RowBlobs};
use crate::schema::TableConfig;
use crate::slab::{Handle, Pinned, Slab};
use crate::sync::{AtomicU64, Mutex, Ordering};

use super::ids::ItemId;
use super::streams::ChunkSpan;
use super::waiting::WaitingLine;
use super::writers::WriterIdentity;

/// Names no chunk.
const NO_CHUNK: u64 = u64::MAX;

/// Reserved capacity of a chunk for items beyond one per row: those whose observation stack is cut at an episode's start.
/// With longer stacks the list may grow under the insert lock where an episode begins with its chunk.
const EXTRA_ITEMS: usize = 12;

/// The chunks of a table. Boxed, so that a free slot takes no more than a pointer.
pub type Chunks = Slab<Box<StoredChunk>>;

/// A chunk that stays while it is read.
pub type PinnedChunk<'a> = Pinned<'a, Box<StoredChunk>>;

/// Steps of one stream, immutable but for the link to the chunk that continues them, and the items that die with them.
pub struct StoredChunk {
    pub packed: PackedRows,
    pub writer: Arc<WriterIdentity>,
    pub stream: u32,
    /// The stream's number of the first row.
    pub first_step: u64,
    /// Bytes of its push if it is the last chunk of it, else 0: only evicting the last one can free the shared buffer.
    pub freed_bytes: u64,
    /// Items whose first row is in it; some may have died already. Only under the insert lock.
    pub items: Mutex<Vec<ItemId>>,
    next: AtomicU64,
}

impl StoredChunk {
    /// A chunk that nothing continues yet, whose eviction frees `freed_bytes`.
    pub fn new(
        packed: PackedRows,
        writer: Arc<WriterIdentity>,
        stream: u32,
        first_step: u64,
        freed_bytes: u64,
    ) -> Box<Self> {
        // With room for later pushes' items that begin in this chunk: the list does not grow under the lock.
        let items = packed.rows() as usize + EXTRA_ITEMS.min(writer.window_before.into());
        let (items, next) = (Mutex::new(Vec::with_capacity(items)), AtomicU64::new(NO_CHUNK));
        Box::new(StoredChunk { packed, writer, stream, first_step, freed_bytes, items, next })
    }

    /// Links the chunk that continues this one. Under the insert lock, before any item that spans both goes live.
    pub fn set_next(&self, next: Handle) {
        // Release: pairs with the Acquire in `next`.
        self.next.store(next.to_bits(), Ordering::Release);
    }

    /// The chunk that continues this one.
    pub fn next(&self) -> Option<Handle> {
        match self.next.load(Ordering::Acquire) {
            NO_CHUNK => None,
            bits => Some(Handle::from_bits(bits)),
        }
    }
}

/// Bytes that a table holds: live chunks, and the payloads of evicted ones while a sampled batch refers to them.
pub struct Held {
    bytes: AtomicU64,
    /// Most bytes: [`TableConfig::effective_capacity_bytes`].
    pub limit: u64,
    pub pushes: Arc<WaitingLine>,
    pub samples: Arc<WaitingLine>,
    /// The table's share of the memory's byte limit, until no batch holds a blob of the dropped table.
    _reservation: Reservation,
}

impl Held {
    /// No bytes held yet, with the table's reservation.
    pub fn new(reservation: Reservation, limit: u64) -> Arc<Self> {
        Arc::new(Held {
            bytes: AtomicU64::new(0),
            limit,
            pushes: Arc::default(),
            samples: Arc::default(),
            _reservation: reservation,
        })
    }

    /// Wakes the first waiting push and sample after a change that may unblock them.
    pub fn wake(&self) {
        WaitingLine::wake_first(&[&self.pushes, &self.samples]);
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

// The allocations of a chunk, without its payload, are within the bytes that it counts for. The atomics of model checkers are larger.
const _: () = {
    let chunk = size_of::<StoredChunk>();
    // The list of a stream's chunks may be half empty. `Table::index_bytes` has the part of each row.
    let lists = 2 * size_of::<ChunkSpan>() + EXTRA_ITEMS * size_of::<ItemId>() + size_of::<RowBlobs>();
    // With the counters of an `Arc` and of a `Bytes` with an owner, and the three words that slices of a `Vec` share.
    let push = size_of::<Charge>() + size_of::<Counted<Arc<Charge>>>() + (2 + 1 + 3) * size_of::<usize>();
    let kept_by_the_allocator = 6 * 16;
    let bytes = chunk + lists + push + kept_by_the_allocator;
    assert!(cfg!(feature = "model") || bytes <= TableConfig::CHUNK_BYTES as usize);
};

/// Bytes of a push, counted until the buffer that its chunks share is freed.
pub struct Charge {
    held: Arc<Held>,
    /// 0 until it counts.
    bytes: AtomicU64,
}

impl Charge {
    pub fn new(held: &Arc<Held>) -> Arc<Self> {
        Arc::new(Charge { held: held.clone(), bytes: AtomicU64::new(0) })
    }

    /// The push's payload, which keeps the charge for as long as there is a slice of it.
    pub fn payload(self: &Arc<Self>, bytes: Bytes) -> Bytes {
        Counted::bytes(bytes, self.clone())
    }

    /// Counts `bytes`. Under the insert lock, so that the sum stays within the table's limit.
    pub fn count(&self, bytes: u64) {
        self.held.bytes.fetch_add(bytes, Ordering::Relaxed);
        // Relaxed, as the access in `drop`: dropping the last `Arc` is ordered after all uses of the others.
        self.bytes.store(bytes, Ordering::Relaxed);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let bytes = self.bytes.load(Ordering::Relaxed);
        if bytes > 0 {
            self.held.bytes.fetch_sub(bytes, Ordering::Relaxed);
            self.held.wake();
        }
    }
}

/// Live chunks, oldest first, numbered by arrival.
pub struct Arrivals {
    chunks: VecDeque<Handle>,
    /// Number of the table in the positions of readers; a restart of the server keeps it.
    pub number: u16,
    /// Number of the oldest live chunk.
    pub first: u64,
    pub steps: u64,
    pub bytes: u64,
    /// Set while a snapshot is written.
    pub after_save_point: Option<AfterSavePoint>,
}

/// Items inserted after a save point and before the next step. The count of steps, which is otherwise the bound of a snapshot, is the same.
pub struct AfterSavePoint {
    /// Steps the table had taken at the save point.
    pub taken: u64,
    pub items: HashSet<ItemId>,
}

impl Arrivals {
    /// Allocates a list for `chunks` chunks of the table `number`, so that nothing is allocated under the lock.
    pub fn new(number: u16, chunks: usize) -> Self {
        let chunks = VecDeque::with_capacity(chunks);
        Arrivals { chunks, number, first: 0, steps: 0, bytes: 0, after_save_point: None }
    }

    /// Bytes of the list for `chunks` chunks.
    pub fn bytes_of(chunks: u32) -> u64 {
        u64::from(chunks) * size_of::<Handle>() as u64
    }

    /// Number that the next chunk will have.
    pub fn end(&self) -> u64 {
        self.first + self.chunks.len() as u64
    }

    /// The chunk of a number, if it is live.
    pub fn get(&self, arrival: u64) -> Option<Handle> {
        let index = arrival.checked_sub(self.first)?;
        self.chunks.get(index as usize).copied()
    }

    /// Adds a chunk as the newest and returns its number.
    pub fn push(&mut self, handle: Handle, chunk: &StoredChunk) -> u64 {
        self.steps += u64::from(chunk.packed.rows());
        self.bytes += chunk.freed_bytes;
        self.chunks.push_back(handle);
        self.end() - 1
    }

    /// Takes the oldest chunk out. The caller retires it.
    pub fn pop<'a>(&mut self, chunks: &'a Chunks) -> Option<(Handle, PinnedChunk<'a>)> {
        let handle = self.chunks.pop_front()?;
        let chunk = chunks.pin(handle).expect("a live chunk is in the slab");
        self.first += 1;
        self.steps -= u64::from(chunk.packed.rows());
        self.bytes -= chunk.freed_bytes;
        Some((handle, chunk))
    }
}
