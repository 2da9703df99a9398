//! F-Stack over memif, in packets and in whole segments, against the kernel's TCP over loopback, with both ends polling: a
//! server and a client process, each on a core of its own. Transport time (`exchanges.rs`: no codec, no memory), and
//! whole calls of a client to `innet-replay serve` (`calls.rs`).
//!
//! Writes the file of `--out`, with commit and versions; a report's raw data are in `docs/reports`. `--rounds N` is the
//! number of rounds [default: 3].

#![allow(clippy::print_stdout, reason = "the record is its output")]

mod calls;
mod ends;
mod exchanges;

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use ends::{BARE_KERNEL, FSTACK, FSTACK_SEGMENTS, KERNEL};

/// The cells of each round, by transport.
type Rounds<'a> = BTreeMap<&'a str, Vec<Value>>;

fn main() {
    stack_fstack::plug_in();
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let print = |cells: Vec<Value>| println!("{}", Value::from(cells));
    match arguments[..] {
        ["serve", way, config] => exchanges::serve(way, Path::new(config)),
        ["exchange", way, config] => print(exchanges::measure(way, Path::new(config))),
        ["call", way, config] => print(calls::measure(way, Path::new(config))),
        _ => {
            let flag = |name: &str| arguments.iter().skip_while(move |&&a| a != name).nth(1);
            let record = record(flag("--rounds").map_or(3, |n| n.parse().unwrap()));
            if let Some(out) = flag("--out") {
                fs::write(out, format!("{record:#}\n")).unwrap();
            }
            println!("{record:#}");
        }
    }
}

fn record(rounds: usize) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let mut exchanges = Rounds::new();
    let mut calls = Rounds::new();
    for _ in 0..rounds {
        for way in [FSTACK, FSTACK_SEGMENTS, KERNEL, BARE_KERNEL] {
            let cells = exchanges::run(way, folder.path());
            exchanges.entry(way).or_default().push(cells);
        }
        for way in [FSTACK, FSTACK_SEGMENTS, KERNEL] {
            let cells = calls::run(way, folder.path());
            calls.entry(way).or_default().push(cells);
        }
    }
    json!({
        "what": "transport time and whole calls from Rust, both ends polling",
        "commit": commit(),
        "fstack": fstack_sys::fstack::RELEASE,
        "dpdk": text("pkg-config", &["--modversion", "libdpdk"]),
        "machine": text("sh", &["-c", "grep -m1 'model name' /proc/cpuinfo | cut -d: -f2; nproc; uname -r"]),
        "links": exchanges.keys().map(|&way| (way.to_owned(), ends::link(way).into())).collect::<serde_json::Map<_, _>>(),
        "rounds": rounds,
        "rows": compared(&exchanges),
        "calls": compared(&calls),
    })
}

/// A row for each cell: the best of the rounds, as noise of a shared machine only adds, and by what share each median is lower
/// than the kernel's.
fn compared(rounds: &Rounds) -> Vec<Value> {
    let best = |way: &str, cell: usize, what: &str| {
        let times = rounds[way].iter().map(|cells| cells[cell][what].as_f64());
        times.map(Option::unwrap).fold(f64::INFINITY, f64::min)
    };
    let row = |(number, cell): (usize, &Value)| {
        let mut row = cell["cell"].clone();
        for &way in rounds.keys() {
            let p50 = best(way, number, "p50_us");
            row[way] = json!({"p50_us": p50, "p99_us": best(way, number, "p99_us")});
            for (name, other) in [("p50_lower_by", KERNEL), ("p50_lower_than_bare_by", BARE_KERNEL)] {
                if rounds.contains_key(other) {
                    let lower = 1.0 - p50 / best(other, number, "p50_us");
                    row[way][name] = json!((lower * 1e4).round() / 1e4);
                }
            }
        }
        row
    };
    let cells = rounds[KERNEL][0].as_array().unwrap();
    cells.iter().enumerate().map(row).collect()
}

/// The one that is checked out, with `-dirty` where files differ from it that are no results themselves.
fn commit() -> String {
    let changed = ["status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)docs/reports"];
    let mut commit = text("git", &["describe", "--always"]);
    if !text("git", &changed).is_empty() {
        commit += "-dirty";
    }
    commit
}

fn text(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}
