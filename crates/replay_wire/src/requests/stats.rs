use super::*;

/// Counters and gauges, as one JSON object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stats;

impl Call for Stats {
    const ROLE: Role = Role::Actor;
    const REPLY: ReplySize = ReplySize::Report;
    type Reply = String;
}

void!(Stats);

impl Answer for String {
    fn words(&self) -> usize {
        64 + self.len() / 8
    }
}
