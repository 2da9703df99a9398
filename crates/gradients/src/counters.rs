//! What aggregators count.

use std::ops::AddAssign;

/// What an aggregator has seen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counters {
    /// Datagrams received.
    pub received: u64,
    /// Contributions counted.
    pub counted: u64,
    /// Segments whose sum was sent.
    pub sums: u64,
    /// Contributions that had been counted before.
    pub duplicates: u64,
    /// Contributions that came after the threshold was reached.
    pub late: u64,
    /// Contributions of segments that are over.
    pub stale: u64,
    /// Contributions that came before their turn.
    pub ahead: u64,
    /// Requests for help.
    pub helped: u64,
    /// Jobs that failed or were halted.
    pub failed: u64,
    /// Datagrams of no session, or from elsewhere than the session's worker, or without its key.
    pub strangers: u64,
    /// Datagrams that are none of this protocol.
    pub malformed: u64,
}

impl AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        let Counters {
            received,
            counted,
            sums,
            duplicates,
            late,
            stale,
            ahead,
            helped,
            failed,
            strangers,
            malformed,
        } = other;
        self.received += received;
        self.counted += counted;
        self.sums += sums;
        self.duplicates += duplicates;
        self.late += late;
        self.stale += stale;
        self.ahead += ahead;
        self.helped += helped;
        self.failed += failed;
        self.strangers += strangers;
        self.malformed += malformed;
    }
}
