//! `innet-replay snapshot`: a snapshot of a server's memory now.

use std::io::{self, Write};

use clap::Args;

use super::server_flags::{ServerFlags, patience};
use super::stats::readable_bytes;
use base::wait::Wait;
use replay_core::replay::Replay;
use replay_link::command::Commands;
use replay_link::error::Result;
use replay_wire::RequestBody;

/// Save the memory of a server now, in the folder of its --snapshot. Needs the operator's token if the server has tokens.
#[derive(Args)]
pub struct SnapshotFlags {
    #[command(flatten)]
    server: ServerFlags,
}

/// Saves the memory, and prints the newest snapshot.
pub fn run(flags: &SnapshotFlags) -> Result<()> {
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
