//! Datagrams through the kernel, many for each system call.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket};
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use socket2::{Domain, SockAddr, Socket, Type};

use super::Transmit;
use super::packet::MAX_DATAGRAM;

/// Datagrams for one system call.
const BATCH: usize = 64;
/// One byte more than the longest, so that a longer one shows.
const ROOM: usize = MAX_DATAGRAM + 1;
/// What is asked for; the system may give less (`net.core.rmem_max`).
const SOCKET_BUFFER: usize = 4 << 20;
/// Class selector of the datagrams (RFC 2474), by which a switch tells them apart: 46, expedited forwarding.
pub const DSCP: u32 = 46;

/// A socket for the datagrams of this protocol, marked with [`DSCP`].
///
/// # Errors
/// Those of the system, such as an address in use.
pub fn bind(address: SocketAddr) -> io::Result<Arc<UdpSocket>> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, None)?;
    match address {
        SocketAddr::V4(_) => socket.set_tos_v4(DSCP << 2)?,
        SocketAddr::V6(_) => socket.set_tclass_v6(DSCP << 2)?,
    }
    socket.set_recv_buffer_size(SOCKET_BUFFER)?;
    socket.set_send_buffer_size(SOCKET_BUFFER)?;
    socket.bind(&address.into())?;
    Ok(Arc::new(socket.into()))
}

/// Receives.
pub struct Inbox {
    socket: Arc<UdpSocket>,
    bytes: Box<[[u8; ROOM]]>,
    arrived: Vec<(SocketAddr, usize)>,
}

impl Inbox {
    /// Receives from `socket`.
    pub fn new(socket: Arc<UdpSocket>) -> Self {
        Inbox {
            socket,
            bytes: vec![[0; ROOM]; BATCH].into_boxed_slice(),
            arrived: Vec::with_capacity(BATCH),
        }
    }

    /// Waits for datagrams, for at most `time`, and takes those that are there: see [`Inbox::iter`].
    ///
    /// # Errors
    /// Those of the system. A signal is none: then nothing has arrived.
    pub fn wait(&mut self, time: Duration) -> io::Result<()> {
        self.arrived.clear();
        if self.take()? == 0 && !time.is_zero() && self.ready(time)? {
            self.take()?;
        }
        Ok(())
    }

    /// What the last [`Inbox::wait`] took: sources and datagrams.
    pub fn iter(&self) -> impl Iterator<Item = (SocketAddr, &[u8])> {
        let datagrams = self.arrived.iter().zip(&self.bytes);
        datagrams.map(|((from, length), bytes)| (*from, &bytes[..*length]))
    }

    /// Whether the last [`Inbox::wait`] took as many as there is room for: more may be there.
    pub fn is_full(&self) -> bool {
        self.arrived.len() == BATCH
    }

    fn ready(&self, time: Duration) -> io::Result<bool> {
        let mut poll = libc::pollfd {
            fd: self.socket.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        let time = libc::timespec {
            tv_sec: time.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: time.subsec_nanos().into(),
        };
        // SAFETY: one pollfd of an open socket and a timespec, both on this stack; no signal mask.
        let ready = unsafe { libc::ppoll(&mut poll, 1, &time, ptr::null()) };
        none_if_interrupted(ready as isize).map(|ready| ready > 0)
    }

    fn take(&mut self) -> io::Result<usize> {
        let mut names = [const { MaybeUninit::<libc::sockaddr_storage>::zeroed() }; BATCH];
        // SAFETY: all zeros is a valid iovec and a valid mmsghdr: null pointers and lengths of 0.
        let mut vectors: [libc::iovec; BATCH] = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let mut messages: [libc::mmsghdr; BATCH] = unsafe { std::mem::zeroed() };
        for (i, message) in messages.iter_mut().enumerate() {
            vectors[i].iov_base = self.bytes[i].as_mut_ptr().cast();
            vectors[i].iov_len = ROOM;
            message.msg_hdr.msg_name = names[i].as_mut_ptr().cast();
            message.msg_hdr.msg_namelen = size_of::<libc::sockaddr_storage>() as u32;
            message.msg_hdr.msg_iov = &mut vectors[i];
            message.msg_hdr.msg_iovlen = 1;
        }
        // SAFETY: each message names one vector of ROOM writable bytes and a name as long as it says; all outlive the call.
        let taken = unsafe {
            libc::recvmmsg(
                self.socket.as_raw_fd(),
                messages.as_mut_ptr(),
                BATCH as u32,
                libc::MSG_DONTWAIT,
                ptr::null_mut(),
            )
        };
        let taken = match none_if_interrupted(taken as isize) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            taken => taken?,
        };
        for (message, name) in messages[..taken].iter().zip(&names) {
            // SAFETY: zeroed at first, so initialised whatever the kernel wrote.
            let name = unsafe { name.assume_init_ref() };
            // A source of another family cannot be: its datagram is as good as empty.
            let from = socket_address(name);
            let length = from.map_or(0, |_| message.msg_len as usize);
            let from = from.unwrap_or((Ipv4Addr::UNSPECIFIED, 0).into());
            self.arrived.push((from, length));
        }
        Ok(taken)
    }
}

fn none_if_interrupted(result: isize) -> io::Result<usize> {
    match usize::try_from(result) {
        Ok(count) => Ok(count),
        Err(_) => match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::Interrupted => Ok(0),
            error => Err(error),
        },
    }
}

fn socket_address(name: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let name_at: *const libc::sockaddr_storage = name;
    match name.ss_family.into() {
        libc::AF_INET => {
            // SAFETY: the family says that it is one, and the storage is large enough and aligned for every family.
            let name = unsafe { &*name_at.cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(u32::from_be(name.sin_addr.s_addr));
            Some((ip, u16::from_be(name.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let name = unsafe { &*name_at.cast::<libc::sockaddr_in6>() };
            let ip = Ipv6Addr::from(name.sin6_addr.s6_addr);
            let port = u16::from_be(name.sin6_port);
            Some(SocketAddrV6::new(ip, port, 0, name.sin6_scope_id).into())
        }
        _ => None,
    }
}

/// Sends.
pub struct Outbox {
    socket: Arc<UdpSocket>,
    waiting: Vec<(SockAddr, usize)>,
    bytes: Box<[[u8; ROOM]]>,
    /// Datagrams that the system took.
    pub sent: u64,
    /// Datagrams that it did not: they are lost, as others are on their way.
    pub refused: u64,
}

impl Outbox {
    /// Sends from `socket`.
    pub fn new(socket: Arc<UdpSocket>) -> Self {
        Outbox {
            socket,
            waiting: Vec::with_capacity(BATCH),
            bytes: vec![[0; ROOM]; BATCH].into_boxed_slice(),
            sent: 0,
            refused: 0,
        }
    }

    /// Hands everything to the system.
    pub fn flush(&mut self) {
        let mut from = 0;
        while from < self.waiting.len() {
            match self.hand_over(from) {
                Ok(count) => {
                    self.sent += count as u64;
                    from += count;
                }
                Err(error) => {
                    tracing::debug!(%error, "a datagram could not be sent");
                    self.refused += 1;
                    from += 1;
                }
            }
        }
        self.waiting.clear();
    }

    fn hand_over(&mut self, from: usize) -> io::Result<usize> {
        // SAFETY: all zeros is a valid iovec and a valid mmsghdr: null pointers and lengths of 0.
        let mut vectors: [libc::iovec; BATCH] = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let mut messages: [libc::mmsghdr; BATCH] = unsafe { std::mem::zeroed() };
        let waiting = &self.waiting[from..];
        for (i, (to, length)) in waiting.iter().enumerate() {
            vectors[i].iov_base = self.bytes[from + i].as_mut_ptr().cast();
            vectors[i].iov_len = *length;
            messages[i].msg_hdr.msg_name = to.as_ptr().cast_mut().cast();
            messages[i].msg_hdr.msg_namelen = to.len();
            messages[i].msg_hdr.msg_iov = &mut vectors[i];
            messages[i].msg_hdr.msg_iovlen = 1;
        }
        // SAFETY: each message names an address and one vector of readable bytes, which the call does not change; all
        // outlive it.
        let sent = unsafe {
            libc::sendmmsg(
                self.socket.as_raw_fd(),
                messages.as_mut_ptr(),
                waiting.len() as u32,
                0,
            )
        };
        none_if_interrupted(sent as isize)
    }
}

impl Transmit for Outbox {
    fn send(&mut self, to: SocketAddr, head: &[u8], body: &[u8]) {
        if self.waiting.len() == BATCH {
            self.flush();
        }
        let bytes = &mut self.bytes[self.waiting.len()];
        let length = head.len() + body.len();
        bytes[..head.len()].copy_from_slice(head);
        bytes[head.len()..length].copy_from_slice(body);
        self.waiting.push((to.into(), length));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagrams_arrive_whole_in_order_and_with_their_source() {
        for loopback in ["127.0.0.1:0", "[::1]:0"] {
            let here = loopback.parse().unwrap();
            let Ok(receiver) = bind(here) else {
                eprintln!("skipped {loopback}: the address is not there");
                continue;
            };
            let sender = bind(here).unwrap();
            let (to, from) = (receiver.local_addr().unwrap(), sender.local_addr().unwrap());
            let mut inbox = Inbox::new(receiver);
            inbox.wait(Duration::ZERO).unwrap();
            assert_eq!(inbox.iter().count(), 0);
            let mut outbox = Outbox::new(sender);
            // More than one batch, of every length.
            for i in 0..100usize {
                outbox.send(to, &[i as u8], &vec![7; i * MAX_DATAGRAM / 101]);
            }
            outbox.flush();
            assert_eq!((outbox.sent, outbox.refused), (100, 0));
            let mut seen = 0;
            while seen < 100 {
                inbox.wait(Duration::from_secs(10)).unwrap();
                assert!(inbox.iter().count() > 0);
                for (source, datagram) in inbox.iter() {
                    assert_eq!(source, from);
                    assert_eq!(datagram[0], seen as u8);
                    assert_eq!(datagram.len(), 1 + seen * MAX_DATAGRAM / 101);
                    seen += 1;
                }
            }
        }
    }

    #[test]
    fn what_is_too_long_does_not_pass_for_shorter() {
        let receiver = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = receiver.local_addr().unwrap();
        sender.send_to(&[0x10; 4000], to).unwrap();
        let mut inbox = Inbox::new(receiver);
        inbox.wait(Duration::from_secs(10)).unwrap();
        let (_, datagram) = inbox.iter().next().unwrap();
        assert!(datagram.len() > MAX_DATAGRAM);
        assert!(super::super::packet::Header::decode(datagram).is_none());
    }
}
