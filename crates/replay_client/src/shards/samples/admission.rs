//! What may be asked now: admission of batches, by the items and the rate limiters of all servers together.

use super::super::merge::min_size;
use super::super::partial::divide;
use super::super::shard_link::ShardLink;
use super::ShardedSamples;
use replay_core::error::WaitReason;
use replay_core::replay::ShareState;
use replay_core::sum_tree::MAX_SAMPLES;
use replay_link::error::Result;

impl ShardedSamples {
    /// The reason to wait before the first `batches` in progress, one of which may be new, can be delivered.
    pub(super) fn lacks(&self, batches: usize) -> Result<Option<WaitReason>> {
        let lacking = self.stocked()?.or_else(|| if batches > self.batches.len() { self.used_up() } else { None });
        // A batch begins only when admitted as a whole: an abandoned one has taken nothing.
        let missing = self.missing(batches) - self.available();
        Ok(lacking.or_else(|| {
            (missing > 0.0).then(|| {
                let ratio = self.states().map(|state| state.samples_per_insert).fold(0.0, f64::max);
                self.on_servers(format!(
                    "has no {} samples left by samples_per_insert {ratio}: insert {} more items",
                    self.request.count,
                    (missing / ratio).ceil()
                ))
            })
        }))
    }

    /// Checks that the servers together have enough items; returns the reason to wait if not.
    pub(super) fn stocked(&self) -> Result<Option<WaitReason>> {
        let items: u64 = self.states().map(|state| state.items).sum();
        let min_size = min_size(self.states().map(|state| state.min_size));
        if self.states().next().is_none() {
            return Ok(Some(self.group.none_answers().to_string().into()));
        }
        // Writers that wait for samples cannot make up for servers without writers.
        if items < min_size && !self.holds_pushes() {
            return Ok(Some(self.on_servers(format!("has {items} items of the {min_size} that min_size asks for"))));
        }
        if self.states().any(|state| state.total_mass > 0.0) {
            return Ok(None);
        }
        if items > 0 && self.states().all(|state| state.max_times_sampled == 0) {
            return Err(replay_core::Error::NoMass { table: self.table.clone(), items }.into());
        }
        Ok(Some(self.on_servers("has nothing to sample".to_owned())))
    }

    /// Reason to wait if `max_times_sampled` leaves fewer samples than a batch. Not checked with a rate limiter, whose writers may wait
    /// until samples are asked for, nor for short batches.
    fn used_up(&self) -> Option<WaitReason> {
        let times = self.states().map(|state| state.max_times_sampled).max()?;
        let items: u64 = self.states().map(|state| state.items).sum();
        let few = items.saturating_mul(times.into()) < self.request.count.into();
        (few && times > 0 && !self.limits() && !self.request.allow_short).then(|| {
            let count = self.request.count;
            self.on_servers(format!("has {items} items, each for {times} samples at most and fewer than {count}"))
        })
    }

    fn states(&self) -> impl Iterator<Item = &ShareState> {
        self.links.iter().filter_map(|link| Some(&link.seen.as_ref()?.state))
    }

    /// Whether rate limiters hold the samples to a ratio.
    fn limits(&self) -> bool {
        self.states().any(|state| state.samples_per_insert > 0.0)
    }

    /// Whether writers wait at a server, perhaps for samples.
    fn holds_pushes(&self) -> bool {
        self.states().any(|state| state.holds_pushes)
    }

    /// Batches for which samples are taken now: those in progress, and while writers wait one more, which the limiters might never admit
    /// as a whole.
    pub(super) fn paying(&self) -> usize {
        self.batches.len() + usize::from(self.holds_pushes())
    }

    /// Samples that so many batches need beyond those taken and in flight.
    fn missing(&self, batches: usize) -> f64 {
        let taking: f64 = self.links.iter().map(ShardLink::taking).sum();
        let wanted = f64::from(self.request.count) * batches as f64;
        if self.limits() { (wanted - self.paid as f64 - taking).max(0.0) } else { 0.0 }
    }

    /// Samples that all rate limiters together would admit now.
    fn available(&self) -> f64 {
        self.links.iter().map(ShardLink::allowance).sum()
    }

    /// Samples that a short batch may have now.
    pub(super) fn short_of(&self, most: u32) -> u32 {
        let admitted = self.available() + self.paid as f64;
        if self.limits() { admitted.clamp(0.0, most.into()) as u32 } else { most }
    }

    /// Samples to take from each rate limiter for the first `batches`, in proportion to what each admits.
    pub(super) fn takes(&self, batches: usize) -> Vec<u32> {
        let allowances: Vec<f64> = self.links.iter().map(ShardLink::allowance).collect();
        divide(self.missing(batches) as u32, &allowances, 0.5).into_iter().map(|take| take.min(MAX_SAMPLES)).collect()
    }

    /// Whether the samples taken suffice for so many items.
    pub(super) fn pays_for(&self, items: usize) -> bool {
        !self.limits() || self.paid >= items as i64
    }

    /// Whether the servers are asked again without a pause: the last answers brought something, and there is more.
    pub(super) fn may_go_on(&self) -> bool {
        let brought = self.batches.front().is_some_and(|batch| !batch.is_complete() && !batch.has_stalled);
        brought || (self.available() >= 1.0 && self.missing(self.paying()) > 0.0)
    }

    /// The reason of a wait for writers, with the names of all servers.
    pub(super) fn on_servers(&self, reason: String) -> WaitReason {
        let (table, servers) = (&self.table, self.group.names());
        WaitReason::for_writers(table, format!("table {table:?} {reason}, on the servers {servers}"))
    }
}
