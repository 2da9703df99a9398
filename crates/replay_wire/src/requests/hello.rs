//! Messages without a table: the handshake, and requests to extensions.

use bytes::Bytes;

use crate::error::Result;
use crate::frame::{Rest, key, text};
use crate::innet_capnp as wire;

/// Starts a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// [`PROTOCOL`](crate::PROTOCOL) of the client.
    pub protocol: u32,
    /// [`RELEASE`](crate::RELEASE) of the client.
    pub release: String,
    /// Random bytes of this connection.
    pub nonce: [u8; 32],
}

/// The answer to [`Hello`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Challenge {
    /// [`PROTOCOL`](crate::PROTOCOL) of the server.
    pub protocol: u32,
    /// [`RELEASE`](crate::RELEASE) of the server.
    pub release: String,
    /// Random number, new at each start of the server.
    pub incarnation: u64,
    /// Random bytes of this connection.
    pub nonce: [u8; 32],
    /// Whether clients need a token.
    pub token_needed: bool,
    /// The server's [`FrameLimits::max_frame_bytes`](crate::FrameLimits::max_frame_bytes).
    pub max_frame_bytes: u64,
}

pub fn read(from: wire::hello::Reader<'_>) -> Result<Hello> {
    Ok(Hello { protocol: from.get_protocol(), release: text(from.get_release())?, nonce: key(from.get_nonce())? })
}

pub fn write(hello: &Hello, mut out: wire::hello::Builder<'_>) {
    out.set_protocol(hello.protocol);
    out.set_release(&hello.release);
    out.set_nonce(&hello.nonce);
}

pub fn read_challenge(from: wire::challenge::Reader<'_>) -> Result<Challenge> {
    Ok(Challenge {
        protocol: from.get_protocol(),
        release: text(from.get_release())?,
        incarnation: from.get_incarnation(),
        nonce: key(from.get_nonce())?,
        token_needed: from.get_token_needed(),
        max_frame_bytes: from.get_max_frame_bytes(),
    })
}

pub fn write_challenge(challenge: &Challenge, mut out: wire::challenge::Builder<'_>) {
    out.set_protocol(challenge.protocol);
    out.set_release(&challenge.release);
    out.set_incarnation(challenge.incarnation);
    out.set_nonce(&challenge.nonce);
    out.set_token_needed(challenge.token_needed);
    out.set_max_frame_bytes(challenge.max_frame_bytes);
}

/// A message to an extension of the server, or its answer, in the extension's format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extension {
    /// Name of the extension.
    pub name: String,
    /// The frame's payload.
    pub message: Bytes,
}

pub fn read_extension(from: wire::extension::Reader<'_>, rest: &Rest) -> Result<Extension> {
    Ok(Extension { name: text(from.get_name())?, message: rest.payload() })
}

pub fn write_extension(extension: &Extension, mut out: wire::extension::Builder<'_>) {
    out.set_name(&extension.name);
}
