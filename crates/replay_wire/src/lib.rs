//! The protocol between clients and a server, without I/O: frames, their Cap'n Proto messages, and the handshake.
//! `schema/innet.capnp` specifies it.
//!
//! A sender encodes a [`Request`] or a [`Reply`] as an [`OutgoingFrame`] and writes its bytes; a receiver fills an
//! [`IncomingFrame`](frame::IncomingFrame) and decodes it:
//!
//! ```
//! # use replay_wire::{frame::*, *};
//! let request = Request::new(7, 0, RequestBody::Stats);
//! let sent = encode_request(&request)?;
//! let frame = Frame::new(sent.control(), bytes::Bytes::new());
//! assert_eq!(decode_request(frame)?, request);
//! # Result::<()>::Ok(())
//! ```
//!
//! # Layout
//!
//! | module | subject |
//! | --- | --- |
//! | `requests` | requests and replies: the lists of them, their contents, and the roles that may make them |
//! | [`frame`] | frames to send and to receive; lengths are checked before memory is allocated. Messages to frames and back, without copies of payloads; any received bytes decode to a message or an [`Error`], in a small multiple of the frame's memory. Texts, keys, lists and JSON in messages |
//! | [`error`] | errors, and the codes by which they cross the wire |
//! | [`auth`] | challenge and response; the server's side of the handshake: versions and tokens |
//! | `innet_capnp` | generated from the schema by `make wire`, and committed |

pub mod auth;
pub mod error;
pub mod frame;
mod requests;

#[rustfmt::skip]
#[allow(clippy::all, dead_code, missing_docs, unused_qualifications)]
mod innet_capnp;

pub use error::{Error, ErrorCode, Result};
pub use frame::{
    Frame, FrameLimits, Header, OutgoingFrame, decode_reply, decode_request, encode_reply, encode_request,
};
pub use requests::*;

/// Protocol version of this release.
pub const PROTOCOL: u32 = 1;

/// Version of this release, sent in handshakes.
pub const RELEASE: &str = env!("CARGO_PKG_VERSION");

/// Request id of an error that answers no request and ends the connection.
pub const NO_REQUEST: u64 = 0;
