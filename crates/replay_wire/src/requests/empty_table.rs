use super::*;

/// Removes the steps and items of a table, by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmptyTable(pub String);

call!(EmptyTable: Operator => (), names: |empty, visit| visit(&mut empty.0), command: |empty, memory| {
    memory.empty_table(&empty.0)
});
