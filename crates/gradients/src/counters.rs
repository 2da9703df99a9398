//! Counters of aggregators, of DPDK interfaces and of asynchronous workers.

use std::ops::AddAssign;

/// Structs of counters with their help texts. Counters are added field by field.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $help:literal,)* })*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
        pub struct $name {
            $(#[doc = $help] pub $field: u64,)*
        }

        impl $name {
            /// Name and help text of each counter.
            pub const HELP: [(&'static str, &'static str); [$($help),*].len()] = [$((stringify!($field), $help)),*];

            /// Name and value of each counter.
            pub fn named(&self) -> [(&'static str, u64); Self::HELP.len()] {
                [$((stringify!($field), self.$field)),*]
            }
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
        received: "Datagrams received",
        counted: "Contributions added to a sum",
        sums: "Segments whose sum was sent",
        duplicates: "Contributions that were in the sum already",
        late: "Contributions that arrived after the threshold was reached",
        stale: "Contributions to segments that are discarded, or from before a reset",
        ahead: "Contributions to a round too far ahead, or to a segment whose predecessor in the window is not complete",
        helped: "Status queries of workers",
        failed: "Failed or suspended jobs",
        strangers: "Datagrams of an unknown session, without its key, or from another address than its worker",
        malformed: "Datagrams that are not of this protocol, or do not fit the job",
    }

    /// Frames of a DPDK interface.
    FrameCounters {
        received: "Frames received",
        sent: "Frames sent or forwarded",
        forwarded: "Frames forwarded from one device of a switch to the other",
        others: "Frames received, neither for this interface nor forwarded",
        broken: "Frames of gradients for this interface, but damaged, truncated, fragmented, or for an unknown UDP port",
        unresolved: "Frames not sent, as the Ethernet address of the receiver is unknown",
        refused: "Frames not sent, as the device's queue stayed full, or all packets were in use",
        overrun: "Frames dropped, as the handover queue of another core was full",
    }

    /// Gradients of an asynchronous worker.
    Contributions {
        offered: "Gradients accepted by `offer`",
        counted: "Gradients with all segments in sums; a segment in flight at a restart, or left to the aggregator, may be counted for the next \
                  gradient",
        dropped: "Gradients with a segment beyond the staleness bound",
        late_segments: "Segments that missed a round and went into a later one",
        dropped_segments: "Dropped segments",
        restarts: "Restarts of a worker that was too far behind",
    }
}
