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
//! A push to a queue (`queue_size`) is admitted while fewer items than that are live: it may overshoot by its other items, so that a sample
//! of at most `queue_size` items never waits for a push that waits for it.
//!
//! # Invariant
//!
//! Concurrent pushes and samples see each other's counts, and no count carries over a reset.

use crate::error::{Error, Result};
use crate::schema::TableConfig;
use crate::sync::{Mutex, lock};

/// Result of an attempt; `Err` is the reason of the wait, without the table before it.
pub type Outcome<T> = std::result::Result<T, String>;

/// Rounding of `samples_per_insert * inserted` must not delay a sample by a whole item.
const TOLERANCE: f64 = 1e-6;

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
        if self.items > 0 {
            lock(&self.limiter.counts).inserting -= self.items;
        }
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    /// Resets so far: samples admitted before one cannot be given back after it.
    epoch: u64,
    inserted: u64,
    /// Items of pushes that are admitted and not counted yet.
    inserting: u64,
    sampled: u64,
}

impl Counts {
    fn sample(&mut self, items: u32) -> Admitted {
        self.sampled += u64::from(items);
        Admitted { epoch: self.epoch, items }
    }
}

/// The rate limiter of one table. Its lock is held for a few instructions.
#[derive(Debug)]
pub struct Limiter {
    table: String,
    samples_per_insert: f64,
    slack: f64,
    min_size: u64,
    queue_size: u64,
    counts: Mutex<Counts>,
}

impl Limiter {
    pub fn new(config: &TableConfig) -> Self {
        Limiter {
            table: config.name.clone(),
            samples_per_insert: config.samples_per_insert,
            slack: config.effective_slack(),
            min_size: config.min_size,
            queue_size: config.queue_size.into(),
            counts: Mutex::default(),
        }
    }

    /// Whether samples are held to a ratio at all.
    pub fn limits_ratio(&self) -> bool {
        self.samples_per_insert > 0.0
    }

    /// Admits a push of `items` items to a table of `live` ones; `unread` is the most items ahead of the samples before it. `Err`
    /// is the reason of the wait. Pushes without items and `needed` pushes are always admitted, but no push to a full queue.
    pub fn admit_insert(&self, live: u64, items: u64, needed: bool, unread: f64) -> Outcome<Inserting<'_>> {
        let is_queue = self.queue_size > 0;
        if !is_queue && (items == 0 || !self.limits_ratio()) {
            return Ok(Inserting { limiter: self, items: 0 });
        }
        let mut counts = lock(&self.counts);
        if is_queue && live + counts.inserting >= self.queue_size {
            return Err(format!(
                "is full: {live} of its items are not delivered yet, and its queue_size is {}",
                self.queue_size
            ));
        }
        if is_queue {
            counts.inserting += items;
            return Ok(Inserting { limiter: self, items });
        }
        let (inserted, sampled) = (counts.inserted + counts.inserting, counts.sampled);
        let lead = self.lead(inserted, sampled);
        let missing = self.excess(lead).max(lead - self.samples_per_insert * unread);
        if needed || missing <= TOLERANCE || live + counts.inserting < self.min_size {
            counts.inserting += items;
            return Ok(Inserting { limiter: self, items });
        }
        drop(counts);
        Err(format!(
            "{}; the next insert waits until {} more are sampled",
            self.state(inserted, sampled),
            missing.ceil()
        ))
    }

    pub fn count_insert(&self, items: u64) {
        lock(&self.counts).inserted += items;
    }

    /// Refuses a sample that may never be admitted, whatever the order of pushes. The error says which slack would do.
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

    /// Admits a sample of `wanted` items, or of 1 to `wanted` where `short` is allowed; `Err` is the reason of the wait.
    pub fn admit_sample(&self, live: u64, wanted: u32, short: bool) -> Outcome<Admitted> {
        if live < self.min_size {
            let min_size = self.min_size;
            return Err(format!("holds {live} items of the {min_size} that min_size asks for; waiting for writers"));
        }
        let mut counts = lock(&self.counts);
        let allowed = self.allowance(&counts);
        if allowed >= f64::from(if short { 1 } else { wanted }) {
            return Ok(counts.sample(wanted.min(allowed as u32)));
        }
        let Counts { inserted, sampled, .. } = *counts;
        drop(counts);
        let missing = (f64::from(wanted) - allowed) / self.samples_per_insert;
        Err(format!(
            "{}; a sample of {wanted} waits for writers to insert {} more",
            self.state(inserted, sampled),
            missing.ceil().max(1.0)
        ))
    }

    /// Admits up to `most` samples for a part of a batch from several memories, perhaps none. The client checks `min_size` over all of
    /// them. Without a ratio nothing is taken.
    pub fn admit_up_to(&self, most: u32) -> Admitted {
        let most = if self.limits_ratio() { most } else { 0 };
        let mut counts = lock(&self.counts);
        let allowed = self.allowance(&counts);
        counts.sample(most.min(allowed as u32))
    }

    /// Takes back samples that were not delivered; those from before a `reset` are void.
    pub fn give_back(&self, admitted: Admitted) {
        if admitted.items > 0 {
            let mut counts = lock(&self.counts);
            if counts.epoch == admitted.epoch {
                counts.sampled -= u64::from(admitted.items);
            }
        }
    }

    pub fn reset(&self) {
        self.restart(0, 0);
    }

    fn restart(&self, inserted: u64, sampled: u64) {
        let mut counts = lock(&self.counts);
        *counts = Counts { epoch: counts.epoch + 1, inserted, sampled, ..*counts };
    }

    /// Continues the counts of a limiter of these settings (`samples_per_insert`, `slack`, `min_size`). If they differ
    /// from this limiter's, the count of samples is clamped so that neither side is further ahead than this limiter allows.
    pub fn go_on_from(&self, inserted: u64, sampled: u64, settings: (f64, f64, u64)) {
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
        self.limits_ratio() && self.excess(self.lead(inserted, sampled)) > TOLERANCE && live >= self.min_size
    }

    /// Items that may be sampled now: infinite without a ratio.
    pub fn allowed(&self) -> f64 {
        self.allowance(&lock(&self.counts))
    }

    /// Items sampled and items inserted since the last reset.
    pub fn counts(&self) -> (u64, u64) {
        let counts = lock(&self.counts);
        (counts.sampled, counts.inserted)
    }

    /// How far inserts are ahead of samples, in sampled items.
    fn lead(&self, inserted: u64, sampled: u64) -> f64 {
        self.samples_per_insert * inserted as f64 - sampled as f64
    }

    /// Sampled items by which one more insert would be too far ahead.
    fn excess(&self, lead: f64) -> f64 {
        lead + self.samples_per_insert - (self.centre() + self.slack)
    }

    fn centre(&self) -> f64 {
        self.samples_per_insert * self.min_size as f64
    }

    fn allowance(&self, counts: &Counts) -> f64 {
        if !self.limits_ratio() || base::planted!(LooseLimiter) {
            return f64::INFINITY;
        }
        let lead = self.lead(counts.inserted, counts.sampled);
        (lead - (self.centre() - self.slack) + TOLERANCE).floor().max(0.0)
    }

    fn state(&self, inserted: u64, sampled: u64) -> String {
        format!(
            "has {sampled} items sampled for {inserted} inserted, at samples_per_insert {} and slack {}",
            self.samples_per_insert, self.slack
        )
    }
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use super::*;

    fn limiter(samples_per_insert: f64, slack: f64, min_size: u64) -> Limiter {
        Limiter::new(&TableConfig { samples_per_insert, slack, min_size, ..TableConfig::new("t", Vec::new(), 1000) })
    }

    fn insert(l: &Limiter, live: u64) -> std::result::Result<(), String> {
        let admitted = l.admit_insert(live, 1, false, f64::INFINITY);
        admitted.map(drop)
    }

    fn sample(l: &Limiter, live: u64, n: u32) -> std::result::Result<u32, String> {
        let admitted = l.admit_sample(live, n, false);
        admitted.map(|a| a.items)
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
        assert!(text.contains("until 4 more are sampled"), "{text}");
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
