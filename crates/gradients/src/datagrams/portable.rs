//! One datagram for each system call, by the standard library alone.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use crate::Transmit;
use crate::packet::MAX_DATAGRAM;

/// Most datagrams received at a time.
const DATAGRAMS: usize = 64;
/// Space for a datagram, one byte more than the longest valid one: a longer one is cut and still too long.
const SPACE: usize = MAX_DATAGRAM + 1;
/// Timeout of a socket that is only looked at. The standard library has no shorter one.
const LOOK: Duration = Duration::from_micros(1);

/// Receive side of a socket. A socket has one, because its wait is a setting of the socket.
pub struct UdpReceiver {
    socket: Arc<UdpSocket>,
    bytes: Vec<u8>,
    /// Sender and length of each datagram.
    received: Vec<(SocketAddr, usize)>,
}

impl UdpReceiver {
    pub fn new(socket: Arc<UdpSocket>) -> Self {
        UdpReceiver { socket, bytes: vec![0; SPACE * DATAGRAMS], received: Vec::with_capacity(DATAGRAMS) }
    }

    /// Waits up to `time` for datagrams, and receives as many as fit the buffers: see [`UdpReceiver::iter`]. A signal ends the wait without an
    /// error.
    pub fn wait(&mut self, time: Duration) -> io::Result<()> {
        self.received.clear();
        self.socket.set_read_timeout(Some(time.max(LOOK)))?;
        if self.take()? {
            self.socket.set_read_timeout(Some(LOOK))?;
            while !self.is_full() && self.take()? {}
        }
        Ok(())
    }

    /// Datagrams of the last [`UdpReceiver::wait`], with their senders.
    pub fn iter(&self) -> impl Iterator<Item = (SocketAddr, &[u8])> {
        let datagrams = self.received.iter().zip(self.bytes.chunks(SPACE));
        datagrams.map(|(&(from, length), bytes)| (from, &bytes[..length]))
    }

    /// Whether the last [`UdpReceiver::wait`] filled all buffers, so more datagrams may be waiting.
    pub fn is_full(&self) -> bool {
        self.received.len() == DATAGRAMS
    }

    /// Receives one datagram; false if none came in time.
    fn take(&mut self) -> io::Result<bool> {
        let at = self.received.len() * SPACE;
        match self.socket.recv_from(&mut self.bytes[at..at + SPACE]) {
            Ok((length, from)) => {
                self.received.push((from, length));
                Ok(true)
            }
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted => Ok(false),
                _ => Err(error),
            },
        }
    }
}

/// Send side of a socket.
pub struct UdpSender {
    socket: Arc<UdpSocket>,
    datagram: Vec<u8>,
    /// Datagrams that the system accepted.
    pub sent: u64,
    /// Datagrams that the system refused, which are lost.
    pub refused: u64,
}

impl UdpSender {
    pub fn new(socket: Arc<UdpSocket>) -> Self {
        UdpSender { socket, datagram: Vec::with_capacity(MAX_DATAGRAM), sent: 0, refused: 0 }
    }

    pub fn socket(&self) -> &Arc<UdpSocket> {
        &self.socket
    }

    /// Does nothing: every datagram was sent at once.
    pub fn flush(&mut self) {}
}

impl Transmit for UdpSender {
    fn send<const HEAD: usize>(&mut self, to: SocketAddr, head: &[u8; HEAD], body: &[u8]) {
        self.datagram.clear();
        self.datagram.extend_from_slice(head);
        self.datagram.extend_from_slice(body);
        match self.socket.send_to(&self.datagram, to) {
            Ok(_) => self.sent += 1,
            Err(error) => {
                tracing::debug!(%error, "a datagram could not be sent");
                self.refused += 1;
            }
        }
    }
}
