use super::*;

/// Removes a table, by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DropTable(pub String);

call!(DropTable: Operator => ());
