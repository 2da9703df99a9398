//! Statistics of the service for Prometheus.

use replay_server::plugin::{Metric, MetricGroup, MetricType};

use MetricType::{Counter, Gauge};

/// All groups.
pub const GROUPS: &[MetricGroup] = &[
    MetricGroup { prefix: "gradients", pointer: "", label: None, metrics: GRADIENTS },
    MetricGroup { prefix: "gradients_job", pointer: "/jobs", label: Some("job"), metrics: JOB },
    MetricGroup { prefix: "gradients_frames", pointer: "/frames", label: None, metrics: FRAMES },
];

const GRADIENTS: &[Metric] = &[
    (Gauge, "threads", "Threads that sum gradients"),
    (Gauge, "max_bytes", "Limit of the bytes of all jobs"),
    (Counter, "received", "Received datagrams"),
    (Counter, "counted", "Counted contributions"),
    (Counter, "sums", "Segments whose sum was sent"),
    (Counter, "duplicates", "Contributions that had been counted before"),
    (Counter, "late", "Contributions after the threshold was reached"),
    (Counter, "stale", "Contributions to segments that are over"),
    (Counter, "ahead", "Contributions before their turn"),
    (Counter, "helped", "Segments that workers asked for"),
    (Counter, "failed", "Failed or halted jobs"),
    (Counter, "strangers", "Datagrams of unknown senders"),
    (Counter, "malformed", "Datagrams of another protocol, or that do not fit the job"),
];

const FRAMES: &[Metric] = &[
    (Counter, "received", "Received frames"),
    (Counter, "sent", "Sent frames"),
    (Counter, "forwarded", "Frames passed from one port of a switch to the other"),
    (Counter, "others", "Frames of no use here"),
    (Counter, "broken", "Damaged frames"),
    (Counter, "unresolved", "Frames without an answer of ARP"),
    (Counter, "refused", "Frames that the device did not accept"),
    (Counter, "overrun", "Frames that found a full queue"),
];

const JOB: &[Metric] = &[
    (Gauge, "workers", "Workers at this server"),
    (Gauge, "world", "Workers of the job"),
    (Gauge, "joined", "Workers at this server that have joined"),
    (Gauge, "threshold", "Contributions that make a sum"),
    (Gauge, "round", "Newest round with a contribution"),
    (Gauge, "halted", "Whether nothing is summed"),
];
