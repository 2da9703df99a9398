//! Admission of batches, by the items and the rate limiters of all servers together.

use super::ShardedSamples;
use crate::shards::merge::min_size;
use base::wait::Wait;
use replay_core::cause::WaitReason;
use replay_link::error::Result;

impl ShardedSamples {
    /// The reason of a wait for writers, with the names of all servers.
    fn on_servers(&self, reason: String) -> WaitReason {
        WaitReason::ForWriters(self.table.clone(), format!("{reason}, on the servers {}", self.group.names()))
    }

    /// Reason of a wait while no server answers.
    pub(super) fn none_answers(&self) -> WaitReason {
        self.group.none_answers().to_string().into()
    }

    /// Checks that the servers together have enough items; returns the reason to wait if not.
    pub(super) fn stocked(&mut self, wait: &Wait<'_>) -> Result<Option<WaitReason>> {
        let seen: Vec<_> = self.lanes.iter().filter_map(|lane| lane.seen).collect();
        if seen.is_empty() {
            return Ok(Some(self.none_answers()));
        }
        let table = self.definition(wait)?;
        let items: u64 = seen.iter().map(|seen| seen.state.items).sum();
        let min_size = min_size(&table, seen.len() as u64);
        // Does not wait if a limiter blocks writers: one server cannot make up for the min_size parts of servers without writers then.
        if items < min_size && !self.holds_writers() {
            return Ok(Some(self.on_servers(format!(
                "table {:?} has {items} items of the {min_size} that min_size asks for",
                table.name
            ))));
        }
        if seen.iter().all(|seen| seen.state.total_priority <= 0.0) {
            if items > 0 && table.max_times_sampled == 0 {
                let table = table.name.clone();
                return Err(replay_core::Error::NoMass { table, items }.into());
            }
            let nothing = format!("table {:?} has nothing to sample", table.name);
            return Ok(Some(self.on_servers(nothing)));
        }
        Ok(None)
    }

    /// Limit of the samples charged to one rate limiter: what it certainly admits before it blocks its writers.
    pub(super) fn most_of_one(&self) -> f64 {
        match &self.definition {
            Some(table) if table.samples_per_insert > 0.0 => {
                (2.0 * table.effective_slack() - table.samples_per_insert).floor()
            }
            _ => f64::INFINITY,
        }
    }

    /// Whether a rate limiter may block its writers until samples are charged.
    fn holds_writers(&self) -> bool {
        let most = self.most_of_one();
        most.is_finite() && self.lanes.iter().any(|lane| lane.allowance() >= most)
    }

    /// Checks that the servers together can deliver a batch; returns the reason to wait if not.
    pub(super) fn ready(&mut self, wait: &Wait<'_>) -> Result<Option<WaitReason>> {
        if let Some(reason) = self.stocked(wait)? {
            return Ok(Some(reason));
        }
        if let Some(reason) = self.used_up() {
            return Ok(Some(reason));
        }
        // A batch begins only when admitted as a whole, so that no charged part waits for other limiters.
        let missing = f64::from(self.request.count) - self.admitted();
        if missing <= 0.0 {
            return Ok(None);
        }
        // Exception: writers are blocked. Their limiter charges what it admits, the writers continue, and the rest follows. A short batch
        // is what is admitted at the deadline.
        if !self.request.allow_short && self.holds_writers() {
            return Ok(None);
        }
        self.limited(missing, wait).map(Some)
    }

    /// Reason to wait if `max_times_sampled` leaves fewer samples than a batch. Not checked with a rate limiter, which has to be asked when
    /// it blocks writers, nor for short batches.
    fn used_up(&self) -> Option<WaitReason> {
        let table = self.definition.as_ref()?;
        let times = u64::from(table.max_times_sampled);
        if times == 0 || table.samples_per_insert > 0.0 || self.request.allow_short {
            return None;
        }
        let seen = self.lanes.iter().filter_map(|lane| lane.seen);
        let items: u64 = seen.map(|seen| seen.state.items).sum();
        let few = items.saturating_mul(times) < u64::from(self.request.count);
        few.then(|| {
            self.on_servers(format!(
                "table {:?} has {items} items, each for {times} samples at most and fewer than {}",
                table.name, self.request.count
            ))
        })
    }

    /// Reason to wait for `missing` samples of the rate limiters.
    pub(super) fn limited(&mut self, missing: f64, wait: &Wait<'_>) -> Result<WaitReason> {
        let table = self.definition(wait)?;
        Ok(self.on_servers(format!(
            "table {:?} has no {} samples left by samples_per_insert {}: insert {} more items",
            table.name,
            self.request.count,
            table.samples_per_insert,
            (missing / table.samples_per_insert).ceil()
        )))
    }

    /// Samples that all rate limiters together would admit now.
    pub(super) fn admitted(&self) -> f64 {
        let most = self.most_of_one();
        let allowances = self.lanes.iter().map(|lane| lane.allowance().min(most));
        allowances.map(|allowed| allowed.max(0.0).floor()).sum()
    }
}
