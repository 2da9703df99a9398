//! Ids of items: [`ItemId`] within their table, and 64 bits outside, which name one item of one table of one memory.
//!
//! # Invariant
//!
//! Ids are the table's number, slot and lifetime. An id names nothing after its item's end, nor in other tables,
//! memories and servers; a restored item keeps its id.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crate::budget::Reservation;
use base::system::random_number;

const SLOT_BITS: u32 = 24;
const LIFETIME_BITS: u32 = 24;
const SPACE_SHIFT: u32 = SLOT_BITS + LIFETIME_BITS;

/// Names an item within its table: its slot in the sum tree, and which of the slot's lifetimes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ItemId {
    pub slot: u32,
    /// The lifetime of the leaf: odd.
    pub generation: u32,
}

/// The part of its ids that a table shares with no other table: a number in the upper 16 bits of every id, and the
/// generation that its slots begin with.
///
/// An id must identify its table wherever it is sent, by its 64 bits alone. Tables of one process take their numbers from
/// one counter, which repeats after 65,536. The counter starts at a random number, in a forked process again, and each
/// table's generations at a random one of 2^24: ids of tables in different processes collide only if both coincide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdSpace {
    /// The upper 16 bits of its ids.
    pub number: u16,
    /// The generation of a slot before its first item.
    pub first_generation: u32,
}

impl IdSpace {
    /// The ids of a new table, which no other table of this process has.
    pub fn unused() -> Self {
        // Upper half: id of the process that counts. Lower half: its next table's number. A forked process begins at a random
        // number. Not loom's: no model makes tables.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let process = std::process::id();
        let random = random_number();
        let number = |next: u64| if (next >> 32) as u32 == process { next as u32 } else { (random >> 32) as u32 };
        let after = |next| Some(u64::from(process) << 32 | u64::from(number(next).wrapping_add(1)));
        // Relaxed: each number is given out once, and nothing is published with it.
        let (Ok(next) | Err(next)) = NEXT.fetch_update(Relaxed, Relaxed, after);
        Self::of(number(next) as u16, random as u32)
    }

    /// The table number in an id.
    pub const fn number_of(bits: u64) -> u16 {
        (bits >> SPACE_SHIFT) as u16
    }

    /// Ids of the number `number`, whose slots begin with the lifetime `lifetime`, modulo 2^24.
    pub const fn of(number: u16, lifetime: u32) -> Self {
        IdSpace { number, first_generation: lifetime << 1 & ((1 << (LIFETIME_BITS + 1)) - 1) }
    }

    /// The id of an item outside its table: lifetime (the generation without its lowest bit, which is 1) in bits 0 to
    /// 23, slot in bits 24 to 47, number in bits 48 to 63.
    pub fn to_bits(self, id: ItemId) -> u64 {
        u64::from(self.number) << SPACE_SHIFT | u64::from(id.slot) << LIFETIME_BITS | u64::from(id.generation >> 1)
    }

    /// The item that an id names; `None` for another table's id.
    pub fn from_bits(self, bits: u64) -> Option<ItemId> {
        (bits >> SPACE_SHIFT == u64::from(self.number)).then_some(ItemId {
            slot: (bits >> LIFETIME_BITS) as u32 & ((1 << SLOT_BITS) - 1),
            generation: (bits as u32 & ((1 << LIFETIME_BITS) - 1)) << 1 | 1,
        })
    }
}

/// Ids of items that a server has restored: as before, with the numbers of earlier tables. Later items have the number of this one.
pub struct RestoredIds {
    /// In ascending order.
    ids: Box<[(u64, ItemId)]>,
    /// Index in `ids` of the item restored into each slot; [`Self::NONE`] without one.
    by_slot: Box<[u32]>,
    _reservation: Reservation,
}

impl RestoredIds {
    const NONE: u32 = u32::MAX;

    pub fn bytes(ids: &[(u64, ItemId)]) -> u64 {
        (size_of_val(ids) + Self::slots(ids) * size_of::<u32>()) as u64
    }

    pub fn new(mut ids: Vec<(u64, ItemId)>, reservation: Reservation) -> Self {
        ids.sort_unstable_by_key(|&(bits, _)| bits);
        let mut by_slot = vec![Self::NONE; Self::slots(&ids)];
        for (index, (_, item)) in (0..).zip(&ids) {
            by_slot[item.slot as usize] = index;
        }
        RestoredIds { ids: ids.into(), by_slot: by_slot.into(), _reservation: reservation }
    }

    pub fn item(&self, bits: u64) -> Option<ItemId> {
        let index = self.ids.binary_search_by_key(&bits, |&(bits, _)| bits);
        Some(self.ids[index.ok()?].1)
    }

    /// The id of an item; `None` if it was inserted later.
    pub fn bits(&self, item: ItemId) -> Option<u64> {
        let index = *self.by_slot.get(item.slot as usize)?;
        let &(bits, restored) = self.ids.get(index as usize)?;
        (restored == item).then_some(bits)
    }

    fn slots(ids: &[(u64, ItemId)]) -> usize {
        let last = ids.iter().map(|(_, item)| item.slot).max();
        last.map_or(0, |slot| slot as usize + 1)
    }
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use std::collections::HashSet;

    use crate::budget::Budget;
    use crate::slab::Handle;
    use crate::table::items::{ItemRows, Items};

    use super::*;

    #[test]
    fn ids_round_trip_and_name_nothing_elsewhere() {
        let id = ItemId { slot: (1 << 24) - 1, generation: (1 << 25) - 1 };
        let ids = IdSpace::of(3, 7);
        let bits = ids.to_bits(id);
        assert_eq!(bits, (4 << 48) - 1);
        assert_eq!(IdSpace::number_of(bits), 3);
        assert_eq!(ids.from_bits(bits), Some(id));
        assert_eq!(IdSpace::of(2, 7).from_bits(bits), None);
        assert_eq!(IdSpace::of(4, 7).from_bits(bits), None);
    }

    #[test]
    fn tables_have_numbers_of_their_own_and_random_first_generations() {
        let spaces: Vec<_> = (0..1000).map(|_| IdSpace::unused()).collect();
        let numbers: HashSet<_> = spaces.iter().map(|space| space.number).collect();
        assert_eq!(numbers.len(), spaces.len());
        let generations: HashSet<_> = spaces.iter().map(|s| s.first_generation).collect();
        // Of 2^24, two of a thousand agree once in 34 runs, and ten pairs never.
        assert!(generations.len() > 990);
        assert!(generations.iter().all(|generation| generation % 2 == 0));
    }

    #[test]
    fn restored_items_keep_their_ids_even_of_this_tables_number() {
        let own = IdSpace::of(1, 0);
        let items = Items::new(own, 3, -19, 0);
        let rows = ItemRows { first_row: 0, before: 0, after: 0 };
        let insert = || items.insert(Handle::from_bits(0), rows, 0, 0, 5).unwrap();
        let [first, second] = [insert(), insert()];
        let earlier = IdSpace::of(1, 900);
        let dead = ItemId { slot: 0, generation: 1901 };
        let (of_first, of_second) = (earlier.to_bits(dead), IdSpace::of(2, 0).to_bits(dead));
        let ids = vec![(of_second, second), (of_first, first)];
        let budget = Budget::new(100);
        let reservation = budget.reserve(RestoredIds::bytes(&ids)).unwrap();
        items.keep_ids(RestoredIds::new(ids, reservation));
        for (id, bits) in [(first, of_first), (second, of_second)] {
            assert_eq!(items.id_bits(id), bits);
            assert_eq!(items.named(bits), Some(id));
        }
        let newcomer = insert();
        assert_eq!(items.id_bits(newcomer), own.to_bits(newcomer));
        // The next item in a restored one's slot has an id of its own.
        assert!(items.kill(first));
        let next = insert();
        assert_eq!(next.slot, first.slot);
        assert_eq!(items.id_bits(next), own.to_bits(next));
        assert!(!items.confirm(items.named(of_first).unwrap()));
    }
}
