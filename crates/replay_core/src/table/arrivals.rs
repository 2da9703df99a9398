//! The live chunks in their order of arrival, which is the order of eviction. Only under the table's insert lock.

use std::collections::{HashSet, VecDeque};

use crate::slab::Handle;

use super::ids::ItemId;
use super::stored::{Chunks, PinnedChunk, StoredChunk};

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
