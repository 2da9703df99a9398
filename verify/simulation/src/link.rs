//! A simulated connection: two pipes with delayed segments, and faults that a test injects.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::SimStack;
use super::machine::{Direction, Queues};
use replay_link::stack::Stack;

/// One end of a simulated connection.
pub struct SimStream {
    stack: SimStack,
    connection: Rc<RefCell<Connection>>,
    end: usize,
}

/// Fault injection for one connection, from one of its ends.
#[derive(Clone)]
pub struct SimLink {
    stack: SimStack,
    connection: Rc<RefCell<Connection>>,
    end: usize,
}

/// A [`SimLink`] that does not keep its connection.
pub struct WeakLink {
    connection: Weak<RefCell<Connection>>,
    end: usize,
}

impl WeakLink {
    pub fn upgrade(&self, stack: &SimStack) -> Option<SimLink> {
        Some(SimLink { stack: stack.clone(), connection: self.connection.upgrade()?, end: self.end })
    }
}

struct Connection {
    /// `pipes[end]` carries the bytes written at that end.
    pipes: [Pipe; 2],
    /// Program at end 1.
    server: u64,
    /// Machine of end 1, if it takes time.
    machine: Option<Rc<RefCell<Queues>>>,
    held: bool,
    broken: bool,
}

#[derive(Default)]
struct Pipe {
    /// Unread segments with their arrival times.
    segments: VecDeque<(Instant, Bytes)>,
    /// Bytes in `segments`, and their limit.
    waiting: usize,
    limit: usize,
    /// Whether the writer has closed.
    ended: bool,
    /// Whether the reader has closed.
    unread: bool,
    /// Bytes that may still be written before the connection breaks.
    cut_after: Option<usize>,
    /// Time of the last write. Writes of one instant are one message.
    written: Option<Instant>,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl Pipe {
    fn wake(&mut self) {
        for waker in [self.reader.take(), self.writer.take()].into_iter().flatten() {
            waker.wake();
        }
    }
}

impl Connection {
    fn wake(&mut self) {
        self.pipes.iter_mut().for_each(Pipe::wake);
    }
}

impl SimStream {
    pub(super) fn pair(
        stack: &SimStack,
        server: u64,
        limit: usize,
        machine: Option<Rc<RefCell<Queues>>>,
    ) -> (SimStream, SimStream) {
        let pipe = || Pipe { limit, ..Pipe::default() };
        let connection =
            Rc::new(RefCell::new(Connection { pipes: [pipe(), pipe()], server, machine, held: false, broken: false }));
        let end = |end| SimStream { stack: stack.clone(), connection: connection.clone(), end };
        (end(0), end(1))
    }

    /// Fault injection from this end.
    pub fn link(&self) -> SimLink {
        SimLink { stack: self.stack.clone(), connection: self.connection.clone(), end: self.end }
    }
}

impl SimLink {
    pub(super) fn downgrade(&self) -> WeakLink {
        WeakLink { connection: Rc::downgrade(&self.connection), end: self.end }
    }

    /// Begins a partition: nothing arrives at either end until [`SimLink::release`].
    pub fn hold(&self) {
        self.connection.borrow_mut().held = true;
    }

    /// Ends a partition: the bytes sent meanwhile arrive.
    pub fn release(&self) {
        let mut connection = self.connection.borrow_mut();
        connection.held = false;
        connection.wake();
    }

    /// Breaks the connection: bytes in transit are lost, and both ends see a reset.
    pub fn cut(&self) {
        let now = self.stack.now();
        let mut connection = self.connection.borrow_mut();
        connection.broken = true;
        // Nothing has arrived during a partition.
        let held = std::mem::take(&mut connection.held);
        for pipe in &mut connection.pipes {
            pipe.segments.retain(|&(arrival, _)| arrival <= now && !held);
        }
        connection.wake();
    }

    /// Breaks the connection once this end has sent `bytes` more, which still arrive.
    pub fn cut_after_sent(&self, bytes: usize) {
        self.connection.borrow_mut().pipes[self.end].cut_after = Some(bytes);
    }

    /// Breaks the connection once the other end has sent `bytes` more, which still arrive.
    pub fn cut_after_received(&self, bytes: usize) {
        self.connection.borrow_mut().pipes[1 - self.end].cut_after = Some(bytes);
    }
}

impl AsyncRead for SimStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let now = self.stack.now();
        let mut connection = self.connection.borrow_mut();
        let (held, broken) = (connection.held, connection.broken);
        let whole = connection.machine.is_some();
        let pipe = &mut connection.pipes[1 - self.end];
        match pipe.segments.front_mut() {
            _ if held => {}
            Some((arrival, segment)) if *arrival <= now => {
                let most = segment.len().min(buffer.remaining());
                if most == 0 {
                    return Poll::Ready(Ok(()));
                }
                let part = if whole { most } else { self.stack.sample_part(most) };
                buffer.put_slice(&segment[..part]);
                segment.advance(part);
                if segment.is_empty() {
                    pipe.segments.pop_front();
                }
                pipe.waiting -= part;
                if let Some(writer) = pipe.writer.take() {
                    writer.wake();
                }
                return Poll::Ready(Ok(()));
            }
            Some(&mut (arrival, _)) => {
                self.stack.set_timer(arrival, cx.waker().clone());
            }
            None if broken => return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
            None if pipe.ended => return Poll::Ready(Ok(())),
            None => {}
        }
        pipe.reader = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl AsyncWrite for SimStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut connection = self.connection.borrow_mut();
        if connection.broken {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        let (server, machine) = (connection.server, connection.machine.clone());
        let pipe = &mut connection.pipes[self.end];
        if pipe.unread || pipe.ended {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let room = (pipe.limit - pipe.waiting).min(pipe.cut_after.unwrap_or(usize::MAX));
        let most = bytes.len().min(room);
        if most == 0 && !bytes.is_empty() {
            if pipe.cut_after == Some(0) {
                connection.broken = true;
                connection.wake();
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
            if self.stack.samples_zero() {
                return Poll::Ready(Ok(0));
            }
            pipe.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        if most == 0 {
            return Poll::Ready(Ok(0));
        }
        let now = self.stack.now();
        let (part, sent) = match machine {
            None => {
                let part = self.stack.sample_part(most);
                (part, now + self.stack.sample_delay(server))
            }
            Some(machine) => {
                let mut machine = machine.borrow_mut();
                let begins = pipe.written.replace(now) != Some(now);
                let delay = self.stack.sample_delay(server);
                let sent = match self.end {
                    0 => machine.pass(Direction::Received, begins, most, now + delay),
                    _ => machine.pass(Direction::Sent, begins, most, now) + delay,
                };
                (most, sent)
            }
        };
        // Segments do not overtake each other.
        let arrival = pipe.segments.back().map_or(sent, |last| last.0.max(sent));
        pipe.segments.push_back((arrival, Bytes::copy_from_slice(&bytes[..part])));
        // Not the bytes: ids have numbers of tables, which a process counts over all of its worlds.
        self.stack.note(part);
        pipe.waiting += part;
        pipe.cut_after = pipe.cut_after.map(|left| left - part);
        if pipe.cut_after == Some(0) {
            connection.broken = true;
            connection.wake();
        } else if let Some(reader) = pipe.reader.take() {
            reader.wake();
        }
        Poll::Ready(Ok(part))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let pipe = &mut self.connection.borrow_mut().pipes[self.end];
        pipe.ended = true;
        pipe.wake();
        Poll::Ready(Ok(()))
    }
}

impl Drop for SimStream {
    fn drop(&mut self) {
        let mut connection = self.connection.borrow_mut();
        connection.pipes[self.end].ended = true;
        connection.pipes[1 - self.end].unread = true;
        connection.wake();
    }
}
