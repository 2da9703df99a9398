use super::*;
use replay_core::replay::ListedParameters;

/// All tables and parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct List;

// Allowed for actors, as `DescribeTable` and `Stats` show the same definitions and versions.
call!(List: Actor => Listing, large: true, names: |_, _| {});

same_fields! {
    listing: Listing { ; tables: "the tables", parameters: "the parameters" }
    listed_parameters: ListedParameters { name, version, bytes }
}
