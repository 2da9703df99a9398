//! Sampling. A random sample takes no lock but the rate limiter's: it loads leaf and metadata, pins the chunks, and then confirms that the item
//! is still live.
//!
//! # Invariant
//!
//! A sample counts, and ends an item at `max_times_sampled`, once its batch is delivered; undelivered, it is taken
//! back.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::chunk::FLAGS_OFFSET;
use crate::error::{Error, Result, WaitReason};
use crate::limiter::Admitted;
use crate::processor::prefetch;
use crate::replay::{BatchShare, SampleRequest, Sampled, SampledItem, ShareState};
use crate::schema::{TableConfig, flags};
use crate::sum_tree::{self, SampledLeaf};
use crate::sync::{AtomicU64, Ordering};
use base::allocation::{self, check_size};

use super::ids::ItemId;
use super::items::{ItemRows, Metadata};
use super::returned::Undelivered;
use super::samplers::{EQUAL_MASS, FirstOfRanking, Taken, Total};
use super::stored::{PinnedChunk, StoredChunk};
use super::versions::Versions;
use super::{Attempt, Table, Turn};

/// Largest number of attempts to replace items of a batch that are evicted while it is sampled.
const ROUNDS: usize = 32;

/// Expired items that one attempt at a random sample removes: then others have their turn.
const MOST_EXPIRED: u64 = 1 << 14;

/// Items whose rows are looked up side by side: enough to hide the cache misses, few enough to stay in the cache.
const SIDE_BY_SIDE: usize = 64;

/// Rows of one chunk.
struct Piece<'a> {
    chunk: PinnedChunk<'a>,
    rows: Range<u32>,
    /// The key row of the first one, where that comes before it.
    key: Option<u32>,
}

impl Piece<'_> {
    /// Its ranges of rows in a reply: the key row, unless it is the first row, then the rows.
    fn parts(&self) -> impl Iterator<Item = Range<u32>> {
        let key = self.key.map(|row| row..row + 1);
        key.into_iter().chain([self.rows.clone()])
    }
}

/// A sampled item on its way into a batch.
struct Candidate<'a> {
    id: ItemId,
    units: u64,
    probability: f64,
    metadata: Metadata,
    /// The chunk of its first row, unless that is gone.
    oldest: Option<PinnedChunk<'a>>,
}

/// A sample in the making.
struct Sampling<'a> {
    table: &'a Arc<Table>,
    request: &'a SampleRequest,
    batch: Undelivered,
    items: Vec<SampledItem>,
    /// Of the item that is being taken.
    pieces: Vec<Piece<'a>>,
    rows: Vec<u8>,
    blobs: Vec<Bytes>,
    blob_bytes: usize,
    /// Pieces copied so far.
    copied: usize,
    /// Steps the table had taken when the sample began.
    now: u64,
    versions: Option<Versions>,
    /// Items removed as too old.
    expired: u64,
}

/// What a random sample found in its table.
struct Drawn {
    live_items: u64,
    /// The smallest probability of an item, if it is asked for and there is one.
    min_probability: Option<f64>,
    total: Total,
}

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
            if self.sampler.first_of_ranking().is_some() {
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
        if self.samples_wanted.fetch_max(count, Ordering::Relaxed) < count {
            self.held.wake();
        }
    }

    fn want_no_samples(&self) {
        if self.samples_wanted.load(Ordering::Relaxed) > 0 {
            self.samples_wanted.store(0, Ordering::Relaxed);
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
        let (live_items, min_probability) = match self.sampler.first_of_ranking() {
            Some(order) => {
                sampling.take_in_order(order)?;
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
            total_priority: total.priority,
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

impl<'a> Sampling<'a> {
    fn new(table: &'a Arc<Table>, request: &'a SampleRequest, admitted: Admitted) -> Self {
        let count = request.count as usize;
        Sampling {
            table,
            request,
            batch: Undelivered::new(table, admitted, request.count),
            items: Vec::with_capacity(count),
            pieces: Vec::new(),
            rows: Vec::new(),
            blobs: Vec::with_capacity(if table.format.layout.blob_columns.is_empty() { 0 } else { 2 * count }),
            blob_bytes: 0,
            copied: 0,
            now: table.counters.inserted_steps.load(Ordering::Relaxed),
            versions: Versions::now(&table.config, &table.parameters),
            expired: 0,
        }
    }

    /// Samples its reserved samples at random.
    fn draw(&mut self) -> Result<Drawn> {
        let (table, request) = (self.table, self.request);
        let live_items = table.items.tree.live_with_mass();
        // Before any item is sampled for the last time, which may change the probabilities of the others.
        let fewest = if request.min_probability { table.sampler.fewest_units(&table.items) } else { None };
        let total = match self.batch.reserved {
            0 => table.sampler.total(&table.items),
            _ => self.take_at_random()?,
        };
        let asked = request.min_probability && total.units > 0;
        let least = asked.then(|| fewest.unwrap_or(total.units) as f64 / total.units as f64);
        // An item may have been updated since it was sampled.
        let sampled = |least| self.items.iter().map(|item| item.probability).fold(least, f64::min);
        Ok(Drawn { live_items, min_probability: least.map(sampled), total })
    }

    /// Samples at random until the batch is full, and returns the total of the sampler at the first sample, without items that expired
    /// meanwhile. The batch stays short when the table loses its mass, or its items go faster than it samples.
    fn take_at_random(&mut self) -> Result<Total> {
        let table = self.table;
        let mut strata = table.draws.next();
        let mut sampled = Vec::with_capacity(self.batch.reserved as usize);
        let mut targets = Vec::with_capacity(self.batch.reserved as usize);
        let mut candidates = Vec::with_capacity(SIDE_BY_SIDE.min(self.batch.reserved as usize));
        let mut first_total = Total::default();
        let (mut rounds, mut expired) = (0, 0);
        while rounds < ROUNDS && self.expired < MOST_EXPIRED {
            strata.fill(self.batch.reserved, &mut targets);
            let total = table.sampler.choose(&table.items, &targets, &mut sampled);
            if first_total.units == 0 || self.expired > expired {
                // The batch is one of the items that are left.
                let ratio = first_total.units as f64 / total.units.max(1) as f64;
                self.items.iter_mut().for_each(|item| item.probability = (item.probability * ratio).min(1.0));
                first_total = total;
            }
            // A round with expired items is no failure: there are fewer of them.
            rounds += usize::from(self.expired == expired);
            expired = self.expired;
            strata.shuffle(&mut sampled);
            for leaves in sampled.chunks(SIDE_BY_SIDE) {
                self.take_side_by_side(leaves, total.units, &mut candidates)?;
            }
            if self.batch.reserved == 0 || (sampled.is_empty() && table.items.without_mass(1)) {
                break;
            }
        }
        Ok(first_total)
    }

    /// Takes sampled leaves in stages, so that their cache misses overlap: leaf, metadata, slot of the chunk, chunk, rows.
    fn take_side_by_side(
        &mut self,
        leaves: &[SampledLeaf],
        total: u64,
        candidates: &mut Vec<Candidate<'a>>,
    ) -> Result<()> {
        let Table { items, chunks, .. } = &**self.table;
        for leaf in leaves {
            items.prefetch(leaf.slot);
        }
        for leaf in leaves {
            let metadata = items.metadata(leaf.slot);
            chunks.prefetch(metadata.oldest);
            candidates.push(Candidate {
                id: ItemId { slot: leaf.slot, generation: leaf.generation },
                units: leaf.units,
                // A concurrently raised leaf may exceed the total.
                probability: (leaf.units as f64 / total as f64).min(1.0),
                metadata,
                oldest: None,
            });
        }
        for candidate in &mut *candidates {
            candidate.oldest = chunks.pin(candidate.metadata.oldest);
            if let Some(chunk) = &candidate.oldest {
                prefetch::<StoredChunk>(chunk);
            }
        }
        for candidate in &*candidates {
            if let Some(chunk) = &candidate.oldest {
                let ItemRows { first_row, before, after } = candidate.metadata.rows;
                let rows = u32::from(before) + 1 + u32::from(after);
                chunk.packed.prefetch(first_row, rows);
            }
        }
        for candidate in candidates.drain(..) {
            let id = candidate.id;
            if let Taken::Last | Taken::Expired = self.take(candidate)? {
                self.table.sampler.remove(id);
            }
        }
        Ok(())
    }

    /// Samples the first items of an order, each until it has no sample left.
    fn take_in_order(&mut self, order: &FirstOfRanking) -> Result<()> {
        let Table { items, chunks, .. } = &**self.table;
        order.offer(self.batch.reserved, |id| {
            let metadata = items.metadata(id.slot);
            self.take(Candidate {
                id,
                units: EQUAL_MASS,
                probability: 1.0,
                metadata,
                oldest: chunks.pin(metadata.oldest),
            })
        })
    }

    /// Takes a sampled item: pins its rows, counts the sample, and copies the rows.
    fn take(&mut self, candidate: Candidate<'a>) -> Result<Taken> {
        let Candidate { id, metadata, .. } = candidate;
        let items = &self.table.items;
        let before = metadata.rows.before.min(self.request.before);
        let mut after = metadata.rows.after.min(self.request.after);
        // Metadata and pins are this item's only if `confirm` succeeds.
        let oldest = candidate.oldest;
        let version = oldest
            .map(|oldest| self.pin(oldest, &metadata.rows, before, after))
            .transpose()?
            .flatten()
            .filter(|()| items.confirm(id))
            .map(|()| self.check_view(&self.pieces[0].chunk))
            .transpose()?
            .map(|()| self.version());
        if let Some(version) = version
            && self.versions.is_some_and(|versions| versions.has_expired(version))
        {
            return Ok(self.expire(id));
        }
        let claim = version.and_then(|version| Some((version, items.claim(id, &metadata, candidate.units)?)));
        let Some((version, claim)) = claim else {
            self.pieces.clear();
            return Ok(Taken::Refused);
        };
        if after < self.request.after && self.pin_last_observation() {
            after += 1;
        }
        self.items.push(SampledItem {
            id: match base::planted!(ForeignId) {
                true => u64::from(id.slot),
                false => items.id_bits(id),
            },
            probability: candidate.probability,
            age: u32::try_from(self.now.saturating_sub(metadata.born)).unwrap_or(u32::MAX),
            times_sampled: claim.times_sampled,
            before: before.saturating_sub(base::planted!(ShortWindow).into()),
            after,
            version,
        });
        self.batch.claims.push(claim);
        self.batch.reserved -= 1;
        self.copy()?;
        Ok(match items.is_last(&claim) {
            true => Taken::Last,
            false => Taken::Again,
        })
    }

    /// The oldest version of the pinned rows, in a table that names parameters.
    fn version(&self) -> u64 {
        let oldest = |_| self.pieces.iter().map(|piece| piece.chunk.version).min();
        self.versions.and_then(oldest).unwrap_or(0)
    }

    /// Removes an item that is too old. The caller takes it out of its sampler.
    fn expire(&mut self, id: ItemId) -> Taken {
        self.pieces.clear();
        let ended = self.table.items.kill(id);
        self.table.counters.expired_items.fetch_add(ended.into(), Ordering::Relaxed);
        self.expired += 1;
        // Pushes may wait until fewer items are live.
        self.batch.wakes = true;
        Taken::Expired
    }

    /// Pins the rows from `before` to `after` the anchor of `item`, which begins in `oldest`; `None` when a chunk is gone.
    fn pin(&mut self, oldest: PinnedChunk<'a>, item: &ItemRows, before: u16, after: u16) -> Result<Option<()>> {
        let mut skip = item.first_row + u32::from(item.before - before);
        let mut wanted = u32::from(before) + 1 + u32::from(after);
        let mut chunk = oldest;
        loop {
            let rows = chunk.packed.rows();
            let next = chunk.next();
            if skip < rows {
                let end = rows.min(skip + wanted);
                wanted -= end - skip;
                let key = chunk.packed.key_row(skip);
                if let Some(row) = key {
                    chunk.packed.prefetch(row, 1);
                }
                self.pieces.push(Piece { chunk, rows: skip..end, key });
                check_size(
                    "a sampled batch, in pieces of chunks,",
                    (self.copied + self.pieces.len()) as u64,
                    Table::MAX_BATCH_PIECES as u64,
                    "sample fewer items at a time, or write with a larger chunk_steps",
                )?;
            }
            skip = skip.saturating_sub(rows);
            if wanted == 0 {
                return Ok(Some(()));
            }
            let Some(next) = next.and_then(|next| self.table.chunks.pin(next)) else {
                return Ok(None);
            };
            chunk = next;
        }
    }

    /// Adds the row after the newest piece if it has the observation after a termination: a final row, or the first of the next
    /// life. `false` if there is none. It may arrive after the item.
    fn pin_last_observation(&mut self) -> bool {
        let flags_of = |chunk: &StoredChunk, row: u32| chunk.packed.row_slice(row..row + 1)[FLAGS_OFFSET];
        let Some(Piece { chunk, rows, .. }) = self.pieces.last_mut() else { return false };
        if flags_of(chunk, rows.end - 1) & flags::TERMINATED == 0 {
            return false;
        }
        if rows.end < chunk.packed.rows() {
            let follows = flags_of(chunk, rows.end) & flags::FIRST == 0;
            rows.end += u32::from(follows);
            return follows;
        }
        let next = chunk.next().and_then(|next| self.table.chunks.pin(next));
        let next = next.filter(|next| flags_of(next, 0) & flags::FIRST == 0);
        let follows = next.is_some();
        self.pieces.extend(next.map(|chunk| Piece { chunk, rows: 0..1, key: None }));
        follows
    }

    fn check_view(&self, chunk: &StoredChunk) -> Result<()> {
        let (request, writer) = (self.request, &chunk.writer);
        if request.before <= writer.window_before && request.after <= writer.window_after {
            return Ok(());
        }
        Err(Error::View {
            table: self.table.config.name.clone(),
            before: request.before,
            after: request.after,
            window_before: writer.window_before,
            window_after: writer.window_after,
        })
    }

    /// Copies the pinned rows of an item, and hands out their blobs.
    fn copy(&mut self) -> Result<()> {
        self.copied += self.pieces.len();
        for piece in self.pieces.drain(..) {
            let (begin, packed) = (self.rows.len(), &piece.chunk.packed);
            for part in piece.parts() {
                let rows = packed.row_slice(part.clone());
                let needed = self.rows.len() + rows.len();
                if self.rows.capacity() < needed {
                    // As many bytes for each item to come as for those so far.
                    let items = self.items.len() + self.batch.reserved as usize;
                    let expected = (needed / self.items.len() + 1).saturating_mul(items);
                    let room = expected.min(needed + Table::MAX_BATCH_BYTES as usize) - self.rows.len();
                    allocation::check("a sampled batch", room as u64)?;
                    self.rows.reserve_exact(room);
                }
                self.rows.extend_from_slice(rows);
                let range = packed.blob_range(part);
                if !range.is_empty() {
                    self.blob_bytes += range.len();
                    self.blobs.push(packed.as_bytes().slice(range));
                    base::planted!(KeptPin => std::mem::forget(self.blobs.last().cloned()));
                }
            }
            if piece.key.is_some() {
                self.rows[begin] |= flags::REFERENCE;
            }
        }
        let bytes = (self.rows.len() + self.blob_bytes) as u64;
        Ok(check_size("a sampled batch, in bytes,", bytes, Table::MAX_BATCH_BYTES, "sample fewer items at a time")?)
    }

    fn finish(self, live_items: u64, min_probability: Option<f64>) -> Sampled {
        let counters = &self.table.counters;
        counters.sampled_items.fetch_add(self.items.len() as u64, Ordering::Relaxed);
        counters.sample_age.record_batch(self.items.iter().map(|item| u64::from(item.age)));
        if let Some(versions) = self.versions {
            counters.sample_lag.record_batch(self.items.iter().filter_map(|item| versions.lag(item.version)));
        }
        Sampled {
            items: self.items,
            live_items,
            min_probability,
            state: None,
            rows: Bytes::from(self.rows),
            blobs: self.blobs,
            shares: Vec::new(),
            lease: 0,
            credit: self.batch.sampled(self.request.share.is_some()),
        }
    }
}
