//! Checks that no two servers have copies of one memory.

use std::collections::BTreeMap;
use std::sync::Mutex;

use base::sync::lock;
use replay_link::error::{Error, Result};
use serde_json::Value;

/// Identities of the servers' memories, by address. The connections to all servers of a client share them.
#[derive(Default)]
pub struct MemoryIdentities(Mutex<BTreeMap<String, String>>);

impl MemoryIdentities {
    /// Records the memory of a server from its statistics.
    ///
    /// # Errors
    /// [`Error::CopiedMemory`] when another server has the same one: an item's id would name an item at each.
    pub fn note(&self, address: String, stats: &Value) -> Result<()> {
        let identity = stats["identity"].as_str().unwrap_or_default();
        let mut memories = lock(&self.0);
        memories.remove(&address);
        match memories.iter().find(|(_, known)| *known == identity) {
            Some((other, _)) => Err(Error::CopiedMemory { address, other: other.clone() }),
            None => {
                memories.insert(address, identity.to_owned());
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_of_another_servers_memory_is_refused_with_both_names() {
        let memories = MemoryIdentities::default();
        let note =
            |name: &str, identity: &str| memories.note(name.to_owned(), &serde_json::json!({ "identity": identity }));
        for (name, identity) in [("innet://a", "1"), ("innet://b", "2"), ("innet://b", "2"), ("innet://a", "3")] {
            note(name, identity).unwrap();
        }
        let refused = note("innet://c", "2").unwrap_err().to_string();
        assert!(refused.starts_with("innet://b and innet://c have the same memory"), "{refused}");
        note("innet://c", "1").unwrap();
    }
}
