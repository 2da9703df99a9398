use super::*;

/// Removes the steps and items of a table, by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmptyTable(pub String);

impl Call for EmptyTable {
    const ROLE: Role = Role::Operator;
    type Reply = ();
}

text!(EmptyTable);
