//! Samplers; [`ItemSampler`] is their interface to a table. To add one, add a file here, a variant of [`Sampler`], and its line in
//! [`make`] and [`bytes`].
//!
//! | file | subject |
//! | --- | --- |
//! | `prioritized` | `prioritized`, `uniform`: at random, by the masses of the sum tree, without a lock |
//! | `ordered` | the first item of an order: `fifo`, `lifo`, `max_heap`, `min_heap` |
//! | `rank_based` | at random, by the rank of the priority |
//! | `order` | the order of both, under one lock |

mod ordered;
mod prioritized;
mod rank_based;
mod sampler;

pub mod order;

use crate::schema::{Sampler, TableConfig};

use order::{LockedOrder, RankBy};
use prioritized::{Prioritized, Uniform};
use rank_based::RankBased;

pub use ordered::{Ordered, Taken};
pub use sampler::{EQUAL_MASS, ItemSampler, Total};

/// The sampler of a table of this valid definition, without items.
pub fn make(config: &TableConfig) -> Box<dyn ItemSampler> {
    match config.sampler {
        Sampler::Prioritized => Prioritized::make(config),
        Sampler::Uniform => Box::new(Uniform),
        Sampler::Fifo => Ordered::make(config, RankBy::Oldest),
        Sampler::Lifo => Ordered::make(config, RankBy::Newest),
        Sampler::MaxHeap => Ordered::make(config, RankBy::Highest),
        Sampler::MinHeap => Ordered::make(config, RankBy::Lowest),
        Sampler::RankBased => Box::new(RankBased::new(config)),
    }
}

pub fn bytes(config: &TableConfig) -> u64 {
    match config.sampler {
        Sampler::Prioritized | Sampler::Uniform => 0,
        Sampler::Fifo | Sampler::Lifo | Sampler::MaxHeap | Sampler::MinHeap => LockedOrder::bytes(config),
        Sampler::RankBased => RankBased::bytes(config),
    }
}
