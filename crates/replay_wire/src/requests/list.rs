use super::*;
use replay_core::replay::ListedParameters;

/// All tables and parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct List;

impl Call for List {
    // Definitions and versions, which `DescribeTable` and `Stats` also show.
    const ROLE: Role = Role::Actor;
    const REPLY: ReplySize = ReplySize::Report;
    type Reply = Listing;
}

void!(List);

impl Answer for Listing {}

same_fields! {
    listing: Listing { ; tables: "the tables", parameters: "the parameters" }
    listed_parameters: ListedParameters { name, version, bytes }
}
