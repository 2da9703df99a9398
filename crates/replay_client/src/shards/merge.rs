//! Merges definitions and statistics of several servers, as if one memory held everything.

use replay_core::replay::Listing;
use replay_core::schema::TableConfig;
use serde_json::{Map, Value, json};

/// One server's part of a table: its capacity, `min_size` and an explicit slack, divided by `servers` and rounded up. A derived slack is
/// not divided: it covers each server's chunks and batches in flight.
pub fn of_server(whole: &TableConfig, servers: u64) -> TableConfig {
    let slack = match whole.slack {
        0.0 => 0.0,
        // Minimum of a table: one insert and one sample.
        slack => (slack / servers as f64).max(whole.samples_per_insert).max(1.0).ceil(),
    };
    TableConfig {
        slack,
        capacity: whole.capacity.div_ceil(servers),
        capacity_bytes: whole.capacity_bytes.div_ceil(servers),
        min_size: whole.min_size.div_ceil(servers),
        ..whole.clone()
    }
}

/// The whole table, from one of `servers` equal parts.
pub fn of_all(part: &TableConfig, servers: u64) -> TableConfig {
    TableConfig {
        slack: part.slack * servers as f64,
        capacity: part.capacity * servers,
        capacity_bytes: part.capacity_bytes.saturating_mul(servers),
        min_size: min_size([part.min_size].repeat(servers as usize)),
        ..part.clone()
    }
}

/// Items that all servers together need before the first sample, from the `min_size` of each.
pub fn min_size(parts: impl IntoIterator<Item = u64>) -> u64 {
    let (sum, most) =
        parts.into_iter().fold((0_u64, 0), |(sum, most), part| (sum.saturating_add(part), part.max(most)));
    // The table waits only for its first item.
    if most == 1 { 1 } else { sum }
}

/// Tables of all servers, and the newest versions of parameters.
pub fn listing(listings: impl Iterator<Item = Listing>, servers: u64) -> Listing {
    let mut merged = Listing::default();
    for listing in listings {
        for table in listing.tables {
            if !merged.tables.iter().any(|known| known.name == table.name) {
                merged.tables.push(of_all(&table, servers));
            }
        }
        for listed in listing.parameters {
            let known = merged.parameters.iter_mut().find(|known| known.name == listed.name);
            match known {
                Some(known) if known.version >= listed.version => {}
                Some(known) => *known = listed,
                None => merged.parameters.push(listed),
            }
        }
    }
    merged.tables.sort_by(|one, other| one.name.cmp(&other.name));
    merged.parameters.sort_by(|one, other| one.name.cmp(&other.name));
    merged
}

/// Statistics that merge to their minimum.
const SMALLEST: [&str; 2] = ["last_push_s", "without_writers_s"];

/// Statistics that merge to their maximum, or are equal on all servers. All other numbers are added up.
const LARGEST: [&str; 9] = [
    "age_s",
    "duration_s",
    "max_priority",
    "max_sample_lag",
    "max_version_lag",
    "queue_size",
    "samples_per_insert",
    "uptime_s",
    "version",
];

/// Adds up the statistics of the servers that answer. `shards` holds each server's own statistics by address, `null` for an absent server.
pub fn stats(incarnation: String, servers: Vec<(String, Option<Value>)>) -> Value {
    let mut merged = json!({});
    let mut shards = Map::new();
    for (name, stats) in servers {
        if let Some(stats) = &stats {
            add("", &mut merged, stats);
        }
        shards.insert(name, stats.unwrap_or(Value::Null));
    }
    // Parameters are copied to every server: their bytes count once.
    let parameters: Vec<_> = shards.values().map(|stats| &stats["parameters"]).collect();
    let mut newest = Map::new();
    for (name, entry) in parameters.into_iter().filter_map(Value::as_object).flatten() {
        let version = |entry: &Value| entry["version"].as_u64().unwrap_or(0);
        if newest.get(name).is_none_or(|known| version(known) < version(entry)) {
            newest.insert(name.clone(), entry.clone());
        }
    }
    merged["parameters"] = newest.into();
    merged["incarnation"] = incarnation.into();
    // A memory of several servers has no identity of its own.
    merged["identity"].take();
    merged["shards"] = shards.into();
    merged
}

fn add(name: &str, sum: &mut Value, more: &Value) {
    match (&mut *sum, more) {
        (Value::Object(sum), Value::Object(more)) => {
            for (key, value) in more {
                // The members of this one are alike.
                let of = if name == "extensions" { name } else { key };
                match sum.get_mut(key) {
                    Some(known) => add(of, known, value),
                    None => {
                        sum.insert(key.clone(), value.clone());
                    }
                }
            }
        }
        // Bounds and counts of a histogram.
        (Value::Array(sum), Value::Array(more)) if name == "buckets" => {
            for (sum, more) in sum.iter_mut().zip(more) {
                if let (Some(sum), Some(more)) = (sum.get_mut(1), more.get(1)) {
                    add("count", sum, more);
                }
            }
        }
        // Servers have the same extensions.
        (Value::Array(sum), Value::Array(more)) if name == "extensions" => {
            for program in more {
                if !sum.contains(program) {
                    sum.push(program.clone());
                }
            }
        }
        (Value::Array(sum), Value::Array(more)) => sum.extend(more.iter().cloned()),
        (Value::Bool(sum), Value::Bool(more)) => *sum |= more,
        (Value::Number(known), Value::Number(number)) => {
            *sum = match (known.as_u64(), number.as_u64()) {
                (Some(known), Some(number)) if LARGEST.contains(&name) => known.max(number).into(),
                // As in `min_size`.
                (Some(1), Some(1)) if name == "min_size" => 1.into(),
                (Some(known), Some(number)) => known.saturating_add(number).into(),
                _ => {
                    let (known, number) = (known.as_f64(), number.as_f64());
                    let (known, number) = (known.unwrap_or(0.0), number.unwrap_or(0.0));
                    match name {
                        _ if LARGEST.contains(&name) => known.max(number).into(),
                        _ if SMALLEST.contains(&name) => known.min(number).into(),
                        _ => (known + number).into(),
                    }
                }
            };
        }
        (Value::Null, more) => *sum = more.clone(),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_in_parts_is_the_table() {
        let table = TableConfig { min_size: 90, ..TableConfig::new("t", Vec::new(), 3000) };
        assert_eq!(of_server(&table, 3).capacity, 1000);
        assert_eq!(of_all(&of_server(&table, 3), 3), table);
        let first = TableConfig::new("t", Vec::new(), 3000);
        assert_eq!(of_all(&of_server(&first, 3), 3), first, "min_size 1 stays");
        assert_eq!(of_server(&table, 7).capacity, 429);
        let limited = |slack: f64, samples_per_insert: f64| TableConfig { slack, samples_per_insert, ..table.clone() };
        let slacks = [(90.0, 4.0), (100.0, 4.0), (5.0, 4.5), (1.0, 1.0), (0.0, 4.0)];
        let parts = slacks.map(|(slack, ratio)| of_server(&limited(slack, ratio), 3));
        assert_eq!(parts.each_ref().map(|part| part.slack), [30.0, 34.0, 5.0, 1.0, 0.0]);
        for each in parts {
            assert_eq!(of_server(&of_all(&each, 3), 3), each, "read and made again");
        }
    }

    #[test]
    fn statistics_add_up() {
        let server = |items: u64, largest: Value, wait: Value| {
            json!({"tables": {"t": {
                "items": items, "max_priority": largest, "samples_per_insert": 4.0, "by_writer": [{"name": items}],
                "samples_wait_for": wait, "sample_age": {"buckets": [[2.0, items], [null, 1]]},
            }}, "parameters": {"p": {"version": items, "bytes": 8}}, "extensions": {"adder": ["/jobs"]}})
        };
        let one = server(2, json!(3.5), Value::Null);
        let two = server(5, Value::Null, json!("more"));
        let servers = vec![("a".to_owned(), Some(one)), ("b".to_owned(), Some(two)), ("c".to_owned(), None)];
        let all = stats("x".to_owned(), servers);
        let table = json!({
            "items": 7, "max_priority": 3.5, "samples_per_insert": 4.0, "by_writer": [{"name": 2}, {"name": 5}],
            "samples_wait_for": "more", "sample_age": {"buckets": [[2.0, 7], [null, 2]]},
        });
        assert_eq!(all["tables"]["t"], table);
        assert_eq!(all["parameters"], json!({"p": {"version": 5, "bytes": 8}}));
        assert_eq!(all["extensions"], json!({"adder": ["/jobs"]}));
        assert_eq!((&all["shards"]["c"], &all["incarnation"]), (&Value::Null, &json!("x")));
    }
}
