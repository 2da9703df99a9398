use super::*;

/// Removes a table, by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DropTable(pub String);

impl Call for DropTable {
    const ROLE: Role = Role::Operator;
    type Reply = ();
}

text!(DropTable);
