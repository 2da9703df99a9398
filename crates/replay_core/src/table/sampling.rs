//! The items of a sample. A random one takes no lock but the rate limiter's: it loads leaf and metadata, pins the chunks, and then confirms
//! that the item is still live.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use base::allocation::{self, check_size};

use crate::chunk::FLAGS_OFFSET;
use crate::error::{Error, Result};
use crate::limiter::Admitted;
use crate::processor::prefetch;
use crate::replay::{SampleRequest, Sampled, SampledItem};
use crate::schema::flags;
use crate::sum_tree::SampledLeaf;
use crate::sync::Ordering;

use super::Table;
use super::ids::ItemId;
use super::items::{ItemRows, Metadata};
use super::returned::Undelivered;
use super::samplers::{EQUAL_MASS, LockedRanking, Taken, Total};
use super::stored::{PinnedChunk, StoredChunk};
use super::versions::Versions;

/// Largest number of attempts to replace items of a batch that are evicted while it is sampled.
const ROUNDS: usize = 32;

/// Expired items that one attempt at a random sample removes: then others have their turn.
const MOST_EXPIRED: u64 = 1 << 14;

/// Items between the stages of [`Sampling::take_in_stages`]: enough to hide a cache miss, few enough to stay in the cache.
const AHEAD: usize = 6;

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
pub(super) struct Sampling<'a> {
    table: &'a Arc<Table>,
    request: &'a SampleRequest,
    pub(super) batch: Undelivered,
    pub(super) items: Vec<SampledItem>,
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
pub(super) struct Drawn {
    pub(super) live_items: u64,
    /// The smallest probability of an item, if it is asked for and there is one.
    pub(super) min_probability: Option<f64>,
    pub(super) total: Total,
}

impl<'a> Sampling<'a> {
    pub(super) fn new(table: &'a Arc<Table>, request: &'a SampleRequest, admitted: Admitted) -> Self {
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
    pub(super) fn draw(&mut self) -> Result<Drawn> {
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
        let mut first_total = Total::default();
        let (mut rounds, mut expired) = (0, 0);
        while rounds < ROUNDS && self.expired < MOST_EXPIRED {
            strata.fill(self.batch.reserved, &mut targets);
            let total = table.sampler.choose(&table.items, &targets, &mut sampled);
            if total.units > 0 && (first_total.units == 0 || self.expired > expired) {
                // The batch is one of the items that are left.
                let ratio = first_total.units as f64 / total.units as f64;
                self.items.iter_mut().for_each(|item| item.probability = (item.probability * ratio).min(1.0));
                first_total = total;
            }
            // A round with expired items is no failure: there are fewer of them.
            rounds += usize::from(self.expired == expired);
            expired = self.expired;
            strata.shuffle(&mut sampled);
            self.take_in_stages(&sampled, total.units)?;
            if self.batch.reserved == 0 || (sampled.is_empty() && table.items.without_mass(1)) {
                break;
            }
        }
        Ok(first_total)
    }

    /// Takes sampled leaves in four stages that prefetch (metadata, slot of the chunk, chunk, rows) and one that copies. A stage is [`AHEAD`]
    /// leaves behind the one before it, so that cache misses overlap with each other and with the copies.
    fn take_in_stages(&mut self, leaves: &[SampledLeaf], total: u64) -> Result<()> {
        let Table { items, chunks, .. } = &**self.table;
        let mut candidates: VecDeque<Candidate<'a>> = VecDeque::with_capacity(4 * AHEAD);
        for tick in 0..leaves.len() + 4 * AHEAD {
            let leaf_of = |stage: usize| tick.checked_sub(stage * AHEAD).filter(|&leaf| leaf < leaves.len());
            let taken = tick.saturating_sub(4 * AHEAD);
            if let Some(leaf) = leaf_of(0) {
                items.prefetch(leaves[leaf].slot);
            }
            if let Some(leaf) = leaf_of(1) {
                let SampledLeaf { slot, generation, units } = leaves[leaf];
                let metadata = items.metadata(slot);
                chunks.prefetch(metadata.oldest);
                // A concurrently raised leaf may exceed the total.
                let probability = (units as f64 / total as f64).min(1.0);
                let id = ItemId { slot, generation };
                candidates.push_back(Candidate { id, units, probability, metadata, oldest: None });
            }
            if let Some(leaf) = leaf_of(2) {
                let candidate = &mut candidates[leaf - taken];
                candidate.oldest = chunks.pin(candidate.metadata.oldest);
                if let Some(chunk) = &candidate.oldest {
                    prefetch::<StoredChunk>(chunk);
                }
            }
            if let Some(leaf) = leaf_of(3)
                && let Candidate { oldest: Some(chunk), metadata, .. } = &candidates[leaf - taken]
            {
                let ItemRows { first_row, before, after } = metadata.rows;
                chunk.packed.prefetch(first_row, u32::from(before) + 1 + u32::from(after));
            }
            if leaf_of(4).is_some()
                && let Some(candidate) = candidates.pop_front()
            {
                let id = candidate.id;
                if let Taken::Last | Taken::Expired = self.take(candidate)? {
                    self.table.sampler.remove(id);
                }
            }
        }
        Ok(())
    }

    /// Samples the first items of a ranking, each until it has no sample left.
    pub(super) fn take_in_order(&mut self, ranking: &LockedRanking) -> Result<()> {
        let Table { items, chunks, .. } = &**self.table;
        ranking.offer(self.batch.reserved, |id| {
            let metadata = items.metadata(id.slot);
            let oldest = chunks.pin(metadata.oldest);
            self.take(Candidate { id, units: EQUAL_MASS, probability: 1.0, metadata, oldest })
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
            .map(|()| self.check_view(&metadata.rows, &self.pieces[0].chunk))
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
            id: if base::planted!(ForeignId) { id.slot.into() } else { items.id_bits(id) },
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
        Ok(if items.is_last(&claim) { Taken::Last } else { Taken::Again })
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
            let end = rows.min(skip + wanted);
            wanted -= end.saturating_sub(skip);
            let next = if wanted > 0 { chunk.next() } else { None };
            if skip < rows {
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

    /// Checks that the request is within the windows of the item's writer. An item's window is never wider than these.
    fn check_view(&self, item: &ItemRows, chunk: &StoredChunk) -> Result<()> {
        let (request, writer) = (self.request, &chunk.writer);
        let is_within = |before, after| request.before <= before && request.after <= after;
        // The item's window comes first: most samples then do not read the writer.
        if is_within(item.before, item.after) || is_within(writer.window_before, writer.window_after) {
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

    pub(super) fn finish(self, live_items: u64, min_probability: Option<f64>) -> Sampled {
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
