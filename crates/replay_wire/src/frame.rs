//! Frames, and messages in them. Received bytes are untrusted: every pointer, length, text and enum is checked.
//!
//! A frame is two lengths, a control message, a payload. No I/O: a receiver fills an [`IncomingFrame`], a sender writes the
//! slices of [`OutgoingFrame::unwritten`]. Both keep their progress, so a transfer may be interrupted and resumed.
//!
//! The fields of messages, texts, keys, lists and JSON, are read here, within the memory that the frame's length allows.

use std::cell::Cell;
use std::io::IoSlice;

use bytes::Bytes;
use capnp::Word;
use capnp::message::{Builder, HeapAllocator, Reader, ReaderOptions};
use capnp::serialize::{self, BufferSegments};
use capnp::traits::OwnedStruct;
use capnp::{data, struct_list, text};
use serde::Serialize;
use serde::de::DeserializeOwned;

use base::allocation::{self, OutOfMemory, check_size};
use base::notation::shortened;
use replay_core::processor::advise_huge_pages;
use replay_core::replay::SampleCredit;

use crate::error::{Error, Result};
use crate::{Reply, ReplyBody, Request, RequestBody, innet_capnp as wire};

/// Bytes of the two lengths at the start of a frame.
pub const HEADER_BYTES: usize = 8;

/// Segments of one vectored write: Linux takes at most 1024.
const MAX_SEGMENTS: usize = 1024;

/// Limits of a receiver, checked before memory is allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameLimits {
    /// Most bytes of one frame, control message and payload together.
    pub max_frame_bytes: u64,
    /// Most bytes of a control message. It also bounds every list in it: see [`super::decode_request`].
    pub max_control_bytes: u32,
}

impl FrameLimits {
    /// Limits for a peer that is not authenticated.
    pub const HANDSHAKE: FrameLimits = FrameLimits { max_frame_bytes: 1 << 16, max_control_bytes: 1 << 16 };

    /// Frames of up to `max_frame_bytes`, of which the control message takes up to 16 MiB: enough for
    /// 600,000 items in a push or in a batch.
    pub const fn new(max_frame_bytes: u64) -> Self {
        let control = if max_frame_bytes < 1 << 24 { max_frame_bytes as u32 } else { 1 << 24 };
        FrameLimits { max_frame_bytes, max_control_bytes: control }
    }
}

impl Default for FrameLimits {
    /// Frames of up to 256 MiB.
    fn default() -> Self {
        FrameLimits::new(256 << 20)
    }
}

/// The two lengths at the start of a frame, within the limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Bytes of the control message, a multiple of 8.
    pub control: u32,
    /// Bytes of the payload.
    pub payload: u32,
}

impl Header {
    /// The lengths in the first [`HEADER_BYTES`] bytes of a frame.
    ///
    /// # Errors
    /// [`Error::Protocol`] for invalid lengths; [`Error::TooLarge`] beyond the limits.
    pub fn parse(bytes: [u8; HEADER_BYTES], limits: &FrameLimits) -> Result<Self> {
        let [a, b, c, d, e, f, g, h] = bytes;
        let header = Header { control: u32::from_le_bytes([a, b, c, d]), payload: u32::from_le_bytes([e, f, g, h]) };
        if header.control == 0 || !header.control.is_multiple_of(8) {
            return Err(Error::Protocol(format!(
                "a frame starts with a control length of {}, which is no positive multiple of 8: the peer does not speak this protocol",
                header.control
            )));
        }
        check_size(
            "a control message, in bytes,",
            header.control.into(),
            limits.max_control_bytes.into(),
            "send fewer chunks, items or ids at a time",
        )?;
        check_size(
            "a frame, in bytes,",
            header.frame_bytes(),
            limits.max_frame_bytes,
            "send less at a time, or raise the receiver's max_frame_bytes",
        )?;
        Ok(header)
    }

    /// Control message and payload together.
    pub fn frame_bytes(&self) -> u64 {
        u64::from(self.control) + u64::from(self.payload)
    }

    /// Memory for the frame and its decoded request, which shares the payload: see [`super::decode_request`].
    pub fn memory_bytes(&self) -> u64 {
        2 * u64::from(self.control) + u64::from(self.payload)
    }
}

/// A received frame.
#[derive(Debug, Clone)]
pub struct Frame {
    /// The control message in words, so that it is aligned for Cap'n Proto.
    pub(super) control: Vec<Word>,
    /// The payload, in a buffer of exactly its size.
    pub(super) payload: Bytes,
}

impl Frame {
    /// A frame from a control message, which is padded to whole words, and a payload.
    pub fn new(control: &[u8], payload: Bytes) -> Self {
        let mut words = Word::allocate_zeroed_vec(control.len().div_ceil(8));
        Word::words_to_bytes_mut(&mut words)[..control.len()].copy_from_slice(control);
        Frame { control: words, payload }
    }

    /// Bytes of the control message.
    pub(super) fn control_bytes(&self) -> usize {
        Word::words_to_bytes(&self.control).len()
    }
}

/// A frame that is being received: first the control message, then the payload.
#[derive(Debug)]
pub struct IncomingFrame {
    header: Header,
    control: Vec<Word>,
    /// Bytes received of the control message.
    filled: usize,
    payload: Vec<u8>,
}

impl IncomingFrame {
    /// Allocates the buffers for a header.
    pub fn new(header: Header) -> Result<Self, OutOfMemory> {
        allocation::check("a received message", header.control.into())?;
        let mut payload = allocation::with_capacity("a received payload", header.payload as usize)?;
        advise_huge_pages(payload.spare_capacity_mut());
        let control = Word::allocate_zeroed_vec(header.control as usize / 8);
        Ok(IncomingFrame { control, filled: 0, payload, header })
    }

    /// The missing part of the control message, to be filled from the front; empty once it is complete.
    pub fn control_rest(&mut self) -> &mut [u8] {
        &mut Word::words_to_bytes_mut(&mut self.control)[self.filled..]
    }

    /// Counts bytes that were written to [`Self::control_rest`].
    pub fn advance_control(&mut self, bytes: usize) {
        self.filled += bytes;
    }

    /// The payload so far, and the count of bytes to append. Appending avoids zeroing the buffer first, a second write of
    /// 13 MB for a version of parameters.
    pub fn payload_rest(&mut self) -> (&mut Vec<u8>, usize) {
        let missing = self.header.payload as usize - self.payload.len();
        (&mut self.payload, missing)
    }

    /// Received and total bytes of the current part.
    pub fn progress(&self) -> (usize, usize) {
        match self.header.control as usize {
            control if self.filled < control => (self.filled, control),
            _ => (self.payload.len(), self.header.payload as usize),
        }
    }

    /// The complete frame.
    ///
    /// # Panics
    /// When a part is missing.
    pub fn finish(self) -> Frame {
        assert_eq!(self.filled, self.header.control as usize, "a whole control message");
        assert_eq!(self.payload.len(), self.header.payload as usize, "a whole payload");
        Frame { control: self.control, payload: Bytes::from(self.payload) }
    }
}

/// A frame to send: the header and the control message in one buffer, and the payload's segments, which are not copied.
pub struct OutgoingFrame {
    head: Vec<u8>,
    payload: Vec<Bytes>,
    payload_bytes: u32,
    credit: Option<Box<dyn SampleCredit>>,
    /// The buffer being written (0 is the head), and the bytes written of it.
    buffer: usize,
    offset: usize,
}

impl OutgoingFrame {
    /// A frame from `head`, which has [`HEADER_BYTES`] free bytes before the control message, and a payload. `credit` is
    /// delivered once the last byte is written, and returned if that never happens.
    pub(super) fn new(mut head: Vec<u8>, payload: Vec<Bytes>, credit: Option<Box<dyn SampleCredit>>) -> Result<Self> {
        let control = limited("a control message, in bytes,", head.len() - HEADER_BYTES)?;
        let payload_bytes = payload.iter().map(|s| s.as_ref().len()).sum();
        let payload_bytes = limited("a payload, in bytes,", payload_bytes)?;
        head[..4].copy_from_slice(&control.to_le_bytes());
        head[4..HEADER_BYTES].copy_from_slice(&payload_bytes.to_le_bytes());
        Ok(OutgoingFrame { head, payload, payload_bytes, credit, buffer: 0, offset: 0 })
    }

    /// Control message and payload together, as the peer's `max_frame_bytes` counts them.
    pub fn frame_bytes(&self) -> u64 {
        (self.head.len() - HEADER_BYTES) as u64 + u64::from(self.payload_bytes)
    }

    /// The control message.
    pub fn control(&self) -> &[u8] {
        &self.head[HEADER_BYTES..]
    }

    /// The payload's segments.
    pub fn payload(&self) -> &[Bytes] {
        &self.payload
    }

    fn buffer(&self, index: usize) -> &[u8] {
        match index {
            0 => &self.head,
            _ => self.payload[index - 1].as_ref(),
        }
    }

    /// The next slices to write, at most 1,024; empty once the frame is written.
    pub fn unwritten(&self) -> Vec<IoSlice<'_>> {
        let buffers = self.buffer..=self.payload.len();
        let mut slices = Vec::with_capacity(buffers.clone().count().min(MAX_SEGMENTS));
        let rest = |index| &self.buffer(index)[if index == self.buffer { self.offset } else { 0 }..];
        slices.extend(buffers.map(rest).filter(|bytes| !bytes.is_empty()).take(MAX_SEGMENTS).map(IoSlice::new));
        slices
    }

    /// Counts bytes that were written.
    pub fn advance(&mut self, written: usize) {
        self.offset += written;
        while self.buffer <= self.payload.len() && self.offset >= self.buffer(self.buffer).len() {
            self.offset -= self.buffer(self.buffer).len();
            self.buffer += 1;
        }
    }

    /// Notes that the frame is written and flushed: a batch in it counts as delivered.
    pub fn delivered(&mut self) {
        if let Some(credit) = self.credit.take() {
            credit.delivered();
        }
    }
}

fn limited(what: &'static str, size: usize) -> Result<u32> {
    check_size(what, size as u64, u32::MAX.into(), "send less at a time")?;
    Ok(size as u32)
}

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
            RequestBody::Push(push) => 4 * push.body.chunks.len() + 3 * push.body.items.len(),
            RequestBody::UpdatePriorities(update) => update.ids.len() + update.priorities.len(),
            _ => 0,
        }
}

/// Words of a reply: at least the elements of its lists, but of definitions of tables, which are short.
fn reply_words(body: &ReplyBody) -> usize {
    FEW_WORDS
        + match body {
            ReplyBody::Sampled(sampled) => 5 * sampled.items.len(),
            ReplyBody::StepsRead(read) => 5 * read.chunks.len(),
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

/// Most bytes of a text in an error: the peer may be unauthenticated, and errors are logged.
const QUOTED: usize = 64;

/// Most bytes of a parser's reason, which also quotes the text.
const REASON: usize = 256;

/// Why `expect` of the setter of a list of numbers holds: capnp's setters of slices always return `Ok`.
pub(crate) const COPIED: &str = "a slice of numbers is copied";

/// A reply's payload, and the credit that counts a sample once the frame is delivered.
pub(crate) type Payload = (Vec<Bytes>, Option<Box<dyn SampleCredit>>);

/// Rest of a frame during decoding: the payload, and the memory budget left for lists of structs. Elements may take no bytes in the
/// message, so the length of the message does not bound the lists.
pub(crate) struct Rest {
    payload: Cell<Bytes>,
    room: Cell<usize>,
}

impl Rest {
    /// The payload, and a budget of `room` bytes for lists.
    pub(crate) fn new(payload: Bytes, room: usize) -> Self {
        Rest { payload: Cell::new(payload), room: Cell::new(room) }
    }

    /// Takes the payload.
    pub(crate) fn payload(&self) -> Bytes {
        self.payload.take()
    }

    /// Reserves memory for a list of so many elements.
    pub(crate) fn reserve<T>(&self, elements: u32) -> Result<()> {
        let left = self.room.get().checked_sub(elements as usize * size_of::<T>());
        let longer = || Error::Protocol("a message whose lists are much longer decoded than encoded".into());
        self.room.set(left.ok_or_else(longer)?);
        Ok(())
    }

    /// A list of structs, each by `read`.
    pub(crate) fn list<'a, S: OwnedStruct, T>(
        &self,
        list: capnp::Result<struct_list::Reader<'a, S>>,
        read: impl Fn(S::Reader<'a>) -> Result<T>,
    ) -> Result<Vec<T>> {
        let list = list?;
        self.reserve::<T>(list.len())?;
        // Not `collect`: an iterator of results has no lower size hint, so it would reallocate.
        let mut values = Vec::with_capacity(list.len() as usize);
        for item in list {
            values.push(read(item)?);
        }
        Ok(values)
    }
}

/// Writes a list of structs, each by `write`.
pub(crate) fn write_list<S: OwnedStruct, T>(
    mut list: struct_list::Builder<'_, S>,
    values: &[T],
    write: impl Fn(&T, S::Builder<'_>),
) {
    for (i, value) in values.iter().enumerate() {
        write(value, list.reborrow().get(i as u32));
    }
}

/// A text.
pub(crate) fn text(text: capnp::Result<text::Reader<'_>>) -> Result<String> {
    let text = text?;
    text.to_string().map_err(|error| {
        let start = String::from_utf8_lossy(&text.as_bytes()[..text.len().min(QUOTED)]);
        Error::Protocol(format!("a text is not UTF-8 but {start:?}: {error}"))
    })
}

/// A nonce or a proof.
pub(crate) fn key(data: capnp::Result<data::Reader<'_>>) -> Result<[u8; 32]> {
    let data = data?;
    data.try_into().map_err(|_| Error::Protocol(format!("a field of 32 bytes has {}", data.len())))
}

/// A value in JSON, which clients of other languages read, too.
pub(crate) fn json<T: DeserializeOwned>(what: &str, json: capnp::Result<text::Reader<'_>>) -> Result<T> {
    let json = json?.as_bytes();
    serde_json::from_slice(json).map_err(|error| {
        let start = String::from_utf8_lossy(&json[..json.len().min(QUOTED)]);
        let reason = shortened(error.to_string(), REASON);
        Error::Protocol(format!("{what} {start:?} cannot be read: {reason}"))
    })
}

/// JSON of a value.
pub(crate) fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("a value with derived serialisation and texts as keys has JSON")
}
