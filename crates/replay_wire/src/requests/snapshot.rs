use super::*;

/// Saves the server's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot;

call!(Snapshot: Operator => (), names: |_, _| {});
