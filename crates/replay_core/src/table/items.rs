//! The items of a table: their metadata beside the leaves of the sum tree, and how often each was sampled.
//!
//! The metadata of a slot are atomic words. The owner of the dead slot writes them before the leaf goes live. A
//! reader samples a leaf (slot and generation), loads the words, pins the chunks, and then asks the tree whether that
//! generation is still live ([`Items::confirm`]): if so, every word belonged to the sampled item. No lock is taken.
//!
//! # Invariant
//!
//! A reader of a leaf sees that item's metadata, or that it is gone: metadata are written while the slot is dead,
//! and the leaf is loaded again after reading them.

use std::sync::OnceLock;

use crate::processor::{filled, prefetch};
use crate::slab::{FreeSlots, Handle};
use crate::sum_tree::SumTree;
use crate::sync::{AtomicI64, AtomicU32, AtomicU64, Ordering, fence};
use base::planted;

use super::ids::{IdSpace, ItemId, RestoredIds};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ItemRows {
    /// The first row, counted in its chunk.
    pub first_row: u32,
    pub before: u16,
    pub after: u16,
}

/// Metadata of an item, as a reader has loaded them.
#[derive(Debug, Clone, Copy)]
pub struct Metadata {
    /// The chunk of its first row: the item dies with it.
    pub oldest: Handle,
    pub rows: ItemRows,
    /// Steps the table had taken when the item was inserted.
    pub born: u64,
    lifetime: u32,
}

/// The metadata of one slot; the module says when they may be written. Half a cache line, never across two.
#[repr(align(32))]
struct Words {
    oldest: AtomicU64,
    window: AtomicU64,
    born: AtomicU64,
    /// 32 bits that differ between lifetimes of the slot, so that a late count fails, then 32 bits of samples.
    samples: AtomicU64,
}

/// The low half of `Words::samples` once the item has died: no claim succeeds any more.
const CLOSED: u64 = u32::MAX as u64;

/// Increment of the begun batches, the upper half of `Items::batches`.
const BEGUN: u64 = 1 << 32;
/// Increment of the batches under way, its lower half.
const UNDER_WAY: u64 = 1;

/// A counted sample of an item.
#[derive(Debug, Clone, Copy)]
pub struct Claim {
    pub id: ItemId,
    lifetime: u32,
    /// Its mass when it was sampled, to put back if this claim took the last sample and is undone.
    units: u64,
    /// Samples of the item, this one included.
    pub times_sampled: u32,
}

/// The items of one table. Every method takes `&self` and is lock-free.
pub struct Items {
    ids: IdSpace,
    /// Priorities, generations and liveness.
    pub tree: SumTree,
    words: Box<[Words]>,
    free: FreeSlots,
    live: AtomicU64,
    /// 0 is no limit.
    max_times_sampled: u32,
    /// With a limit: samples left of live items that no batch has reserved. Negative for an instant when items with reserved ones die.
    samples_left: AtomicI64,
    /// With a limit: the largest sample that was refused for lack of samples left; 0 again after one succeeds.
    pub samples_wanted: AtomicU32,
    /// With a limit: batches begun (upper half, modulo 2^32) and batches under way (lower half), which may hold the
    /// mass of items that they sampled for the last time.
    batches: AtomicU64,
    restored_ids: OnceLock<RestoredIds>,
}

impl Items {
    /// `capacity` free slots (at most 2^24), whose items have ids of `ids`.
    pub fn new(ids: IdSpace, capacity: u32, priority_unit_log2: i32, max_times_sampled: u32) -> Self {
        let dead = |_| Words {
            oldest: AtomicU64::new(0),
            window: AtomicU64::new(0),
            born: AtomicU64::new(0),
            samples: AtomicU64::new(CLOSED),
        };
        Items {
            ids,
            tree: SumTree::dead(capacity, priority_unit_log2, ids.first_generation),
            words: filled(capacity as usize, dead),
            free: FreeSlots::all(capacity),
            live: AtomicU64::new(0),
            max_times_sampled,
            samples_left: AtomicI64::new(0),
            samples_wanted: AtomicU32::new(0),
            batches: AtomicU64::new(0),
            restored_ids: OnceLock::new(),
        }
    }

    /// Gives restored items the ids that they had before; once for a table.
    pub fn keep_ids(&self, ids: RestoredIds) {
        // An error is a second restore, whose items get new ids of this table.
        let _ = self.restored_ids.set(ids);
    }

    pub fn bytes(capacity: u32) -> u64 {
        <SumTree>::bytes(capacity) + u64::from(capacity) * (size_of::<Words>() + FreeSlots::SLOT_BYTES) as u64
    }

    pub fn capacity(&self) -> usize {
        self.words.len()
    }

    /// Slots that are certainly free for the one thread that inserts.
    pub fn free(&self) -> usize {
        self.capacity().saturating_sub(self.live() as usize)
    }

    pub fn free_at_rest(&self) -> usize {
        self.free.count()
    }

    /// As [`Table::end_items_unnoticed`](super::Table::end_items_unnoticed).
    #[cfg(debug_assertions)]
    pub fn end_unnoticed(&self) {
        for words in &self.words {
            words.samples.fetch_or(CLOSED, Ordering::Relaxed);
        }
    }

    pub fn live(&self) -> u64 {
        self.live.load(Ordering::Relaxed)
    }

    /// With a limit: samples that are left of live items, and not reserved.
    pub fn samples_left(&self) -> i64 {
        self.samples_left.load(Ordering::Relaxed)
    }

    /// Makes an item whose first row is in the chunk `oldest`, with `units` of mass and, if it is restored, earlier samples; `None`
    /// when no slot is free.
    pub fn insert(&self, oldest: Handle, rows: ItemRows, born: u64, sampled: u32, units: u64) -> Option<ItemId> {
        let slot = self.free.pop()?;
        let words = &self.words[slot as usize];
        let window = u64::from(rows.first_row) << 32 | u64::from(rows.before) << 16 | u64::from(rows.after);
        let lifetime = (words.samples.load(Ordering::Relaxed) >> 32) as u32;
        // Orders the kill of the slot's last item before these stores. Pairs with the Acquire fence in
        // `SumTree::is_live`: a reader that has loaded one of them for the last item finds it dead.
        if !planted!(UnorderedMetadata) {
            fence(Ordering::Release);
        }
        words.oldest.store(oldest.to_bits(), Ordering::Relaxed);
        words.window.store(window, Ordering::Relaxed);
        words.born.store(born, Ordering::Relaxed);
        // The count stays below `CLOSED`.
        let samples = u64::from(sampled).min(CLOSED - 1);
        words.samples.store(u64::from(lifetime.wrapping_add(1)) << 32 | samples, Ordering::Relaxed);
        // Before the item can die, so that the count of live items never falls below zero.
        self.live.fetch_add(1, Ordering::Relaxed);
        // `activate` publishes the words (Release).
        let generation = self.tree.activate(slot, units);
        // After activation: counted samples have mass in the tree. Pairs with the Acquire in `reserve_samples`.
        self.samples_left.fetch_add(
            i64::from(self.max_times_sampled.saturating_sub(sampled)),
            if planted!(EarlySamples) { Ordering::Relaxed } else { Ordering::Release },
        );
        Some(ItemId { slot, generation })
    }

    /// Asks for a slot's metadata ahead of their use.
    pub fn prefetch(&self, slot: u32) {
        prefetch(&self.words[slot as usize]);
    }

    /// Loads the metadata of a sampled slot. They are the sampled item's only if [`Self::confirm`] succeeds afterwards.
    pub fn metadata(&self, slot: u32) -> Metadata {
        let words = &self.words[slot as usize];
        let window = words.window.load(Ordering::Relaxed);
        Metadata {
            oldest: Handle::from_bits(words.oldest.load(Ordering::Relaxed)),
            rows: ItemRows { first_row: (window >> 32) as u32, before: (window >> 16) as u16, after: window as u16 },
            born: words.born.load(Ordering::Relaxed),
            lifetime: (words.samples.load(Ordering::Relaxed) >> 32) as u32,
        }
    }

    /// Whether the item was live after everything that this thread has loaded so far.
    pub fn confirm(&self, id: ItemId) -> bool {
        planted!(UnconfirmedPin) || self.tree.is_live(id.slot, id.generation)
    }

    /// The id of an item outside this table.
    pub fn id_bits(&self, id: ItemId) -> u64 {
        let restored = self.restored_ids.get();
        let earlier = restored.and_then(|restored| restored.bits(id));
        earlier.unwrap_or_else(|| self.ids.to_bits(id))
    }

    /// The item that an id from outside names, which may have died; `None` for another table's id.
    pub fn named(&self, bits: u64) -> Option<ItemId> {
        let own = self.ids.from_bits(bits);
        let own = own.filter(|id| (id.slot as usize) < self.words.len());
        let Some(restored) = self.restored_ids.get() else {
            return own;
        };
        // One table in 65,536 has the number of the earlier one whose items it has restored.
        own.filter(|&id| self.confirm(id)).or_else(|| restored.item(bits)).or(own)
    }

    pub fn number(&self) -> u16 {
        self.ids.number
    }

    /// Whether no live item has mass, and no batch under way is about to give any back. `own` is the number of the
    /// caller's batches, which hold none.
    pub fn without_mass(&self, own: u32) -> bool {
        if self.max_times_sampled == 0 {
            return self.tree.live_with_mass() == 0;
        }
        // Acquire: pairs with the Release in `end_batch`, so that the mass it put back is seen.
        let batches = self.batches.load(Ordering::Acquire);
        if batches as u32 != own || self.tree.live_with_mass() > 0 {
            return false;
        }
        // Pairs with the Release fence in `begin_batch`: if a batch has taken the mass since, its beginning is seen.
        fence(Ordering::Acquire);
        planted!(OneLook) || self.batches.load(Ordering::Relaxed) == batches
    }

    pub fn begin_batch(&self) {
        if self.max_times_sampled > 0 {
            self.batches.fetch_add(BEGUN + UNDER_WAY, Ordering::Relaxed);
            // Orders it before the claims. Pairs with the Acquire fence in `without_mass`.
            fence(Ordering::Release);
        }
    }

    /// Ends a batch, whose claims are settled or undone.
    pub fn end_batch(&self) {
        if self.max_times_sampled > 0 {
            // Pairs with the Acquire in `without_mass`.
            self.batches.fetch_sub(UNDER_WAY, Ordering::Release);
        }
    }

    /// Sets `count` samples aside, or up to `count` where `short`; `Err` with the samples that are left when they are
    /// too few. Without a limit on samples every reservation succeeds.
    pub fn reserve_samples(&self, count: u32, short: bool) -> std::result::Result<u32, u64> {
        if self.max_times_sampled == 0 {
            return Ok(count);
        }
        let grant = |left: i64| match left.max(0) {
            left if left >= i64::from(count) => Some(count),
            left if short && left > 0 => Some(left as u32),
            _ => None,
        };
        // Acquire: pairs with the Release in `insert` and `undo`, so the mass of a reserved sample is seen in the tree.
        self.samples_left
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, |left| grant(left).map(|n| left - i64::from(n)))
            .map(|before| grant(before).unwrap_or(0))
            .map_err(|left| left.max(0) as u64)
    }

    /// Returns reserved samples that no claim has used.
    pub fn return_samples(&self, count: u32) {
        if self.max_times_sampled > 0 {
            self.samples_left.fetch_add(i64::from(count), Ordering::Release);
        }
    }

    /// Counts one sample of the item that `metadata` was confirmed for; `None` when it has died or was sampled as
    /// often as it may be. The claim that takes the last sample also takes the item's mass.
    pub fn claim(&self, id: ItemId, metadata: &Metadata, units: u64) -> Option<Claim> {
        let most = match self.max_times_sampled {
            0 => CLOSED,
            n => u64::from(n),
        };
        let ours = |word: u64| word >> 32 == u64::from(metadata.lifetime) || planted!(ForeignClaim);
        let count = |word: u64| {
            (ours(word) && word & CLOSED < most)
                .then(|| word + 1)
                // Without a limit the count saturates one below `CLOSED`.
                .map(|next| if next & CLOSED == CLOSED { word } else { next })
        };
        let before =
            self.words[id.slot as usize].samples.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count).ok()?;
        let times_sampled = (before & CLOSED) as u32 + 1;
        let claim = Claim { id, lifetime: metadata.lifetime, units, times_sampled };
        if self.is_last(&claim) {
            self.tree.set(id.slot, id.generation, 0);
        }
        Some(claim)
    }

    /// Makes a claim final: the item dies with its last sample.
    pub fn settle(&self, claim: &Claim) {
        if self.is_last(claim) {
            self.kill(claim.id);
        }
    }

    pub fn limits_samples(&self) -> bool {
        self.max_times_sampled > 0
    }

    /// Whether a claim took the last sample of its item.
    pub fn is_last(&self, claim: &Claim) -> bool {
        claim.times_sampled == self.max_times_sampled
    }

    /// Takes a claim back, and returns its sample if the item is still alive.
    pub fn undo(&self, claim: &Claim) {
        let uncount =
            |word: u64| (word >> 32 == u64::from(claim.lifetime) && word & CLOSED != CLOSED).then(|| word - 1);
        let undone = self.words[claim.id.slot as usize]
            .samples
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, uncount)
            .is_ok();
        if undone && self.max_times_sampled > 0 {
            if self.is_last(claim) {
                self.tree.set(claim.id.slot, claim.id.generation, claim.units);
            }
            self.return_samples(1);
        }
    }

    /// The live item in a slot, if there is one.
    pub fn live_in(&self, slot: u32) -> Option<ItemId> {
        let generation = self.tree.live_generation(slot)?;
        Some(ItemId { slot, generation })
    }

    /// Samples of the item in a slot. They are that item's only if [`Self::confirm`] succeeds afterwards.
    pub fn times_sampled(&self, slot: u32) -> u32 {
        self.words[slot as usize].samples.load(Ordering::Relaxed) as u32
    }

    /// Whether an item that was sampled so often has no sample left.
    pub fn is_used_up(&self, times_sampled: u32) -> bool {
        self.max_times_sampled > 0 && times_sampled >= self.max_times_sampled
    }

    /// Ends an item; true for exactly one caller.
    pub fn kill(&self, id: ItemId) -> bool {
        self.end(id).is_some()
    }

    /// Ends an item, and returns its samples left, 0 without a limit, to exactly one caller.
    pub fn end(&self, id: ItemId) -> Option<u64> {
        if !self.tree.kill(id.slot, id.generation) {
            return None;
        }
        let samples = &self.words[id.slot as usize].samples;
        let sampled = samples.fetch_or(CLOSED, Ordering::Relaxed) & CLOSED;
        assert!(sampled < CLOSED, "an item ends once: one caller wins the kill");
        let left = u64::from(self.max_times_sampled).saturating_sub(sampled);
        if left > 0 {
            self.samples_left.fetch_sub(left as i64, Ordering::Relaxed);
        }
        self.free.push(id.slot);
        // After its slot is free, as `free` promises.
        self.live.fetch_sub(1, Ordering::Relaxed);
        Some(left)
    }
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use super::*;

    const IDS: IdSpace = IdSpace::of(1, 0);

    const OLDEST: Handle = Handle { slot: 7, generation: 3 };

    const ROWS: ItemRows = ItemRows { first_row: 1, before: 2, after: 5 };

    #[test]
    fn slots_begin_with_the_generation_of_their_table() {
        let last = IdSpace::of(9, (1 << 24) - 1);
        let items = Items::new(last, 1, 0, 0);
        let first = items.insert(OLDEST, ROWS, 0, 0, 5).unwrap();
        assert_eq!(first.generation, (1 << 25) - 1);
        assert_eq!(items.named(items.id_bits(first)), Some(first));
        assert!(items.confirm(first) && items.kill(first));
        let wrapped = items.insert(OLDEST, ROWS, 0, 0, 5).unwrap();
        assert_eq!(wrapped.generation, 1);
        let elsewhere = IdSpace::of(9, 0).to_bits(ItemId { slot: 1, generation: 1 });
        assert_eq!(items.named(elsewhere), None, "a slot beyond the table");
    }

    #[test]
    fn a_slot_is_used_again_under_another_id() {
        let items = Items::new(IDS, 1, -19, 0);
        let first = items.insert(OLDEST, ROWS, 0, 0, 5).unwrap();
        assert!(items.insert(OLDEST, ROWS, 0, 0, 5).is_none());
        let metadata = items.metadata(first.slot);
        assert_eq!((metadata.oldest, metadata.rows), (OLDEST, ROWS));
        assert!(items.kill(first) && !items.kill(first));
        let second = items.insert(OLDEST, ROWS, 9, 0, 5).unwrap();
        assert_ne!(first, second);
        assert!(!items.confirm(first) && items.confirm(second));
        assert!(items.claim(first, &metadata, 5).is_none(), "a late claim must not count for the newcomer");
        assert_eq!(items.metadata(second.slot).born, 9);
        assert_eq!(items.live(), 1);
    }

    #[test]
    fn samples_are_reserved_claimed_undone_and_end_the_item() {
        let items = Items::new(IDS, 4, -19, 2);
        let id = items.insert(OLDEST, ROWS, 0, 0, 5).unwrap();
        let metadata = items.metadata(id.slot);
        assert_eq!(items.reserve_samples(3, false), Err(2));
        assert_eq!(items.reserve_samples(3, true), Ok(2));
        let first = items.claim(id, &metadata, 5).unwrap();
        let last = items.claim(id, &metadata, 5).unwrap();
        assert_eq!((first.times_sampled, last.times_sampled), (1, 2));
        assert!(items.claim(id, &metadata, 5).is_none());
        assert_eq!(items.tree.total(), 0, "no sample may find it");
        items.undo(&last);
        assert_eq!(items.tree.total(), 5);
        assert_eq!(items.reserve_samples(1, false), Ok(1));
        let last = items.claim(id, &metadata, 5).unwrap();
        items.settle(&first);
        assert!(items.confirm(id));
        items.settle(&last);
        assert!(!items.confirm(id));
        assert_eq!(items.reserve_samples(1, true), Err(0));
    }

    #[test]
    fn a_dead_items_samples_are_gone() {
        let items = Items::new(IDS, 4, -19, 3);
        let id = items.insert(OLDEST, ROWS, 0, 0, 5).unwrap();
        let metadata = items.metadata(id.slot);
        assert_eq!(items.reserve_samples(1, false), Ok(1));
        let claim = items.claim(id, &metadata, 5).unwrap();
        items.kill(id);
        items.undo(&claim);
        assert_eq!(items.reserve_samples(1, true), Err(0));
        items.insert(OLDEST, ROWS, 0, 0, 5).unwrap();
        assert_eq!(items.reserve_samples(4, true), Ok(3));
    }
}
