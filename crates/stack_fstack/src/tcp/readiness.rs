//! Readiness of sockets for reading and writing, from F-Stack's events and the calls since.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::task::Waker;

/// Bytes that a socket may write in one turn. Packets are sent at the end of the turn, so a longer write would delay its
/// first packet until the last one is built.
const WRITE_QUOTA: usize = 64 << 10;

/// Index of a socket in the table, with the entry's generation in the upper half, so that a late event of an earlier
/// socket is ignored. Never 0, which F-Stack treats as no token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Token(usize);

impl Token {
    fn new(index: usize, generation: u32) -> Self {
        Token((generation as usize) << 32 | (index + 1))
    }

    /// Value for an event's `udata`.
    pub(super) fn as_pointer(self) -> *mut c_void {
        ptr::without_provenance_mut(self.0)
    }

    /// Token in an event's `udata`.
    pub(super) fn of(carried: *mut c_void) -> Self {
        Token(carried.addr())
    }

    fn index(self) -> Option<usize> {
        (self.0 & u32::MAX as usize).checked_sub(1)
    }

    fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

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
    generation: u32,
    fd: c_int,
    read: DirectionState,
    write: DirectionState,
}

/// All sockets of a reactor.
#[derive(Default)]
pub(super) struct Sockets {
    all: Vec<SocketState>,
    free: Vec<usize>,
}

impl Sockets {
    /// Adds a socket. `ready` says whether an operation may be tried before the first event.
    pub fn insert(&mut self, fd: c_int, ready: bool) -> Token {
        let index = self.free.pop().unwrap_or_else(|| {
            self.all.push(SocketState::default());
            self.all.len() - 1
        });
        let socket = &mut self.all[index];
        socket.fd = fd;
        socket.read.ready = ready;
        socket.write.ready = ready;
        Token::new(index, socket.generation)
    }

    /// Removes a closed socket; does nothing if it is removed already.
    pub fn forget(&mut self, token: Token) {
        if let Some(socket) = self.socket(token) {
            *socket = SocketState { generation: socket.generation.wrapping_add(1), ..SocketState::default() };
            self.free.extend(token.index());
        }
    }

    fn socket(&mut self, token: Token) -> Option<&mut SocketState> {
        let socket = self.all.get_mut(token.index()?)?;
        (socket.generation == token.generation()).then_some(socket)
    }

    pub fn fd(&mut self, token: Token) -> Option<c_int> {
        self.socket(token).map(|socket| socket.fd)
    }

    pub fn direction(&mut self, token: Token, direction: Direction) -> Option<&mut DirectionState> {
        let socket = self.socket(token)?;
        Some(match direction {
            Direction::Read => &mut socket.read,
            Direction::Write => &mut socket.write,
        })
    }

    /// Whether an operation may be tried now.
    pub fn is_ready(&mut self, token: Token, direction: Direction) -> bool {
        self.direction(token, direction).is_some_and(|side| side.ready)
    }

    /// Records that an operation would block.
    pub fn blocks(&mut self, token: Token, direction: Direction) {
        if let Some(side) = self.direction(token, direction) {
            side.ready = false;
        }
    }

    /// Records an event (for reading, with the number of available `bytes`). Returns the waiting task.
    pub fn event(&mut self, token: Token, direction: Direction, bytes: usize, ended: bool) -> Option<Waker> {
        let side = self.direction(token, direction)?;
        side.ready = true;
        side.waiting = bytes;
        side.ended |= ended;
        side.watched = matches!(direction, Direction::Read);
        side.waker.take()
    }

    /// Records a read of `count` bytes. After `all` available bytes, or all bytes of the last event, another read would only block: the
    /// next event reports more.
    pub fn consumed(&mut self, token: Token, count: usize, all: bool) {
        if let Some(side) = self.direction(token, Direction::Read) {
            side.waiting = side.waiting.saturating_sub(count);
            if all || side.waiting == 0 {
                side.ready = side.ended;
            }
        }
    }

    /// Bytes that the socket may still write in this turn.
    pub fn write_quota(&mut self, token: Token, turn: u32) -> usize {
        match self.direction(token, Direction::Write) {
            Some(side) if side.written.0 == turn => WRITE_QUOTA.saturating_sub(side.written.1),
            _ => WRITE_QUOTA,
        }
    }

    /// Records a write of `count` bytes in this turn.
    pub fn wrote(&mut self, token: Token, turn: u32, count: usize) {
        if let Some(side) = self.direction(token, Direction::Write) {
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
        let token = sockets.insert(3, false);
        let ready = |sockets: &mut Sockets| sockets.is_ready(token, Direction::Read);
        assert!(!ready(&mut sockets));
        sockets.event(token, Direction::Read, 64, false);
        sockets.consumed(token, 16, false);
        assert!(ready(&mut sockets));
        sockets.consumed(token, 48, false);
        assert!(!ready(&mut sockets));
        // A short read has taken all bytes, also those after the event.
        sockets.event(token, Direction::Read, 64, false);
        sockets.consumed(token, 80, true);
        assert!(!ready(&mut sockets));
        // The end carries no bytes and is reported once, so the socket stays readable.
        sockets.event(token, Direction::Read, 8, true);
        sockets.consumed(token, 8, false);
        assert!(ready(&mut sockets));
    }

    #[test]
    fn a_socket_writes_its_share_of_each_turn() {
        let mut sockets = Sockets::default();
        let [one, other] = [3, 4].map(|fd| sockets.insert(fd, true));
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
    fn a_late_event_of_an_earlier_socket_is_ignored() {
        let mut sockets = Sockets::default();
        let first = sockets.insert(3, false);
        sockets.forget(first);
        sockets.forget(first);
        let second = sockets.insert(4, false);
        assert_ne!(first, second);
        sockets.event(first, Direction::Read, 1, false);
        assert!(!sockets.is_ready(second, Direction::Read));
        assert_eq!((sockets.fd(first), sockets.fd(second)), (None, Some(4)));
        let third = sockets.insert(5, false);
        assert_eq!(sockets.fd(third), Some(5));
    }
}
