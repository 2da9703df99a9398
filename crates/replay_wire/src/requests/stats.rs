use super::*;

/// Counters and gauges, as one JSON object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stats;

call!(Stats: Actor => String, large: true, names: |_, _| {});
