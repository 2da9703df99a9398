//! Costs of operations, in counts that do not depend on the machine: allocations and their bytes, reads and writes of
//! the transport (each a system call on the kernel's stack), bytes on the wire. They are compared with those in
//! `benchmarks/counts.json` (`make bench-check`), or recorded there (`make bench-record`, with `--record`).
//!
//! Nothing is left to chance: client and server take turns on one thread ([`world`]) over a connection in memory
//! ([`pipe`]), with generated frames and a seeded memory. So a count is compared exactly, and one that fell has to be
//! recorded too, or it could rise again unseen. The build is that of the tests: a release may allocate less.

#[path = "../../../replay_core/benches/breakout/mod.rs"]
mod breakout;
mod operations;
mod pipe;
mod tally;
mod world;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::{Result, Write as _};
use std::process::{Command, ExitCode};

use serde::{Deserialize, Serialize};

use tally::Counts;

const RECORDED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benchmarks/counts.json");

/// Contents of `benchmarks/counts.json`.
#[derive(Serialize, Deserialize)]
struct Record {
    /// The compiler, which decides on some allocations.
    rustc: String,
    /// By operation.
    counts: BTreeMap<String, Counts>,
}

fn main() -> Result<ExitCode> {
    let counted = Record { rustc: rustc()?, counts: operations::count_all() };
    let mut out = std::io::stdout();
    if std::env::args().any(|argument| argument == "--record") {
        let text = serde_json::to_string_pretty(&counted)?;
        std::fs::write(RECORDED, text + "\n")?;
        writeln!(out, "recorded in benchmarks/counts.json")?;
        return Ok(ExitCode::SUCCESS);
    }
    let recorded = match std::fs::read_to_string(RECORDED) {
        Ok(text) => text,
        Err(error) => {
            writeln!(out, "benchmarks/counts.json: {error}; `make bench-record` makes it")?;
            return Ok(ExitCode::FAILURE);
        }
    };
    let recorded: Record = serde_json::from_str(&recorded)?;
    let differences = differences(&recorded.counts, &counted.counts);
    if differences.is_empty() {
        let number: usize = counted.counts.values().map(BTreeMap::len).sum();
        writeln!(out, "{number} counts are as recorded")?;
        return Ok(ExitCode::SUCCESS);
    }
    writeln!(out, "{}", complaint(&differences, &recorded, &counted))?;
    Ok(ExitCode::FAILURE)
}

/// `rustc 1.95.0 (...)` and the target.
fn rustc() -> Result<String> {
    let said = Command::new("rustc").arg("-vV").output()?.stdout;
    let said = String::from_utf8_lossy(&said);
    let host = said.lines().find_map(|line| line.strip_prefix("host: "));
    let version = said.lines().next().unwrap_or_default();
    Ok(format!("{version}, {}", host.unwrap_or_default()))
}

/// One line for each count that is not as recorded, under a line with its operation.
fn differences(recorded: &BTreeMap<String, Counts>, counted: &BTreeMap<String, Counts>) -> String {
    let mut lines = String::new();
    let operations: BTreeSet<_> = recorded.keys().chain(counted.keys()).collect();
    for operation in operations {
        let (none, mut heading) = (Counts::new(), Some(operation));
        let old = recorded.get(operation).unwrap_or(&none);
        let new = counted.get(operation).unwrap_or(&none);
        for name in old.keys().chain(new.keys()).collect::<BTreeSet<_>>() {
            let (old, new) = (old.get(name), new.get(name));
            if old == new {
                continue;
            }
            if let Some(operation) = heading.take() {
                writeln!(lines, "  {operation}").expect("a string takes it");
            }
            let text = |count: Option<&f64>| count.map_or("nothing".to_owned(), f64::to_string);
            writeln!(lines, "    {name}: recorded {}, counted {}", text(old), text(new)).expect("a string takes it");
        }
    }
    lines
}

fn complaint(differences: &str, recorded: &Record, counted: &Record) -> String {
    let compiler = match recorded.rustc == counted.rustc {
        true => String::new(),
        false => format!(
            "\nThey were recorded with {}; this is {}. Another compiler may allocate otherwise: count the commit that \
             recorded them again with this one before you look for a change in the code.\n",
            recorded.rustc, counted.rustc
        ),
    };
    format!(
        "The costs of operations differ from benchmarks/counts.json:\n\n{differences}{compiler}\n\
         Where a cost rose, find the part of the change that raised it. Where it fell, or rose for a good reason, run \
         `make bench-record` and commit benchmarks/counts.json together with the change that explains it."
    )
}
