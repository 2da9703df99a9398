//! `innet-replay top`: the statistics of a server, live in the terminal.

use std::collections::BTreeSet;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::Value;
use terminal_size::{Height, Width, terminal_size};

use super::server_flags::{MemoryFlags, patience};
use super::stats::{printable, readable_bytes, with_separators};
use replay_core::replay::Replay;
use replay_link::error::Result;

/// Limit of writers shown for each table, the longest waits first.
const WRITERS: usize = 8;

/// Show a server live: tables, rate limiters, throughput, latencies, connections; until Ctrl-C.
#[derive(Args)]
pub struct TopFlags {
    #[command(flatten)]
    memory: MemoryFlags,
    /// Seconds between two looks at the server
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    every: u32,
}

/// Shows the statistics repeatedly. In a terminal each replaces the last.
pub fn run(flags: &TopFlags) -> Result<()> {
    let client = flags.memory.connect()?;
    let mut before: Option<Polled> = None;
    loop {
        let now = Polled { time: Instant::now(), stats: client.stats(&patience())? };
        // Counters restart with the server, so no rates across a restart.
        let same = |earlier: &&Polled| earlier.stats["incarnation"] == now.stats["incarnation"];
        let lines = Change { before: before.as_ref().filter(same).unwrap_or(&now), now: &now }.lines();
        if print(&lines).is_err() {
            // Broken pipe (`| head`).
            return Ok(());
        }
        before = Some(now);
        std::thread::sleep(Duration::from_secs(flags.every.into()));
    }
}

fn print(lines: &[String]) -> io::Result<()> {
    let mut text = String::new();
    if let (true, Some((Width(width), Height(height)))) = (io::stdout().is_terminal(), terminal_size()) {
        // Cursor to the upper left corner. Each line clears the rest of its row, and the end clears the rows below.
        text.push_str("\x1b[H");
        for line in lines.iter().take(usize::from(height).saturating_sub(1)) {
            text.extend(line.chars().take(width.into()));
            text.push_str("\x1b[K\n");
        }
        text.push_str("\x1b[J");
    } else {
        text.extend(lines.iter().flat_map(|line| [line, "\n"]));
        text.push('\n');
    }
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Statistics and their time.
struct Polled {
    time: Instant,
    stats: Value,
}

/// Two polls, for rates.
struct Change<'a> {
    before: &'a Polled,
    now: &'a Polled,
}

impl Change<'_> {
    /// Increase per second of the counter that the keys lead to.
    fn rate(&self, keys: &[&str]) -> f64 {
        let seconds = self.now.time.duration_since(self.before.time).as_secs_f64();
        let value = |polled: &Polled| number(at(&polled.stats, keys));
        let increase = value(self.now) - value(self.before);
        if seconds > 0.0 { increase.max(0.0) / seconds } else { 0.0 }
    }

    /// Increase of the histogram that the keys lead to, or all of it without an increase.
    fn gained(&self, keys: &[&str]) -> Buckets {
        let buckets = |polled: &Polled| Buckets::of(at(&polled.stats, keys));
        let (before, mut now) = (buckets(self.before), buckets(self.now));
        if before.count < now.count {
            now.count -= before.count;
            now.sum -= before.sum;
            for (range, earlier) in now.ranges.iter_mut().zip(&before.ranges) {
                range.1 = range.1.saturating_sub(earlier.1);
            }
        }
        now
    }

    fn lines(&self) -> Vec<String> {
        let stats = &self.now.stats;
        let server = &stats["server"];
        let mut lines = vec![
            format!(
                "innet-replay {}  up {}  {} connections  {} in tables",
                text(&server["release"]),
                time(&stats["uptime_s"]),
                count(&server["connections"]),
                bytes(&stats["bytes"]),
            ),
            format!(
                "{} requests/s  {}/s received  {}/s sent  {} errors",
                readable_count(self.rate(&["server", "requests"])),
                readable_bytes(self.rate(&["server", "bytes_received"]) as u64),
                readable_bytes(self.rate(&["server", "bytes_sent"]) as u64),
                count(&server["errors"]),
            ),
        ];
        lines.extend(snapshots(&stats["snapshots"]));
        self.tables(&mut lines);
        self.requests(&mut lines);
        self.parameters(&mut lines);
        self.extensions(&mut lines);
        lines
    }

    fn tables(&self, lines: &mut Vec<String>) {
        let mut rows = Vec::new();
        let mut notes = Vec::new();
        for (name, table) in members(&self.now.stats["tables"]) {
            let rate = |statistic| readable_count(self.rate(&["tables", name, statistic]));
            let mean = |statistic| readable_count(self.gained(&["tables", name, statistic]).mean());
            let name = printable(name);
            let ratio = number(&table["limiter_sampled"]) / number(&table["limiter_inserted"]).max(1.0);
            let wanted = match number(&table["samples_per_insert"]) {
                0.0 => "any".to_owned(),
                wanted => readable_count(wanted),
            };
            rows.push(vec![
                ("TABLE", name.clone()),
                ("STEPS", count(&table["steps"])),
                ("OF", count(&table["capacity"])),
                ("BYTES", bytes(&table["bytes"])),
                ("STEPS IN/s", rate("inserted_steps")),
                ("SAMPLED/s", rate("sampled_items")),
                ("UPDATED/s", rate("updated_priorities")),
                ("STALE/s", rate("stale_updates")),
                ("PER INSERT", readable_count(ratio)),
                ("WANTED", wanted),
                ("AGE", mean("sample_age")),
                ("LAG", mean("version_lag")),
            ]);
            for calls in ["pushes", "samples"] {
                let waiting = &table[format!("waiting_{calls}")];
                if number(waiting) > 0.0 {
                    let reason = printable(text(&table[format!("{calls}_wait_for")]));
                    notes.push(format!("  {name}: waiting {calls}: {} ({reason})", count(waiting)));
                }
            }
            if table["failed"] == true {
                notes.push(format!("  {name} has failed: drop it, or restart the server"));
            }
        }
        aligned(lines, rows);
        lines.append(&mut notes);
        self.writers(lines);
    }

    fn writers(&self, lines: &mut Vec<String>) {
        let mut rows = Vec::new();
        for (table, stats) in members(&self.now.stats["tables"]) {
            let writers = stats["by_writer"].as_array().into_iter().flatten();
            for writer in writers.take(WRITERS) {
                let gone = if writer["connected"] == true { "" } else { ", gone" };
                rows.push(vec![
                    ("WRITER", printable(text(&writer["name"]))),
                    ("TABLE", printable(table)),
                    ("STEPS", count(&writer["steps"])),
                    ("PUSHES THAT WAITED", count(&writer["blocked_pushes"])),
                    ("WAITED", time(&writer["waited_s"])),
                    ("LAST PUSH", writer["last_push_s"].as_f64().map_or("none".into(), readable_time) + gone),
                ]);
            }
        }
        aligned(lines, rows);
    }

    fn requests(&self, lines: &mut Vec<String>) {
        let row = |(kind, _): (&String, &Value)| {
            let times = self.gained(&["server", "latency_s", kind]);
            vec![
                ("REQUEST", kind.clone()),
                ("PER s", readable_count(self.rate(&["server", "latency_s", kind, "count"]))),
                ("MEDIAN", readable_time(times.quantile(0.5))),
                ("99 %", readable_time(times.quantile(0.99))),
            ]
        };
        aligned(lines, members(&self.now.stats["server"]["latency_s"]).map(row).collect());
    }

    fn parameters(&self, lines: &mut Vec<String>) {
        let row = |(name, stats): (&String, &Value)| {
            let lag = self.gained(&["parameters", name, "lag"]);
            vec![
                ("PARAMETERS", printable(name)),
                ("VERSION", count(&stats["version"])),
                ("BYTES", bytes(&stats["bytes"])),
                ("READERS BEHIND", readable_count(lag.mean())),
            ]
        };
        aligned(lines, members(&self.now.stats["parameters"]).map(row).collect());
    }

    /// A table for each group of named members of an extension, with all numbers and texts.
    fn extensions(&self, lines: &mut Vec<String>) {
        for (extension, pointers) in members(&self.now.stats["extensions"]) {
            for pointer in pointers.as_array().into_iter().flatten() {
                // A JSON pointer, empty or with a slash before each key.
                let path: Vec<&str> = text(pointer).split('/').skip(1).collect();
                let group = [&[extension.as_str()], &path[..]].concat();
                let named = at(&self.now.stats, &group);
                let all = members(named).flat_map(|(_, member)| members(member));
                let shown = all.filter(|(_, value)| !value.is_object() && !value.is_array());
                let keys: BTreeSet<_> = shown.map(|(key, _)| key).collect();
                let title = |text: &str| printable(&text.to_uppercase());
                let row = |(name, member): (&String, &Value)| {
                    let mut row = vec![(title(&format!("{extension}: {}", path.join(" "))), printable(name))];
                    for key in &keys {
                        let cell = match &member[*key] {
                            Value::Null => String::new(),
                            Value::String(text) => printable(text),
                            value => match self.rate(&[&group[..], &[name, key]].concat()) {
                                0.0 => count(value),
                                rate => format!("{} ({}/s)", count(value), readable_count(rate)),
                            },
                        };
                        row.push((title(key), cell));
                    }
                    row
                };
                aligned(lines, members(named).map(row).collect());
            }
        }
    }
}

/// Line about snapshots, if the server saves any.
fn snapshots(stats: &Value) -> Option<String> {
    let saved = stats["saved"].as_u64()?;
    let last = stats["age_s"].as_f64().map(|age| {
        format!(", the last {} ago ({} in {})", readable_time(age), bytes(&stats["bytes"]), time(&stats["duration_s"]),)
    });
    Some(format!(
        "{} snapshots saved{}  {} failed",
        with_separators(saved),
        last.unwrap_or_default(),
        count(&stats["failed"]),
    ))
}

/// A histogram of the statistics.
struct Buckets {
    count: u64,
    sum: f64,
    /// Upper bound (`None` for the last bucket) and count of each bucket.
    ranges: Vec<(Option<f64>, u64)>,
}

impl Buckets {
    fn of(histogram: &Value) -> Self {
        let ranges = histogram["buckets"].as_array().into_iter().flatten();
        Buckets {
            count: histogram["count"].as_u64().unwrap_or(0),
            sum: number(&histogram["sum"]),
            ranges: ranges.map(|range| (range[0].as_f64(), range[1].as_u64().unwrap_or(0))).collect(),
        }
    }

    fn mean(&self) -> f64 {
        self.sum / self.count.max(1) as f64
    }

    /// Quantile `q`, interpolated within its bucket.
    fn quantile(&self, q: f64) -> f64 {
        let (mut left, mut low) = (self.count as f64 * q, 0.0);
        for &(bound, count) in &self.ranges {
            let (Some(bound), count) = (bound, count as f64) else {
                break;
            };
            if count > 0.0 && count >= left {
                return low + (bound - low) * left / count;
            }
            left -= count;
            low = bound;
        }
        low
    }
}

fn members(object: &Value) -> impl Iterator<Item = (&String, &Value)> {
    object.as_object().into_iter().flatten()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// The value that keys lead to.
fn at<'a>(stats: &'a Value, keys: &[&str]) -> &'a Value {
    keys.iter().fold(stats, |value, key| &value[key])
}

fn readable_count(number: f64) -> String {
    match number {
        100.0.. => with_separators(number.round() as u64),
        _ if number.fract() == 0.0 => format!("{number}"),
        _ => format!("{number:.1}"),
    }
}

fn readable_time(seconds: f64) -> String {
    match seconds {
        ..1e-3 => format!("{:.0} µs", seconds * 1e6),
        ..1.0 => format!("{:.1} ms", seconds * 1e3),
        ..120.0 => format!("{seconds:.1} s"),
        ..7200.0 => format!("{:.0} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3600.0),
    }
}

fn count(value: &Value) -> String {
    readable_count(number(value))
}

fn bytes(value: &Value) -> String {
    readable_bytes(number(value) as u64)
}

fn time(value: &Value) -> String {
    readable_time(number(value))
}

/// Adds an empty line, a line of titles and the rows; each cell comes with the title of its column. The first column is left-aligned, the
/// others are right-aligned. Adds nothing without rows.
fn aligned<T: AsRef<str>>(lines: &mut Vec<String>, rows: Vec<Vec<(T, String)>>) {
    let Some(first) = rows.first() else { return };
    let titles = first.iter().map(|(title, _)| title.as_ref()).collect();
    let cells = rows.iter().map(|row| row.iter().map(|(_, cell)| cell.as_str()).collect());
    let rows: Vec<Vec<&str>> = [titles].into_iter().chain(cells).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..rows[0].len()).filter_map(width).collect();
    lines.push(String::new());
    for row in &rows {
        let mut line = String::new();
        for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
            line.push_str(&match column {
                0 => format!("{cell:width$}"),
                _ => format!("  {cell:>width$}"),
            });
        }
        lines.push(line.trim_end().to_owned());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn snapshots_are_one_line_with_the_age_of_the_last() {
        let mut stats = json!({"saved": 0, "failed": 2, "age_s": null, "bytes": null, "duration_s": null});
        let line = |stats: &Value| snapshots(stats).unwrap();
        assert_eq!(line(&stats), "0 snapshots saved  2 failed");
        stats["saved"] = 7.into();
        stats["age_s"] = 61.25.into();
        stats["bytes"] = (3u64 << 30).into();
        stats["duration_s"] = 0.25.into();
        assert_eq!(line(&stats), "7 snapshots saved, the last 61.2 s ago (3.0 GiB in 250.0 ms)  2 failed");
        assert_eq!(snapshots(&Value::Null), None);
    }

    #[test]
    fn rates_are_of_the_time_between_two_looks() {
        let stats = |steps: u64, count: u64| {
            json!({
                "uptime_s": 60.0,
                "bytes": 2048,
                "server": {
                    "release": "1.0", "connections": 3, "requests": count, "bytes_received": 0, "bytes_sent": 0, "errors": 0,
                    "latency_s": {"push": {"count": count, "sum": 0.1, "buckets": [[0.001, 10], [0.002, count - 10], [null, 0]]}},
                },
                "tables": {"a/b~\u{1b}[2J": {
                    "steps": steps, "capacity": 1_000_000, "bytes": 2048, "inserted_steps": steps, "limiter_inserted": 100,
                    "limiter_sampled": 250, "samples_per_insert": 4.0, "waiting_pushes": 2,
                    "pushes_wait_for": "the rate limiter",
                    "version_lag": {"count": steps, "sum": 1.5 * steps as f64, "buckets": []},
                    "by_writer": [
                        {"name": "actor 1", "steps": steps, "blocked_pushes": 1, "waited_s": 0.5, "connected": true, "last_push_s": 3.0},
                        {"name": "actor 2", "steps": 4, "blocked_pushes": 0, "waited_s": 0.0, "connected": false, "last_push_s": 41.0},
                    ],
                }},
                "parameters": {},
                "extensions": {"add\u{1b}er": ["/jobs"]},
                "add\u{1b}er": {"jobs": {"run-1": {"round": steps, "state": "disk full", "parts": {}}, "run-2": {"workers": 3}}},
            })
        };
        let start = Instant::now();
        let polled = |seconds, stats| Polled { time: start + Duration::from_secs(seconds), stats };
        let (before, now) = (polled(0, stats(1000, 10)), polled(2, stats(6000, 110)));
        let change = Change { before: &before, now: &now };
        let lines = change.lines();
        let text = lines.join("\n");
        let table = lines.iter().find(|line| line.starts_with("a/b")).unwrap();
        assert!(!text.contains('\u{1b}'), "{text}");
        let cells: Vec<&str> = table.split("  ").map(str::trim).filter(|c| !c.is_empty()).collect();
        assert_eq!(cells[1..5], ["6,000", "1,000,000", "2.0 KiB", "2,500"], "{text}");
        assert_eq!(cells[8..], ["2.5", "4", "0", "1.5"], "{text}");
        assert!(!text.contains("snapshots"), "{text}");
        let words = |begin| {
            let line = lines.iter().find(|line| line.starts_with(begin)).unwrap();
            line.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert!(words("ADD").ends_with("ER: JOBS ROUND STATE WORKERS"), "{text}");
        assert_eq!(words("run-1"), "run-1 6,000 (2,500/s) disk full");
        assert_eq!(words("run-2"), "run-2 3");
        assert!(text.contains("waiting pushes: 2 (the rate limiter)"), "{text}");
        let push = lines.iter().find(|line| line.starts_with("push")).unwrap();
        // The hundred new ones are between one and two milliseconds.
        assert!(push.contains("50") && push.contains("1.5 ms"), "{push}");
        assert!(text.contains("50 requests/s") && words("actor 1").ends_with("500.0 ms 3.0 s"), "{text}");
        assert!(words("actor 2").ends_with("41.0 s, gone"), "{text}");
    }
}
