//! Racks that wait for each other. An aggregator between them and a parent of its own tells that one how many workers it has below it, so all
//! of its racks have to come before it goes up.

use std::time::Instant;

use super::JoinJob;
use super::terms::Terms;
use replay_core::error::{Error, Result};

/// The racks of one job.
pub struct Gathering {
    terms: Terms,
    begun: Instant,
    /// The workers of each rack that has come.
    racks: Vec<Option<u32>>,
}

impl Gathering {
    /// For racks that agree on `terms`.
    pub fn new(terms: Terms, now: Instant) -> Self {
        Gathering {
            terms,
            begun: now,
            racks: vec![None; terms.workers.into()],
        }
    }

    /// Whether nobody waits any more for what was begun then.
    pub fn is_over(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.begun) >= self.terms.deadline
    }

    /// Whether a request with `terms` is of another attempt, and nobody waits here for that.
    pub fn is_of_another(&self, terms: &Terms) -> bool {
        self.terms != *terms && self.total().is_ok()
    }

    /// Takes a rack of `below` workers that asks for `terms`; whether it had not come before.
    ///
    /// # Errors
    /// [`Error::Config`] where it differs from the others.
    pub fn add(&mut self, request: &JoinJob, terms: &Terms, below: u32) -> Result<bool> {
        self.terms.admit(request, terms)?;
        let Some(rack) = self.racks.get_mut(usize::from(request.worker)) else {
            return Err(Error::Config(format!(
                "rack {} of {}: racks are numbered from 0",
                request.worker, request.workers
            )));
        };
        Ok(rack.replace(below).is_none())
    }

    /// The workers of all racks, or the numbers of those that have not come.
    pub fn total(&self) -> std::result::Result<u32, Vec<u16>> {
        let racks = self.racks.iter().zip(0..);
        let absent = racks.filter_map(|(rack, number)| rack.is_none().then_some(number));
        let absent: Vec<u16> = absent.collect();
        match absent.is_empty() {
            true => Ok(self
                .racks
                .iter()
                .flatten()
                .fold(0, |sum, workers| workers.saturating_add(sum))),
            false => Err(absent),
        }
    }
}
