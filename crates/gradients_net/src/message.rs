//! Messages of the extension, as JSON: a request to join a job until the connection ends ([`JoinJob`](gradients::JoinJob)), and
//! the answer ([`Ticket`](gradients::Ticket)).
//!
//! ```json
//! {"job": "run-7", "worker": 0, "workers": 2, "world": 2, "name": "host-0", "arithmetic": "float", "segment_values": 360,
//!  "deadline_ms": 30000}
//! {"address": "127.0.0.1:7711", "session": 3, "key": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], "round": 1,
//!  "window": 256}
//! ```
//!
//! An asynchronous job has `"asynchronous": {"values": 1000, "threshold": 2, "staleness": 3}`, a rack `"below"`.

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use replay_link::error::{Error, Result};

/// Name of the extension in requests and statistics.
pub const NAME: &str = "gradients";

/// Encodes a message.
///
/// # Errors
/// [`Error::Internal`] for a value that JSON cannot represent.
pub fn write(message: &impl Serialize) -> Result<Bytes> {
    let written = serde_json::to_vec(message);
    written.map(Bytes::from).map_err(|error| Error::Internal(error.to_string()))
}

/// Decodes a message.
///
/// # Errors
/// [`Error::Wire`] for an invalid message.
pub fn read<T: DeserializeOwned>(message: &Bytes) -> Result<T> {
    serde_json::from_slice(message).map_err(|error| {
        let reason = format!("a message about gradients cannot be read: {error}");
        replay_wire::Error::Protocol(reason).into()
    })
}
