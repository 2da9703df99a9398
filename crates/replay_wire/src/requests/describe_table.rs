use super::*;

/// Definition of a table, by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DescribeTable(pub String);

call!(DescribeTable: Actor => TableConfig, names: |describe, visit| visit(&mut describe.0));
