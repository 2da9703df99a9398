//! Racks that have asked to join a job. An aggregator between racks and a parent passes the parent its number of workers, which is known
//! once every rack has asked.

use std::time::Instant;

use super::settings::JobSettings;
use super::{Error, JoinJob, Result};

/// Racks of one job.
pub struct PendingRacks {
    settings: JobSettings,
    started: Instant,
    /// Workers of each rack that has asked.
    workers: Vec<Option<u32>>,
}

impl PendingRacks {
    /// A job with these settings, without racks.
    pub fn new(settings: JobSettings, now: Instant) -> Self {
        PendingRacks { settings, started: now, workers: vec![None; settings.workers.into()] }
    }

    /// Whether the deadline of the first request has passed, so that no rack waits any more.
    pub fn is_expired(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.started) >= self.settings.deadline
    }

    /// Whether a request with `settings` begins a new job of the same name: the settings differ, and all racks of this one have asked.
    pub fn is_superseded_by(&self, settings: &JobSettings) -> bool {
        self.settings != *settings && self.total().is_ok()
    }

    /// Adds a rack with `below` workers. `false` if it had asked before.
    ///
    /// # Errors
    /// [`Error::Config`] if its settings differ from the first rack's.
    pub fn add(&mut self, request: &JoinJob, settings: &JobSettings, below: u32) -> Result<bool> {
        self.settings.check_same(request, settings)?;
        let Some(rack) = self.workers.get_mut(usize::from(request.worker)) else {
            return Err(Error::Config(format!(
                "rack {} of {}: racks are numbered from 0",
                request.worker, request.workers
            )));
        };
        Ok(rack.replace(below).is_none())
    }

    /// Workers of all racks; `Err` has the numbers of the racks that have not asked.
    pub fn total(&self) -> std::result::Result<u32, Vec<u16>> {
        let racks = self.workers.iter().zip(0..);
        let absent = racks.filter_map(|(rack, number)| rack.is_none().then_some(number));
        let absent: Vec<u16> = absent.collect();
        if !absent.is_empty() {
            return Err(absent);
        }
        let workers = self.workers.iter().flatten();
        Ok(workers.fold(0, |sum, workers| workers.saturating_add(sum)))
    }
}
