//! Readiness of sockets for reading and writing, from F-Stack's events and the calls since.

use std::ffi::c_int;
use std::task::Waker;

/// Bytes that a socket may write in one turn. Packets are sent at the end of the turn, so a longer write would delay its
/// first packet until the last one is built.
const WRITE_QUOTA: usize = 64 << 10;

/// Direction of an operation.
#[derive(Debug, Clone, Copy)]
pub enum Direction {
    /// Data, connections or the end have arrived.
    Read,
    /// There is buffer space to write, or a connection was established or refused.
    Write,
}

/// State of one direction of a socket. Events are edge-triggered, so readiness is kept until a call would block.
#[derive(Default)]
pub(super) struct DirectionState {
    ready: bool,
    /// The peer has closed: no further event follows.
    ended: bool,
    /// Whether F-Stack reports events. Reading: always. Writing: each event is requested, because F-Stack would report every
    /// acknowledgement.
    pub watched: bool,
    /// Reading: unread bytes of the last event.
    waiting: usize,
    /// Writing: the last turn with a write, and the bytes written in it.
    written: (u32, usize),
    waker: Option<Waker>,
}

impl DirectionState {
    /// Registers the task to wake at the next event.
    pub fn wake_later(&mut self, waker: &Waker) {
        match &mut self.waker {
            Some(known) => known.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
    }
}

#[derive(Default)]
struct SocketState {
    read: DirectionState,
    write: DirectionState,
}

/// The open sockets of a reactor, by descriptor. F-Stack gives a new one the lowest number that is free. Closing a socket also takes its
/// events out of the queue, so that none is late.
#[derive(Default)]
pub(super) struct Sockets(Vec<Option<SocketState>>);

impl Sockets {
    /// Adds a socket. `ready` says whether an operation may be tried before the first event.
    pub fn insert(&mut self, fd: c_int, ready: bool) {
        let index = fd as usize;
        if self.0.len() <= index {
            self.0.resize_with(index + 1, || None);
        }
        let direction = || DirectionState { ready, ..DirectionState::default() };
        self.0[index] = Some(SocketState { read: direction(), write: direction() });
    }

    /// Removes a socket that is to be closed.
    pub fn forget(&mut self, fd: c_int) {
        self.0[fd as usize] = None;
    }

    pub fn direction(&mut self, fd: c_int, direction: Direction) -> Option<&mut DirectionState> {
        let socket = self.0.get_mut(fd as usize)?.as_mut()?;
        Some(match direction {
            Direction::Read => &mut socket.read,
            Direction::Write => &mut socket.write,
        })
    }

    /// Whether an operation may be tried now.
    pub fn is_ready(&mut self, fd: c_int, direction: Direction) -> bool {
        self.direction(fd, direction).is_some_and(|side| side.ready)
    }

    /// Records that an operation would block.
    pub fn blocks(&mut self, fd: c_int, direction: Direction) {
        if let Some(side) = self.direction(fd, direction) {
            side.ready = false;
        }
    }

    /// Records an event (for reading, with the number of available `bytes`). Returns the waiting task.
    pub fn event(&mut self, fd: c_int, direction: Direction, bytes: usize, ended: bool) -> Option<Waker> {
        let side = self.direction(fd, direction)?;
        side.ready = true;
        side.waiting = bytes;
        side.ended |= ended;
        side.watched = matches!(direction, Direction::Read);
        side.waker.take()
    }

    /// Records a read of `count` bytes. After `all` available bytes, or all bytes of the last event, another read would only block: the
    /// next event reports more.
    pub fn consumed(&mut self, fd: c_int, count: usize, all: bool) {
        if let Some(side) = self.direction(fd, Direction::Read) {
            side.waiting = side.waiting.saturating_sub(count);
            if all || side.waiting == 0 {
                side.ready = side.ended;
            }
        }
    }

    /// Bytes that the socket may still write in this turn.
    pub fn write_quota(&mut self, fd: c_int, turn: u32) -> usize {
        match self.direction(fd, Direction::Write) {
            Some(side) if side.written.0 == turn => WRITE_QUOTA.saturating_sub(side.written.1),
            _ => WRITE_QUOTA,
        }
    }

    /// Records a write of `count` bytes in this turn.
    pub fn wrote(&mut self, fd: c_int, turn: u32, count: usize) {
        if let Some(side) = self.direction(fd, Direction::Write) {
            let before = match side.written {
                (of, bytes) if of == turn => bytes,
                _ => 0,
            };
            side.written = (turn, before + count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_of_an_event_are_read_without_another_call() {
        let mut sockets = Sockets::default();
        let fd = 3;
        sockets.insert(fd, false);
        let ready = |sockets: &mut Sockets| sockets.is_ready(fd, Direction::Read);
        assert!(!ready(&mut sockets));
        sockets.event(fd, Direction::Read, 64, false);
        sockets.consumed(fd, 16, false);
        assert!(ready(&mut sockets));
        sockets.consumed(fd, 48, false);
        assert!(!ready(&mut sockets));
        // A short read has taken all bytes, also those after the event.
        sockets.event(fd, Direction::Read, 64, false);
        sockets.consumed(fd, 80, true);
        assert!(!ready(&mut sockets));
        // The end carries no bytes and is reported once, so the socket stays readable.
        sockets.event(fd, Direction::Read, 8, true);
        sockets.consumed(fd, 8, false);
        assert!(ready(&mut sockets));
    }

    #[test]
    fn a_socket_writes_its_share_of_each_turn() {
        let mut sockets = Sockets::default();
        let [one, other] = [3, 4];
        [one, other].into_iter().for_each(|fd| sockets.insert(fd, true));
        assert_eq!(sockets.write_quota(one, 7), WRITE_QUOTA);
        sockets.wrote(one, 7, 1000);
        sockets.wrote(one, 7, WRITE_QUOTA - 1001);
        assert_eq!(sockets.write_quota(one, 7), 1);
        sockets.wrote(one, 7, 1);
        assert_eq!((sockets.write_quota(one, 7), sockets.write_quota(other, 7)), (0, WRITE_QUOTA));
        assert_eq!(sockets.write_quota(one, 8), WRITE_QUOTA);
        sockets.wrote(one, 8, 5);
        assert_eq!(sockets.write_quota(one, 8), WRITE_QUOTA - 5);
    }

    #[test]
    fn a_socket_that_gets_the_descriptor_of_a_closed_one_begins_anew() {
        let mut sockets = Sockets::default();
        sockets.insert(3, false);
        sockets.event(3, Direction::Read, 1, false);
        assert!(sockets.is_ready(3, Direction::Read));
        sockets.forget(3);
        sockets.event(3, Direction::Read, 1, false);
        assert!(!sockets.is_ready(3, Direction::Read));
        sockets.insert(3, false);
        assert!(!sockets.is_ready(3, Direction::Read));
        // Of a descriptor that was never here.
        assert!(sockets.event(9, Direction::Read, 1, false).is_none());
    }
}
