use super::*;

/// Saves the server's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot;

impl Call for Snapshot {
    const ROLE: Role = Role::Operator;
    type Reply = ();
}

void!(Snapshot);
