//! Frames: two lengths, a control message, a payload. No I/O: a receiver fills an [`IncomingFrame`], a sender writes the
//! slices of [`OutgoingFrame::unwritten`]. Both keep their progress, so a transfer may be interrupted and resumed.

use std::io::IoSlice;

use bytes::Bytes;
use capnp::Word;

use crate::error::{Error, Result};
use base::allocation::{self, OutOfMemory};
use base::error::check_size;
use replay_core::memory_hints::advise_huge_pages;
use replay_core::replay::SampleCredit;

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
    /// The part being written (0 is the head), and the bytes written of it.
    part: usize,
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
        Ok(OutgoingFrame { head, payload, payload_bytes, credit, part: 0, offset: 0 })
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

    fn part(&self, part: usize) -> &[u8] {
        match part {
            0 => &self.head,
            _ => self.payload[part - 1].as_ref(),
        }
    }

    /// The next slices to write, at most 1,024; empty once the frame is written.
    pub fn unwritten(&self) -> Vec<IoSlice<'_>> {
        let parts = self.part..=self.payload.len();
        let mut slices = Vec::with_capacity(parts.clone().count().min(MAX_SEGMENTS));
        let rest = |part| &self.part(part)[if part == self.part { self.offset } else { 0 }..];
        slices.extend(parts.map(rest).filter(|bytes| !bytes.is_empty()).take(MAX_SEGMENTS).map(IoSlice::new));
        slices
    }

    /// Counts bytes that were written.
    pub fn advance(&mut self, written: usize) {
        self.offset += written;
        while self.part <= self.payload.len() && self.offset >= self.part(self.part).len() {
            self.offset -= self.part(self.part).len();
            self.part += 1;
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
