//! Statistics in the OpenMetrics text format, which Prometheus reads. Every number, flag and histogram is a metric, named by the prefix of
//! its group and its own name.

use std::collections::BTreeMap;
use std::fmt::{Error, Result};
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text};
use prometheus_client::registry::Registry;
use serde_json::{Value, json};

use crate::plugin::{Extension, Metric, MetricGroup, MetricType};

/// Media type of the encoded text.
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

use MetricType::{Counter, Gauge, Histogram};

const MEMORY: &[Metric] = &[
    (Gauge, "uptime_s", "Time since the memory was created"),
    (Gauge, "max_bytes", "Limit of bytes"),
    (Gauge, "reserved_bytes", "Bytes of tables at their capacity, and of parameters"),
    (Gauge, "receive_bytes", "Bytes in receive buffers"),
    (Gauge, "reply_bytes", "Bytes of unread replies"),
    (Gauge, "bytes", "Bytes held by tables"),
];

const TABLE: &[Metric] = &[
    (Gauge, "items", "Live items"),
    (Gauge, "items_with_mass", "Live items with a priority above zero"),
    (Gauge, "steps", "Live steps"),
    (Gauge, "capacity", "Limit of steps"),
    (Gauge, "bytes", "Bytes held"),
    (Gauge, "capacity_bytes", "Limit of bytes"),
    (Gauge, "live_bytes", "Bytes of live steps"),
    (Gauge, "pinned_bytes", "Bytes of evicted steps that are still read"),
    (Gauge, "connected_writers", "Writers with a connection, or of the server's process"),
    (Gauge, "resumable_writers", "Writers whose connection has ended, and that may come back"),
    (Gauge, "streams", "Streams of all writers"),
    (Gauge, "last_push_s", "Time since the last push"),
    (Gauge, "without_writers_s", "Time without a connected writer; 0 while one is connected"),
    (Gauge, "total_mass", "Sum of the priorities after the exponent; none for samplers with an order"),
    (Gauge, "max_priority", "Priority of items inserted without one"),
    (Gauge, "failed", "Whether a call panicked while it changed the table"),
    (Gauge, "samples_per_insert", "Wanted samples for each inserted item; 0 is any number"),
    (Gauge, "slack", "Sampled items by which the replay ratio may be off"),
    (Gauge, "min_size", "Least items for sampling"),
    (Gauge, "queue_size", "Items for which a queue has room; 0 for other tables"),
    (Gauge, "leased_items", "Items that readers have and have not acknowledged"),
    (Gauge, "max_version_lag", "Versions by which writers may be behind; 0 is any number"),
    (Gauge, "max_sample_lag", "Versions by which sampled items may be behind; 0 is any number"),
    (Gauge, "limiter_inserted", "Inserted items that the rate limiter counts"),
    (Gauge, "limiter_sampled", "Sampled items that the rate limiter counts"),
    (Gauge, "waiting_pushes", "Pushes that wait"),
    (Gauge, "waiting_samples", "Samples that wait"),
    (Gauge, "outdated_pushes", "Pushes that wait until their writer gets newer parameters"),
    (Counter, "inserted_steps", "Inserted steps"),
    (Counter, "inserted_items", "Inserted items"),
    (Counter, "late_items", "Items whose first step had been evicted"),
    (Counter, "evicted_steps", "Evicted steps"),
    (Counter, "evicted_items", "Evicted items"),
    (Counter, "evicted_unread_items", "Items evicted with samples left (max_times_sampled)"),
    (Counter, "expired_items", "Items removed at a draw for their versions (max_sample_lag)"),
    (Counter, "sampled_items", "Sampled items"),
    (Counter, "updated_priorities", "Updated priorities"),
    (Counter, "stale_updates", "Updates of items that were gone"),
    (Counter, "saturated_priorities", "Priorities stored as the largest one"),
    (Counter, "rounded_up_priorities", "Priorities above 0 stored as the smallest one"),
    (Counter, "corrupt_items", "Items that did not decode"),
    (Counter, "panics", "Calls that panicked while they changed the table"),
    (Counter, "blocked_pushes", "Pushes that had to wait"),
    (Counter, "blocked_samples", "Samples that had to wait"),
    (Histogram, "version_lag", "Versions by which writers were behind when their pushes were stored"),
    (Histogram, "sample_lag", "Versions by which sampled items were behind"),
    (Histogram, "sample_age", "Steps inserted between an item's insertion and its sampling"),
];

const WRITER: &[Metric] = &[
    (Counter, "steps", "Steps of open writers of this name"),
    (Counter, "blocked_pushes", "Pushes of open writers of this name that had to wait"),
    (Counter, "waited_s", "Waits of open writers of this name"),
    (Gauge, "connected", "Connected writers of this name"),
    (Gauge, "last_push_s", "Time since the last push of a writer of this name"),
];

const PARAMETERS: &[Metric] = &[
    (Gauge, "version", "Newest version"),
    (Gauge, "bytes", "Bytes of the newest version"),
    (Histogram, "lag", "Versions by which readers were behind"),
];

const SERVER: &[Metric] = &[
    (Gauge, "connections", "Open connections"),
    (Counter, "connections_opened", "Accepted connections"),
    (Counter, "connections_refused", "Refused connections"),
    (Counter, "failed_logins", "Handshakes and HTTP requests without a valid token, or with invalid TLS"),
    (Counter, "bad_frames", "Connections closed after an invalid frame"),
    (Counter, "slow_readers_dropped", "Connections closed as a reply was not read in time"),
    (Counter, "requests", "Received requests"),
    (Counter, "errors", "Error replies"),
    (Counter, "retries", "Repeated attempts at waiting requests"),
    (Counter, "bytes_received", "Bytes of requests"),
    (Counter, "bytes_sent", "Bytes of replies"),
];

const LATENCY: &[Metric] =
    &[(Histogram, "latency_s", "Time from the arrival of a request to its reply, waits included")];

const TLS: &[Metric] =
    &[(Gauge, "certificate_expires_s", "Time until a certificate of the server's chain expires; negative after it")];

const SNAPSHOTS: &[Metric] = &[
    (Counter, "saved", "Saved snapshots"),
    (Counter, "failed", "Snapshots that could not be saved"),
    (Gauge, "age_s", "Time since the last snapshot was complete"),
    (Gauge, "duration_s", "Time that the last snapshot took"),
    (Gauge, "bytes", "Bytes of the last snapshot"),
];

/// Encodes a server's statistics.
///
/// # Errors
/// [`Error`], which a `String` never causes.
pub(super) fn encode(stats: Value, extensions: &[Arc<dyn Extension>]) -> std::result::Result<String, Error> {
    let extensions = extensions.iter();
    let groups = extensions.map(|extension| (extension.name(), extension.metrics()));
    let groups = groups.collect();
    let mut registry = Registry::with_prefix("innet");
    registry.register_collector(Box::new(Scrape(stats, groups)));
    let mut text = String::new();
    text::encode(&mut text, &registry)?;
    Ok(text)
}

/// Statistics at one time, and the groups of each extension.
#[derive(Debug)]
struct Scrape(Value, Vec<(&'static str, &'static [MetricGroup])>);

type Labels = Vec<(&'static str, String)>;

/// Labels and statistics of one member of a group.
type Member = (Labels, Value);

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result {
        let Scrape(stats, extensions) = self;
        let server = &stats["server"];
        let information = [("release", text_of(&server["release"])), ("incarnation", text_of(&stats["incarnation"]))];
        encoder
            .encode_descriptor("server", "Release, and creation of the memory", None, MetricType::Info)?
            .encode_info(&information)?;
        let mut group = |prefix, metrics, members: Vec<Member>| encode_group(&mut encoder, prefix, metrics, &members);
        group("memory", MEMORY, single(stats))?;
        group("server", SERVER, single(server))?;
        let latencies = named("request", &server["latency_s"]);
        let latencies = latencies.map(|(labels, times)| (labels, json!({"latency_s": times})));
        group("server", LATENCY, latencies.collect())?;
        group("table", TABLE, named("table", &stats["tables"]).collect())?;
        group("writer", WRITER, writers(&stats["tables"]))?;
        group("parameters", PARAMETERS, named("name", &stats["parameters"]).collect())?;
        for (name, metrics) in [("tls", TLS), ("snapshots", SNAPSHOTS)] {
            if stats[name].is_object() {
                group(name, metrics, single(&stats[name]))?;
            }
        }
        for (extension, groups) in extensions {
            for of in *groups {
                let Some(stats) = stats[extension].pointer(of.pointer) else {
                    continue;
                };
                let members = match of.label {
                    Some(label) => named(label, stats).collect(),
                    None => single(stats),
                };
                group(of.prefix, of.metrics, members)?;
            }
        }
        Ok(())
    }
}

fn single(member: &Value) -> Vec<Member> {
    vec![(Vec::new(), member.clone())]
}

/// The members of an object, with their names as a label.
fn named(label: &'static str, members: &Value) -> impl Iterator<Item = Member> {
    let members = members.as_object().into_iter().flatten();
    members.map(move |(name, member)| (vec![(label, name.clone())], member.clone()))
}

/// The writers of all tables. Writers of a table with equal names are added up.
fn writers(tables: &Value) -> Vec<Member> {
    let mut sums = BTreeMap::<(String, String), BTreeMap<&str, f64>>::new();
    for (table, stats) in tables.as_object().into_iter().flatten() {
        for writer in stats["by_writer"].as_array().into_iter().flatten() {
            let key = (table.clone(), text_of(&writer["name"]));
            let sum = sums.entry(key).or_default();
            for (_, statistic, _) in WRITER {
                let value = &writer[*statistic];
                // A writer that has not pushed has no last push.
                let Some(number) = value.as_f64().or_else(|| value.as_bool().map(|yes| u8::from(yes).into())) else {
                    continue;
                };
                let known = sum.get(statistic).copied();
                let number = match *statistic {
                    "last_push_s" => known.unwrap_or(number).min(number),
                    _ => known.unwrap_or_default() + number,
                };
                sum.insert(*statistic, number);
            }
        }
    }
    let member = |((table, writer), sum)| {
        let labels = vec![("table", table), ("writer", writer)];
        (labels, json!(sum))
    };
    sums.into_iter().map(member).collect()
}

fn text_of(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn encode_group(encoder: &mut DescriptorEncoder, prefix: &str, metrics: &[Metric], members: &[Member]) -> Result {
    for (metric_type, statistic, help) in metrics {
        // Prometheus names units in full.
        let name = match statistic.strip_suffix("_s") {
            Some(quantity) => format!("{prefix}_{quantity}_seconds"),
            None => format!("{prefix}_{statistic}"),
        };
        let mut family = encoder.encode_descriptor(&name, help, None, *metric_type)?;
        for (labels, stats) in members {
            let value = &stats[*statistic];
            match labels.is_empty() {
                true => encode_value(&mut family, *metric_type, value)?,
                false => {
                    let mut member = family.encode_family(labels)?;
                    encode_value(&mut member, *metric_type, value)?;
                }
            }
        }
    }
    Ok(())
}

/// Encodes a number, a flag, a reason (1 if present) or a histogram; nothing for a missing value.
fn encode_value(encoder: &mut MetricEncoder, metric_type: MetricType, value: &Value) -> Result {
    if let Histogram = metric_type {
        let number = |value: &Value| value.as_f64().unwrap_or(f64::INFINITY);
        let buckets = value["buckets"].as_array().into_iter().flatten();
        let buckets: Vec<(f64, u64)> =
            buckets.map(|bucket| (number(&bucket[0]), bucket[1].as_u64().unwrap_or(0))).collect();
        let (sum, count) = (number(&value["sum"]), value["count"].as_u64().unwrap_or(0));
        return encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None);
    }
    // Not converted to floats, which would lose digits.
    let integer = match value {
        Value::Bool(flag) => Some(u64::from(*flag)),
        Value::String(reason) => Some(u64::from(!reason.is_empty())),
        value => value.as_u64(),
    };
    match (metric_type, integer, value.as_f64()) {
        (Counter, Some(count), _) => encoder.encode_counter::<NoLabelSet, _, u64>(&count, None),
        (Counter, None, Some(sum)) => encoder.encode_counter::<NoLabelSet, _, u64>(&sum, None),
        (_, Some(number), _) => encoder.encode_gauge(&number),
        (_, None, Some(number)) => encoder.encode_gauge(&number),
        (_, None, None) => Ok(()),
    }
}
