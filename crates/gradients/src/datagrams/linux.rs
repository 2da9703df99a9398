//! Many datagrams for each system call. Consecutive datagrams of equal length to one address pass Linux's network stack as one buffer
//! (generic segmentation offload, GSO), and on one machine also arrive as one (generic receive offload, GRO).

use std::collections::HashSet;
use std::io;
use std::mem::size_of;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use socket2::{SockAddr, SockAddrStorage};

use crate::Transmit;

/// Most buffers in one system call.
const BATCHES_PER_CALL: usize = 16;
/// Longest received buffer in bytes, as UDP's length field limits it.
const GRO_MAX_BYTES: usize = u16::MAX as usize;
/// Longest sent buffer in bytes, which leaves space for headers.
const GSO_MAX_BYTES: usize = 65_000;
/// Most datagrams of a buffer, as the kernel limits them.
const GSO_MAX_SEGMENTS: usize = 64;
/// Most addresses remembered as without GSO. A full set is cleared, so that GSO is tried again.
const MAX_WITHOUT_GSO: usize = 1024;
/// Space for one control message with an integer, aligned as one.
type ControlBuffer = [u64; 3];
/// Receive side of a socket.
pub struct UdpReceiver {
    socket: Arc<UdpSocket>,
    bytes: Vec<u8>,
    received: Vec<ReceivedBatch>,
}

struct ReceivedBatch {
    from: SocketAddr,
    bytes: usize,
    /// Length of each datagram but the last.
    segment_bytes: usize,
}

impl UdpReceiver {
    pub fn new(socket: Arc<UdpSocket>) -> Self {
        // Without GRO datagrams arrive one by one.
        if let Err(error) = enable_gro(&socket) {
            tracing::debug!(%error, "no receive offload for datagrams");
        }
        UdpReceiver {
            socket,
            bytes: vec![0; GRO_MAX_BYTES * BATCHES_PER_CALL],
            received: Vec::with_capacity(BATCHES_PER_CALL),
        }
    }

    /// Waits up to `time` for datagrams, and receives as many as fit the buffers: see [`UdpReceiver::iter`]. A signal ends the wait without an
    /// error.
    pub fn wait(&mut self, time: Duration) -> io::Result<()> {
        self.received.clear();
        if self.take()? == 0 && !time.is_zero() && self.ready(time)? {
            self.take()?;
        }
        Ok(())
    }

    /// Datagrams of the last [`UdpReceiver::wait`], with their senders.
    pub fn iter(&self) -> impl Iterator<Item = (SocketAddr, &[u8])> {
        let batches = self.received.iter().zip(self.bytes.chunks(GRO_MAX_BYTES));
        batches.flat_map(|(received, bytes)| {
            let datagrams = bytes[..received.bytes].chunks(received.segment_bytes);
            datagrams.map(|datagram| (received.from, datagram))
        })
    }

    /// Whether the last [`UdpReceiver::wait`] filled all buffers, so more datagrams may be waiting.
    pub fn is_full(&self) -> bool {
        self.received.len() == BATCHES_PER_CALL
    }

    fn ready(&self, time: Duration) -> io::Result<bool> {
        let mut poll = libc::pollfd { fd: self.socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let time = libc::timespec {
            tv_sec: time.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: time.subsec_nanos().into(),
        };
        // SAFETY: one pollfd of an open socket and a timespec, both on this stack; a null signal mask is allowed.
        let ready = unsafe { libc::ppoll(&mut poll, 1, &time, ptr::null()) };
        none_if_interrupted(ready as isize).map(|ready| ready > 0)
    }

    fn take(&mut self) -> io::Result<usize> {
        let mut names: [_; BATCHES_PER_CALL] = std::array::from_fn(|_| SockAddrStorage::zeroed());
        // SAFETY: all zeros is a valid iovec and a valid mmsghdr: null pointers and lengths of 0.
        let mut vectors: [libc::iovec; BATCHES_PER_CALL] = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let mut messages: [libc::mmsghdr; BATCHES_PER_CALL] = unsafe { std::mem::zeroed() };
        let mut controls = [ControlBuffer::default(); BATCHES_PER_CALL];
        let buffers = self.bytes.chunks_mut(GRO_MAX_BYTES);
        for (i, (message, buffer)) in messages.iter_mut().zip(buffers).enumerate() {
            vectors[i].iov_base = buffer.as_mut_ptr().cast();
            vectors[i].iov_len = buffer.len();
            message.msg_hdr.msg_control = controls[i].as_mut_ptr().cast();
            message.msg_hdr.msg_controllen = size_of::<ControlBuffer>();
            message.msg_hdr.msg_name = ptr::from_mut(&mut names[i]).cast();
            message.msg_hdr.msg_namelen = names[i].size_of();
            message.msg_hdr.msg_iov = &mut vectors[i];
            message.msg_hdr.msg_iovlen = 1;
        }
        // SAFETY: each message points to one vector of writable bytes, an address and a control buffer, with their lengths; all outlive
        // the call.
        let taken = unsafe {
            libc::recvmmsg(
                self.socket.as_raw_fd(),
                messages.as_mut_ptr(),
                BATCHES_PER_CALL as u32,
                libc::MSG_DONTWAIT,
                ptr::null_mut(),
            )
        };
        let taken = match none_if_interrupted(taken as isize) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            taken => taken?,
        };
        for (message, name) in messages[..taken].iter().zip(names) {
            // SAFETY: it was zeroed, and the kernel has written an address of this length.
            let name = unsafe { SockAddr::new(name, message.msg_hdr.msg_namelen) };
            // Always an IP address on this socket; a datagram without one would be treated as empty.
            let from = name.as_socket();
            let bytes = from.map_or(0, |_| message.msg_len as usize);
            self.received.push(ReceivedBatch {
                from: from.unwrap_or((Ipv4Addr::UNSPECIFIED, 0).into()),
                bytes,
                segment_bytes: gro_segment_bytes(&message.msg_hdr).unwrap_or(bytes).max(1),
            });
        }
        Ok(taken)
    }
}

fn enable_gro(socket: &UdpSocket) -> io::Result<()> {
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

/// Length of the datagrams in a buffer that GRO joined.
fn gro_segment_bytes(message: &libc::msghdr) -> Option<usize> {
    // SAFETY: the message points to its control buffer with the length that the kernel wrote, and the buffer is borrowed with it.
    let control = unsafe { libc::CMSG_FIRSTHDR(message).as_ref() }?;
    if (control.cmsg_level, control.cmsg_type) != (libc::SOL_UDP, libc::UDP_GRO) {
        return None;
    }
    // SAFETY: a control message of this type holds an integer.
    let size = unsafe { libc::CMSG_DATA(control).cast::<libc::c_int>().read_unaligned() };
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

/// Send side of a socket.
pub struct UdpSender {
    socket: Arc<UdpSocket>,
    batches: Vec<GsoBatch>,
    /// Buffers for reuse by later batches.
    spare: Vec<Vec<u8>>,
    /// Addresses to which GSO failed.
    without_gso: HashSet<IpAddr>,
    /// Datagrams that the system accepted.
    pub sent: u64,
    /// Datagrams that the system refused, which are lost.
    pub refused: u64,
}

/// Datagrams to one address, all of one length except the last, which may be shorter.
struct GsoBatch {
    to: SocketAddr,
    name: SockAddr,
    bytes: Vec<u8>,
    /// Length of each datagram but the last.
    segment_bytes: usize,
}

impl GsoBatch {
    fn count(&self) -> usize {
        self.bytes.len().div_ceil(self.segment_bytes)
    }

    fn has_room_for(&self, length: usize) -> bool {
        self.bytes.len().is_multiple_of(self.segment_bytes)
            && length <= self.segment_bytes
            && self.bytes.len() + length <= GSO_MAX_BYTES
            && self.count() < GSO_MAX_SEGMENTS
    }
}

impl UdpSender {
    pub fn new(socket: Arc<UdpSocket>) -> Self {
        UdpSender {
            socket,
            batches: Vec::with_capacity(BATCHES_PER_CALL),
            spare: Vec::new(),
            without_gso: HashSet::new(),
            sent: 0,
            refused: 0,
        }
    }

    pub fn socket(&self) -> &Arc<UdpSocket> {
        &self.socket
    }

    pub fn flush(&mut self) {
        let mut batches = std::mem::take(&mut self.batches);
        let mut left = batches.as_slice();
        while let [first, rest @ ..] = left {
            match self.send_batches(left) {
                Ok(count) => {
                    self.sent += left[..count].iter().map(GsoBatch::count).sum::<usize>() as u64;
                    left = &left[count..];
                }
                Err(error) => {
                    tracing::debug!(%error, datagrams = first.count(), "a batch could not be sent");
                    self.disable_gso_after(first, &error);
                    self.send_one_by_one(first);
                    left = rest;
                }
            }
        }
        self.spare.extend(batches.drain(..).map(|batch| batch.bytes));
        self.batches = batches;
    }

    /// A segmentation error disables GSO for that address only. Other errors, such as an unreachable address, do not concern GSO.
    fn disable_gso_after(&mut self, batch: &GsoBatch, error: &io::Error) {
        let of_gso = [libc::EIO, libc::EINVAL, libc::EMSGSIZE, libc::EOPNOTSUPP];
        if batch.count() == 1 || error.raw_os_error().is_none_or(|code| !of_gso.contains(&code)) {
            return;
        }
        if self.without_gso.len() == MAX_WITHOUT_GSO {
            self.without_gso.clear();
        }
        self.without_gso.insert(batch.to.ip());
    }

    fn may_use_gso(&self, to: SocketAddr) -> bool {
        self.without_gso.is_empty() || !self.without_gso.contains(&to.ip())
    }

    fn send_one_by_one(&mut self, batch: &GsoBatch) {
        for datagram in batch.bytes.chunks(batch.segment_bytes) {
            match self.socket.send_to(datagram, batch.to) {
                Ok(_) => self.sent += 1,
                Err(_) => self.refused += 1,
            }
        }
    }

    fn send_batches(&self, batches: &[GsoBatch]) -> io::Result<usize> {
        // SAFETY: all zeros is a valid iovec and a valid mmsghdr: null pointers and lengths of 0.
        let mut vectors: [libc::iovec; BATCHES_PER_CALL] = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let mut messages: [libc::mmsghdr; BATCHES_PER_CALL] = unsafe { std::mem::zeroed() };
        let mut controls = [ControlBuffer::default(); BATCHES_PER_CALL];
        for (i, batch) in batches.iter().enumerate() {
            vectors[i].iov_base = batch.bytes.as_ptr().cast_mut().cast();
            vectors[i].iov_len = batch.bytes.len();
            let message = &mut messages[i].msg_hdr;
            message.msg_name = batch.name.as_ptr().cast_mut().cast();
            message.msg_namelen = batch.name.len();
            message.msg_iov = &mut vectors[i];
            message.msg_iovlen = 1;
            if batch.count() > 1 {
                set_gso_segment_bytes(message, &mut controls[i], batch.segment_bytes as u16);
            }
        }
        // SAFETY: each message points to an address, one vector of readable bytes and perhaps a control buffer; all outlive the call, which
        // does not change them.
        let sent = unsafe { libc::sendmmsg(self.socket.as_raw_fd(), messages.as_mut_ptr(), batches.len() as u32, 0) };
        none_if_interrupted(sent as isize)
    }
}

/// Makes the kernel split a message into datagrams of `size` bytes.
fn set_gso_segment_bytes(message: &mut libc::msghdr, control: &mut ControlBuffer, size: u16) {
    message.msg_control = control.as_mut_ptr().cast();
    // SAFETY: it only computes with its argument.
    message.msg_controllen = unsafe { libc::CMSG_SPACE(size_of::<u16>() as u32) } as usize;
    // SAFETY: the message points to a control buffer with space for one header and two bytes, aligned for it.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(message);
        (*header).cmsg_level = libc::SOL_UDP;
        (*header).cmsg_type = libc::UDP_SEGMENT;
        (*header).cmsg_len = libc::CMSG_LEN(size_of::<u16>() as u32) as usize;
        libc::CMSG_DATA(header).cast::<u16>().write_unaligned(size);
    }
}

impl Transmit for UdpSender {
    fn send<const HEAD: usize>(&mut self, to: SocketAddr, head: &[u8; HEAD], body: &[u8]) {
        let length = head.len() + body.len();
        // The newest batch to this address, so datagrams to one address keep their order.
        let newest = self.batches.iter().rposition(|batch| batch.to == to);
        let open = newest.filter(|&at| self.may_use_gso(to) && self.batches[at].has_room_for(length));
        let at = open.unwrap_or_else(|| {
            if self.batches.len() == BATCHES_PER_CALL {
                self.flush();
            }
            let spare = self.spare.pop();
            let mut bytes = spare.unwrap_or_else(|| Vec::with_capacity(GSO_MAX_BYTES));
            bytes.clear();
            self.batches.push(GsoBatch { to, name: to.into(), bytes, segment_bytes: length });
            self.batches.len() - 1
        });
        let bytes = &mut self.batches[at].bytes;
        bytes.extend_from_slice(head);
        bytes.extend_from_slice(body);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datagrams::bind;

    #[test]
    #[cfg_attr(miri, ignore = "a socket of the kernel")]
    fn an_error_disables_gso_for_one_address_at_most() {
        let socket = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let mut sender = UdpSender::new(socket);
        // EACCES: the socket does not have SO_BROADCAST.
        let nobody: SocketAddr = "255.255.255.255:9".parse().unwrap();
        (0..3).for_each(|_| sender.send(nobody, &[1], &[2]));
        sender.flush();
        assert_eq!((sender.sent, sender.refused), (0, 3));
        assert!(sender.without_gso.is_empty());
        // A segmentation error disables GSO for that address only.
        sender.send(nobody, &[1], &[2]);
        sender.send(nobody, &[1], &[2]);
        let batch = sender.batches.pop().unwrap();
        sender.disable_gso_after(&batch, &io::Error::from_raw_os_error(libc::EIO));
        assert!(!sender.may_use_gso(nobody));
        let other = "127.0.0.1:9".parse().unwrap();
        assert!(sender.may_use_gso(other));
        sender.send(nobody, &[1], &[2]);
        sender.send(nobody, &[1], &[2]);
        sender.send(other, &[1], &[2]);
        sender.send(other, &[1], &[2]);
        let lengths: Vec<usize> = sender.batches.iter().map(GsoBatch::count).collect();
        assert_eq!(lengths, [1, 1, 2]);
    }
}
