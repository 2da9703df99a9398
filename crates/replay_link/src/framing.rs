//! Frames of [`replay_wire::frame`] over streams. Reading and writing are cancel safe: progress is kept in [`FrameReader`]
//! and [`OutgoingFrame`], so a caller may `select!` on them and call again.

use std::io;

use bytes::BufMut;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::error::{Error, Result};
use replay_wire::frame::{Frame, FrameLimits, HEADER_BYTES, Header, IncomingFrame, OutgoingFrame};

/// Reads frames. Wrap the reader in a [`tokio::io::BufReader`]: without one a small frame takes three system calls.
#[derive(Debug)]
pub struct FrameReader<R> {
    reader: R,
    peer: String,
    limits: FrameLimits,
    start: [u8; HEADER_BYTES],
    /// Bytes read of `start`.
    filled: usize,
    header: Option<Header>,
    /// Frame whose body is being read.
    incoming: Option<IncomingFrame>,
    /// Treats a reset between two frames as a normal end.
    may_be_reset: bool,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    /// Reads from `reader`. Errors name the peer by `peer`.
    pub fn new(reader: R, limits: FrameLimits, peer: impl Into<String>) -> Self {
        FrameReader {
            reader,
            peer: peer.into(),
            limits,
            start: [0; HEADER_BYTES],
            filled: 0,
            header: None,
            incoming: None,
            may_be_reset: false,
        }
    }

    /// Treats a reset between two frames as the end of the connection from now on. The kernel sends a reset when a client closes its
    /// socket before it has read all replies.
    pub fn allow_reset(&mut self) {
        self.may_be_reset = true;
    }

    /// Received bytes of a header that is incomplete or invalid.
    pub fn received(&self) -> &[u8] {
        &self.start[..self.filled]
    }

    /// Sets the limits for the next frame, as after the handshake.
    pub fn set_limits(&mut self, limits: FrameLimits) {
        self.limits = limits;
    }

    /// The next frame, or `None` when the peer closed the connection between two frames.
    ///
    /// # Errors
    /// [`Error::Disconnected`] in the middle of a frame; errors of [`FrameReader::header`].
    pub async fn frame(&mut self) -> Result<Option<Frame>> {
        match self.header().await? {
            Some(_) => self.body().await.map(Some),
            None => Ok(None),
        }
    }

    /// Lengths of the next frame, before memory is allocated for it; `None` when the peer closed the connection. Returns the same header
    /// again until [`FrameReader::body`] is called.
    ///
    /// # Errors
    /// [`Error::TooLarge`] and [`replay_wire::Error::Protocol`]: the stream cannot be read any further.
    pub async fn header(&mut self) -> Result<Option<Header>> {
        if let Some(header) = self.header {
            return Ok(Some(header));
        }
        base::planted!(ForgottenBytes => self.filled = 0);
        while self.filled < HEADER_BYTES {
            match self.reader.read(&mut self.start[self.filled..]).await {
                Ok(0) if self.filled == 0 => return Ok(None),
                Ok(0) => return Err(truncated(&self.peer, (self.filled, HEADER_BYTES))),
                Ok(n) => self.filled += n,
                Err(e) if self.filled == 0 && self.may_be_reset && is_closed(&e) => {
                    return Ok(None);
                }
                Err(e) => return Err(broken(&self.peer, e)),
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
    /// [`Error::Disconnected`] when the connection ends before the frame does, [`Error::OutOfMemory`].
    pub async fn body(&mut self) -> Result<Frame> {
        let Some(header) = self.header else {
            return Err(Error::Internal("a frame's body before its header".into()));
        };
        let incoming = match &mut self.incoming {
            Some(incoming) => incoming,
            none => none.insert(IncomingFrame::new(header)?),
        };
        loop {
            let rest = incoming.control_rest();
            if rest.is_empty() {
                break;
            }
            match self.reader.read(rest).await {
                Ok(0) => return Err(truncated(&self.peer, incoming.progress())),
                Ok(n) => incoming.advance_control(n),
                Err(e) => return Err(broken(&self.peer, e)),
            }
        }
        loop {
            let (payload, missing) = incoming.payload_rest();
            if missing == 0 {
                break;
            }
            match self.reader.read_buf(&mut payload.limit(missing)).await {
                Ok(0) => return Err(truncated(&self.peer, incoming.progress())),
                Ok(_) => {}
                Err(e) => return Err(broken(&self.peer, e)),
            }
        }
        self.header = None;
        let incoming = self.incoming.take().expect("set above");
        Ok(incoming.finish())
    }
}

/// Writes the rest of a frame and flushes. Errors name the peer by `peer`.
pub async fn write_frame<W: AsyncWrite + Unpin>(frame: &mut OutgoingFrame, writer: &mut W, peer: &str) -> Result<()> {
    loop {
        let part = write_part(frame, writer).await;
        if part.map_err(|error| broken(peer, error))? == 0 {
            return Ok(());
        }
    }
}

/// Writes the part of the frame that the writer accepts at once, and returns its length. After the last byte, flushes and returns 0.
pub async fn write_part<W: AsyncWrite + Unpin>(frame: &mut OutgoingFrame, writer: &mut W) -> io::Result<usize> {
    let slices = frame.unwritten();
    if slices.is_empty() {
        writer.flush().await?;
        frame.delivered();
        return Ok(0);
    }
    match writer.write_vectored(&slices).await? {
        0 if base::planted!(ZeroIsEnd) => Ok(0),
        0 => Err(io::ErrorKind::WriteZero.into()),
        n => {
            frame.advance(n);
            Ok(n)
        }
    }
}

/// Broken pipe or connection reset: the peer has closed the connection.
pub fn is_closed(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset};
    matches!(error.kind(), BrokenPipe | ConnectionReset)
}

/// Error of a broken connection to `peer`.
pub fn broken(peer: &str, error: io::Error) -> Error {
    Error::Disconnected { address: peer.into(), reason: error.to_string() }
}

fn truncated(peer: &str, (filled, wanted): (usize, usize)) -> Error {
    Error::Disconnected {
        address: peer.into(),
        reason: format!("it ended within a frame, after {filled} of {wanted} bytes"),
    }
}
