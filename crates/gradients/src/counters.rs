//! Counters of aggregators, of DPDK interfaces and of asynchronous workers.

use std::ops::AddAssign;

/// Structs of counters, which are added field by field.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident,)* })*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: u64,)*
        }

        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                $(self.$field += other.$field;)*
            }
        }
    )*};
}

counters! {
    /// Datagrams and segments of an aggregator.
    AggregatorCounters {
        /// Datagrams received.
        received,
        /// Contributions added to a sum.
        counted,
        /// Segments whose sum was sent.
        sums,
        /// Contributions that were in the sum already.
        duplicates,
        /// Contributions that arrived after the threshold was reached.
        late,
        /// Contributions to segments that are discarded, or from before a reset.
        stale,
        /// Contributions to a round too far ahead, or to a segment whose predecessor in the window is not complete.
        ahead,
        /// Status queries (`Help`).
        helped,
        /// Failed or suspended jobs.
        failed,
        /// Datagrams of an unknown session, from another address than the worker's, or without its key.
        strangers,
        /// Datagrams that are not of this protocol, or do not fit the job.
        malformed,
    }

    /// Frames of a DPDK interface.
    FrameCounters {
        /// Received.
        received,
        /// Sent or forwarded.
        sent,
        /// Forwarded from one device of a switch to the other.
        forwarded,
        /// Received, neither for this interface nor forwarded.
        others,
        /// Received with the protocol's DSCP for this interface, but damaged, truncated, fragmented, or for an unknown UDP port.
        broken,
        /// Not sent, as the Ethernet address of the receiver is unknown.
        unresolved,
        /// Not sent, as the device's queue stayed full, or all packets were in use.
        refused,
        /// Dropped, as the handover queue of another core was full.
        overrun,
    }
}

/// Counts of a worker's gradients.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Contributions {
    /// Gradients accepted by `offer`.
    pub offered: u64,
    /// Gradients with all segments in sums. A segment in flight at a restart, or left to the aggregator, may be counted for the next
    /// gradient.
    pub counted: u64,
    /// Gradients with a segment beyond the staleness bound.
    pub dropped: u64,
    /// Segments that missed a round and went into a later one.
    pub late_segments: u64,
    /// Dropped segments.
    pub dropped_segments: u64,
    /// Restarts of a worker that was too far behind.
    pub restarts: u64,
}
