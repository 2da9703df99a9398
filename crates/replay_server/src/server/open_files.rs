//! The limit of open files: connections have what it leaves beside files, HTTP and operators.

use std::fs;

use super::admission::{MAX_REFUSALS, OPERATORS};
use super::http;
use crate::config::ServerConfig;
use replay_link::error::{Result, refuse};

/// File descriptors of a process for anything but connections, with a reserve.
const OTHER_FILES: u64 = 128;

/// File descriptors of snapshots, and of a thread: its events and their wake-up.
const SNAPSHOT_FILES: u64 = 8;
const THREAD_FILES: u64 = 3;

/// File descriptors of a server with all its connections.
pub fn open_files(config: &ServerConfig) -> u64 {
    u64::from(config.max_connections) + u64::from(config.max_handshakes) + OTHER_FILES
}

/// Raises the soft limit of open files, 1024 on many systems, up to the hard limit. Returns the configuration with as many connections
/// as the limit allows.
///
/// # Errors
/// [`Error::Config`](replay_link::error::Error::Config) if it allows none.
pub fn within_open_files(config: &ServerConfig) -> Result<ServerConfig> {
    let wanted = open_files(config);
    let (limit, _) = rlimit::Resource::NOFILE.get().unwrap_or((u64::MAX, 0));
    let limit = if limit < wanted { rlimit::increase_nofile_limit(wanted).unwrap_or(limit) } else { limit };
    if limit >= wanted {
        return Ok(config.clone());
    }
    let open = fs::read_dir("/proc/self/fd").map_or(0, Iterator::count) as u64;
    let threads = config.effective_io_threads() as u64 + u64::from(config.http.is_some());
    let others = open
        + threads * THREAD_FILES
        + config.listen.len() as u64
        + config.http.as_ref().map_or(0, |_| 1 + http::MAX_CONNECTIONS as u64)
        + SNAPSHOT_FILES
        + MAX_REFUSALS as u64
        + u64::from(OPERATORS);
    let left = u32::try_from(limit.saturating_sub(others)).unwrap_or(u32::MAX);
    if left < 2 {
        return refuse(format!(
            "the limit of open files, {limit}, leaves none for connections: raise it to more than {} (ulimit -n, or LimitNOFILE of the \
             service)",
            others + 1
        ));
    }
    let max_handshakes = config.max_handshakes.min((left / 4).max(1));
    let max_connections = config.max_connections.min(left - max_handshakes);
    tracing::warn!(
        limit,
        max_connections,
        max_handshakes,
        "max_connections and max_handshakes are lowered to what the limit of open files allows: raise it (ulimit -Hn, or LimitNOFILE of \
         the service)"
    );
    Ok(ServerConfig { max_connections, max_handshakes, ..config.clone() })
}
