//! Datagrams through the kernel: many for each system call, and trains of equal length to one address that go through the stack as one
//! (segmentation offload), which on one machine also arrive as one.

use std::collections::HashSet;
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket};
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use socket2::{Domain, SockAddr, Socket, Type};

use super::Transmit;

/// Trains for one system call.
const BATCH: usize = 16;
/// Longest train, in bytes: what the length field of UDP has room for.
const ROOM: usize = u16::MAX as usize;
/// Bytes of a train that is sent, with room for its headers.
const TRAIN_BYTES: usize = 65_000;
/// Datagrams of a train, as the kernel limits them.
const TRAIN: usize = 64;
/// Addresses that are remembered for taking no trains; then each is tried again.
const MOST_WITHOUT_TRAINS: usize = 1024;
/// Room for one control message of an integer, aligned as one.
type Control = [u64; 3];
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
    bytes: Vec<u8>,
    arrived: Vec<Arrived>,
}

struct Arrived {
    from: SocketAddr,
    bytes: usize,
    /// Of each datagram but the last.
    size: usize,
}

impl Inbox {
    /// Receives from `socket`.
    pub fn new(socket: Arc<UdpSocket>) -> Self {
        // Without it trains arrive in single datagrams.
        if let Err(error) = take_trains(&socket) {
            tracing::debug!(%error, "no receive offload for datagrams");
        }
        Inbox {
            socket,
            bytes: vec![0; ROOM * BATCH],
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
        let trains = self.arrived.iter().zip(self.bytes.chunks(ROOM));
        trains.flat_map(|(arrived, bytes)| {
            let datagrams = bytes[..arrived.bytes].chunks(arrived.size);
            datagrams.map(|datagram| (arrived.from, datagram))
        })
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
        let mut controls = [Control::default(); BATCH];
        let room = self.bytes.chunks_mut(ROOM);
        for (i, (message, room)) in messages.iter_mut().zip(room).enumerate() {
            vectors[i].iov_base = room.as_mut_ptr().cast();
            vectors[i].iov_len = room.len();
            message.msg_hdr.msg_control = controls[i].as_mut_ptr().cast();
            message.msg_hdr.msg_controllen = size_of::<Control>();
            message.msg_hdr.msg_name = names[i].as_mut_ptr().cast();
            message.msg_hdr.msg_namelen = size_of::<libc::sockaddr_storage>() as u32;
            message.msg_hdr.msg_iov = &mut vectors[i];
            message.msg_hdr.msg_iovlen = 1;
        }
        // SAFETY: each message names one vector of writable bytes, a name and a control buffer as long as it says; all outlive the call.
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
            let bytes = from.map_or(0, |_| message.msg_len as usize);
            self.arrived.push(Arrived {
                from: from.unwrap_or((Ipv4Addr::UNSPECIFIED, 0).into()),
                bytes,
                size: train_size(&message.msg_hdr).unwrap_or(bytes).max(1),
            });
        }
        Ok(taken)
    }
}

fn take_trains(socket: &UdpSocket) -> io::Result<()> {
    let on: libc::c_int = 1;
    // SAFETY: the option's value is the integer on this stack, with its size.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_UDP,
            libc::UDP_GRO,
            ptr::from_ref(&on).cast(),
            size_of::<libc::c_int>() as u32,
        )
    };
    match set {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The length of a train's datagrams, where the message is a train.
fn train_size(message: &libc::msghdr) -> Option<usize> {
    // SAFETY: the kernel filled the control buffer, which the message names with its length, and which is still there.
    let control = unsafe { libc::CMSG_FIRSTHDR(message).as_ref() }?;
    if (control.cmsg_level, control.cmsg_type) != (libc::SOL_UDP, libc::UDP_GRO) {
        return None;
    }
    // SAFETY: a control message of this type has an integer.
    let size = unsafe {
        libc::CMSG_DATA(control)
            .cast::<libc::c_int>()
            .read_unaligned()
    };
    usize::try_from(size).ok()
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
    trains: Vec<Train>,
    /// Emptied trains, for their memory: at most as many as there have been trains at a time.
    spare: Vec<Vec<u8>>,
    /// Where the system takes no trains to.
    without_trains: HashSet<IpAddr>,
    /// Datagrams that the system took.
    pub sent: u64,
    /// Datagrams that it did not: they are lost, as others are on their way.
    pub refused: u64,
}

/// Datagrams to one address, all but the last of one length.
struct Train {
    to: SocketAddr,
    name: SockAddr,
    bytes: Vec<u8>,
    size: usize,
}

impl Train {
    fn count(&self) -> usize {
        self.bytes.len().div_ceil(self.size)
    }

    fn takes(&self, length: usize) -> bool {
        self.bytes.len().is_multiple_of(self.size)
            && length <= self.size
            && self.bytes.len() + length <= TRAIN_BYTES
            && self.count() < TRAIN
    }
}

impl Outbox {
    /// Sends from `socket`.
    pub fn new(socket: Arc<UdpSocket>) -> Self {
        Outbox {
            socket,
            trains: Vec::with_capacity(BATCH),
            spare: Vec::new(),
            without_trains: HashSet::new(),
            sent: 0,
            refused: 0,
        }
    }

    /// Hands everything to the system.
    pub fn flush(&mut self) {
        let mut trains = std::mem::take(&mut self.trains);
        let mut left = trains.as_slice();
        while let [first, rest @ ..] = left {
            match self.hand_over(left) {
                Ok(count) => {
                    self.sent += left[..count].iter().map(Train::count).sum::<usize>() as u64;
                    left = &left[count..];
                }
                Err(error) => {
                    tracing::debug!(%error, datagrams = first.count(), "could not be sent as one");
                    self.note_refusal(first, &error);
                    self.send_singly(first);
                    left = rest;
                }
            }
        }
        self.spare.extend(trains.drain(..).map(|train| train.bytes));
        self.trains = trains;
    }

    /// What cannot be reached says nothing about trains, and a device that takes none, or smaller ones, nothing about other devices.
    fn note_refusal(&mut self, train: &Train, error: &io::Error) {
        let of_trains = [libc::EIO, libc::EINVAL, libc::EMSGSIZE, libc::EOPNOTSUPP];
        if train.count() == 1
            || error
                .raw_os_error()
                .is_none_or(|code| !of_trains.contains(&code))
        {
            return;
        }
        if self.without_trains.len() == MOST_WITHOUT_TRAINS {
            self.without_trains.clear();
        }
        self.without_trains.insert(train.to.ip());
    }

    fn takes_trains(&self, to: SocketAddr) -> bool {
        self.without_trains.is_empty() || !self.without_trains.contains(&to.ip())
    }

    fn send_singly(&mut self, train: &Train) {
        for datagram in train.bytes.chunks(train.size) {
            match self.socket.send_to(datagram, train.to) {
                Ok(_) => self.sent += 1,
                Err(_) => self.refused += 1,
            }
        }
    }

    fn hand_over(&self, trains: &[Train]) -> io::Result<usize> {
        // SAFETY: all zeros is a valid iovec and a valid mmsghdr: null pointers and lengths of 0.
        let mut vectors: [libc::iovec; BATCH] = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let mut messages: [libc::mmsghdr; BATCH] = unsafe { std::mem::zeroed() };
        let mut controls = [Control::default(); BATCH];
        for (i, train) in trains.iter().enumerate() {
            vectors[i].iov_base = train.bytes.as_ptr().cast_mut().cast();
            vectors[i].iov_len = train.bytes.len();
            let message = &mut messages[i].msg_hdr;
            message.msg_name = train.name.as_ptr().cast_mut().cast();
            message.msg_namelen = train.name.len();
            message.msg_iov = &mut vectors[i];
            message.msg_iovlen = 1;
            if train.count() > 1 {
                set_train_size(message, &mut controls[i], train.size as u16);
            }
        }
        // SAFETY: each message names an address, one vector of readable bytes and perhaps a control buffer, none of which the call
        // changes; all outlive it.
        let sent = unsafe {
            libc::sendmmsg(
                self.socket.as_raw_fd(),
                messages.as_mut_ptr(),
                trains.len() as u32,
                0,
            )
        };
        none_if_interrupted(sent as isize)
    }
}

/// Lets the kernel cut a message into datagrams of `size` bytes.
fn set_train_size(message: &mut libc::msghdr, control: &mut Control, size: u16) {
    message.msg_control = control.as_mut_ptr().cast();
    // SAFETY: a constant expression of its argument.
    message.msg_controllen = unsafe { libc::CMSG_SPACE(size_of::<u16>() as u32) } as usize;
    // SAFETY: the message names a control buffer with room for one header and two bytes, aligned for it.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(message);
        (*header).cmsg_level = libc::SOL_UDP;
        (*header).cmsg_type = libc::UDP_SEGMENT;
        (*header).cmsg_len = libc::CMSG_LEN(size_of::<u16>() as u32) as usize;
        libc::CMSG_DATA(header).cast::<u16>().write_unaligned(size);
    }
}

impl Transmit for Outbox {
    fn send<const HEAD: usize>(&mut self, to: SocketAddr, head: &[u8; HEAD], body: &[u8]) {
        let length = head.len() + body.len();
        // The newest one to this address: datagrams to one address keep their order.
        let newest = self.trains.iter().rposition(|train| train.to == to);
        let open = newest.filter(|&at| self.takes_trains(to) && self.trains[at].takes(length));
        let at = open.unwrap_or_else(|| {
            if self.trains.len() == BATCH {
                self.flush();
            }
            let spare = self.spare.pop();
            let mut bytes = spare.unwrap_or_else(|| Vec::with_capacity(TRAIN_BYTES));
            bytes.clear();
            self.trains.push(Train {
                to,
                name: to.into(),
                bytes,
                size: length,
            });
            self.trains.len() - 1
        });
        let bytes = &mut self.trains[at].bytes;
        bytes.extend_from_slice(head);
        bytes.extend_from_slice(body);
    }
}

#[cfg(test)]
mod tests {
    use super::super::packet::MAX_DATAGRAM;
    use super::*;

    const COUNT: usize = 250;

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
            // Trains and single ones: lengths that stay for a while, rise and fall.
            let length = |i: usize| match i {
                ..100 => 1 + i * MAX_DATAGRAM / 101,
                100..180 => MAX_DATAGRAM,
                _ => 300 - i,
            };
            for i in 0..COUNT {
                outbox.send(to, &[i as u8], &vec![7; length(i) - 1]);
            }
            outbox.flush();
            assert_eq!((outbox.sent, outbox.refused), (COUNT as u64, 0));
            let mut seen = 0;
            while seen < COUNT {
                inbox.wait(Duration::from_secs(10)).unwrap();
                assert!(inbox.iter().count() > 0);
                for (source, datagram) in inbox.iter() {
                    assert_eq!(source, from);
                    assert_eq!(datagram[0], seen as u8);
                    assert_eq!(datagram.len(), length(seen));
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

    #[test]
    fn who_cannot_be_reached_leaves_the_trains_of_others() {
        let sender = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let mut outbox = Outbox::new(sender);
        // Not without asking for broadcasts: the system says EACCES.
        let nobody: SocketAddr = "255.255.255.255:9".parse().unwrap();
        (0..3).for_each(|_| outbox.send(nobody, &[1], &[2]));
        outbox.flush();
        assert_eq!((outbox.sent, outbox.refused), (0, 3));
        assert!(outbox.without_trains.is_empty());
        // What says that it is about trains is about those to there.
        outbox.send(nobody, &[1], &[2]);
        outbox.send(nobody, &[1], &[2]);
        let train = outbox.trains.pop().unwrap();
        outbox.note_refusal(&train, &io::Error::from_raw_os_error(libc::EIO));
        assert!(!outbox.takes_trains(nobody));
        let other = "127.0.0.1:9".parse().unwrap();
        assert!(outbox.takes_trains(other));
        outbox.send(nobody, &[1], &[2]);
        outbox.send(nobody, &[1], &[2]);
        outbox.send(other, &[1], &[2]);
        outbox.send(other, &[1], &[2]);
        let lengths: Vec<usize> = outbox.trains.iter().map(Train::count).collect();
        assert_eq!(lengths, [1, 1, 2]);
    }
}
