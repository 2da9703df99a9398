//! Roles of clients. A server has a token for each role; the token that a client proves to know decides which requests it may
//! make.

use serde::{Deserialize, Serialize};

use crate::RequestBody;
use crate::error::{Error, Result};

/// Role of a client. Each one may make the requests of those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Role {
    /// Writes with writers of its own; reads definitions, parameters and statistics.
    Actor,
    /// Samples, updates priorities, publishes parameters, makes tables, joins gradient jobs, removes damaged items.
    Learner,
    /// Empties and drops tables, saves snapshots.
    Operator,
}

impl Role {
    /// Name for errors and logs.
    pub fn name(self) -> &'static str {
        match self {
            Role::Actor => "actor",
            Role::Learner => "learner",
            Role::Operator => "operator",
        }
    }

    /// The lowest role that may make a request.
    fn required(request: &RequestBody) -> Self {
        match request {
            RequestBody::Hello(_)
            | RequestBody::Authenticate(_)
            | RequestBody::DescribeTable(_)
            | RequestBody::OpenWriter { .. }
            | RequestBody::Push(_)
            | RequestBody::CloseWriter { .. }
            | RequestBody::GetParameters { .. }
            | RequestBody::Stats
            // Definitions and versions, which `DescribeTable` and `Stats` also show.
            | RequestBody::List => Role::Actor,
            RequestBody::CreateTable(_)
            | RequestBody::Sample(_)
            | RequestBody::UpdatePriorities { .. }
            // A learner could also remove an item by a priority of 0, and without this request it would sample a damaged one
            // again and again.
            | RequestBody::ReportCorrupt { .. }
            | RequestBody::PutParameters { .. }
            | RequestBody::JoinGradients { .. } => Role::Learner,
            RequestBody::EmptyTable(_) | RequestBody::DropTable(_) | RequestBody::Snapshot => {
                Role::Operator
            }
        }
    }

    /// Checks that a client of this role may make a request.
    ///
    /// # Errors
    /// [`Error::Forbidden`].
    pub fn check(self, request: &RequestBody) -> Result<()> {
        let required = Role::required(request);
        if self >= required {
            return Ok(());
        }
        Err(Error::Forbidden {
            role: self.name(),
            request: request.name(),
            allowed_by: match required {
                Role::Operator => "the server's operator token (--token-file)",
                _ => {
                    "the server's learner token (--learner-token-file) or operator token (--token-file)"
                }
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_role_request_and_setting() {
        let sample = RequestBody::PutParameters {
            version: 0,
            id: 1,
            name: "policy".into(),
            bytes: bytes::Bytes::new(),
        };
        let drop = RequestBody::DropTable("steps".into());
        assert!(Role::Learner.check(&sample).is_ok() && Role::Operator.check(&drop).is_ok());
        for (role, request, parts) in [
            (
                Role::Actor,
                sample,
                ["actor", "put_parameters", "--learner-token-file"],
            ),
            (
                Role::Learner,
                drop,
                ["learner", "drop_table", "--token-file"],
            ),
        ] {
            let error = role.check(&request).unwrap_err().to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }
}
