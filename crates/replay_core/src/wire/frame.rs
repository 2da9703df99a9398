//! Frames: two lengths, a control message, a payload. Both directions survive being dropped between two
//! polls: what was read or written so far is kept in [`FrameReader`] and [`Outgoing`], so a caller may
//! `select!` on them and go on later.

use std::io::IoSlice;

use bytes::{BufMut, Bytes};
use capnp::Word;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::error::{Error, Result};
use crate::memory_hints::advise_huge_pages;
use crate::replay::{BlobSegment, SampleCredit};

/// Bytes of the two lengths that start a frame.
pub const HEADER_BYTES: usize = 8;

/// Segments handed to one vectored write: Linux takes at most 1024.
const MAX_SEGMENTS: usize = 1024;

/// What a receiver accepts. Lengths are held against it before anything is allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most bytes of one frame, control message and payload together.
    pub max_frame_bytes: u64,
    /// Most bytes of a control message. It also bounds every list in it: see [`super::decode_request`].
    pub max_control_bytes: u32,
}

impl Limits {
    /// For a peer that has not shown who it is.
    pub const HANDSHAKE: Limits = Limits {
        max_frame_bytes: 1 << 16,
        max_control_bytes: 1 << 16,
    };

    /// Frames of up to `max_frame_bytes`, of which the control message takes up to 16 MiB: enough for
    /// 600,000 items in a push or in a batch.
    pub const fn new(max_frame_bytes: u64) -> Self {
        let control = if max_frame_bytes < 1 << 24 {
            max_frame_bytes as u32
        } else {
            1 << 24
        };
        Limits {
            max_frame_bytes,
            max_control_bytes: control,
        }
    }
}

impl Default for Limits {
    /// Frames of up to 256 MiB.
    fn default() -> Self {
        Limits::new(256 << 20)
    }
}

/// The two lengths that start a frame, within the limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Bytes of the control message, a multiple of 8.
    pub control: u32,
    /// Bytes of the payload.
    pub payload: u32,
}

impl Header {
    fn parse(bytes: [u8; HEADER_BYTES], limits: &Limits) -> Result<Self> {
        let [a, b, c, d, e, f, g, h] = bytes;
        let header = Header {
            control: u32::from_le_bytes([a, b, c, d]),
            payload: u32::from_le_bytes([e, f, g, h]),
        };
        if header.control == 0 || !header.control.is_multiple_of(8) {
            return Err(Error::Protocol(format!(
                "a frame starts with a control length of {}, which is no positive multiple of 8: the peer does not speak this protocol",
                header.control
            )));
        }
        if header.control > limits.max_control_bytes {
            return Err(Error::TooLarge {
                what: "a control message, in bytes,",
                size: header.control.into(),
                limit: limits.max_control_bytes.into(),
                advice: "send fewer chunks, items or keys at a time",
            });
        }
        if header.frame_bytes() > limits.max_frame_bytes {
            return Err(Error::TooLarge {
                what: "a frame, in bytes,",
                size: header.frame_bytes(),
                limit: limits.max_frame_bytes,
                advice: "send less at a time, or raise the receiver's max_frame_bytes",
            });
        }
        Ok(header)
    }

    /// Control message and payload together.
    pub fn frame_bytes(&self) -> u64 {
        u64::from(self.control) + u64::from(self.payload)
    }
}

/// A frame as it was received.
#[derive(Debug, Clone)]
pub struct Frame {
    /// The control message in words, so that it is aligned for Cap'n Proto.
    pub(super) control: Vec<Word>,
    /// The payload, in a buffer of exactly its size.
    pub(super) payload: Bytes,
}

impl Frame {
    /// A frame from a control message and a payload; a control message that ends within a word is
    /// filled up with zeros.
    pub fn new(control: &[u8], payload: Bytes) -> Self {
        let mut words = Word::allocate_zeroed_vec(control.len().div_ceil(8));
        Word::words_to_bytes_mut(&mut words)[..control.len()].copy_from_slice(control);
        Frame {
            control: words,
            payload,
        }
    }
}

/// Reads frames. Wrap the reader in a [`tokio::io::BufReader`], or small frames cost three system calls.
#[derive(Debug)]
pub struct FrameReader<R> {
    reader: R,
    peer: String,
    limits: Limits,
    start: [u8; HEADER_BYTES],
    header: Option<Header>,
    control: Vec<Word>,
    payload: Vec<u8>,
    /// Bytes read of the part that is being read.
    filled: usize,
    control_done: bool,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    /// Reads from `reader`; `peer` names the other end in errors.
    pub fn new(reader: R, limits: Limits, peer: impl Into<String>) -> Self {
        FrameReader {
            reader,
            peer: peer.into(),
            limits,
            start: [0; HEADER_BYTES],
            header: None,
            control: Vec::new(),
            payload: Vec::new(),
            filled: 0,
            control_done: false,
        }
    }

    /// Sets the limits for the next frame, as after the handshake.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// The next frame, or `None` where the peer ended the connection between two frames.
    ///
    /// # Errors
    /// [`Error::Disconnected`] in the middle of a frame; those of [`FrameReader::header`].
    pub async fn frame(&mut self) -> Result<Option<Frame>> {
        match self.header().await? {
            Some(_) => self.body().await.map(Some),
            None => Ok(None),
        }
    }

    /// The lengths of the next frame, before anything is allocated for it; `None` where the peer ended the
    /// connection. Asked again before [`FrameReader::body`], the answer is the same.
    ///
    /// # Errors
    /// [`Error::TooLarge`] and [`Error::Protocol`]: the stream has no next frame then.
    pub async fn header(&mut self) -> Result<Option<Header>> {
        if let Some(header) = self.header {
            return Ok(Some(header));
        }
        while self.filled < HEADER_BYTES {
            let n = self.reader.read(&mut self.start[self.filled..]).await;
            match n.map_err(|e| broken(&self.peer, e))? {
                0 if self.filled == 0 => return Ok(None),
                0 => return Err(truncated(&self.peer, self.filled, HEADER_BYTES)),
                n => self.filled += n,
            }
        }
        let header = Header::parse(self.start, &self.limits)?;
        self.filled = 0;
        self.header = Some(header);
        Ok(Some(header))
    }

    /// The rest of the frame whose [`FrameReader::header`] was read.
    ///
    /// # Errors
    /// [`Error::Disconnected`] when the connection ends before the frame does.
    pub async fn body(&mut self) -> Result<Frame> {
        let Some(header) = self.header else {
            return Err(Error::Internal("a frame's body before its header".into()));
        };
        if !self.control_done {
            if self.control.is_empty() {
                self.control = Word::allocate_zeroed_vec(header.control as usize / 8);
            }
            let control = Word::words_to_bytes_mut(&mut self.control);
            while self.filled < control.len() {
                match self.reader.read(&mut control[self.filled..]).await {
                    Ok(0) => return Err(truncated(&self.peer, self.filled, control.len())),
                    Ok(n) => self.filled += n,
                    Err(e) => return Err(broken(&self.peer, e)),
                }
            }
            self.control_done = true;
            self.filled = 0;
            self.payload = Vec::with_capacity(header.payload as usize);
            advise_huge_pages(self.payload.spare_capacity_mut());
        }
        let wanted = header.payload as usize;
        while self.payload.len() < wanted {
            // Into memory that nobody has cleared before.
            let missing = wanted - self.payload.len();
            let mut rest = (&mut self.payload).limit(missing);
            match self.reader.read_buf(&mut rest).await {
                Ok(0) => return Err(truncated(&self.peer, self.payload.len(), wanted)),
                Ok(_) => {}
                Err(e) => return Err(broken(&self.peer, e)),
            }
        }
        self.control_done = false;
        self.header = None;
        Ok(Frame {
            control: std::mem::take(&mut self.control),
            payload: Bytes::from(std::mem::take(&mut self.payload)),
        })
    }
}

/// A frame to be sent: the header and the control message in one buffer, then the payload's segments where
/// they lie.
pub struct Outgoing {
    head: Vec<u8>,
    payload: Vec<BlobSegment>,
    payload_bytes: u32,
    credit: Option<Box<dyn SampleCredit>>,
    /// The part being written (0 is the head) and how much of it is written.
    part: usize,
    offset: usize,
}

impl Outgoing {
    /// A frame of a control message that stands behind [`HEADER_BYTES`] free bytes in `head`.
    /// `credit` counts as delivered once the last byte is written, and goes back if it never is.
    pub(super) fn new(
        mut head: Vec<u8>,
        payload: Vec<BlobSegment>,
        credit: Option<Box<dyn SampleCredit>>,
    ) -> Result<Self> {
        let control = limited("a control message, in bytes,", head.len() - HEADER_BYTES)?;
        let payload_bytes = payload.iter().map(|s| s.as_ref().len()).sum();
        let payload_bytes = limited("a payload, in bytes,", payload_bytes)?;
        head[..4].copy_from_slice(&control.to_le_bytes());
        head[4..HEADER_BYTES].copy_from_slice(&payload_bytes.to_le_bytes());
        Ok(Outgoing {
            head,
            payload,
            payload_bytes,
            credit,
            part: 0,
            offset: 0,
        })
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
    pub fn payload(&self) -> &[BlobSegment] {
        &self.payload
    }

    /// Writes what is not written yet, and flushes; `peer` names the other end in errors.
    ///
    /// # Errors
    /// [`Error::Disconnected`].
    pub async fn write<W: AsyncWrite + Unpin>(&mut self, writer: &mut W, peer: &str) -> Result<()> {
        while self.part <= self.payload.len() {
            let slices = self.unwritten();
            if slices.is_empty() {
                break;
            }
            match writer.write_vectored(&slices).await {
                Ok(0) => return Err(broken(peer, std::io::ErrorKind::WriteZero.into())),
                Ok(n) => self.advance(n),
                Err(e) => return Err(broken(peer, e)),
            }
        }
        writer.flush().await.map_err(|e| broken(peer, e))?;
        if let Some(credit) = self.credit.take() {
            credit.delivered();
        }
        Ok(())
    }

    fn part(&self, part: usize) -> &[u8] {
        match part {
            0 => &self.head,
            _ => self.payload[part - 1].as_ref(),
        }
    }

    fn unwritten(&self) -> Vec<IoSlice<'_>> {
        let parts = self.part..=self.payload.len();
        let mut slices = Vec::with_capacity(parts.clone().count().min(MAX_SEGMENTS));
        let slices_of = parts
            .map(|part| match part == self.part {
                true => &self.part(part)[self.offset..],
                false => self.part(part),
            })
            .filter(|bytes| !bytes.is_empty())
            .take(MAX_SEGMENTS)
            .map(IoSlice::new);
        slices.extend(slices_of);
        slices
    }

    fn advance(&mut self, written: usize) {
        self.offset += written;
        while self.part <= self.payload.len() && self.offset >= self.part(self.part).len() {
            self.offset -= self.part(self.part).len();
            self.part += 1;
        }
    }
}

fn limited(what: &'static str, size: usize) -> Result<u32> {
    u32::try_from(size).map_err(|_| Error::TooLarge {
        what,
        size: size as u64,
        limit: u32::MAX.into(),
        advice: "send less at a time",
    })
}

fn broken(peer: &str, error: std::io::Error) -> Error {
    Error::Disconnected {
        address: peer.into(),
        reason: error.to_string(),
    }
}

fn truncated(peer: &str, filled: usize, wanted: usize) -> Error {
    Error::Disconnected {
        address: peer.into(),
        reason: format!("it ended within a frame, {filled} bytes into a part of {wanted}"),
    }
}
