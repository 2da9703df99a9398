//! `fifo`: the oldest item, until it has been sampled `max_times_sampled` times. Priorities are ignored and not kept. Samples
//! take no lock.

use crate::error::Result;
use crate::schema::TableConfig;
use crate::table::ids::ItemId;
use crate::table::items::Items;

use super::order::InsertionOrder;
use super::{ItemSampler, Order, TableSampler, Taken};

pub struct Fifo(InsertionOrder);

impl ItemSampler for Fifo {
    fn make(config: &TableConfig) -> TableSampler {
        let order = InsertionOrder::new(config.capacity as u32);
        TableSampler::Other(Box::new(Fifo(order)))
    }

    fn check(config: &TableConfig) -> std::result::Result<(), String> {
        if config.max_times_sampled > 0 {
            return Ok(());
        }
        Err("the fifo sampler needs max_times_sampled of at least 1: else every sample is the oldest item".into())
    }

    fn bytes(config: &TableConfig) -> u64 {
        InsertionOrder::bytes(config.capacity as u32)
    }

    fn has_room(&self, items: &Items, count: usize) -> bool {
        self.0.has_room(count, |id| items.confirm(id))
    }

    fn insert(&self, id: ItemId, _priority: f64) {
        self.0.append(id);
    }

    // No `put_back`: a live item keeps its position.
    fn order(&self) -> Option<&dyn Order> {
        Some(self)
    }

    fn ids<'a>(&'a self, items: &'a Items) -> Box<dyn Iterator<Item = ItemId> + 'a> {
        let mut from = 0;
        Box::new(std::iter::from_fn(move || {
            let (position, id) = self.0.first_live(from, |id| items.confirm(id))?;
            from = position + 1;
            Some(id)
        }))
    }
}

impl Order for Fifo {
    fn offer(&self, items: &Items, mut count: u32, take: &mut dyn FnMut(ItemId) -> Result<Taken>) -> Result<()> {
        let mut from = 0;
        while count > 0
            && let Some((position, id)) = self.0.first_live(from, |id| items.confirm(id))
        {
            let taken = take(id)?;
            count -= u32::from(taken != Taken::Refused);
            from = position + u64::from(taken != Taken::Again);
        }
        Ok(())
    }
}
