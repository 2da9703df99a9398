//! Statistics of the service for Prometheus.

use gradients::{AggregatorCounters, FrameCounters};
use replay_server::plugin::{Metric, MetricGroup, MetricType};

use MetricType::{Counter, Gauge};

/// All groups.
pub const GROUPS: &[MetricGroup] = &[
    MetricGroup { prefix: "gradients", pointer: "", label: None, metrics: GRADIENTS },
    MetricGroup { prefix: "gradients", pointer: "", label: None, metrics: &counters(AggregatorCounters::HELP) },
    MetricGroup { prefix: "gradients_job", pointer: "/jobs", label: Some("job"), metrics: JOB },
    MetricGroup {
        prefix: "gradients_frames",
        pointer: "/frames",
        label: None,
        metrics: &counters(FrameCounters::HELP),
    },
];

const fn counters<const N: usize>(help: [(&'static str, &'static str); N]) -> [Metric; N] {
    let mut metrics = [(Counter, "", ""); N];
    let mut at = 0;
    while at < N {
        metrics[at] = (Counter, help[at].0, help[at].1);
        at += 1;
    }
    metrics
}

const GRADIENTS: &[Metric] =
    &[(Gauge, "threads", "Threads that sum gradients"), (Gauge, "max_bytes", "Limit of the bytes of all jobs")];

const JOB: &[Metric] = &[
    (Gauge, "workers", "Workers at this server"),
    (Gauge, "world", "Workers of the job"),
    (Gauge, "joined", "Workers at this server that have joined"),
    (Gauge, "threshold", "Contributions that make a sum"),
    (Gauge, "round", "Newest round with a contribution"),
    (Gauge, "halted", "Whether nothing is summed"),
];
