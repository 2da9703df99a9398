//! The segments of a job that are under way, and the sums that are kept: two for each place of the window, or as many as an asynchronous job
//! wants for each segment of its vector.

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
    /// When the first contribution arrived; where it is raised, when that was.
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
    places: u32,
    /// Of a segment's number, for its place: a division takes a tenth of what a small contribution does.
    mask: Option<u32>,
    /// Slots of each place: one to add up, the others for the sums before.
    depth: usize,
    stride: usize,
    slots: Vec<Slot>,
    bytes: Vec<u8>,
}

impl Slots {
    /// Memory for `depth` segments, two or more, of up to `stride` bytes at each of `places`.
    pub fn new(places: u32, depth: usize, stride: usize, now: Instant) -> Self {
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
        let count = depth * places as usize;
        Slots {
            places,
            mask: places.is_power_of_two().then(|| places - 1),
            depth,
            stride,
            slots: vec![empty; count],
            bytes: vec![0; count * stride],
        }
    }

    /// Bytes that so many slots take.
    pub fn bytes(places: u32, depth: usize, stride: usize) -> usize {
        (places as usize)
            .saturating_mul(depth)
            .saturating_mul(stride + size_of::<Slot>())
    }

    /// Where `tag` is, or may go.
    pub fn find(&self, tag: Tag) -> Place {
        let first = self.first(tag);
        let mut newest: Option<&Slot> = None;
        let mut oldest: Option<(usize, &Slot)> = None;
        let mut empty = None;
        for (index, slot) in (first..).zip(self.place(first)) {
            if slot.state == State::Empty {
                empty = empty.or(Some(index));
                continue;
            }
            if slot.tag == tag {
                return Place::Found(index);
            }
            if newest.is_none_or(|newest| newest.tag < slot.tag) {
                newest = Some(slot);
            }
            if oldest.is_none_or(|(_, oldest)| slot.tag < oldest.tag) {
                oldest = Some((index, slot));
            }
        }
        let oldest = oldest.map(|(index, _)| index);
        match newest {
            Some(newest) if tag < newest.tag => Place::Gone,
            // It is the only one that may be open: nothing begins before it is done.
            Some(newest) if newest.state != State::Done => Place::Ahead,
            _ => Place::Free(empty.or(oldest).unwrap_or(first)),
        }
    }

    /// The slot where a contribution of `bytes` bytes only has to be added up: the segment is under way, contributions are of this kind and
    /// length, and the worker's is not there.
    #[inline]
    pub fn awaiting(&self, tag: Tag, kind: Kind, worker: u16, bytes: usize) -> Option<usize> {
        let first = self.first(tag);
        let open = |slot: &Slot| slot.tag == tag && slot.state == State::Open;
        let at = self.place(first).iter().position(open)?;
        let slot = &self.slots[first + at];
        let awaits = slot.kind == kind && slot.bytes == bytes && slot.counted & 1 << worker == 0;
        awaits.then_some(first + at)
    }

    #[inline]
    fn first(&self, tag: Tag) -> usize {
        let place = match self.mask {
            Some(mask) => tag.segment & mask,
            None => tag.segment % self.places,
        };
        self.depth * place as usize
    }

    #[inline]
    fn place(&self, first: usize) -> &[Slot] {
        &self.slots[first..first + self.depth]
    }

    /// A slot.
    #[inline]
    pub fn slot(&self, index: usize) -> &Slot {
        &self.slots[index]
    }

    /// A slot, to change.
    #[inline]
    pub fn slot_mut(&mut self, index: usize) -> &mut Slot {
        &mut self.slots[index]
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &Slot)> {
        self.slots.iter().enumerate()
    }

    /// The values of a slot: its sum so far.
    #[inline]
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
    #[inline(always)]
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
        let mut slots = Slots::new(4, 2, 8, Instant::now());
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
        let mut slots = Slots::new(1, 2, 4, Instant::now());
        fill(&mut slots, tag(3, 0), State::Open);
        assert_eq!(slots.find(tag(3, 1)), Place::Ahead);
        assert_eq!(slots.find(tag(2, 9)), Place::Gone);
        slots.clear();
        assert!(matches!(slots.find(tag(1, 0)), Place::Free(_)));
    }

    #[test]
    fn only_what_is_under_way_and_lacks_a_worker_awaits_it() {
        let mut slots = Slots::new(4, 2, 8, Instant::now());
        let open = fill(&mut slots, tag(1, 2), State::Open);
        assert_eq!(slots.awaiting(tag(1, 2), Kind::Float, 1, 4), Some(open));
        assert_eq!(
            slots.awaiting(tag(1, 2), Kind::Float, 0, 4),
            None,
            "counted"
        );
        assert_eq!(slots.awaiting(tag(1, 2), Kind::Float, 1, 8), None, "longer");
        assert_eq!(
            slots.awaiting(tag(1, 2), Kind::Fixed, 1, 4),
            None,
            "of another kind"
        );
        assert_eq!(
            slots.awaiting(tag(2, 2), Kind::Float, 1, 4),
            None,
            "of another round"
        );
        for state in [State::Empty, State::Raised, State::Done] {
            slots.slot_mut(open).state = state;
            assert_eq!(
                slots.awaiting(tag(1, 2), Kind::Float, 1, 4),
                None,
                "{state:?}"
            );
        }
    }

    #[test]
    fn a_deeper_place_keeps_more_sums() {
        let mut slots = Slots::new(2, 4, 4, Instant::now());
        for round in 1..=4 {
            fill(&mut slots, tag(round, 1), State::Done);
        }
        let open = fill(&mut slots, tag(5, 1), State::Open);
        assert_eq!(slots.find(tag(1, 1)), Place::Gone);
        for round in 2..=4 {
            assert!(matches!(slots.find(tag(round, 1)), Place::Found(_)));
        }
        assert_eq!(slots.find(tag(5, 1)), Place::Found(open));
        assert_eq!(slots.find(tag(6, 1)), Place::Ahead);
        assert!(matches!(slots.find(tag(1, 0)), Place::Free(_)));
    }
}
