use super::*;

/// Definition of a table, by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DescribeTable(pub String);

impl Call for DescribeTable {
    const ROLE: Role = Role::Actor;
    type Reply = TableConfig;
}

text!(DescribeTable);
