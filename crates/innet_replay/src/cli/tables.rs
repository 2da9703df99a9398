//! `innet-replay tables`, `empty`, `drop` and `snapshot`: the tables of a server, and a snapshot of them now.

use std::io::{self, Write};

use clap::Args;
use serde_json::Value;

use base::wait::Wait;
use replay_core::replay::Replay;
use replay_link::Commands;
use replay_link::error::Result;
use replay_wire::RequestBody;

use super::server_flags::{MemoryFlags, ServerFlags, patience};
use super::stats::{printable, readable_bytes, with_separators};

/// List the tables of a server.
#[derive(Args)]
pub struct TablesFlags {
    #[command(flatten)]
    memory: MemoryFlags,
}

/// A table of a server.
#[derive(Args)]
pub struct TableFlags {
    /// Name of the table
    #[arg(value_name = "NAME", value_parser = table_name)]
    table: String,
    #[command(flatten)]
    memory: MemoryFlags,
}

/// Parses a table's name; refuses the address of a server.
fn table_name(text: &str) -> std::result::Result<String, String> {
    match text.contains("://") {
        true => Err(format!("this is an address, which follows the name of the table: NAME {text}")),
        false => Ok(text.to_owned()),
    }
}

/// Prints a line for each table: name, steps, items, bytes.
pub fn list(flags: &TablesFlags) -> Result<()> {
    let stats = flags.memory.connect()?.stats(&patience())?;
    // Ignores a broken pipe (`| head`).
    let _ = io::stdout().write_all(lines(&stats["tables"]).as_bytes());
    Ok(())
}

/// Empties a table.
pub fn empty_table(flags: &TableFlags) -> Result<()> {
    let client = flags.memory.connect()?;
    client.command(RequestBody::EmptyTable(flags.table.clone()), &patience())
}

/// Drops a table.
pub fn drop_table(flags: &TableFlags) -> Result<()> {
    let client = flags.memory.connect()?;
    client.drop_table(&flags.table, &patience())
}

fn lines(tables: &Value) -> String {
    let tables = tables.as_object().into_iter().flatten();
    let line = |(name, table): (&String, &Value)| {
        let count = |counter: &str| table[counter].as_u64().unwrap_or(0);
        format!(
            "{}  {} steps  {} items  {}\n",
            printable(name),
            with_separators(count("steps")),
            with_separators(count("items")),
            readable_bytes(count("bytes"))
        )
    };
    tables.map(line).collect()
}

/// Save the memory of a server now, in the folder of its --snapshot. Needs the operator's token if the server has tokens.
#[derive(Args)]
pub struct SnapshotFlags {
    #[command(flatten)]
    server: ServerFlags,
}

/// Saves the memory, and prints the newest snapshot.
pub fn snapshot(flags: &SnapshotFlags) -> Result<()> {
    let client = flags.server.connect(None)?;
    // No deadline: saving a large memory takes longer than a connection attempt may.
    client.command(RequestBody::Snapshot, &Wait::forever())?;
    let saved = &client.stats(&patience())?["snapshots"];
    let line = format!(
        "{}  {}  {:.1} s\n",
        saved["path"].as_str().unwrap_or_default(),
        readable_bytes(saved["bytes"].as_u64().unwrap_or(0)),
        saved["duration_s"].as_f64().unwrap_or(0.0),
    );
    // Ignores a broken pipe (`| head`).
    let _ = io::stdout().write_all(line.as_bytes());
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_table_is_one_line() {
        let tables = json!({"apex": {"steps": 12345, "items": 12000, "bytes": 2048}, "b": {}});
        let expected = "apex  12,345 steps  12,000 items  2.0 KiB\nb  0 steps  0 items  0 B\n";
        assert_eq!(lines(&tables), expected);
    }
}
