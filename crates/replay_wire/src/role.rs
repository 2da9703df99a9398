//! Roles of clients. A server has a token for each role; the token that verifies a client's proof decides which requests it may make.

use serde::{Deserialize, Serialize};

use crate::RequestBody;
use crate::error::{Error, Result};

/// Role of a client. Each one may make the requests of those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Role {
    /// Writes with writers of its own; reads definitions, parameters and statistics.
    Actor,
    /// Samples, updates priorities, publishes parameters, makes tables, removes damaged items, and uses the server's extensions.
    Learner,
    /// Empties and drops tables, drops parameters, saves snapshots.
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

    /// Checks that a client of this role may make a request.
    pub fn check(self, request: &RequestBody) -> Result<()> {
        let required = request.role();
        if self >= required {
            return Ok(());
        }
        Err(Error::Forbidden {
            role: self.name(),
            request: request.name(),
            allowed_by: match required {
                Role::Operator => "the server's operator token (--token-file)",
                _ => "the server's learner token (--learner-token-file) or operator token (--token-file)",
            },
        })
    }
}
