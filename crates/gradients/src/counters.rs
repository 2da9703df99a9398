//! Counters of aggregators and of DPDK interfaces.

use std::ops::AddAssign;

/// Datagrams and segments of an aggregator.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct AggregatorCounters {
    /// Datagrams received.
    pub received: u64,
    /// Contributions added to a sum.
    pub counted: u64,
    /// Segments whose sum was sent.
    pub sums: u64,
    /// Contributions that were in the sum already.
    pub duplicates: u64,
    /// Contributions that arrived after the threshold was reached.
    pub late: u64,
    /// Contributions to segments that are discarded, or from before a reset.
    pub stale: u64,
    /// Contributions to segments whose predecessor in the window is not complete.
    pub ahead: u64,
    /// Status queries (`Help`).
    pub helped: u64,
    /// Failed or suspended jobs.
    pub failed: u64,
    /// Datagrams of an unknown session, from another address than the worker's, or without its key.
    pub strangers: u64,
    /// Datagrams that are not of this protocol.
    pub malformed: u64,
}

impl AddAssign for AggregatorCounters {
    fn add_assign(&mut self, other: Self) {
        let AggregatorCounters {
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

/// Frames of a DPDK interface.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct FrameCounters {
    /// Received.
    pub received: u64,
    /// Sent or forwarded.
    pub sent: u64,
    /// Forwarded from one device of a switch to the other.
    pub forwarded: u64,
    /// Received, neither for this interface nor forwarded.
    pub others: u64,
    /// Marked and for this interface, but damaged, truncated, fragmented, or for a UDP port that it does not have.
    pub broken: u64,
    /// Not sent, as the Ethernet address of the receiver is unknown.
    pub unresolved: u64,
    /// Not sent, as the device's queue stayed full, or all packets were in use.
    pub refused: u64,
    /// Dropped, as the handover queue of another core was full.
    pub overrun: u64,
}

impl AddAssign for FrameCounters {
    fn add_assign(&mut self, other: Self) {
        self.received += other.received;
        self.sent += other.sent;
        self.forwarded += other.forwarded;
        self.others += other.others;
        self.broken += other.broken;
        self.unresolved += other.unresolved;
        self.refused += other.refused;
        self.overrun += other.overrun;
    }
}
