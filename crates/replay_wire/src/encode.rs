//! Messages to frames.

use capnp::message::{Builder, HeapAllocator};
use capnp::serialize;

use super::fields::internal;
use super::frame::{HEADER_BYTES, OutgoingFrame};
use super::innet_capnp as wire;
use super::{Reply, Request};
use crate::error::Result;

/// The frame of a request. Its payload is shared, not copied.
///
/// # Errors
/// [`Error::TooLarge`] for lists and payloads over the format's limits, [`Error::Priority`] for a push with a priority that
/// is NaN, infinite or negative.
///
/// [`Error::TooLarge`]: replay_core::error::Error::TooLarge
/// [`Error::Priority`]: replay_core::error::Error::Priority
pub fn encode_request(request: &Request) -> Result<OutgoingFrame> {
    let mut message = builder(request.body.words());
    let mut root = message.init_root::<wire::request::Builder<'_>>();
    root.set_id(request.id);
    root.set_deadline_ms(request.deadline_ms);
    request.body.write(root)?;
    OutgoingFrame::new(head(&message)?, vec![request.body.payload()], None)
}

/// The frame of a reply. It owns the credit and the blobs, which stay pinned until it is dropped.
///
/// # Errors
/// [`Error::TooLarge`] for batches and payloads over the format's limits.
///
/// [`Error::TooLarge`]: replay_core::error::Error::TooLarge
pub fn encode_reply(reply: Reply) -> Result<OutgoingFrame> {
    let mut message = builder(reply.body.words());
    let mut root = message.init_root::<wire::reply::Builder<'_>>();
    root.set_id(reply.id);
    reply.body.write(root)?;
    let (payload, credit) = reply.body.payload();
    OutgoingFrame::new(head(&message)?, payload, credit)
}

fn builder(words: usize) -> Builder<HeapAllocator> {
    let words = u32::try_from(words).unwrap_or(u32::MAX);
    Builder::new(HeapAllocator::new().first_segment_words(words))
}

/// The message, behind [`HEADER_BYTES`] free bytes.
fn head(message: &Builder<HeapAllocator>) -> Result<Vec<u8>> {
    let bytes = 8 * serialize::compute_serialized_size_in_words(message);
    let mut head = Vec::with_capacity(HEADER_BYTES + bytes);
    head.resize(HEADER_BYTES, 0);
    serialize::write_message(&mut head, message).map_err(internal)?;
    Ok(head)
}
