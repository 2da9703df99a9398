//! Which sockets may be read and written: what F-Stack's events said, and what has been done since.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::task::Waker;

/// Bytes that a socket may write in one turn. They leave at its end: of a longer write the first packet would wait for the last one's
/// making, and so would the other end.
const SHARE: usize = 64 << 10;

/// A socket's place in the table: its index, and its generation in the upper half, so that a late event of an
/// earlier socket finds nobody. Never 0, which F-Stack would take for no token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Token(usize);

impl Token {
    fn new(index: usize, generation: u32) -> Self {
        Token((generation as usize) << 32 | (index + 1))
    }

    /// As an event carries it.
    pub(super) fn as_pointer(self) -> *mut c_void {
        ptr::without_provenance_mut(self.0)
    }

    /// Of what an event carries.
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

/// Reading or writing.
#[derive(Debug, Clone, Copy)]
pub enum Direction {
    /// Data, connections or the end have arrived.
    Read,
    /// There is room to write, or a connection has been made or refused.
    Write,
}

/// One direction of a socket. An event comes when a state is entered, so readiness is kept until a call says that it
/// would block, or it is known that it would.
#[derive(Default)]
pub(super) struct Side {
    ready: bool,
    /// The other end has closed: no event will follow.
    ended: bool,
    /// Whether F-Stack will tell. It always does for reading; for writing it would do so with every acknowledgement, so
    /// it is asked each time.
    pub watched: bool,
    /// For reading: bytes that the last event told of and nothing has taken yet.
    waiting: usize,
    /// For writing: bytes written in the turn of this number.
    written: (u32, usize),
    waker: Option<Waker>,
}

impl Side {
    /// Whose task goes on with the next event.
    pub fn wake_later(&mut self, waker: &Waker) {
        match &mut self.waker {
            Some(known) => known.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
    }
}

#[derive(Default)]
struct Socket {
    generation: u32,
    fd: c_int,
    read: Side,
    write: Side,
}

/// All sockets of a reactor.
#[derive(Default)]
pub(super) struct Sockets {
    all: Vec<Socket>,
    free: Vec<usize>,
}

impl Sockets {
    /// `ready` is whether the first operation may be tried at once.
    pub fn insert(&mut self, fd: c_int, ready: bool) -> Token {
        let index = self.free.pop().unwrap_or_else(|| {
            self.all.push(Socket::default());
            self.all.len() - 1
        });
        let socket = &mut self.all[index];
        socket.fd = fd;
        socket.read.ready = ready;
        socket.write.ready = ready;
        Token::new(index, socket.generation)
    }

    /// A socket that is closed. One that is forgotten already stays so.
    pub fn forget(&mut self, token: Token) {
        if let Some(socket) = self.socket(token) {
            *socket = Socket {
                generation: socket.generation.wrapping_add(1),
                ..Socket::default()
            };
            self.free.extend(token.index());
        }
    }

    fn socket(&mut self, token: Token) -> Option<&mut Socket> {
        let socket = self.all.get_mut(token.index()?)?;
        (socket.generation == token.generation()).then_some(socket)
    }

    pub fn fd(&mut self, token: Token) -> Option<c_int> {
        self.socket(token).map(|socket| socket.fd)
    }

    pub fn side(&mut self, token: Token, direction: Direction) -> Option<&mut Side> {
        let socket = self.socket(token)?;
        Some(match direction {
            Direction::Read => &mut socket.read,
            Direction::Write => &mut socket.write,
        })
    }

    /// Whether an operation may be tried.
    pub fn is_ready(&mut self, token: Token, direction: Direction) -> bool {
        self.side(token, direction).is_some_and(|side| side.ready)
    }

    /// An operation has said that it would block.
    pub fn blocks(&mut self, token: Token, direction: Direction) {
        if let Some(side) = self.side(token, direction) {
            side.ready = false;
        }
    }

    /// An event: for reading there are so many `bytes`. Returns who waits for it.
    pub fn event(
        &mut self,
        token: Token,
        direction: Direction,
        bytes: usize,
        ended: bool,
    ) -> Option<Waker> {
        let side = self.side(token, direction)?;
        side.ready = true;
        side.waiting = bytes;
        side.ended |= ended;
        side.watched = matches!(direction, Direction::Read);
        side.waker.take()
    }

    /// A read has taken `count` bytes, and `all` that there were or as many as the last event told of: then an event tells when there are
    /// more, and another read would only say that it would block.
    pub fn took(&mut self, token: Token, count: usize, all: bool) {
        if let Some(side) = self.side(token, Direction::Read) {
            side.waiting = side.waiting.saturating_sub(count);
            if all || side.waiting == 0 {
                side.ready = side.ended;
            }
        }
    }

    /// Bytes that the socket may still write in this turn.
    pub fn share(&mut self, token: Token, turn: u32) -> usize {
        match self.side(token, Direction::Write) {
            Some(side) if side.written.0 == turn => SHARE.saturating_sub(side.written.1),
            _ => SHARE,
        }
    }

    /// A write in this turn has taken `count` bytes.
    pub fn wrote(&mut self, token: Token, turn: u32, count: usize) {
        if let Some(side) = self.side(token, Direction::Write) {
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
    fn what_an_event_told_of_is_read_without_asking_for_more() {
        let mut sockets = Sockets::default();
        let token = sockets.insert(3, false);
        let ready = |sockets: &mut Sockets| sockets.is_ready(token, Direction::Read);
        assert!(!ready(&mut sockets));
        sockets.event(token, Direction::Read, 64, false);
        sockets.took(token, 16, false);
        assert!(ready(&mut sockets));
        sockets.took(token, 48, false);
        assert!(!ready(&mut sockets));
        // A short read has taken all, also what has come since the event.
        sockets.event(token, Direction::Read, 64, false);
        sockets.took(token, 80, true);
        assert!(!ready(&mut sockets));
        // The end is no byte, and is told once: it is always there to be read.
        sockets.event(token, Direction::Read, 8, true);
        sockets.took(token, 8, false);
        assert!(ready(&mut sockets));
    }

    #[test]
    fn a_socket_writes_its_share_of_each_turn() {
        let mut sockets = Sockets::default();
        let [one, other] = [3, 4].map(|fd| sockets.insert(fd, true));
        assert_eq!(sockets.share(one, 7), SHARE);
        sockets.wrote(one, 7, 1000);
        sockets.wrote(one, 7, SHARE - 1001);
        assert_eq!(sockets.share(one, 7), 1);
        sockets.wrote(one, 7, 1);
        assert_eq!((sockets.share(one, 7), sockets.share(other, 7)), (0, SHARE));
        assert_eq!(sockets.share(one, 8), SHARE);
        sockets.wrote(one, 8, 5);
        assert_eq!(sockets.share(one, 8), SHARE - 5);
    }

    #[test]
    fn a_late_event_of_an_earlier_socket_finds_nobody() {
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
