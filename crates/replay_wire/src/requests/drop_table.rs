use super::*;

/// Removes a table, by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DropTable(pub String);

call!(DropTable: Operator => (), names: |drop, visit| visit(&mut drop.0));
