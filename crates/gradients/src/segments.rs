//! Segment table of a job: segments in flight, and complete sums.
//!
//! The table has `window` entries, and segment `s` of a round uses entry `s mod window`. An entry has two slots: one for the segment in
//! flight, one for the sum before it. In an asynchronous job each segment of the vector has an entry of its own, with more slots.

use std::time::Instant;

use super::arithmetic;
use super::packet::PacketKind;

/// Number of a segment. A worker sends the segments of one entry in ascending order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SegmentId {
    pub round: u64,
    pub segment: u32,
}

impl SegmentId {
    #[inline]
    pub fn new(round: u64, segment: u32) -> Self {
        SegmentId { round, segment }
    }
}

/// Progress of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentState {
    Empty,
    /// Contributions are missing.
    Open,
    /// Complete here and sent to the parent; the parent's sum has not arrived.
    AwaitingParent,
    /// The sum is final.
    Complete,
}

#[derive(Debug, Clone, Copy)]
pub struct SegmentSlot {
    pub id: SegmentId,
    pub kind: PacketKind,
    pub state: SegmentState,
    /// Members whose contribution is in the sum, a bit each.
    pub counted: u64,
    /// Start of the wait: arrival of the first contribution, or the time it was sent to the parent.
    pub waiting_since: Instant,
    /// Length of the vector, where contributions to this segment tell it.
    pub length: Option<u32>,
    /// Bytes of its values.
    pub bytes: usize,
}

impl SegmentSlot {
    /// A segment with the first contribution, of `worker`.
    pub fn open(id: SegmentId, kind: PacketKind, worker: u16, length: Option<u32>, now: Instant) -> Self {
        SegmentSlot { id, kind, state: SegmentState::Open, counted: 1 << worker, waiting_since: now, length, bytes: 0 }
    }
}

/// Result of a search for a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lookup {
    /// It is in this slot.
    Found(usize),
    /// It is new, and this slot is free for it.
    Free(usize),
    /// Its slot has been reused.
    Gone,
    /// Its predecessor in the entry is not complete.
    Ahead,
}

/// Slots of a job.
pub struct SegmentTable {
    entries: u32,
    /// `entries - 1` if `entries` is a power of two: a division would take a tenth of a small contribution's time.
    mask: Option<u32>,
    /// Slots of an entry.
    depth: usize,
    /// Bytes of a slot's values.
    stride: usize,
    slots: Vec<SegmentSlot>,
    bytes: Vec<u8>,
}

impl SegmentTable {
    /// A table with `depth` slots, two or more, of up to `stride` bytes in each of `entries` entries.
    pub fn new(entries: u32, depth: usize, stride: usize, now: Instant) -> Self {
        let empty = SegmentSlot {
            id: SegmentId::new(0, 0),
            kind: PacketKind::Float,
            state: SegmentState::Empty,
            counted: 0,
            waiting_since: now,
            length: None,
            bytes: 0,
        };
        let count = depth * entries as usize;
        SegmentTable {
            entries,
            mask: entries.is_power_of_two().then(|| entries - 1),
            depth,
            stride,
            slots: vec![empty; count],
            bytes: vec![0; count * stride],
        }
    }

    /// Bytes of such a table.
    pub fn bytes(entries: u32, depth: usize, stride: usize) -> usize {
        (entries as usize).saturating_mul(depth).saturating_mul(stride + size_of::<SegmentSlot>())
    }

    pub fn find(&self, id: SegmentId) -> Lookup {
        let first = self.first_slot(id);
        let mut newest: Option<&SegmentSlot> = None;
        let mut oldest: Option<(usize, &SegmentSlot)> = None;
        let mut empty = None;
        for (index, slot) in (first..).zip(self.entry(first)) {
            if slot.state == SegmentState::Empty {
                empty = empty.or(Some(index));
                continue;
            }
            if slot.id == id {
                return Lookup::Found(index);
            }
            if newest.is_none_or(|newest| newest.id < slot.id) {
                newest = Some(slot);
            }
            if oldest.is_none_or(|(_, oldest)| slot.id < oldest.id) {
                oldest = Some((index, slot));
            }
        }
        let oldest = oldest.map(|(index, _)| index);
        match newest {
            Some(newest) if id < newest.id => Lookup::Gone,
            // Only the newest segment can be incomplete: no other begins before it is complete.
            Some(newest) if newest.state != SegmentState::Complete => Lookup::Ahead,
            _ => Lookup::Free(empty.or(oldest).unwrap_or(first)),
        }
    }

    /// The slot of a segment to which a contribution of `bytes` bytes can be added without further checks: it is open, its contributions
    /// have this kind and length and do not tell the vector's, and `worker` has not contributed.
    #[inline]
    pub fn awaiting(&self, id: SegmentId, kind: PacketKind, worker: u16, bytes: usize) -> Option<usize> {
        let first = self.first_slot(id);
        let open = |slot: &SegmentSlot| slot.id == id && slot.state == SegmentState::Open;
        let at = self.entry(first).iter().position(open)?;
        let slot = &self.slots[first + at];
        let alike = slot.kind == kind && slot.bytes == bytes && slot.length.is_none();
        let awaits = alike && slot.counted & 1 << worker == 0;
        awaits.then_some(first + at)
    }

    #[inline]
    fn first_slot(&self, id: SegmentId) -> usize {
        let entry = match self.mask {
            Some(mask) => id.segment & mask,
            None => id.segment % self.entries,
        };
        self.depth * entry as usize
    }

    #[inline]
    fn entry(&self, first: usize) -> &[SegmentSlot] {
        &self.slots[first..first + self.depth]
    }

    #[inline]
    pub fn slot(&self, index: usize) -> &SegmentSlot {
        &self.slots[index]
    }

    #[inline]
    pub fn slot_mut(&mut self, index: usize) -> &mut SegmentSlot {
        &mut self.slots[index]
    }

    pub fn iter(&self) -> impl Iterator<Item = (usize, &SegmentSlot)> {
        self.slots.iter().enumerate()
    }

    /// Values of a slot: the sum so far.
    #[inline]
    pub fn values(&self, index: usize) -> &[u8] {
        let start = index * self.stride;
        &self.bytes[start..start + self.slots[index].bytes]
    }

    /// Begins a segment with its first contribution, of at most `stride` bytes.
    pub fn begin(&mut self, index: usize, segment: SegmentSlot, body: &[u8]) {
        self.slots[index] = SegmentSlot { bytes: body.len(), ..segment };
        self.replace(index, body);
    }

    /// Adds the contribution of another worker, as long as the first one.
    #[inline(always)]
    pub fn add(&mut self, index: usize, worker: u16, body: &[u8]) {
        let slot = &mut self.slots[index];
        slot.counted |= 1 << worker;
        let start = index * self.stride;
        arithmetic::add(slot.kind, &mut self.bytes[start..start + slot.bytes], body);
    }

    /// Replaces the sum, by one as long.
    pub fn replace(&mut self, index: usize, sum: &[u8]) {
        let start = index * self.stride;
        self.bytes[start..start + sum.len()].copy_from_slice(sum);
    }

    pub fn clear(&mut self) {
        for slot in &mut self.slots {
            slot.state = SegmentState::Empty;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(round: u64, segment: u32) -> SegmentId {
        SegmentId { round, segment }
    }

    fn fill(slots: &mut SegmentTable, id: SegmentId, state: SegmentState) -> usize {
        let Lookup::Free(index) = slots.find(id) else {
            panic!("{id:?} has no slot: {:?}", slots.find(id));
        };
        let slot = SegmentSlot::open(id, PacketKind::Float, 0, None, Instant::now());
        slots.begin(index, SegmentSlot { state, ..slot }, &[0; 4]);
        index
    }

    #[test]
    fn an_entry_keeps_the_sum_before_and_frees_slots_in_order() {
        let mut slots = SegmentTable::new(4, 2, 8, Instant::now());
        let first = fill(&mut slots, id(1, 2), SegmentState::Complete);
        let second = fill(&mut slots, id(1, 6), SegmentState::Open);
        assert_eq!(slots.find(id(1, 2)), Lookup::Found(first));
        assert_eq!(slots.find(id(1, 6)), Lookup::Found(second));
        assert_eq!(slots.find(id(2, 2)), Lookup::Ahead, "the second is open");
        slots.slot_mut(second).state = SegmentState::Complete;
        assert_eq!(fill(&mut slots, id(2, 2), SegmentState::Open), first);
        assert_eq!(slots.find(id(1, 2)), Lookup::Gone);
        assert_eq!(slots.find(id(1, 6)), Lookup::Found(second));
        assert!(matches!(slots.find(id(1, 3)), Lookup::Free(_)));
    }

    #[test]
    fn an_open_segment_is_never_overtaken() {
        let mut slots = SegmentTable::new(1, 2, 4, Instant::now());
        fill(&mut slots, id(3, 0), SegmentState::Open);
        assert_eq!(slots.find(id(3, 1)), Lookup::Ahead);
        assert_eq!(slots.find(id(2, 9)), Lookup::Gone);
        slots.clear();
        assert!(matches!(slots.find(id(1, 0)), Lookup::Free(_)));
    }

    #[test]
    fn only_an_open_segment_without_the_worker_awaits_it() {
        let mut slots = SegmentTable::new(4, 2, 8, Instant::now());
        let open = fill(&mut slots, id(1, 2), SegmentState::Open);
        assert_eq!(slots.awaiting(id(1, 2), PacketKind::Float, 1, 4), Some(open));
        assert_eq!(slots.awaiting(id(1, 2), PacketKind::Float, 0, 4), None, "counted");
        assert_eq!(slots.awaiting(id(1, 2), PacketKind::Float, 1, 8), None, "longer");
        assert_eq!(slots.awaiting(id(1, 2), PacketKind::Fixed, 1, 4), None, "of another kind");
        assert_eq!(slots.awaiting(id(2, 2), PacketKind::Float, 1, 4), None, "of another round");
        for state in [SegmentState::Empty, SegmentState::AwaitingParent, SegmentState::Complete] {
            slots.slot_mut(open).state = state;
            assert_eq!(slots.awaiting(id(1, 2), PacketKind::Float, 1, 4), None, "{state:?}");
        }
    }

    #[test]
    fn a_deeper_entry_keeps_more_sums() {
        let mut slots = SegmentTable::new(2, 4, 4, Instant::now());
        for round in 1..=4 {
            fill(&mut slots, id(round, 1), SegmentState::Complete);
        }
        let open = fill(&mut slots, id(5, 1), SegmentState::Open);
        assert_eq!(slots.find(id(1, 1)), Lookup::Gone);
        for round in 2..=4 {
            assert!(matches!(slots.find(id(round, 1)), Lookup::Found(_)));
        }
        assert_eq!(slots.find(id(5, 1)), Lookup::Found(open));
        assert_eq!(slots.find(id(6, 1)), Lookup::Ahead);
        assert!(matches!(slots.find(id(1, 0)), Lookup::Free(_)));
    }
}
