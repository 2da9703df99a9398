//! `fifo`, `lifo`, `max_heap`, `min_heap`: the first item of an order, until it has been sampled `max_times_sampled` times. Its
//! probability is 1. The first two ignore priorities, and do not keep them.

use crate::error::Result;
use crate::schema::TableConfig;
use crate::table::ids::ItemId;

use super::ItemSampler;
use super::ranking::{LockedRanking, RankBy};

/// Outcome of offering an item to a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// Sampled; it has samples left.
    Again,
    /// Sampled for the last time.
    Last,
    /// Not sampled: it is gone, or has no sample left.
    Refused,
    /// Not sampled, and removed: its parameters are too old.
    Expired,
}

pub struct FirstOfRanking(LockedRanking);

impl FirstOfRanking {
    pub fn make(config: &TableConfig, by: RankBy) -> Box<dyn ItemSampler> {
        Box::new(FirstOfRanking(LockedRanking::new(config, by)))
    }

    /// Offers items from the first on to `take`, until it has sampled `count` times or has refused the last one.
    pub fn offer(&self, mut count: u32, mut take: impl FnMut(ItemId) -> Result<Taken>) -> Result<()> {
        while count > 0 {
            // Locked until the item is taken: no other sample may remove it after it was put back.
            let mut order = self.0.lock();
            let Some(id) = order.at(0) else { break };
            let taken = take(id)?;
            count -= u32::from(matches!(taken, Taken::Again | Taken::Last));
            if taken != Taken::Again {
                order.remove(id);
            }
        }
        Ok(())
    }
}

impl ItemSampler for FirstOfRanking {
    fn ranking(&self) -> Option<&LockedRanking> {
        Some(&self.0)
    }

    fn first_of_ranking(&self) -> Option<&FirstOfRanking> {
        Some(self)
    }
}
