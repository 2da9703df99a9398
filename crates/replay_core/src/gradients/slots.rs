//! The segments of a job that are under way, and the sums that are kept: two for each place of the window.

use std::time::Instant;

use super::arithmetic;
use super::packet::Kind;

/// A segment's name. In the order of their names a worker sends the segments of one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tag {
    /// The round.
    pub round: u64,
    /// The segment's number in it.
    pub segment: u32,
}

/// How far a segment is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Nothing is here.
    Empty,
    /// Contributions are missing.
    Open,
    /// Complete here; the parent's sum is missing.
    Raised,
    /// The sum is here.
    Done,
}

/// One segment.
#[derive(Debug, Clone, Copy)]
pub struct Slot {
    /// Its name.
    pub tag: Tag,
    /// Of its contributions.
    pub kind: Kind,
    /// How far it is.
    pub state: State,
    /// Who has been counted, a bit for each worker.
    pub counted: u64,
    /// When the first contribution arrived.
    pub opened: Instant,
    bytes: usize,
}

/// Where a segment is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In this slot.
    Found(usize),
    /// Nowhere yet; this slot is free for it.
    Free(usize),
    /// Its slot has been used again.
    Gone,
    /// Before the one that it follows is done.
    Ahead,
}

/// The slots of a job.
pub struct Slots {
    window: u32,
    stride: usize,
    slots: Vec<Slot>,
    bytes: Vec<u8>,
}

impl Slots {
    /// Memory for `window` places of segments of up to `stride` bytes.
    pub fn new(window: u32, stride: usize, now: Instant) -> Self {
        let empty = Slot {
            tag: Tag {
                round: 0,
                segment: 0,
            },
            kind: Kind::Float,
            state: State::Empty,
            counted: 0,
            opened: now,
            bytes: 0,
        };
        let count = 2 * window as usize;
        Slots {
            window,
            stride,
            slots: vec![empty; count],
            bytes: vec![0; count * stride],
        }
    }

    /// Bytes that so many slots take.
    pub fn bytes(window: u32, stride: usize) -> usize {
        2 * window as usize * (stride + size_of::<Slot>())
    }

    /// Where `tag` is, or may go.
    pub fn find(&self, tag: Tag) -> Place {
        let first = 2 * (tag.segment % self.window) as usize;
        let pair = [first, first + 1];
        let known = |&index: &usize| {
            let slot = &self.slots[index];
            slot.state != State::Empty && slot.tag == tag
        };
        if let Some(index) = pair.into_iter().find(known) {
            return Place::Found(index);
        }
        let [a, b] = pair.map(|index| Some(&self.slots[index]).filter(|s| s.state != State::Empty));
        match (a, b) {
            (None, None) => Place::Free(first),
            (Some(one), None) | (None, Some(one)) if tag < one.tag => Place::Gone,
            (Some(one), None) | (None, Some(one)) if one.state != State::Done => Place::Ahead,
            (Some(_), None) => Place::Free(first + 1),
            (None, Some(_)) => Place::Free(first),
            (Some(a), Some(b)) if tag < a.tag.max(b.tag) => Place::Gone,
            (Some(a), Some(b)) if a.state != State::Done || b.state != State::Done => Place::Ahead,
            (Some(a), Some(b)) => Place::Free(if a.tag < b.tag { first } else { first + 1 }),
        }
    }

    /// A slot.
    pub fn slot(&self, index: usize) -> &Slot {
        &self.slots[index]
    }

    /// A slot, to change.
    pub fn slot_mut(&mut self, index: usize) -> &mut Slot {
        &mut self.slots[index]
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &Slot)> {
        self.slots.iter().enumerate()
    }

    /// The values of a slot: its sum so far.
    pub fn values(&self, index: usize) -> &[u8] {
        let start = index * self.stride;
        &self.bytes[start..start + self.slots[index].bytes]
    }

    /// Begins a segment with its first contribution, which has at most `stride` bytes.
    pub fn begin(
        &mut self,
        index: usize,
        tag: Tag,
        kind: Kind,
        worker: u16,
        body: &[u8],
        now: Instant,
    ) {
        self.slots[index] = Slot {
            tag,
            kind,
            state: State::Open,
            counted: 1 << worker,
            opened: now,
            bytes: body.len(),
        };
        self.put(index, body);
    }

    /// Adds the contribution of another worker, which is as long as the first one.
    pub fn add(&mut self, index: usize, worker: u16, body: &[u8]) {
        let slot = &mut self.slots[index];
        slot.counted |= 1 << worker;
        let start = index * self.stride;
        arithmetic::add(slot.kind, &mut self.bytes[start..start + slot.bytes], body);
    }

    /// Replaces the sum by the parent's, which is as long.
    pub fn put(&mut self, index: usize, sum: &[u8]) {
        let start = index * self.stride;
        self.bytes[start..start + sum.len()].copy_from_slice(sum);
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        for slot in &mut self.slots {
            slot.state = State::Empty;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tag(round: u64, segment: u32) -> Tag {
        Tag { round, segment }
    }

    fn fill(slots: &mut Slots, tag: Tag, state: State) -> usize {
        let Place::Free(index) = slots.find(tag) else {
            panic!("{tag:?} has no room: {:?}", slots.find(tag));
        };
        slots.begin(index, tag, Kind::Float, 0, &[0; 4], Instant::now());
        slots.slot_mut(index).state = state;
        index
    }

    #[test]
    fn a_place_keeps_the_sum_before_and_makes_room_in_order() {
        let mut slots = Slots::new(4, 8, Instant::now());
        let first = fill(&mut slots, tag(1, 2), State::Done);
        let second = fill(&mut slots, tag(1, 6), State::Open);
        assert_eq!(slots.find(tag(1, 2)), Place::Found(first));
        assert_eq!(slots.find(tag(1, 6)), Place::Found(second));
        assert_eq!(slots.find(tag(2, 2)), Place::Ahead, "the second is open");
        slots.slot_mut(second).state = State::Done;
        assert_eq!(fill(&mut slots, tag(2, 2), State::Open), first);
        assert_eq!(slots.find(tag(1, 2)), Place::Gone);
        assert_eq!(slots.find(tag(1, 6)), Place::Found(second));
        assert!(matches!(slots.find(tag(1, 3)), Place::Free(_)));
    }

    #[test]
    fn an_open_segment_is_never_overtaken() {
        let mut slots = Slots::new(1, 4, Instant::now());
        fill(&mut slots, tag(3, 0), State::Open);
        assert_eq!(slots.find(tag(3, 1)), Place::Ahead);
        assert_eq!(slots.find(tag(2, 9)), Place::Gone);
        slots.clear();
        assert!(matches!(slots.find(tag(1, 0)), Place::Free(_)));
    }
}
