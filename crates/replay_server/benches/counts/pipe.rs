//! A connection in memory that counts: it takes as much at once as a Unix socket of Linux does by default, moves
//! all of it, and wakes the waiting side.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::tally;

/// Bytes on their way in each direction.
const ROOM: usize = 208 << 10;

#[derive(Default)]
struct Pipe {
    bytes: VecDeque<u8>,
    ended: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

type SharedPipe = Arc<Mutex<Pipe>>;

/// One end of a connection.
pub struct End {
    incoming: SharedPipe,
    outgoing: SharedPipe,
}

/// Both ends of a new connection.
pub fn connection() -> (End, End) {
    let pipe = || Arc::new(Mutex::new(Pipe { bytes: VecDeque::with_capacity(ROOM), ..Pipe::default() }));
    let (up, down) = (pipe(), pipe());
    let near = End { incoming: down.clone(), outgoing: up.clone() };
    let far = End { incoming: up, outgoing: down };
    (near, far)
}

fn lock(pipe: &SharedPipe) -> MutexGuard<'_, Pipe> {
    pipe.lock().expect("nothing panics with the lock")
}

fn wake(waker: &mut Option<Waker>) {
    if let Some(waker) = waker.take() {
        waker.wake();
    }
}

impl AsyncRead for End {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut pipe = lock(&self.incoming);
        if pipe.bytes.is_empty() && !pipe.ended {
            pipe.reader = Some(context.waker().clone());
            return Poll::Pending;
        }
        let (front, back) = pipe.bytes.as_slices();
        let first = front.len().min(buffer.remaining());
        buffer.put_slice(&front[..first]);
        let second = back.len().min(buffer.remaining());
        buffer.put_slice(&back[..second]);
        pipe.bytes.drain(..first + second);
        wake(&mut pipe.writer);
        tally::count_read();
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for End {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut pipe = lock(&self.outgoing);
        if pipe.ended {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let before = pipe.bytes.len();
        if before == ROOM {
            pipe.writer = Some(context.waker().clone());
            return Poll::Pending;
        }
        for slice in slices {
            let taken = slice.len().min(ROOM - pipe.bytes.len());
            pipe.bytes.extend(&slice[..taken]);
        }
        let written = pipe.bytes.len() - before;
        wake(&mut pipe.reader);
        tally::count_write(written);
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut pipe = lock(&self.outgoing);
        pipe.ended = true;
        wake(&mut pipe.reader);
        Poll::Ready(Ok(()))
    }
}

impl Drop for End {
    fn drop(&mut self) {
        for pipe in [&self.incoming, &self.outgoing] {
            let mut pipe = lock(pipe);
            pipe.ended = true;
            wake(&mut pipe.reader);
            wake(&mut pipe.writer);
        }
    }
}
