//! `innet-replay stats`: counters and gauges of a server, as tables or as JSON.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::Value;

use super::server_flags::{MemoryFlags, patience};
use replay_core::replay::Replay;
use replay_link::error::Result;

/// Show the counters and gauges of a server.
#[derive(Args)]
pub struct StatsFlags {
    #[command(flatten)]
    memory: MemoryFlags,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// Print again every so many seconds, with the increase per second of what grew, until Ctrl-C
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    watch: Option<u32>,
}

/// Prints the statistics of the server.
pub fn run(flags: &StatsFlags) -> Result<()> {
    let client = flags.memory.connect()?;
    let mut last: Option<(Value, Instant)> = None;
    loop {
        let (stats, now) = (client.stats(&patience())?, Instant::now());
        // Counters restart with the server, so no increase across a restart.
        let last_look = last.as_ref().filter(|(earlier, _)| earlier["incarnation"] == stats["incarnation"]);
        let earlier =
            last_look.map(|(earlier, time)| Earlier { values: earlier, seconds: (now - *time).as_secs_f64() });
        let mut text = if flags.json { stats.to_string() } else { tables(&stats, earlier) };
        if flags.json || flags.watch.is_some() {
            text.push('\n');
        }
        let printed = io::stdout().write_all(text.as_bytes());
        let Some(seconds) = flags.watch.filter(|_| printed.is_ok()) else {
            // Ignores a broken pipe (`| head`).
            return Ok(());
        };
        last = Some((stats, now));
        std::thread::sleep(Duration::from_secs(seconds.into()));
    }
}

/// Statistics of the last look, some seconds ago.
#[derive(Clone, Copy)]
struct Earlier<'a> {
    values: &'a Value,
    seconds: f64,
}

impl<'a> Earlier<'a> {
    /// The part of this name.
    fn part(self, name: &str) -> Self {
        Earlier { values: &self.values[name], ..self }
    }

    /// Increase per second to a count of now, where it grew.
    fn rate(self, now: u64) -> Option<f64> {
        let increase = now.checked_sub(self.values.as_u64()?).filter(|increase| *increase > 0)?;
        Some(increase as f64 / self.seconds)
    }
}

/// Statistics as text: single values first, then a section for each group. A group of groups (tables, parameters) becomes a section for
/// each member.
fn tables(stats: &Value, earlier: Option<Earlier<'_>>) -> String {
    let mut text = String::new();
    section(&mut text, "", stats, earlier);
    text
}

fn section(text: &mut String, title: &str, values: &Value, earlier: Option<Earlier<'_>>) {
    let Some(values) = values.as_object() else {
        return;
    };
    let (groups, singles): (Vec<_>, Vec<_>) =
        values.iter().partition(|(_, value)| value.is_object() && !is_histogram(value));
    if !singles.is_empty() {
        if !text.is_empty() {
            text.push('\n');
        }
        if !title.is_empty() {
            text.push_str(&format!("{}\n", printable(title)));
        }
        let width = singles.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        for (name, value) in singles {
            let rate = earlier.and_then(|earlier| match is_histogram(value) {
                true => earlier.part(name).part("count").rate(value["count"].as_u64()?),
                false => earlier.part(name).rate(value.as_u64()?),
            });
            let rate = rate.map(|rate| format!("  {}/s", readable_rate(name, rate))).unwrap_or_default();
            text.push_str(&format!("  {name:width$}  {:>16}{rate}\n", readable(name, value)));
        }
    }
    for (name, value) in groups {
        section(text, format!("{title} {name}").trim(), value, earlier.map(|earlier| earlier.part(name)));
    }
}

fn is_histogram(value: &Value) -> bool {
    value.get("buckets").is_some()
}

fn readable_rate(name: &str, rate: f64) -> String {
    match rate {
        rate if name.contains("bytes") => readable_bytes(rate as u64),
        ..10.0 => format!("{rate:.1}"),
        rate => with_separators(rate.round() as u64),
    }
}

/// A value with its unit: bytes in powers of 1024, numbers with separators, histograms as count and mean.
fn readable(name: &str, value: &Value) -> String {
    if is_histogram(value) {
        let (count, sum) = (value["count"].as_u64().unwrap_or(0), value["sum"].as_f64());
        let mean = sum.unwrap_or(0.0) / count.max(1) as f64;
        let mean = match mean {
            ..0.1 => format!("{mean:.3e}"),
            _ => format!("{mean:.3}"),
        };
        return format!("{} (mean {mean})", with_separators(count));
    }
    match (value.as_u64(), value.as_f64(), value.as_str()) {
        (Some(u64::MAX), ..) => "no limit".to_owned(),
        (Some(bytes), ..) if name.contains("bytes") => readable_bytes(bytes),
        (Some(number), ..) => with_separators(number),
        (None, Some(number), _) => format!("{number:.3}"),
        (None, None, Some(text)) => printable(text),
        _ => value.to_string(),
    }
}

/// Removes control characters from a client's text, which could write anything to the terminal.
pub(super) fn printable(text: &str) -> String {
    let shown = |c: char| if c.is_control() { c.escape_debug().to_string() } else { c.to_string() };
    text.chars().map(shown).collect()
}

pub(super) fn readable_bytes(bytes: u64) -> String {
    let unit = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = (bytes.max(1).ilog2() / 10).min(unit.len() as u32 - 1);
    match power {
        0 => format!("{bytes} B"),
        _ => format!("{:.1} {}", bytes as f64 / f64::from(1u32 << 10).powi(power as i32), unit[power as usize]),
    }
}

pub(super) fn with_separators(number: u64) -> String {
    let digits: Vec<_> = number.to_string().chars().collect();
    let groups: Vec<String> = digits.rchunks(3).rev().map(|digits| digits.iter().collect()).collect();
    groups.join(",")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_and_bytes_are_readable() {
        assert_eq!(with_separators(0), "0");
        assert_eq!(with_separators(999), "999");
        assert_eq!(with_separators(1_234_567), "1,234,567");
        assert_eq!(readable_bytes(0), "0 B");
        assert_eq!(readable_bytes(1023), "1023 B");
        assert_eq!(readable_bytes(1536), "1.5 KiB");
        assert_eq!(readable_bytes(7 << 30), "7.0 GiB");
        assert_eq!(readable("max_bytes", &json!(u64::MAX)), "no limit");
        assert_eq!(readable("priority", &json!(0.25)), "0.250");
        let histogram = json!({"count": 4, "sum": 0.01, "buckets": []});
        assert_eq!(readable("push", &histogram), "4 (mean 2.500e-3)");
    }

    #[test]
    fn every_table_has_its_section() {
        let stats = json!({
            "uptime_s": 1.5,
            "tables": {"apex": {"steps": 12345}, "other": {"steps": 1}},
            "parameters": {},
        });
        let text = tables(&stats, None);
        let lines: Vec<Vec<&str>> = text.lines().map(|l| l.split_whitespace().collect()).collect();
        assert!(lines.contains(&vec!["uptime_s", "1.500"]));
        let apex = lines.iter().position(|line| line == &["tables", "apex"]).unwrap();
        assert_eq!(lines[apex + 1], ["steps", "12,345"]);
        assert!(lines.contains(&vec!["tables", "other"]));
        assert!(!text.contains("parameters"));
    }

    #[test]
    fn what_grew_has_its_increase_per_second() {
        let stats = |pushes: u64, bytes: u64| {
            let times = json!({"count": pushes, "sum": 0.5, "buckets": []});
            json!({"connections": 3, "server": {"bytes_sent": bytes, "latency_s": {"push": times}, "requests": 7 - bytes / 1024}})
        };
        let earlier = stats(10, 0);
        let text = tables(&stats(13, 4096), Some(Earlier { values: &earlier, seconds: 2.0 }));
        let line = |name| text.lines().find(|line| line.trim().starts_with(name)).unwrap();
        assert!(line("bytes_sent").ends_with("4.0 KiB  2.0 KiB/s"), "{text}");
        assert!(line("push").ends_with("  1.5/s"), "{text}");
        assert!(!line("connections").contains("/s") && !line("requests").contains("/s"), "{text}");
    }
}
