//! Frames to messages. The bytes are untrusted: every pointer, length, text and enum is checked.

use bytes::Bytes;
use capnp::Word;
use capnp::message::{Reader, ReaderOptions};
use capnp::serialize::BufferSegments;

use super::fields::{Rest, malformed};
use super::frame::Frame;
use super::innet_capnp as wire;
use super::{Reply, ReplyBody, Request, RequestBody};
use crate::error::{Error, Result};

/// Memory for the lists of structs in a request, besides the bytes of its control message. Chunks and items are as long decoded as
/// encoded; the columns of a table are longer.
const SMALL_LISTS: usize = 16 << 10;

/// Bytes of lists of structs in a reply for each byte of its control message: a list of tables takes one and a half.
const REPLY_LISTS: usize = 3;

/// Nesting limit; the deepest message is request, table, columns, column, shape.
const NESTING: i32 = 16;

/// The request in a frame.
///
/// # Errors
/// [`Error::Protocol`] for anything but a request, and for one that takes much more memory than its frame: its control message,
/// decoded, takes at most twice as much as encoded, and 16 KiB.
pub fn decode_request(frame: Frame) -> Result<Request> {
    let message = reader(&frame)?;
    let root: wire::request::Reader<'_> = message.get_root().map_err(malformed)?;
    let rest = Rest::new(frame.payload.clone(), frame.control_bytes() + SMALL_LISTS);
    let body = RequestBody::read(root, &rest)?;
    refuse_unused(&rest.payload())?;
    Ok(Request {
        id: root.get_id(),
        deadline_ms: root.get_deadline_ms(),
        body,
    })
}

/// The reply in a frame.
///
/// # Errors
/// [`Error::Protocol`] for anything but a reply.
pub fn decode_reply(frame: Frame) -> Result<Reply> {
    let message = reader(&frame)?;
    let root: wire::reply::Reader<'_> = message.get_root().map_err(malformed)?;
    let rest = Rest::new(frame.payload.clone(), REPLY_LISTS * frame.control_bytes());
    let body = ReplyBody::read(root, &rest)?;
    refuse_unused(&rest.payload())?;
    Ok(Reply {
        id: root.get_id(),
        body,
    })
}

fn reader(frame: &Frame) -> Result<Reader<BufferSegments<&[u8]>>> {
    let options = ReaderOptions {
        // Each word of a well-formed message is read once, so texts and numbers take no more than the message; every element of
        // a list counts.
        traversal_limit_in_words: Some(frame.control.len() + 64),
        nesting_limit: NESTING,
    };
    let bytes = Word::words_to_bytes(&frame.control);
    let segments = BufferSegments::new(bytes, options).map_err(malformed)?;
    Ok(Reader::new(segments, options))
}

fn refuse_unused(payload: &Bytes) -> Result<()> {
    if payload.is_empty() {
        return Ok(());
    }
    Err(Error::Protocol(format!(
        "a payload of {} bytes with a message that has none",
        payload.len()
    )))
}
