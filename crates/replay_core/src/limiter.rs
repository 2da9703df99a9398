//! Samples per insert, in items: holds `sampled` near `samples_per_insert * inserted`.
//!
//! With `d = samples_per_insert * inserted - sampled` and `centre = samples_per_insert * min_size` (as in
//! Reverb's `SampleToInsertRatio`, Cassirer et al., 2021):
//!
//! - a sample of n is admitted while `d - n >= centre - slack`, and only when `min_size` items are live;
//! - a push is admitted while its first item keeps `d` within `centre + slack`, or while fewer than `min_size`
//!   items are live. A push applies as a whole, so it may overshoot by its other items. Where `max_times_sampled` ends
//!   items, a derived slack is at most the items that fit unread, except while a sample waits.
//!
//! Both sides block each other only if `n > 2 * slack - samples_per_insert`: such a sample is an error.
//!
//! `max_times_sampled` can also block a sample: the limiter still counts on samples of items that were evicted before they were
//! used up. While a sample finds too few samples left, pushes are therefore admitted whatever the counts (`needed` in
//! [`Limiter::admit_insert`]). `samples_per_insert` is at most `max_times_sampled`, and a sample larger than a full table can
//! serve is an error, so a table never blocks both sides for good.
//!
//! # Invariant
//!
//! Concurrent pushes and samples see each other's counts, and no count carries over a reset.

use crate::cause::Cause;
use crate::error::{Error, Result};
use crate::schema::TableConfig;
use crate::sync::fault::{self, Fault};
use crate::sync::{AtomicU64, Ordering};

/// Result of an attempt; `Err` is the cause of the wait.
pub type Outcome<T> = std::result::Result<T, Cause>;

/// Rounding of `samples_per_insert * inserted` must not delay a sample by a whole item.
const TOLERANCE: f64 = 1e-6;

/// A count of 48 bits under an epoch of 16 bits. `reset` starts a new epoch, which makes credits of the
/// old one void.
#[derive(Clone, Copy, PartialEq)]
struct Count(u64);

impl Count {
    fn epoch(self) -> u64 {
        self.0 >> 48
    }
    fn items(self) -> u64 {
        self.0 & ((1 << 48) - 1)
    }
    fn next_epoch(self) -> Count {
        Count((self.epoch() + 1) << 48)
    }
}

/// Increment of the ended pushes in `Limiter::inserting` (ABA guard): without it, an admission could miss that another push began,
/// was counted and ended since it read the counts.
const ENDED: u64 = 1 << 40;

/// Samples that were admitted and may be given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admitted {
    epoch: u64,
    /// Items admitted: as many as asked for, or fewer for a short sample.
    pub items: u32,
}

impl Admitted {
    /// Splits `items` off.
    pub fn split(&mut self, items: u32) -> Admitted {
        self.items -= items;
        Admitted { epoch: self.epoch, items }
    }
}

/// An admitted push: until this is dropped its items count for other pushes as if they were inserted.
#[derive(Debug)]
pub struct Inserting<'a> {
    limiter: &'a Limiter,
    items: u64,
}

impl Drop for Inserting<'_> {
    fn drop(&mut self) {
        // Release: pairs with the Acquire in `admit_insert`.
        let ended = fault::weakened(Fault::EarlyEnd, Ordering::Release);
        let push = if fault::injected(Fault::ForgottenEnd) { 0 } else { ENDED };
        self.limiter.inserting.fetch_add(push.wrapping_sub(self.items), ended);
    }
}

/// The rate limiter of one table. Neither side locks; inserts are counted under the table's insert lock.
#[derive(Debug)]
pub struct Limiter {
    table: String,
    samples_per_insert: f64,
    slack: f64,
    min_size: u64,
    /// Written only under the insert lock.
    inserted: AtomicU64,
    /// Lower 40 bits: items of pushes that are admitted and not yet counted, so that concurrent pushes see each other. Upper 24
    /// bits: ended pushes, modulo 2^24.
    inserting: AtomicU64,
    sampled: AtomicU64,
}

impl Limiter {
    /// Limiter of a valid table definition.
    pub fn new(config: &TableConfig) -> Self {
        Limiter {
            table: config.name.clone(),
            samples_per_insert: config.samples_per_insert,
            slack: config.effective_slack(),
            min_size: config.min_size,
            inserted: AtomicU64::new(0),
            inserting: AtomicU64::new(0),
            sampled: AtomicU64::new(0),
        }
    }

    /// Whether samples are held to a ratio at all.
    pub fn limits_ratio(&self) -> bool {
        self.samples_per_insert > 0.0
    }

    /// Admits a push of `items` items to a table of `live` ones; `unread` is the most items ahead of the samples before it. `Err`
    /// is the cause of the wait. Pushes without items and `needed` pushes are always admitted.
    pub fn admit_insert(&self, live: u64, items: u64, needed: bool, unread: f64) -> Outcome<Inserting<'_>> {
        let items = if self.limits_ratio() { items } else { 0 };
        let mut refused = None;
        let admit = |word: u64| {
            let ahead = word & (ENDED - 1);
            let inserted = Count(self.inserted.load(Ordering::Relaxed)).items() + ahead;
            let sampled = Count(self.sampled.load(Ordering::Relaxed)).items();
            let lead = self.lead(inserted, sampled);
            let over = lead + self.samples_per_insert - (self.centre() + self.slack);
            let over = over.max(lead - self.samples_per_insert * unread);
            let passes = needed || items == 0 || over <= TOLERANCE || live + ahead < self.min_size;
            refused = (!passes).then_some((inserted, sampled, over));
            passes.then_some(word + items)
        };
        // Acquire: pairs with the Release in the drop of `Inserting`. Items of an ended push are then visible in `inserted`.
        let _ = self.inserting.fetch_update(Ordering::Acquire, Ordering::Acquire, admit);
        match refused {
            None => Ok(Inserting { limiter: self, items }),
            Some((inserted, sampled, missing)) => Err(Cause::Samples {
                sampled,
                inserted,
                missing,
                samples_per_insert: self.samples_per_insert,
                slack: self.slack,
            }),
        }
    }

    /// Counts inserted items. Only under the table's insert lock.
    pub fn count_insert(&self, items: u64) {
        self.inserted.fetch_add(items, Ordering::Relaxed);
    }

    /// Checks that a sample of `wanted` items can be admitted eventually, whatever the order of pushes.
    ///
    /// # Errors
    /// [`Error::Config`] that says which slack would do.
    pub fn check_sample(&self, wanted: u32) -> Result<()> {
        let most = 2.0 * self.slack - self.samples_per_insert;
        if !self.limits_ratio() || f64::from(wanted) <= most + TOLERANCE {
            return Ok(());
        }
        Err(Error::Config(format!(
            "a sample of {wanted} items from table {:?} may never be admitted: with samples_per_insert {} and slack {} a \
             sample has at most {} items; sample fewer, or make the table with a slack of {}",
            self.table,
            self.samples_per_insert,
            self.slack,
            most.floor(),
            ((f64::from(wanted) + self.samples_per_insert) / 2.0).ceil()
        )))
    }

    /// Admits a sample of `wanted` items, or of 1 to `wanted` where `short` is allowed; `Err` is the cause of
    /// the wait.
    pub fn admit_sample(&self, live: u64, wanted: u32, short: bool) -> Outcome<Admitted> {
        if live < self.min_size {
            return Err(Cause::MinSize { live, min_size: self.min_size });
        }
        self.admit(wanted, if short { 1 } else { wanted })
    }

    /// Admits up to `most` samples of a reader of several memories, perhaps none. It counts `min_size` over all of them, and nothing is
    /// taken without a ratio.
    pub fn admit_up_to(&self, most: u32) -> Admitted {
        let most = if self.limits_ratio() { most } else { 0 };
        // Between two epochs there is nothing to take.
        self.admit(most, 0).unwrap_or(Admitted { epoch: 0, items: 0 })
    }

    fn admit(&self, wanted: u32, least: u32) -> Outcome<Admitted> {
        let mut outcome = Err(Cause::Emptied);
        let admit = |seen: u64| {
            outcome = self.grant(Count(seen), wanted, least);
            let admitted = outcome.as_ref().ok()?;
            Some(seen + u64::from(admitted.items))
        };
        // The refusal is in `outcome`.
        let _ = self.sampled.fetch_update(Ordering::AcqRel, Ordering::Acquire, admit);
        outcome
    }

    /// The part of a sample that the counts allow, if it has at least so many items.
    fn grant(&self, sampled: Count, wanted: u32, least: u32) -> Outcome<Admitted> {
        // Pairs with the Release stores of `restart`: equal epochs mean that both counts are of one epoch.
        let inserted = Count(self.inserted.load(Ordering::Acquire));
        if inserted.epoch() != sampled.epoch() && !fault::injected(Fault::MixedEpochs) {
            return Err(Cause::Emptied);
        }
        let items = match self.allowance(inserted.items(), sampled.items()) {
            None => wanted,
            Some(allowed) if allowed >= f64::from(least) => wanted.min(allowed as u32),
            Some(allowed) => {
                return Err(Cause::Inserts {
                    sampled: sampled.items(),
                    inserted: inserted.items(),
                    wanted,
                    missing: f64::from(wanted) - allowed,
                    samples_per_insert: self.samples_per_insert,
                    slack: self.slack,
                });
            }
        };
        Ok(Admitted { epoch: sampled.epoch(), items })
    }

    /// Takes back samples that were not delivered; those from before a `reset` are void.
    pub fn give_back(&self, admitted: Admitted) {
        let undo = |now: u64| {
            let ours = Count(now).epoch() == admitted.epoch || fault::injected(Fault::ForeignCredit);
            ours.then(|| now.wrapping_sub(u64::from(admitted.items)))
        };
        // `Err`: the samples are from before a reset.
        let _ = self.sampled.fetch_update(Ordering::AcqRel, Ordering::Acquire, undo);
    }

    /// Resets both counts to zero. Only under the table's insert lock.
    pub fn reset(&self) {
        self.restart(0, 0);
    }

    /// Starts a new epoch with these counts. Only under the table's insert lock.
    fn restart(&self, inserted: u64, sampled: u64) {
        let epoch = Count(self.inserted.load(Ordering::Relaxed)).next_epoch().0;
        // `sampled` first: a sample that mixes the epochs sees that they differ (Acquire loads in `admit_sample` and `grant`), and
        // one that read both before fails its compare-and-exchange.
        // A swap instead of a store: loom does not order a store among concurrent exchanges.
        self.sampled.swap(epoch | sampled, Ordering::Release);
        self.inserted.store(epoch | inserted, Ordering::Release);
    }

    /// Continues the counts of a limiter of these settings (`samples_per_insert`, `slack`, `min_size`). If they differ
    /// from this limiter's, the count of samples is clamped so that neither side is further ahead than this limiter allows.
    /// Only under the table's insert lock.
    ///
    /// # Panics
    /// With debug assertions, for counts of more than 48 bits.
    pub fn go_on_from(&self, inserted: u64, sampled: u64, settings: (f64, f64, u64)) {
        debug_assert!(inserted < 1 << 48 && sampled < 1 << 48);
        let same = settings == (self.samples_per_insert, self.slack, self.min_size);
        let sampled = if same || !self.limits_ratio() {
            sampled
        } else {
            let even = self.lead(inserted, 0) - self.centre();
            let (least, most) = (even - self.slack, even + self.slack);
            (sampled as f64).clamp(least.max(0.0), most.max(0.0)) as u64
        };
        self.restart(inserted, sampled);
    }

    /// Whether a table of `live` items makes pushes wait for samples.
    pub fn holds_inserts(&self, live: u64) -> bool {
        let (sampled, inserted) = self.counts();
        let over = self.lead(inserted, sampled) + self.samples_per_insert - (self.centre() + self.slack);
        self.limits_ratio() && over > TOLERANCE && live >= self.min_size
    }

    /// Items that may be sampled now: infinite without a ratio.
    pub fn allowed(&self) -> f64 {
        let (sampled, inserted) = self.counts();
        self.allowance(inserted, sampled).unwrap_or(f64::INFINITY)
    }

    /// Items sampled and items inserted since the last reset.
    pub fn counts(&self) -> (u64, u64) {
        (Count(self.sampled.load(Ordering::Relaxed)).items(), Count(self.inserted.load(Ordering::Relaxed)).items())
    }

    /// How far inserts are ahead of samples, in sampled items.
    fn lead(&self, inserted: u64, sampled: u64) -> f64 {
        self.samples_per_insert * inserted as f64 - sampled as f64
    }

    fn centre(&self) -> f64 {
        self.samples_per_insert * self.min_size as f64
    }

    /// Items that may be sampled now; `None` is any number.
    fn allowance(&self, inserted: u64, sampled: u64) -> Option<f64> {
        base::planted!(LooseLimiter => return None);
        self.limits_ratio()
            .then(|| (self.lead(inserted, sampled) - (self.centre() - self.slack) + TOLERANCE).floor().max(0.0))
    }
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use super::*;
    use crate::cause::WaitReason;

    fn limiter(samples_per_insert: f64, slack: f64, min_size: u64) -> Limiter {
        Limiter::new(&TableConfig { samples_per_insert, slack, min_size, ..TableConfig::new("t", Vec::new(), 1000) })
    }

    /// The sentence of a wait for the limiter.
    fn text(cause: Cause) -> String {
        WaitReason::at("t", cause).to_string()
    }

    fn insert(l: &Limiter, live: u64) -> std::result::Result<(), String> {
        let admitted = l.admit_insert(live, 1, false, f64::INFINITY);
        admitted.map(drop).map_err(text)
    }

    fn sample(l: &Limiter, live: u64, n: u32) -> std::result::Result<u32, String> {
        let admitted = l.admit_sample(live, n, false);
        admitted.map(|a| a.items).map_err(text)
    }

    #[test]
    fn min_size_holds_samples_and_frees_inserts() {
        let l = limiter(1.0, 2.0, 10);
        l.count_insert(9);
        assert!(sample(&l, 9, 1).unwrap_err().contains("9 items of the 10"));
        assert_eq!(insert(&l, 9), Ok(()));
        l.count_insert(1);
        assert_eq!(sample(&l, 10, 2), Ok(2));
        assert!(sample(&l, 10, 1).unwrap_err().contains("insert 1 more"));
    }

    #[test]
    fn holds_both_sides_within_slack() {
        let l = limiter(4.0, 8.0, 1);
        l.count_insert(1);
        // d = 4, centre 4: two more inserts reach 12 = centre + slack.
        assert_eq!(insert(&l, 1), Ok(()));
        l.count_insert(2);
        let text = insert(&l, 3).unwrap_err();
        assert!(text.contains("sample 4 more"), "{text}");
        assert_eq!(sample(&l, 3, 4), Ok(4));
        assert_eq!(insert(&l, 3), Ok(()));
        // d = 8; down to centre - slack = -4 are 12 samples.
        assert_eq!(sample(&l, 3, 12), Ok(12));
        assert!(sample(&l, 3, 1).unwrap_err().contains("insert 1 more"));
    }

    #[test]
    fn pushes_at_the_same_time_see_each_other() {
        let l = limiter(4.0, 8.0, 1);
        l.count_insert(2);
        let first = l.admit_insert(2, 50, false, f64::INFINITY).unwrap();
        assert!(insert(&l, 2).is_err(), "the first one's items are ahead");
        assert!(l.admit_insert(2, 0, false, f64::INFINITY).is_ok());
        assert!(l.admit_insert(2, 5, true, f64::INFINITY).is_ok());
        drop(first);
        assert_eq!(insert(&l, 2), Ok(()));
        let l = limiter(4.0, 8.0, 60);
        let _first = l.admit_insert(0, 59, false, f64::INFINITY).unwrap();
        assert_eq!(insert(&l, 0), Ok(()), "59 of the 60 that min_size asks for");
    }

    #[test]
    fn short_samples_take_what_is_allowed() {
        let l = limiter(1.0, 4.0, 1);
        l.count_insert(1);
        assert_eq!(l.admit_sample(1, 100, true).unwrap().items, 4);
        assert!(l.admit_sample(1, 100, true).is_err());
    }

    #[test]
    fn a_sample_that_could_wait_for_ever_is_an_error() {
        let l = limiter(2.0, 8.0, 1);
        assert!(matches!(l.check_sample(15), Err(Error::Config(_))));
        assert!(l.check_sample(14).is_ok());
    }

    #[test]
    fn the_largest_sample_is_always_reached() {
        let l = limiter(2.0, 8.0, 1);
        let mut live = 0;
        for _ in 0..100 {
            while insert(&l, live).is_ok() {
                l.count_insert(1);
                live += 1;
            }
            assert_eq!(sample(&l, live, 14), Ok(14));
        }
    }

    #[test]
    fn credits_come_back_but_not_over_a_reset() {
        let l = limiter(1.0, 4.0, 1);
        l.count_insert(1);
        let admitted = l.admit_sample(1, 4, false).unwrap();
        assert!(sample(&l, 1, 1).is_err());
        l.give_back(admitted);
        assert_eq!(l.counts(), (0, 1));
        let old = l.admit_sample(1, 4, false).unwrap();
        l.reset();
        assert_eq!(l.counts(), (0, 0));
        l.count_insert(1);
        assert_eq!(sample(&l, 1, 4), Ok(4));
        l.give_back(old);
        assert_eq!(l.counts(), (4, 1));
    }

    #[test]
    fn without_a_ratio_only_min_size_counts() {
        let l = limiter(0.0, 0.0, 2);
        l.count_insert(2);
        assert_eq!(insert(&l, 1_000_000), Ok(()));
        assert_eq!(sample(&l, 2, 1_000_000), Ok(1_000_000));
        assert!(sample(&l, 1, 1).is_err());
    }
}
