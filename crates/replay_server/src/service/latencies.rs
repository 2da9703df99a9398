//! Times that requests spend in a server.

use std::time::Duration;

use serde::{Serialize, Serializer};

use base::histogram::Histogram;
use replay_wire::RequestBody;

/// Histograms of the time from the arrival of a request to its reply, waits included, by kind of request.
#[derive(Debug)]
pub struct Latencies([Histogram; RequestBody::NAMES.len()]);

impl Default for Latencies {
    fn default() -> Self {
        // Bounds from 1 µs to 69 s, in nanoseconds.
        Latencies(std::array::from_fn(|_| Histogram::new(10, 36)))
    }
}

impl Latencies {
    /// Counts a request that is answered.
    pub fn record(&self, request: &RequestBody, elapsed: Duration) {
        let elapsed = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
        self.0[request.kind()].record(elapsed);
    }
}

/// An object with a histogram, in seconds, for each kind that has been requested.
impl Serialize for Latencies {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let stats = RequestBody::NAMES.iter().zip(&self.0);
        let stats = stats.map(|(kind, histogram)| (kind, histogram.stats(1e-9)));
        serializer.collect_map(stats.filter(|(_, stats)| stats["count"] != 0))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_request_counts_for_its_kind() {
        let latencies = Latencies::default();
        assert_eq!(json!(latencies), json!({}));
        latencies.record(&RequestBody::Stats, Duration::from_millis(1));
        latencies.record(&RequestBody::Snapshot, Duration::ZERO);
        let stats = json!(latencies);
        let kinds: Vec<_> = stats.as_object().unwrap().keys().collect();
        assert_eq!(kinds, ["snapshot", "stats"]);
        assert_eq!(stats["stats"]["count"], 1);
    }
}
