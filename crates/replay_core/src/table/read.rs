//! Reads the stored steps of a table in their order of arrival, while it is in use: a few chunks at a time, each pinned while it is read.

use crate::error::Result;
use crate::replay::{ReadSteps, StepsRead, StoredSteps};
use crate::slab::Handle;

use super::Table;

/// Chunks named under one hold of the insert lock.
const NAMED_AT_ONCE: usize = 64;
/// Bytes of a chunk's head in a message, with room.
const HEAD_BYTES: usize = 64;

impl Table {
    /// The next chunks of a reading, which ends with the steps that the table has at its first request. A request for 0 bytes gets a position
    /// alone, from which the reading ends with the steps of now. An error when the table was dropped, even if a new one has its name.
    pub fn read_steps(&self, request: &ReadSteps) -> Result<StepsRead> {
        self.check_open()?;
        let mut at = request.from;
        let arrivals = self.lock_inserts()?;
        if at.end == 0 {
            // Of a table that has had no steps, as later ones would be read otherwise.
            (at.number, at.end) = (arrivals.number, arrivals.end().max(1));
        }
        if at.number != arrivals.number {
            return Err(Self::was_dropped(&self.config.name));
        }
        drop(arrivals);
        if request.bytes == 0 {
            return Ok(StepsRead { chunks: Vec::new(), next: Some(at) });
        }
        let mut read = StepsRead::default();
        let mut bytes = 0;
        loop {
            let named = self.name_chunks(&mut at.next, at.end)?;
            if named.is_empty() {
                return Ok(read);
            }
            for (arrival, handle) in named {
                // None: it was evicted since.
                let Some(chunk) = self.chunks.pin(handle) else {
                    continue;
                };
                let packed = chunk.packed.as_bytes();
                // Its head is a part of the answer, too.
                bytes += packed.len() + HEAD_BYTES;
                if bytes > request.bytes as usize && !read.chunks.is_empty() {
                    at.next = arrival;
                    read.next = Some(at);
                    return Ok(read);
                }
                read.chunks.push(StoredSteps {
                    writer: chunk.writer.serial,
                    stream: chunk.stream,
                    rows: chunk.packed.rows(),
                    first_step: chunk.first_step,
                    packed: packed.clone(),
                });
            }
        }
    }

    /// Numbers and handles of a few chunks, from the number `next` up to `end`, exclusive. `next` becomes the number after them.
    pub(super) fn name_chunks(&self, next: &mut u64, end: u64) -> Result<Vec<(u64, Handle)>> {
        let mut named = Vec::with_capacity(NAMED_AT_ONCE);
        let arrivals = self.lock_inserts()?;
        *next = arrivals.first.max(*next);
        while *next < end && named.len() < NAMED_AT_ONCE {
            named.extend(arrivals.get(*next).map(|handle| (*next, handle)));
            *next += 1;
        }
        Ok(named)
    }
}
