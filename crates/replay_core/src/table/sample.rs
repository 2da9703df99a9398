//! When a table is sampled, and why a sample waits. `sampling.rs` takes the items.
//!
//! # Invariant
//!
//! A sample counts, and ends an item at `max_times_sampled`, once its batch is delivered; otherwise neither.

use std::sync::Arc;

use crate::error::{Error, Result, WaitReason};
use crate::replay::{BatchShare, SampleRequest, Sampled, ShareState};
use crate::schema::TableConfig;
use crate::sum_tree;
use crate::sync::{AtomicU64, Ordering};

use super::sampling::{Drawn, Sampling};
use super::{Attempt, Table, Turn};

/// Steps without an item from which on a waiting sample hints that its writers may drop their windows.
const STEPS_OF_ITEMS: u64 = 100;

impl Table {
    /// Most bytes of one sampled batch, rows and blobs.
    pub const MAX_BATCH_BYTES: u64 = 1 << 30;

    /// Most pieces of chunks of one sampled batch: a window has one in each chunk that it spans. They are counted as they are
    /// pinned, so a sample of long windows over chunks of one step ends before it takes the memory of a larger one.
    pub const MAX_BATCH_PIECES: usize = 1 << 21;

    /// Samples `request.count` items, with replacement. Blocked while fewer items than `min_size` are live, or fewer samples than asked for
    /// are allowed by the rate limiter or by `max_times_sampled`, and by earlier waiting samples. With `last_try` (the caller's deadline
    /// has come) and `request.allow_short` it samples as many as are allowed, at least one.
    ///
    /// Random batches are stratified: the total of the sampler is cut into `count` equal ranges and one item is sampled from
    /// each (Schaul et al., 2016, appendix B.2.1); they come in random order, so every part of a batch is as good a sample as the
    /// whole. The other samplers take the first item of their order with probability 1, as often as `max_times_sampled` allows, then
    /// the next one.
    ///
    /// An item that is more than `max_sample_lag` versions behind the newest of its table's parameters when the sample begins is removed,
    /// and another one sampled in its place.
    ///
    /// A share of a batch ([`SampleRequest::share`]) never waits.
    ///
    /// # Errors
    /// [`Error::NoMass`] when there are items and none has mass; [`Error::View`] when the request reaches beyond
    /// the window that a sampled item was written with; [`Error::TooLarge`] for more than [`sum_tree::MAX_SAMPLES`] items,
    /// [`Self::MAX_BATCH_BYTES`] or [`Self::MAX_BATCH_PIECES`]; [`Error::Config`] for no items, or more than the rate limiter or
    /// `max_times_sampled` can ever admit;
    /// [`Error::UnknownTable`] when the table was dropped; [`Error::TableDiffers`] for the definition of another one.
    pub fn try_sample(
        self: &Arc<Self>,
        request: &SampleRequest,
        last_try: bool,
        turn: &mut Turn,
    ) -> Result<Attempt<Sampled>> {
        self.check_open()?;
        self.check_request(request)?;
        self.expire_leases();
        if let Some(share) = request.share {
            return Ok(Attempt::Ready(self.sample_share(request, share)?));
        }
        let short = request.allow_short && last_try;
        let waited = turn.waits();
        let attempt = turn.attempt(&self.held.samples, false, || self.sample(request, short))?;
        if let (Attempt::Blocked(_), true) = (&attempt, waited) {
            turn.count_once(&self.counters.blocked_samples);
        }
        Ok(attempt)
    }

    fn check_request(&self, request: &SampleRequest) -> Result<()> {
        if request.definition > 0 && !self.format.checksums.contains(&request.definition) {
            return Err(Error::TableDiffers {
                table: self.config.name.clone(),
                difference: "it was made again with other columns or another view".to_owned(),
            });
        }
        if request.lease_ms > 0 && (!self.items.limits_samples() || request.share.is_some()) {
            return Err(Error::Config(format!(
                "batches of table {:?} have no leases: acknowledge=True is for a table of one server whose items end with their last \
                 sample (max_times_sampled), such as a queue",
                self.config.name
            )));
        }
        if let Some(share) = request.share {
            if self.config.sampler.is_ordered() {
                return Err(Error::Config(format!(
                    "table {:?} is sampled in an order of its items, which several servers do not share: make it with \
                     sampler \"prioritized\" or \"uniform\", or connect to one server",
                    self.config.name
                )));
            }
            return sum_tree::check_samples(request.count.max(share.take).max(1));
        }
        sum_tree::check_samples(request.count)?;
        if request.allow_short {
            return Ok(());
        }
        let most = self.most_samples();
        if most > 0 && u64::from(request.count) > most {
            let TableConfig { name, queue_size, capacity, max_times_sampled, .. } = &*self.config;
            let size = match queue_size {
                0 => format!("capacity of {capacity} at max_times_sampled {max_times_sampled}"),
                size => format!("queue_size of {size}"),
            };
            return Err(Error::Config(format!(
                "table {name:?} never has the {} samples asked for: its {size} gives {most}; sample fewer items, or make a \
                 table with more of either",
                request.count
            )));
        }
        self.limiter.check_sample(request.count)
    }

    /// With a limit: samples that a full table of new items has left; of a full queue, those that are left in any case.
    fn most_samples(&self) -> u64 {
        match self.config.queue_size {
            0 => self.config.capacity * u64::from(self.config.max_times_sampled),
            size => size.into(),
        }
    }

    /// Admits pushes regardless of the limiter until `count` samples are left.
    fn want_samples(&self, count: u64) {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        if self.items.samples_wanted.fetch_max(count, Ordering::Relaxed) < count {
            self.held.wake();
        }
    }

    fn want_no_samples(&self) {
        if self.items.samples_wanted.load(Ordering::Relaxed) > 0 {
            self.items.samples_wanted.store(0, Ordering::Relaxed);
        }
    }

    fn blocked_sample<T>(&self, reason: &str) -> Attempt<T> {
        let (table, mut hint) = (&self.config.name, String::new());
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let [steps, late, expired] =
            [&self.counters.inserted_steps, &self.counters.late_items, &self.counters.expired_items].map(count);
        if late > 0 && self.items.live() == 0 {
            hint = format!(
                "; {late} items came after their first step had been evicted: give the table a larger capacity, or the view shorter \
                 windows (of a Trajectory: max_steps)"
            );
        } else if steps >= STEPS_OF_ITEMS && count(&self.counters.inserted_items) == 0 {
            hint = format!(
                "; {steps} steps have arrived and made no item: is each the first of an episode (first=True, see \
                 Writer.dropped_windows), or no episode longer than the burn_in of its view, or none of a Trajectory at its end?"
            );
        } else if expired > 0 {
            let lag = self.config.max_sample_lag;
            hint = format!("; {expired} items have expired so far, more than max_sample_lag {lag} versions old");
        }
        Attempt::Blocked(WaitReason::for_writers(table, format!("table {table:?} {reason}{hint}")))
    }

    fn sample(self: &Arc<Self>, request: &SampleRequest, short: bool) -> Result<Attempt<Sampled>> {
        let live = self.items.live();
        let admitted = match self.limiter.admit_sample(live, request.count, short) {
            Ok(admitted) => admitted,
            Err(reason) => return Ok(self.blocked_sample(&reason)),
        };
        let mut sampling = Sampling::new(self, request, admitted);
        let wanted = admitted.items;
        match self.items.reserve_samples(wanted, short) {
            Ok(samples) => sampling.batch.reserved = samples,
            Err(left) => {
                if !short {
                    // A sample that may be short may ask for more than that.
                    self.want_samples(u64::from(wanted).min(self.most_samples()));
                }
                return Ok(self.blocked_sample(&format!(
                    "has {left} samples left of the {wanted} asked for, at max_times_sampled {}{}; waiting for writers",
                    self.config.max_times_sampled,
                    self.leased()
                )));
            }
        }
        let ranking = self.sampler.ranking().filter(|_| self.config.sampler.is_ordered());
        let (live_items, min_probability) = match ranking {
            Some(ranking) => {
                sampling.take_in_order(ranking)?;
                (live, request.min_probability.then_some(1.0))
            }
            None => {
                let drawn = sampling.draw()?;
                (drawn.live_items, drawn.min_probability)
            }
        };
        if sampling.batch.reserved > 0 && (sampling.items.is_empty() || !short) {
            if sampling.items.is_empty() && self.is_massless()? {
                return Err(Error::NoMass { table: self.config.name.clone(), items: self.items.live() });
            }
            let found = sampling.items.len() as u64;
            if self.items.limits_samples() && self.items.without_mass(1) {
                // Samples are left, of items without mass, which no batch gets: as many more are wanted as were not found.
                let left = self.items.samples_left().max(0) as u64 + u64::from(wanted);
                self.want_samples(left + u64::from(wanted).saturating_sub(found));
            }
            return Ok(self.blocked_sample(&format!(
                "has {found} items to sample now of the {} asked for; waiting for writers",
                request.count
            )));
        }
        self.want_no_samples();
        Ok(Attempt::Ready(sampling.finish(live_items, min_probability)))
    }

    /// Samples a share of a batch: what there is now. The client asks other memories for the rest.
    fn sample_share(self: &Arc<Self>, request: &SampleRequest, share: BatchShare) -> Result<Sampled> {
        // Whole samples that wait here come first.
        let is_free = !self.held.samples.is_waited();
        let admitted = self.limiter.admit_up_to(if is_free { share.take } else { 0 });
        let taken = admitted.items;
        let mut sampling = Sampling::new(self, request, admitted);
        let count = if is_free || !self.items.limits_samples() { request.count } else { 0 };
        sampling.batch.reserved = self.items.reserve_samples(count, true).unwrap_or(0);
        let Drawn { live_items, min_probability, total } = sampling.draw()?;
        if !is_free {
            // The wish is that of the waiting samples.
        } else if !sampling.items.is_empty() {
            self.want_no_samples();
        } else if self.items.limits_samples() && (request.count > 0 || self.items.without_mass(1)) {
            self.want_samples(self.items.samples_left().max(0) as u64 + u64::from(request.count.max(1)));
        }
        let mut sampled = sampling.finish(live_items, min_probability);
        // Items that are being pushed have no mass yet, which is not the same as priorities of 0.
        let counts = total.units > 0 || self.is_massless()?;
        sampled.state = Some(ShareState {
            number: self.number(),
            total_mass: total.mass,
            items: if counts { self.items.live() } else { 0 },
            taken,
            allowance: if is_free { self.limiter.allowed() } else { 0.0 },
            holds_pushes: self.limiter.holds_inserts(self.items.live()) || self.held.pushes.is_waited(),
            min_size: self.config.min_size,
            samples_per_insert: self.config.samples_per_insert,
            max_times_sampled: self.config.max_times_sampled,
        });
        Ok(sampled)
    }

    /// Whether there are items and none has mass, for a sample that found nothing. Takes the insert lock, the only one of a prioritized
    /// sample: a push counts an item before it has its mass, and an eviction after it has lost it.
    fn is_massless(&self) -> Result<bool> {
        let _no_births_or_evictions = self.lock_inserts()?;
        // The mass first: batches that settle meanwhile may take the last items with them.
        Ok(self.items.without_mass(1) && self.items.live() > 0)
    }
}
