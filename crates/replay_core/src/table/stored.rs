//! Chunks as the table keeps them, what readers pin of them, and the bytes they hold.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use event_listener::Event;

use crate::budget::Reservation;
use crate::chunk::{PackedRows, RowBlobs};
use crate::schema::TableConfig;
use crate::slab::{Handle, Pinned, Slab};

use super::items::ItemKey;
use super::prepare::EXTRA_ITEMS;
use super::residents::Resident;
use super::streams::Link;
use super::writers::Identity;

/// Names no chunk.
const NO_CHUNK: u64 = u64::MAX;

/// The chunks of a table. Boxed, so that a free slot takes a pointer's room.
pub type Chunks = Slab<Box<StoredChunk>>;

/// Steps of one stream, immutable but for the link to the chunk that continues them.
pub struct StoredChunk {
    /// Rows and blobs as they arrived.
    pub packed: PackedRows,
    /// Who wrote them.
    pub writer: Arc<Identity>,
    /// The writer's stream.
    pub stream: u32,
    /// The stream's number of the first row.
    pub first_step: u64,
    next: AtomicU64,
    /// After `packed` in this struct, so that it is dropped after: the bytes are free when they are given back.
    _charge: Arc<Charge>,
}

impl StoredChunk {
    /// A chunk that nothing continues yet.
    pub fn new(
        packed: PackedRows,
        writer: Arc<Identity>,
        stream: u32,
        first_step: u64,
        charge: Arc<Charge>,
    ) -> Box<Self> {
        Box::new(StoredChunk {
            packed,
            writer,
            stream,
            first_step,
            next: AtomicU64::new(NO_CHUNK),
            _charge: charge,
        })
    }

    /// Names the chunk whose first row follows this one's last. Under the insert lock, before any item that spans
    /// both goes live.
    pub fn set_next(&self, next: Handle) {
        // Release: pairs with the Acquire in `next`.
        self.next.store(next.to_bits(), Ordering::Release);
    }

    /// The chunk whose first row follows this one's last.
    pub fn next(&self) -> Option<Handle> {
        match self.next.load(Ordering::Acquire) {
            NO_CHUNK => None,
            bits => Some(Handle::from_bits(bits)),
        }
    }
}

/// Bytes that a table holds: those of live chunks, and of evicted ones that somebody still pins.
pub struct Held {
    bytes: AtomicU64,
    /// What waits for room or for data hears of it here: the table notifies after each change.
    pub changed: Event,
    /// The table's share of the memory's byte limit, until the last pinned chunk of a dropped table is gone.
    _reservation: Reservation,
}

impl Held {
    /// Nothing is held yet of what was reserved for the table.
    pub fn new(reservation: Reservation) -> Arc<Self> {
        Arc::new(Held {
            bytes: AtomicU64::new(0),
            changed: Event::new(),
            _reservation: reservation,
        })
    }

    /// Bytes held now.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

// What a chunk allocates beside its payload is within what it counts for.
const _: () = {
    let chunk = size_of::<StoredChunk>() + size_of::<Resident>();
    // The list of a stream's links may be half empty. What each row adds is in `Table::index_bytes`.
    let lists = 2 * size_of::<Link>() + EXTRA_ITEMS * size_of::<ItemKey>() + size_of::<RowBlobs>();
    // With the counters of an `Arc`, and what the clones of a `Bytes` share.
    let push = size_of::<Charge>() + 2 * size_of::<usize>() + 4 * size_of::<usize>();
    let kept_by_the_allocator = 6 * 16;
    assert!(chunk + lists + push + kept_by_the_allocator <= TableConfig::CHUNK_BYTES as usize);
};

/// The bytes of one push. Its chunks share the buffer that it came in, so they count until the last is dropped.
pub struct Charge {
    held: Arc<Held>,
    bytes: u64,
    counted: AtomicBool,
}

impl Charge {
    /// A charge that is not counted yet.
    pub fn new(held: Arc<Held>, bytes: u64) -> Arc<Self> {
        Arc::new(Charge {
            held,
            bytes,
            counted: AtomicBool::new(false),
        })
    }

    /// Counts it. Under the insert lock, so that the sum stays within the table's limit.
    pub fn count(&self) {
        self.held.bytes.fetch_add(self.bytes, Ordering::Relaxed);
        self.counted.store(true, Ordering::Relaxed);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if *self.counted.get_mut() {
            self.held.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
            self.held.changed.notify(usize::MAX);
        }
    }
}

/// The blobs of some rows of a chunk, which stays for as long as this lives.
pub struct PinnedSlice {
    chunk: Pinned<Box<StoredChunk>>,
    range: Range<usize>,
}

impl PinnedSlice {
    /// The blobs of `rows` of a pinned chunk; `None` when they have none.
    pub fn blobs(chunk: Pinned<Box<StoredChunk>>, rows: Range<u32>) -> Option<Self> {
        let range = chunk.packed.blob_range(rows);
        (!range.is_empty()).then_some(PinnedSlice { chunk, range })
    }
}

impl AsRef<[u8]> for PinnedSlice {
    fn as_ref(&self) -> &[u8] {
        &self.chunk.packed.as_bytes()[self.range.clone()]
    }
}
