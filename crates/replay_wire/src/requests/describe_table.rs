use super::*;

/// Definition of a table, by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DescribeTable(pub String);

call!(DescribeTable: Actor => TableConfig);
