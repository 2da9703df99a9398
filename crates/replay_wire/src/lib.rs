//! The protocol between clients and a server, without I/O: frames, the Cap'n Proto messages in them, the handshake and
//! its proofs. `schema/innet.capnp` is the contract; this crate is its Rust side.
//!
//! A sender makes an [`OutgoingFrame`] frame of a [`Request`] or a [`Reply`] and writes its bytes; a receiver fills an
//! [`IncomingFrame`](frame::IncomingFrame) one and decodes it:
//!
//! ```
//! # use replay_wire::{frame::*, *};
//! let request = Request { id: 7, deadline_ms: 0, body: RequestBody::Stats };
//! let sent = encode_request(&request)?;
//! let frame = Frame::new(sent.control(), bytes::Bytes::new());
//! assert_eq!(decode_request(frame)?, request);
//! # replay_core::Result::Ok(())
//! ```
//!
//! # Layout
//!
//! | module | subject |
//! | --- | --- |
//! | this file | requests and replies |
//! | [`frame`] | lengths, capped before anything is allocated; frames to send and to receive |
//! | `encode` | messages to frames. A payload is never copied: its segments are written from where they lie |
//! | `decode` | frames to messages. Any bytes give a message or an [`Error`], never a panic, and no more memory than a small multiple of the frame. Payloads are slices of the receive buffer |
//! | `names` | the schema's enumerations and ours |
//! | [`handshake`] | versions and tokens: the server's side |
//! | [`auth`] | challenge and response |
//! | `innet_capnp` | generated from the schema by `make wire`, and committed |

pub mod auth;
mod decode;
mod encode;
pub mod frame;
pub mod handshake;
mod names;

#[rustfmt::skip]
#[allow(clippy::all, dead_code, unused_qualifications)]
mod innet_capnp;

pub use decode::{decode_reply, decode_request, decode_table};
pub use encode::{encode_reply, encode_request};
pub use frame::{Frame, FrameLimits, Header, OutgoingFrame};

use std::net::SocketAddr;

use bytes::Bytes;

use gradients::{JoinJob, Ticket};
use replay_core::error::{Error, ErrorCode};
use replay_core::replay::{
    Listing, OpenWriter, Parameters, Push, SampleRequest, Sampled, UpdateReceipt, WriterOpened,
};
use replay_core::schema::TableConfig;

/// Version of the protocol that this release speaks.
pub const PROTOCOL: u32 = 3;

/// This release, as it stands in handshakes.
pub const RELEASE: &str = env!("CARGO_PKG_VERSION");

/// The id of an error that answers no request in particular: the connection ends after it.
pub const NO_REQUEST: u64 = 0;

/// What a client asks.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Comes back in the reply. Clients count from 1.
    pub id: u64,
    /// How long the server may let the request wait, in milliseconds; 0 is one try without waiting.
    pub deadline_ms: u32,
    /// The question.
    pub body: RequestBody,
}

/// The questions. Answers are named in brackets; each may be [`ReplyBody::Error`] instead.
#[derive(Debug, Clone, PartialEq)]
pub enum RequestBody {
    /// Starts a connection ([`ReplyBody::Challenge`]).
    Hello(Hello),
    /// Ends the handshake ([`ReplyBody::Welcome`]): the client's proof, `None` without a token.
    Authenticate(Option<[u8; 32]>),
    /// Makes a table ([`ReplyBody::Done`]).
    CreateTable(TableConfig),
    /// Asks for the definition of the table of this name ([`ReplyBody::Table`]).
    DescribeTable(String),
    /// Removes the steps and items of the table of this name ([`ReplyBody::Done`]).
    EmptyTable(String),
    /// Removes the table of this name ([`ReplyBody::Done`]).
    DropTable(String),
    /// Opens or takes over a writer ([`ReplyBody::Writer`]). Its pushes come over the same connection.
    OpenWriter {
        /// The writer.
        open: OpenWriter,
        /// It was opened before: a server that does not know it must not open it anew.
        resume: bool,
    },
    /// Steps and items ([`ReplyBody::Pushed`]).
    Push(Push),
    /// A draw ([`ReplyBody::Sampled`]).
    Sample(SampleRequest),
    /// New priorities ([`ReplyBody::Updated`]).
    UpdatePriorities {
        /// The table.
        table: String,
        /// Keys of its items.
        keys: Vec<u64>,
        /// One for each key, before the exponent.
        priorities: Vec<f64>,
    },
    /// A blob that does not decode ([`ReplyBody::Corrupt`]).
    ReportCorrupt {
        /// The table.
        table: String,
        /// The item.
        key: u64,
        /// What is wrong with it.
        reason: String,
    },
    /// Stores parameters ([`ReplyBody::Parameters`], without the bytes).
    PutParameters {
        /// Their name.
        name: String,
        /// One safetensors file.
        bytes: Bytes,
    },
    /// Asks for parameters ([`ReplyBody::Parameters`]).
    GetParameters {
        /// Their name.
        name: String,
        /// The version that the client has; 0 is none.
        newer_than: u64,
    },
    /// Asks for counters and gauges ([`ReplyBody::Stats`]).
    Stats,
    /// Asks which tables and parameters there are ([`ReplyBody::Listing`]).
    List,
    /// Closes a writer ([`ReplyBody::Done`]).
    CloseWriter {
        /// The table.
        table: String,
        /// The writer.
        writer: u64,
        /// Its connection.
        epoch: u32,
    },
    /// Takes part in a gradient job for as long as the connection is open ([`ReplyBody::Gradients`]).
    JoinGradients {
        /// The job, and the place in it.
        job: JoinJob,
        /// This is no worker but a server: how many workers it has sums of.
        below: Option<u32>,
    },
}

/// The first request of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// [`PROTOCOL`] of the client.
    pub protocol: u32,
    /// [`RELEASE`] of the client.
    pub release: String,
    /// Drawn at random for this connection.
    pub nonce: [u8; 32],
}

/// The answer to [`Hello`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Challenge {
    /// [`PROTOCOL`] of the server.
    pub protocol: u32,
    /// [`RELEASE`] of the server.
    pub release: String,
    /// Drawn at random when the server started.
    pub incarnation: u64,
    /// Drawn at random for this connection.
    pub nonce: [u8; 32],
    /// The server asks for a token.
    pub token_needed: bool,
    /// The server's own proof that it knows the token; `None` without one.
    pub proof: Option<[u8; 32]>,
    /// The server's [`FrameLimits::max_frame_bytes`].
    pub max_frame_bytes: u64,
}

/// What the server answers.
pub struct Reply {
    /// The request's id; [`NO_REQUEST`] for an error of the connection itself.
    pub id: u64,
    /// The answer.
    pub body: ReplyBody,
}

/// The answers.
pub enum ReplyBody {
    /// The request failed.
    Error {
        /// What kind of error.
        code: ErrorCode,
        /// For people.
        message: String,
    },
    /// Prove that you know the token.
    Challenge(Challenge),
    /// The handshake is over.
    Welcome,
    /// It is done, and there is nothing to tell.
    Done,
    /// A table's definition.
    Table(TableConfig),
    /// The writer is open.
    Writer(WriterOpened),
    /// The push is applied.
    Pushed {
        /// Steps that the table has taken from this writer so far.
        steps: u64,
    },
    /// A batch.
    Sampled(Sampled),
    /// What the update did.
    Updated(UpdateReceipt),
    /// The item is removed; the name of the writer that pushed it, `None` when the item was gone.
    Corrupt(Option<String>),
    /// A version with its bytes (`getParameters`) or without (`putParameters`); `None`: nothing newer.
    Parameters(Option<Parameters>),
    /// One JSON object.
    Stats(String),
    /// Tables and parameters.
    Listing(Listing),
    /// A place in a gradient job.
    Gradients(GradientsJoined),
}

/// The answer to [`RequestBody::JoinGradients`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GradientsJoined {
    /// The aggregator's UDP; an IP address of all zeros is the server's own.
    pub address: SocketAddr,
    /// What the aggregator knows the worker by.
    pub ticket: Ticket,
}

impl From<&Error> for ReplyBody {
    fn from(error: &Error) -> Self {
        ReplyBody::Error {
            code: error.code(),
            message: error.to_string(),
        }
    }
}

impl ReplyBody {
    /// The schema's name of the answer, for errors about an answer to another question.
    pub fn name(&self) -> &'static str {
        match self {
            ReplyBody::Error { .. } => "error",
            ReplyBody::Challenge(_) => "challenge",
            ReplyBody::Welcome => "welcome",
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
