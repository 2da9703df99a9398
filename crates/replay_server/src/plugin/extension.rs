//! An extension of a running server: requests over connections of its own, statistics.

use std::sync::Arc;

use bytes::Bytes;
use event_listener::{Event, EventListener};
pub use prometheus_client::metrics::MetricType;
use replay_core::table::Attempt;
use serde_json::Value;

use replay_link::error::Result;

/// Longest message in either direction, in bytes: messages do not count in the limits of memory for requests and replies.
pub const MAX_MESSAGE: u64 = 16 << 10;

/// An extension of a running server.
pub trait Extension: Send + Sync {
    /// Name of its plug-in.
    fn name(&self) -> &'static str;
    /// Starts a session for a new connection.
    fn session(self: Arc<Self>) -> Box<dyn Session>;
    /// Own address, for the server's ready line.
    fn address(&self) -> Option<String> {
        None
    }
    /// Reason for which requests to the memory are refused; `None` if the server has a memory.
    fn instead_of_memory(&self) -> Option<&'static str> {
        None
    }
    /// Statistics: a JSON object, which the server's statistics have under the name of the extension.
    fn stats(&self) -> Value;
    /// Statistics exported to Prometheus. The live page also shows groups with a label.
    fn metrics(&self) -> &'static [MetricGroup] {
        &[]
    }
}

/// Requests of one connection. Dropped when the connection ends.
pub trait Session {
    /// One attempt at a request of at most [`MAX_MESSAGE`] bytes; a blocked one is tried again after [`Session::changed`].
    ///
    /// # Errors
    /// The error to answer the request with.
    fn attempt(&mut self, message: &Bytes) -> Result<Attempt<Bytes>>;
    /// Listens for the next change that may unblock a request. A blocked attempt must not notify, or it would wake itself forever. The
    /// default is for extensions that never block.
    fn changed(&self) -> EventListener {
        Event::new().listen()
    }
    /// Called when the connection ends while the server keeps running.
    fn end(&mut self) {}
}

/// A group of metrics: the members of one JSON object or, with a label, of each object in it.
#[derive(Debug)]
pub struct MetricGroup {
    /// Prefix of the metrics' names.
    pub prefix: &'static str,
    /// JSON pointer to the object within the extension's statistics; empty for all of them.
    pub pointer: &'static str,
    /// Name of the label; its values are the names of the objects.
    pub label: Option<&'static str>,
    /// Type of each metric, name of its statistic, and help.
    pub metrics: &'static [Metric],
}

/// Type of a metric, name of its statistic, and help.
pub type Metric = (MetricType, &'static str, &'static str);
