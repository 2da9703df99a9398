//! The protocol between clients and a server, without I/O: frames, their Cap'n Proto messages, and the handshake.
//! `schema/innet.capnp` specifies it.
//!
//! A sender encodes a [`Request`] or a [`Reply`] as an [`OutgoingFrame`] and writes its bytes; a receiver fills an
//! [`IncomingFrame`](frame::IncomingFrame) and decodes it:
//!
//! ```
//! # use replay_wire::{frame::*, *};
//! let request = Request { id: 7, deadline_ms: 0, body: RequestBody::Stats };
//! let sent = encode_request(&request)?;
//! let frame = Frame::new(sent.control(), bytes::Bytes::new());
//! assert_eq!(decode_request(frame)?, request);
//! # Ok::<(), Error>(())
//! ```
//!
//! # Layout
//!
//! | module | subject |
//! | --- | --- |
//! | this file | requests and replies |
//! | [`frame`] | frames to send and to receive; lengths are checked before memory is allocated |
//! | `encode` | messages to frames; payloads are not copied |
//! | `decode` | frames to messages; any bytes give a message or an [`Error`], with memory of a small multiple of the frame; payloads are slices of the receive buffer |
//! | [`error`] | errors, and the codes by which they cross the wire |
//! | `fields` | structs and enumerations that the schema and Rust share, each listed once for both directions |
//! | [`handshake`] | the server's side of the handshake: versions and tokens |
//! | [`auth`] | challenge and response |
//! | [`role`] | the requests that a token allows |
//! | `innet_capnp` | generated from the schema by `make wire`, and committed |

pub mod auth;
mod decode;
mod encode;
pub mod error;
mod fields;
pub mod frame;
pub mod handshake;
pub mod role;

#[rustfmt::skip]
#[allow(clippy::all, dead_code, missing_docs, unused_qualifications)]
mod innet_capnp;

pub use decode::{decode_reply, decode_request};
pub use encode::{encode_reply, encode_request};
pub use error::{Error, ErrorCode, Result};
pub use frame::{Frame, FrameLimits, Header, OutgoingFrame};

use std::net::SocketAddr;

use bytes::Bytes;

use gradients::{JoinJob, Ticket};
use replay_core::cause::WaitReason;
use replay_core::replay::{
    Listing, OpenWriter, Parameters, Push, SampleRequest, Sampled, UpdateReceipt, WriterId,
    WriterOpened,
};
use replay_core::schema::TableConfig;

/// Protocol version of this release.
pub const PROTOCOL: u32 = 1;

/// Version of this release, sent in handshakes.
pub const RELEASE: &str = env!("CARGO_PKG_VERSION");

/// Request id of an error that answers no request and ends the connection.
pub const NO_REQUEST: u64 = 0;

/// A request of a client.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Number of the request on its connection, from 1; the reply has the same.
    pub id: u64,
    /// Longest wait at the server in milliseconds; 0 is one try without waiting.
    pub deadline_ms: u32,
    /// Content of the request.
    pub body: RequestBody,
}

/// Kinds of requests, with their replies in parentheses. Each may be answered by [`ReplyBody::Error`] instead.
#[derive(Debug, Clone, PartialEq)]
pub enum RequestBody {
    /// Starts a connection ([`ReplyBody::Challenge`]).
    Hello(Hello),
    /// Ends the handshake ([`ReplyBody::Welcome`]): the client's proof, `None` without a token.
    Authenticate(Option<[u8; 32]>),
    /// Makes a table ([`ReplyBody::Done`]).
    CreateTable(TableConfig),
    /// Definition of a table, by name ([`ReplyBody::Table`]).
    DescribeTable(String),
    /// Removes the steps and items of a table, by name ([`ReplyBody::Done`]).
    EmptyTable(String),
    /// Removes a table, by name ([`ReplyBody::Done`]).
    DropTable(String),
    /// Opens or takes over a writer ([`ReplyBody::Writer`]). Its pushes use the same connection.
    OpenWriter {
        /// The writer.
        open: OpenWriter,
        /// Whether the writer was opened before: a server that does not know it then refuses.
        resume: bool,
    },
    /// Steps and items ([`ReplyBody::Pushed`]).
    Push(Push),
    /// A request for samples ([`ReplyBody::Sampled`]).
    Sample(SampleRequest),
    /// New priorities ([`ReplyBody::Updated`]).
    UpdatePriorities {
        /// The table.
        table: String,
        /// Ids of its items.
        ids: Vec<u64>,
        /// New priority of each id, before the exponent.
        priorities: Vec<f64>,
    },
    /// A blob that does not decode ([`ReplyBody::Corrupt`]).
    ReportCorrupt {
        /// The table.
        table: String,
        /// The item.
        id: u64,
        /// The fault.
        reason: String,
    },
    /// Stores parameters ([`ReplyBody::Parameters`] without bytes).
    PutParameters {
        /// Their name.
        name: String,
        /// Number of the put, the same when it is sent again; 0 is none.
        id: u64,
        /// The version to store; the next one for 0, or where that is not newer.
        version: u64,
        /// A safetensors file.
        bytes: Bytes,
    },
    /// Newest parameters ([`ReplyBody::Parameters`]).
    GetParameters {
        /// Their name.
        name: String,
        /// The client's version; 0 is none.
        newer_than: u64,
        /// The writer that makes its steps with them from now on.
        writer: Option<WriterId>,
    },
    /// Counters and gauges ([`ReplyBody::Stats`]).
    Stats,
    /// All tables and parameters ([`ReplyBody::Listing`]).
    List,
    /// Saves the server's memory ([`ReplyBody::Done`]).
    Snapshot,
    /// Closes a writer ([`ReplyBody::Done`]).
    CloseWriter {
        /// The table.
        table: String,
        /// The writer.
        writer: u64,
        /// Epoch of its connection.
        epoch: u32,
    },
    /// Joins a gradient job until the connection ends ([`ReplyBody::Gradients`]).
    JoinGradients {
        /// The job and the worker's part in it.
        job: JoinJob,
        /// For a server that joins its parent: the number of its workers.
        below: Option<u32>,
    },
}

/// Names the requests. A variant that is missing here does not compile.
macro_rules! request_names {
    ($($variant:ident => $name:literal,)+) => {
        impl RequestBody {
            /// Names of all kinds of requests.
            pub const NAMES: [&str; [$($name),+].len()] = [$($name),+];

            /// Index of the request's kind in [`RequestBody::NAMES`].
            pub fn kind(&self) -> usize {
                enum Kind {
                    $($variant),+
                }
                match self {
                    $(RequestBody::$variant { .. } => Kind::$variant as usize),+
                }
            }

            /// Name of the request, for errors.
            pub fn name(&self) -> &'static str {
                Self::NAMES[self.kind()]
            }
        }
    };
}

request_names! {
    Hello => "hello",
    Authenticate => "authenticate",
    CreateTable => "create_table",
    DescribeTable => "describe_table",
    EmptyTable => "empty_table",
    DropTable => "drop_table",
    OpenWriter => "open_writer",
    Push => "push",
    Sample => "sample",
    UpdatePriorities => "update_priorities",
    ReportCorrupt => "report_corrupt",
    PutParameters => "put_parameters",
    GetParameters => "get_parameters",
    Stats => "stats",
    List => "list",
    Snapshot => "snapshot",
    CloseWriter => "close_writer",
    JoinGradients => "join_gradients",
}

/// The first request of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// [`PROTOCOL`] of the client.
    pub protocol: u32,
    /// [`RELEASE`] of the client.
    pub release: String,
    /// Random bytes of this connection.
    pub nonce: [u8; 32],
    /// Number of the client's program, the same for all of its processes; 0 is no number.
    pub program: u64,
}

/// The answer to [`Hello`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Challenge {
    /// [`PROTOCOL`] of the server.
    pub protocol: u32,
    /// [`RELEASE`] of the server.
    pub release: String,
    /// Random number of this start of the server.
    pub incarnation: u64,
    /// Random bytes of this connection.
    pub nonce: [u8; 32],
    /// Whether clients need a token.
    pub token_needed: bool,
    /// The server's [`FrameLimits::max_frame_bytes`].
    pub max_frame_bytes: u64,
}

/// A reply of the server.
pub struct Reply {
    /// Id of the request; [`NO_REQUEST`] for an error of the connection.
    pub id: u64,
    /// Content of the reply.
    pub body: ReplyBody,
}

/// Kinds of replies.
pub enum ReplyBody {
    /// The request failed.
    Error {
        /// Kind of the error.
        code: ErrorCode,
        /// Message for the user; empty with a reason.
        message: String,
        /// With [`ErrorCode::Deadline`] and [`ErrorCode::Renew`]: what the request waited for.
        waited_for: Option<Box<WaitReason>>,
    },
    /// Answer to a hello.
    Challenge(Challenge),
    /// End of the handshake: the server's proof, `None` without a token.
    Welcome(Option<[u8; 32]>),
    /// No answer yet, and the reason: the request waits or, with id [`NO_REQUEST`], the server does not read the
    /// connection for now.
    Waiting(WaitReason),
    /// Success without a result.
    Done,
    /// Definition of a table.
    Table(TableConfig),
    /// An opened writer.
    Writer(WriterOpened),
    /// An applied push.
    Pushed {
        /// Steps of this writer that the table has applied so far.
        steps: u64,
    },
    /// A sampled batch.
    Sampled(Sampled),
    /// Result of an update of priorities.
    Updated(UpdateReceipt),
    /// A removed item: the name of its writer, or `None` when it was removed before.
    Corrupt(Option<String>),
    /// A version with its bytes (`getParameters`) or without (`putParameters`); `None` when there is none newer.
    Parameters(Option<Parameters>),
    /// One JSON object.
    Stats(String),
    /// Tables and parameters.
    Listing(Listing),
    /// Membership in a gradient job.
    Gradients(GradientsJoined),
}

/// The answer to [`RequestBody::JoinGradients`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GradientsJoined {
    /// UDP address of the aggregator; an IP address of all zeros stands for the server's own.
    pub address: SocketAddr,
    /// The worker's session and key at the aggregator.
    pub ticket: Ticket,
}

impl ReplyBody {
    /// Name in the schema, for errors about unexpected replies.
    pub fn name(&self) -> &'static str {
        match self {
            ReplyBody::Error { .. } => "error",
            ReplyBody::Challenge(_) => "challenge",
            ReplyBody::Welcome(_) => "welcome",
            ReplyBody::Waiting(_) => "waiting",
            ReplyBody::Done => "done",
            ReplyBody::Table(_) => "table",
            ReplyBody::Writer(_) => "writer",
            ReplyBody::Pushed { .. } => "pushed",
            ReplyBody::Sampled(_) => "sampled",
            ReplyBody::Updated(_) => "updated",
            ReplyBody::Corrupt(_) => "corrupt",
            ReplyBody::Parameters(_) => "parameters",
            ReplyBody::Stats(_) => "stats",
            ReplyBody::Listing(_) => "listing",
            ReplyBody::Gradients(_) => "gradients",
        }
    }
}
