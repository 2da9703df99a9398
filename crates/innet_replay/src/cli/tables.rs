//! `innet-replay tables`, `empty` and `drop`: the tables of a server.

use std::io::{self, Write};

use clap::Args;
use serde_json::Value;

use super::server_flags::{MemoryFlags, patience};
use super::stats::{printable, readable_bytes, with_separators};
use replay_core::replay::Replay;
use replay_link::command::Commands;
use replay_link::error::Result;
use replay_wire::RequestBody;

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
