//! `uniform`: at random, each live item with the same probability. Priorities are ignored and not kept.

use crate::schema::TableConfig;

use super::{ItemSampler, TableSampler};

pub struct Uniform;

impl ItemSampler for Uniform {
    fn make(_: &TableConfig) -> TableSampler {
        TableSampler::Other(Box::new(Uniform))
    }
}
