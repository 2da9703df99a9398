//! `uniform`: at random, each live item with the same probability. Priorities are ignored and not kept.

use super::ItemSampler;

pub struct Uniform;

impl ItemSampler for Uniform {}
