//! UDP sockets, with many datagrams for each system call where the kernel can: on Linux, consecutive datagrams of equal length to one
//! address pass the network stack as one buffer (generic segmentation offload, GSO), and on one machine also arrive as one (generic receive
//! offload, GRO). Elsewhere a system call takes one datagram.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::net::{Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use socket2::{Domain, MaybeUninitSlice, MsgHdr, MsgHdrMut, SockAddr, SockRef, Socket, Type};

use super::Transmit;
use base::fork::close_in_children;

/// Requested size of a socket's buffers in bytes. The kernel may grant less (`net.core.rmem_max`).
pub const SOCKET_BUFFER: usize = 4 << 20;
/// Traffic class of the datagrams (differentiated services code point, RFC 2474), by which a switch recognises them: expedited forwarding.
pub const DSCP: u32 = 46;

/// Most buffers sent at a time, and most received before answers are sent.
const BATCHES: usize = 16;
/// Longest received buffer in bytes, as UDP's length field limits it.
const GRO_MAX_BYTES: usize = u16::MAX as usize;
/// Longest sent buffer in bytes, which leaves space for headers.
const GSO_MAX_BYTES: usize = 65_000;
/// Most datagrams of a buffer, as the kernel limits them.
const GSO_MAX_SEGMENTS: usize = if cfg!(target_os = "linux") { 64 } else { 1 };
/// Options of Linux's UDP, and types of its control messages (linux/udp.h).
const SOL_UDP: libc::c_int = 17;
const UDP_SEGMENT: libc::c_int = 103;
const UDP_GRO: libc::c_int = 104;

/// A socket for the datagrams of this protocol, marked with [`DSCP`].
pub fn bind(address: SocketAddr) -> io::Result<Arc<UdpSocket>> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, None)?;
    close_in_children(&socket);
    match address {
        SocketAddr::V4(_) => socket.set_tos_v4(DSCP << 2)?,
        SocketAddr::V6(_) => {
            socket.set_tclass_v6(DSCP << 2)?;
            // For IPv4 hosts of a socket for both; not every system has it.
            let _ = socket.set_tos_v4(DSCP << 2);
        }
    }
    socket.set_recv_buffer_size(SOCKET_BUFFER)?;
    socket.set_send_buffer_size(SOCKET_BUFFER)?;
    socket.bind(&address.into())?;
    Ok(Arc::new(socket.into()))
}

/// A control message of UDP with an integer: Linux's `cmsghdr` (its length, level and type), then space for the value.
#[repr(align(8))]
struct Control([u8; Control::VALUE_AT + 8]);

impl Control {
    const LEVEL_AT: usize = size_of::<usize>();
    const VALUE_AT: usize = Control::LEVEL_AT + 8;

    /// Makes the kernel split a message into datagrams of `bytes` bytes.
    fn gso(bytes: u16) -> Self {
        let mut control = Control([0; _]);
        let head = Control::VALUE_AT..Control::VALUE_AT + size_of::<u16>();
        control.0[..Control::LEVEL_AT].copy_from_slice(&head.end.to_ne_bytes());
        control.0[Control::LEVEL_AT..][..4].copy_from_slice(&SOL_UDP.to_ne_bytes());
        control.0[Control::LEVEL_AT + 4..][..4].copy_from_slice(&UDP_SEGMENT.to_ne_bytes());
        control.0[head].copy_from_slice(&bytes.to_ne_bytes());
        control
    }

    /// Length of the datagrams in a buffer that GRO joined.
    fn gro(&self) -> Option<usize> {
        let integer = |at| Some(i32::from_ne_bytes(*self.0[at..].first_chunk()?));
        let head = (integer(Control::LEVEL_AT)?, integer(Control::LEVEL_AT + 4)?);
        (head == (SOL_UDP, UDP_GRO)).then(|| integer(Control::VALUE_AT)?.try_into().ok())?
    }
}

/// Bytes for the kernel to write to.
fn writable(bytes: &mut [u8]) -> &mut [MaybeUninit<u8>] {
    // SAFETY: the kernel, to which alone they are passed, writes initialised bytes.
    unsafe { &mut *(ptr::from_mut(bytes) as *mut [MaybeUninit<u8>]) }
}

/// Receive side of a socket.
pub struct UdpReceiver {
    socket: Arc<UdpSocket>,
    buffer: Vec<u8>,
    from: SocketAddr,
    /// Bytes of the datagrams in the buffer.
    bytes: usize,
    /// Length of each datagram but the last.
    segment_bytes: usize,
    /// Buffers received since the last pause.
    without_pause: usize,
}

impl UdpReceiver {
    pub fn new(socket: Arc<UdpSocket>) -> Self {
        // Without GRO datagrams arrive one by one.
        if let Err(error) = enable_gro(&socket) {
            tracing::debug!(%error, "no receive offload for datagrams");
        }
        let nobody = (Ipv6Addr::UNSPECIFIED, 0).into();
        UdpReceiver {
            socket,
            buffer: vec![0; GRO_MAX_BYTES],
            from: nobody,
            bytes: 0,
            segment_bytes: 1,
            without_pause: 0,
        }
    }

    /// Receives a buffer of datagrams from one sender: see [`UdpReceiver::iter`]. If there is none, flushes `out`, then waits for one up to
    /// `time`, rounded up to whole milliseconds. A signal ends the wait without an error.
    pub fn wait(&mut self, time: Duration, out: &mut UdpSender) -> io::Result<()> {
        self.without_pause += 1;
        if self.take()? {
            // Answers leave in large batches, but not only once the last datagram of a flood is answered.
            if self.without_pause.is_multiple_of(BATCHES) {
                out.flush();
            }
            return Ok(());
        }
        self.without_pause = 0;
        out.flush();
        if !time.is_zero() && self.ready(time)? {
            self.take()?;
        }
        Ok(())
    }

    /// Datagrams of the last [`UdpReceiver::wait`], with their sender.
    pub fn iter(&self) -> impl Iterator<Item = (SocketAddr, &[u8])> {
        let datagrams = self.buffer[..self.bytes].chunks(self.segment_bytes);
        datagrams.map(|datagram| (self.from, datagram))
    }

    /// Whether the last [`UdpReceiver::wait`] did not have to wait, so more datagrams may be there.
    pub fn is_busy(&self) -> bool {
        self.without_pause > 0
    }

    fn ready(&self, time: Duration) -> io::Result<bool> {
        let mut poll = libc::pollfd { fd: self.socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let milliseconds = time.as_nanos().div_ceil(1_000_000).try_into().unwrap_or(libc::c_int::MAX);
        // SAFETY: one pollfd of an open socket, on this stack.
        match unsafe { libc::poll(&mut poll, 1, milliseconds) } {
            0.. => Ok(poll.revents != 0),
            _ => none_if_nothing_came(io::Error::last_os_error()),
        }
    }

    /// Fills the buffer; `false` if nothing is there.
    fn take(&mut self) -> io::Result<bool> {
        self.bytes = 0;
        // The longest address; the kernel writes the family of the actual one.
        let mut name = SockAddr::from(SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)));
        let mut control = Control([0; _]);
        let mut buffers = [MaybeUninitSlice::new(writable(&mut self.buffer))];
        let message = MsgHdrMut::new().with_addr(&mut name).with_buffers(&mut buffers);
        let mut message = message.with_control(writable(&mut control.0));
        let bytes = match SockRef::from(&*self.socket).recvmsg(&mut message, libc::MSG_DONTWAIT) {
            Ok(bytes) => bytes,
            Err(error) => return none_if_nothing_came(error),
        };
        // Always an IP address on this socket; a datagram without one is dropped.
        if let Some(from) = name.as_socket() {
            (self.from, self.bytes) = (from, bytes);
            self.segment_bytes = control.gro().unwrap_or(bytes).max(1);
        }
        Ok(true)
    }
}

fn enable_gro(socket: &UdpSocket) -> io::Result<()> {
    if cfg!(not(target_os = "linux")) {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let on: libc::c_int = 1;
    let size = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the option's value is the integer on this stack, with its size.
    match unsafe { libc::setsockopt(socket.as_raw_fd(), SOL_UDP, UDP_GRO, ptr::from_ref(&on).cast(), size) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn none_if_nothing_came(error: io::Error) -> io::Result<bool> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(false),
        _ => Err(error),
    }
}

/// Send side of a socket.
pub struct UdpSender {
    socket: Arc<UdpSocket>,
    batches: Vec<GsoBatch>,
    /// Buffers for reuse by later batches.
    spare: Vec<Vec<u8>>,
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

    fn fits(&self, length: usize) -> bool {
        self.bytes.len().is_multiple_of(self.segment_bytes)
            && length <= self.segment_bytes
            && self.bytes.len() + length <= GSO_MAX_BYTES
            && self.count() < GSO_MAX_SEGMENTS
    }
}

impl UdpSender {
    pub fn new(socket: Arc<UdpSocket>) -> Self {
        UdpSender { socket, batches: Vec::with_capacity(BATCHES), spare: Vec::new() }
    }

    pub fn socket(&self) -> &Arc<UdpSocket> {
        &self.socket
    }

    pub fn flush(&mut self) {
        let mut batches = std::mem::take(&mut self.batches);
        for batch in &batches {
            if let Err(error) = self.send_batch(batch) {
                tracing::debug!(%error, to = %batch.to, datagrams = batch.count(), "a batch could not be sent");
                // The device may be without GSO. A datagram that cannot be sent alone, either, is lost.
                for datagram in batch.bytes.chunks(batch.segment_bytes) {
                    let _ = self.socket.send_to(datagram, batch.to);
                }
            }
        }
        self.spare.extend(batches.drain(..).map(|batch| batch.bytes));
        self.batches = batches;
    }

    fn send_batch(&self, batch: &GsoBatch) -> io::Result<usize> {
        let bytes = [IoSlice::new(&batch.bytes)];
        let message = MsgHdr::new().with_addr(&batch.name).with_buffers(&bytes);
        let socket = SockRef::from(&*self.socket);
        match batch.count() {
            1 => socket.sendmsg(&message, 0),
            _ => socket.sendmsg(&message.with_control(&Control::gso(batch.segment_bytes as u16).0), 0),
        }
    }
}

impl Transmit for UdpSender {
    fn send<const HEAD: usize>(&mut self, to: SocketAddr, head: &[u8; HEAD], body: &[u8]) {
        let length = head.len() + body.len();
        // The newest batch to this address, so datagrams to one address keep their order.
        let newest = self.batches.iter().rposition(|batch| batch.to == to);
        let open = newest.filter(|&at| self.batches[at].fits(length));
        let at = open.unwrap_or_else(|| {
            if self.batches.len() == BATCHES {
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
    use std::io::Write;

    use super::*;
    use crate::packet::{MAX_DATAGRAM, PacketHeader};

    const COUNT: usize = 250;

    #[test]
    #[cfg_attr(miri, ignore = "a socket of the kernel")]
    fn datagrams_arrive_whole_in_order_and_with_their_source() {
        for loopback in ["127.0.0.1:0", "[::1]:0"] {
            let here = loopback.parse().unwrap();
            let Ok(receiver) = bind(here) else {
                // Not `eprintln!`, which the test harness captures. The configuration of nextest shows it.
                let mut stderr = std::io::stderr();
                writeln!(stderr, "skipped: the address {loopback} is not there").unwrap();
                continue;
            };
            let mut sending = UdpSender::new(bind(here).unwrap());
            let to = receiver.local_addr().unwrap();
            let from = sending.socket().local_addr().unwrap();
            let mut receiving = UdpReceiver::new(receiver);
            receiving.wait(Duration::ZERO, &mut sending).unwrap();
            assert_eq!(receiving.iter().count(), 0);
            // Batches and single datagrams: lengths that stay equal for a while, rise and fall.
            let length = |i: usize| match i {
                ..100 => 1 + i * MAX_DATAGRAM / 101,
                100..180 => MAX_DATAGRAM,
                _ => 300 - i,
            };
            for i in 0..COUNT {
                sending.send(to, &[i as u8], &vec![7; length(i) - 1]);
            }
            sending.flush();
            let mut seen = 0;
            while seen < COUNT {
                receiving.wait(Duration::from_secs(10), &mut sending).unwrap();
                assert!(receiving.iter().count() > 0);
                for (source, datagram) in receiving.iter() {
                    assert_eq!(source, from);
                    assert_eq!(datagram[0], seen as u8);
                    assert_eq!(datagram.len(), length(seen));
                    seen += 1;
                }
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "a socket of the kernel")]
    fn a_datagram_that_is_too_long_is_not_cut_to_a_valid_one() {
        let receiver = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = receiver.local_addr().unwrap();
        sender.send_to(&[0x10; 4000], to).unwrap();
        let mut out = UdpSender::new(receiver.clone());
        let mut receiving = UdpReceiver::new(receiver);
        receiving.wait(Duration::from_secs(10), &mut out).unwrap();
        let (_, datagram) = receiving.iter().next().unwrap();
        assert!(datagram.len() > MAX_DATAGRAM);
        assert!(PacketHeader::decode(datagram).is_none());
    }

    #[test]
    #[cfg_attr(miri, ignore = "a socket of the kernel")]
    fn a_batch_that_cannot_be_sent_does_not_hold_others_up() {
        let receiver = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let to = receiver.local_addr().unwrap();
        let mut sender = UdpSender::new(bind("127.0.0.1:0".parse().unwrap()).unwrap());
        // EACCES: the socket does not have SO_BROADCAST.
        let nobody: SocketAddr = "255.255.255.255:9".parse().unwrap();
        for receiver in [nobody, to, nobody, to] {
            sender.send(receiver, &[1], &[2]);
        }
        sender.flush();
        let mut receiving = UdpReceiver::new(receiver);
        let mut seen = 0;
        while seen < 2 {
            receiving.wait(Duration::from_secs(10), &mut sender).unwrap();
            assert!(receiving.iter().count() > 0);
            seen += receiving.iter().count();
        }
    }
}
