//! Messages to frames, and frames to messages. Received bytes are untrusted: every pointer, length, text and enum is checked.

use capnp::Word;
use capnp::message::{Builder, HeapAllocator, Reader, ReaderOptions};
use capnp::serialize::{self, BufferSegments};

use crate::error::{Error, Result};
use crate::fields::{Rest, text};
use crate::frame::{Frame, HEADER_BYTES, OutgoingFrame};
use crate::innet_capnp as wire;
use crate::{Reply, ReplyBody, Request, RequestBody};
use base::error::check_size;

/// Memory for decoded lists in a request, in addition to the size of its control message: chunks and items take as much decoded as encoded.
const SMALL_LISTS: usize = 16 << 10;

/// Memory for decoded lists in a reply, in bytes per byte of its control message. A list of tables takes 1.5.
const REPLY_LISTS: usize = 3;

/// First segment of a message without long lists, in words.
const FEW_WORDS: usize = 64;

/// Longest message that is built, in words: a list of Cap'n Proto has fewer.
const MAX_WORDS: u64 = (1 << 29) - 1;

/// Nesting limit; the deepest message is reply, listing, tables, definition.
const NESTING: i32 = 16;

/// The frame of a request. Its payload is shared, not copied.
///
/// # Errors
/// [`Error::TooLarge`] for lists and payloads over the format's limits, [`Error::Priority`] for a push with a priority that
/// is NaN, infinite or negative.
///
/// [`Error::TooLarge`]: replay_core::error::Error::TooLarge
/// [`Error::Priority`]: replay_core::error::Error::Priority
pub fn encode_request(request: &Request) -> Result<OutgoingFrame> {
    let mut message = builder(request_words(&request.body))?;
    let mut root = message.init_root::<wire::request::Builder<'_>>();
    root.set_id(request.id);
    root.set_deadline_ms(request.deadline_ms);
    root.set_table(request.table);
    if let Some(name) = &request.table_name {
        root.set_table_name(name);
    }
    let payload = request.body.write(root)?;
    OutgoingFrame::new(head(&message), vec![payload], None)
}

/// The frame of a reply. It owns the credit and the blobs, which stay pinned until it is dropped.
///
/// # Errors
/// [`Error::TooLarge`] for batches and payloads over the format's limits.
///
/// [`Error::TooLarge`]: replay_core::error::Error::TooLarge
pub fn encode_reply(reply: Reply) -> Result<OutgoingFrame> {
    let mut message = builder(reply_words(&reply.body))?;
    let mut root = message.init_root::<wire::reply::Builder<'_>>();
    root.set_id(reply.id);
    let (payload, credit) = reply.body.write(root);
    OutgoingFrame::new(head(&message), payload, credit)
}

/// Words of a request: at least the elements of its lists.
fn request_words(body: &RequestBody) -> usize {
    FEW_WORDS
        + match body {
            RequestBody::CreateTable(table) => 64 + 16 * table.columns.len(),
            RequestBody::Push(push) => 3 * (push.body.chunks.len() + push.body.items.len()),
            RequestBody::UpdatePriorities(update) => update.ids.len() + update.priorities.len(),
            _ => 0,
        }
}

/// Words of a reply: at least the elements of its lists, but of definitions of tables, which are short.
fn reply_words(body: &ReplyBody) -> usize {
    FEW_WORDS
        + match body {
            ReplyBody::Sampled(sampled) => 4 * sampled.items.len(),
            ReplyBody::StepsRead(read) => 4 * read.chunks.len(),
            ReplyBody::Stats(json) => json.len() / 8,
            ReplyBody::Listing(listing) => 64 * listing.tables.len() + 8 * listing.parameters.len(),
            _ => 0,
        }
}

/// A message whose first segment has `words`. Lists over Cap'n Proto's limits are refused here: its builders would panic.
fn builder(words: usize) -> Result<Builder<HeapAllocator>> {
    check_size("a control message, in words,", words as u64, MAX_WORDS, "send less at a time")?;
    Ok(Builder::new(HeapAllocator::new().first_segment_words(words as u32)))
}

/// The message, behind [`HEADER_BYTES`] free bytes.
fn head(message: &Builder<HeapAllocator>) -> Vec<u8> {
    let bytes = 8 * serialize::compute_serialized_size_in_words(message);
    let mut head = Vec::with_capacity(HEADER_BYTES + bytes);
    head.resize(HEADER_BYTES, 0);
    serialize::write_message(&mut head, message).expect("a vector takes any message");
    head
}

/// The request in a frame.
///
/// # Errors
/// [`Error::Protocol`] for anything but a request, and for one whose lists take too much memory: a decoded control message takes at most
/// twice its encoded size plus 16 KiB, but for the definition of a table, which takes up to six times its JSON of at most 128 KiB.
pub fn decode_request(frame: Frame) -> Result<Request> {
    let message = reader(&frame)?;
    let root: wire::request::Reader<'_> = message.get_root()?;
    let rest = Rest::new(frame.payload.clone(), frame.control_bytes() + SMALL_LISTS);
    let body = RequestBody::read(root, &rest)?;
    refuse_unused(&rest)?;
    let table_name = root.has_table_name().then(|| text(root.get_table_name())).transpose()?;
    let (id, deadline_ms, table) = (root.get_id(), root.get_deadline_ms(), root.get_table());
    Ok(Request { id, deadline_ms, table, table_name, body })
}

/// The reply in a frame.
///
/// # Errors
/// [`Error::Protocol`] for anything but a reply.
pub fn decode_reply(frame: Frame) -> Result<Reply> {
    let message = reader(&frame)?;
    let root: wire::reply::Reader<'_> = message.get_root()?;
    let rest = Rest::new(frame.payload.clone(), REPLY_LISTS * frame.control_bytes());
    let body = ReplyBody::read(root, &rest)?;
    refuse_unused(&rest)?;
    Ok(Reply { id: root.get_id(), body })
}

fn reader(frame: &Frame) -> Result<Reader<BufferSegments<&[u8]>>> {
    let options = ReaderOptions {
        // Each word of a well-formed message is read once, so texts and numbers take no more than the message; every element of
        // a list counts.
        traversal_limit_in_words: Some(frame.control.len() + 64),
        nesting_limit: NESTING,
    };
    let bytes = Word::words_to_bytes(&frame.control);
    let segments = BufferSegments::new(bytes, options)?;
    Ok(Reader::new(segments, options))
}

fn refuse_unused(rest: &Rest) -> Result<()> {
    let unused = match rest.payload().len() {
        0 => return Ok(()),
        bytes => format!("a payload of {bytes} bytes with a message that has none"),
    };
    Err(Error::Protocol(unused))
}
