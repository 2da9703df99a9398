//! The live chunks in their order of arrival, which is the order of eviction. Only under the table's insert lock.

use std::collections::{HashSet, VecDeque};

use crate::slab::Handle;

use super::ids::ItemId;

/// Reserved capacity of a chunk for items beyond one per row: those whose observation stack is cut at an episode's start.
/// With longer stacks the list may grow under the insert lock where an episode begins with its chunk.
pub const EXTRA_ITEMS: usize = 12;

/// A live chunk and the items that die with it.
pub struct Resident {
    pub handle: Handle,
    pub rows: u32,
    /// Bytes of its push if it is the last chunk of it, else 0: only evicting the last one can free the shared buffer.
    pub freed_bytes: u64,
    /// Items whose first row is in it. Some may have died already.
    pub items: Vec<ItemId>,
}

/// Live chunks, oldest first, numbered by arrival.
pub struct Residents {
    chunks: VecDeque<Box<Resident>>,
    /// Number of the table in the positions of readers: of the first table in a line of restarts.
    pub number: u16,
    /// Number of the oldest live chunk.
    pub first: u64,
    /// Steps of the live chunks.
    pub steps: u64,
    /// Bytes of the pushes with live chunks.
    pub bytes: u64,
    /// Set while a snapshot is written.
    pub after_moment: Option<AfterMoment>,
}

/// Items inserted without new steps after the moment of a snapshot: the step count at their insertion does not
/// distinguish them from the snapshot's.
pub struct AfterMoment {
    /// Steps the table had taken at the moment.
    pub taken: u64,
    pub items: HashSet<ItemId>,
}

impl Residents {
    /// Allocates a list for `chunks` chunks of the table `number`, so that nothing is allocated under the lock.
    pub fn new(number: u16, chunks: usize) -> Self {
        Residents { chunks: VecDeque::with_capacity(chunks), number, first: 0, steps: 0, bytes: 0, after_moment: None }
    }

    /// Bytes of the list for `chunks` chunks.
    pub fn bytes_of(chunks: u32) -> u64 {
        u64::from(chunks) * size_of::<Box<Resident>>() as u64
    }

    /// Number that the next chunk will have.
    pub fn end(&self) -> u64 {
        self.first + self.chunks.len() as u64
    }

    pub fn get_mut(&mut self, arrival: u64) -> Option<&mut Resident> {
        let index = arrival.checked_sub(self.first)?;
        self.chunks.get_mut(index as usize).map(Box::as_mut)
    }

    /// Adds a chunk as the newest and returns its number.
    pub fn push(&mut self, chunk: Box<Resident>) -> u64 {
        self.steps += u64::from(chunk.rows);
        self.bytes += chunk.freed_bytes;
        self.chunks.push_back(chunk);
        self.end() - 1
    }

    pub fn pop(&mut self) -> Option<Box<Resident>> {
        let chunk = self.chunks.pop_front()?;
        self.first += 1;
        self.steps -= u64::from(chunk.rows);
        self.bytes -= chunk.freed_bytes;
        Some(chunk)
    }
}
