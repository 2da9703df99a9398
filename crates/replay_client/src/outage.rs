//! Servers as their client sees them: outages, a final shutdown, and whose memory they have, since no two may have copies of one.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde_json::Value;

use base::sync::lock;
use base::system;
use base::wait::Wait;
use replay_link::error::{Error, Result};
use replay_link::stack::Address;
use replay_wire::ErrorCode;

/// Outage of a server, shared by all calls of a client, so that it is logged once.
#[derive(Default)]
pub struct Outage(Mutex<OutageState>);

#[derive(Default)]
struct OutageState {
    /// Time of the first failed attempt.
    since: Option<Instant>,
    /// The outage was logged.
    logged: bool,
    /// Connections that calls used so far, new and idle ones.
    connections: u64,
    closed: bool,
}

impl Outage {
    /// Logs `error` once per outage. `longest` is the time for which the call retries.
    pub fn begin(&self, error: &Error, longest: Duration) {
        // Logs without the lock: logging may wait for Python's GIL, whose holder may wait for the lock.
        if lock(&self.0).begin(system::now()) {
            let seconds = longest.as_secs_f64();
            tracing::warn!("waiting up to {seconds}s for a server: {error}");
        }
    }

    /// Marks the server as closed for good.
    pub fn close(&self) {
        lock(&self.0).closed = true;
    }

    /// Ends an outage: a connection is open. `kept` describes a restarted server's data: see [`kept`].
    pub fn end(&self, address: &Address, kept: Option<&str>) {
        let outage = lock(&self.0).end();
        if let Some(since) = outage {
            let seconds = system::elapsed(since).as_secs();
            let kept = kept.map_or(String::new(), |kept| format!(": it was started again, {kept}"));
            tracing::warn!("{address} answers again after {seconds} s{kept}");
        }
    }

    /// Counts the use of an idle connection.
    pub fn used(&self) {
        lock(&self.0).connections += 1;
    }

    /// Connections that calls used so far, new and idle ones.
    pub fn connections(&self) -> u64 {
        lock(&self.0).connections
    }

    /// # Errors
    /// [`ErrorCode::Closed`] for a server that was closed for good.
    pub fn check(&self, address: &Address) -> Result<()> {
        match lock(&self.0).closed {
            true => {
                Err(Error::Remote { code: ErrorCode::Closed, message: format!("the server at {address} is closed") })
            }
            false => Ok(()),
        }
    }
}

impl OutageState {
    /// Records a failed attempt; returns whether to log the outage now. An outage of a server that has answered before is logged at once.
    /// Otherwise the server is probably still starting.
    fn begin(&mut self, now: Instant) -> bool {
        let since = *self.since.get_or_insert(now);
        let due = self.connections > 0 || now - since >= Wait::REPORT_AFTER;
        due && !std::mem::replace(&mut self.logged, true)
    }

    /// Records a connection; returns the start of the outage if it was logged.
    fn end(&mut self) -> Option<Instant> {
        self.connections += 1;
        self.closed = false;
        let since = self.since.take();
        since.filter(|_| std::mem::take(&mut self.logged))
    }
}

/// Data that a restarted server has kept, from its statistics.
pub fn kept(stats: &Value) -> String {
    match stats["snapshots"]["restored"]["tables"].as_object() {
        Some(tables) => {
            let steps: u64 = tables.values().filter_map(Value::as_u64).sum();
            format!("with {steps} steps of its snapshot")
        }
        None => "without a snapshot".to_owned(),
    }
}

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
    use serde_json::json;

    use super::*;

    #[test]
    fn a_server_that_was_started_again_has_kept_what_its_snapshot_had() {
        let stats = json!({"snapshots": {"restored": {"path": "a", "tables": {"s": 1, "t": 20}}}});
        assert_eq!(kept(&stats), "with 21 steps of its snapshot");
        for without in [json!({}), json!({"snapshots": {"restored": null}})] {
            assert_eq!(kept(&without), "without a snapshot");
        }
    }

    #[test]
    fn a_server_that_starts_is_named_after_a_while_and_one_that_breaks_off_at_once() {
        let mut state = OutageState::default();
        let start = Instant::now();
        assert!(!state.begin(start));
        assert_eq!(state.end(), None, "a quick start is not in the log");
        let mut state = OutageState::default();
        assert!(!state.begin(start));
        assert!(state.begin(start + Wait::REPORT_AFTER));
        assert!(!state.begin(start + 2 * Wait::REPORT_AFTER), "once");
        assert_eq!(state.end(), Some(start));
        assert!(state.begin(start), "its connection broke");
        assert_eq!(state.end(), Some(start));
        assert_eq!(state.end(), None);
    }

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
