//! Streams and listeners of F-Stack.

use std::ffi::{c_int, c_void};
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::mem::{MaybeUninit, size_of};
use std::net::SocketAddr;
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use fstack_sys::fstack as ff;
use libc::socklen_t;
use socket2::{SockAddr, SockAddrStorage};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::reactor::{Reactor, check, off_thread};
use super::readiness::Direction;
use super::start;
use base::system::random_number;
use replay_link::stack::Address;

/// Length of the listen queue.
const BACKLOG: c_int = 1024;

/// TCP keepalive, as on the kernel's sockets: times in seconds and number of probes. Detects a vanished peer within a minute.
const KEEPALIVE: [(c_int, c_int); 3] = [(libc::TCP_KEEPIDLE, 30), (libc::TCP_KEEPINTVL, 10), (libc::TCP_KEEPCNT, 3)];

/// Limit of slices in one write.
const MAX_SLICES: usize = 256;

/// Limit of bytes in one read or write: F-Stack's lengths are C ints.
const MAX_BYTES: usize = 1 << 30;

/// An open descriptor that the reactor watches. Dropping closes it: at once on the reactor thread, elsewhere by a
/// submission.
struct Descriptor {
    fd: c_int,
}

impl Descriptor {
    /// Takes ownership of a descriptor. `ready` says whether an operation may be tried before the first event.
    fn watch(fd: c_int, ready: bool) -> io::Result<Self> {
        Reactor::for_socket(|reactor| {
            reactor.register(fd, ready).inspect_err(|_| close(fd))?;
            Ok(Descriptor { fd })
        })
    }

    fn poll<T>(
        &self,
        direction: Direction,
        context: &mut Context<'_>,
        operation: impl FnMut() -> io::Result<T>,
    ) -> Poll<io::Result<T>> {
        Reactor::with(|reactor| reactor.poll_socket(self.fd, direction, context, operation))
            .unwrap_or_else(|| Poll::Ready(Err(off_thread())))
    }

    fn set(&self, level: c_int, option: c_int, value: c_int) -> io::Result<()> {
        Reactor::for_socket(|_| {
            let length = size_of::<c_int>() as socklen_t;
            // SAFETY: the value is an int of this length.
            let set = unsafe { ff::ff_setsockopt(self.fd, level, option, (&raw const value).cast(), length) };
            check(set).map(drop)
        })
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        let fd = self.fd;
        // Closing also removes the socket from F-Stack's event queue.
        let end = move |reactor: &Rc<Reactor>| {
            reactor.sockets.borrow_mut().forget(fd);
            close(fd);
        };
        if Reactor::with(end).is_none() {
            // Fails after the end of the loop, which has closed all sockets.
            start::submit_to_reactor(Box::new(end));
        }
    }
}

/// A new non-blocking socket for the family of `address`.
fn socket(address: &SocketAddr) -> io::Result<c_int> {
    let domain = match address {
        SocketAddr::V4(_) => libc::AF_INET,
        SocketAddr::V6(_) => ff::AF_INET6_LINUX,
    };
    Reactor::for_socket(|_| {
        // SAFETY: on the reactor thread, as every call in this file: `for_socket` and `poll_socket` make sure of it.
        let fd = check(unsafe { ff::ff_socket(domain, libc::SOCK_STREAM, 0) })?;
        unblock(fd).inspect_err(|_| close(fd))?;
        Ok(fd)
    })
}

/// Only on the reactor thread.
fn close(fd: c_int) {
    // SAFETY: on the reactor thread, with an F-Stack descriptor that nothing else refers to.
    unsafe { ff::ff_close(fd) };
}

/// Only on the reactor thread.
fn unblock(fd: c_int) -> io::Result<()> {
    let mut on: c_int = 1;
    // SAFETY: FIONBIO takes a pointer to an int.
    check(unsafe { ff::ff_ioctl(fd, libc::FIONBIO, &raw mut on) }).map(drop)
}

/// Converts the result of a read or a write.
fn bytes(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Calls `get` with memory for any address: F-Stack writes a whole address and ignores the length.
fn address_from(get: impl FnOnce(*mut ff::linux_sockaddr, *mut socklen_t) -> c_int) -> io::Result<(c_int, SocketAddr)> {
    let mut storage = SockAddrStorage::zeroed();
    let mut length = storage.size_of();
    let result = check(get((&raw mut storage).cast(), &raw mut length))?;
    // SAFETY: all zero, or an address in Linux's layout.
    let address = unsafe { SockAddr::new(storage, length) };
    let unknown = || io::Error::other("F-Stack returned an address that is neither IPv4 nor IPv6");
    Ok((result, address.as_socket().ok_or_else(unknown)?))
}

/// Binds to an address, for port 0 to a random free port: F-Stack chooses ports only for outgoing connections.
fn bind(fd: c_int, at: SocketAddr) -> io::Result<SocketAddr> {
    /// Linux's default range of ephemeral ports.
    const PORTS: Range<u16> = 32_768..60_999;
    const TRIES: usize = 100;
    let mut tries = match at.port() {
        0 => TRIES,
        _ => 1,
    };
    loop {
        let mut at = at;
        if at.port() == 0 {
            let port = random_number() % PORTS.len() as u64;
            at.set_port(PORTS.start + port as u16);
        }
        let name = SockAddr::from(at);
        let bound = Reactor::for_socket(|_| {
            // SAFETY: a socket address in Linux's layout, and its length.
            check(unsafe { ff::ff_bind(fd, name.as_ptr().cast(), name.len()) })
        });
        tries -= 1;
        match bound {
            Ok(_) => return Ok(at),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && tries > 0 => {}
            Err(error) => return Err(error),
        }
    }
}

/// A bound address.
pub struct FstackListener {
    descriptor: Descriptor,
    pub(super) address: Address,
}

impl FstackListener {
    pub(super) fn bind(at: SocketAddr, address: &Address) -> io::Result<Self> {
        let fd = socket(&at)?;
        let descriptor = Descriptor::watch(fd, true)?;
        // Lets a restarted server bind while old connections are in TIME_WAIT.
        descriptor.set(libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
        let bound = bind(fd, at)?;
        // SAFETY: a bound socket.
        Reactor::for_socket(|_| check(unsafe { ff::ff_listen(fd, BACKLOG) }))?;
        let mut address = address.clone();
        if let Address::Tcp { host, port, .. } = &mut address {
            *host = bound.ip().to_string();
            *port = bound.port();
        }
        Ok(FstackListener { descriptor, address })
    }

    pub(super) async fn accept(&mut self) -> io::Result<(FstackStream, SocketAddr)> {
        let fd = self.descriptor.fd;
        poll_fn(|context| {
            self.descriptor.poll(Direction::Read, context, || {
                // SAFETY: there is memory for any address.
                let (accepted, peer) = address_from(|address, length| unsafe { ff::ff_accept(fd, address, length) })?;
                // Only some releases let it inherit the listener's non-blocking mode.
                unblock(accepted).inspect_err(|_| close(accepted))?;
                let stream = FstackStream(Descriptor::watch(accepted, true)?);
                Ok((stream, peer))
            })
        })
        .await
    }
}

/// An open connection.
pub struct FstackStream(Descriptor);

impl FstackStream {
    /// Connects to `peer`.
    ///
    /// # Errors
    /// Errors of a socket, by Linux's numbers.
    pub async fn connect(peer: SocketAddr) -> io::Result<Self> {
        let fd = socket(&peer)?;
        let name = SockAddr::from(peer);
        Reactor::for_socket(|_| {
            // SAFETY: a socket address in Linux's layout, and its length.
            match check(unsafe { ff::ff_connect(fd, name.as_ptr().cast(), name.len()) }) {
                Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => {
                    close(fd);
                    Err(error)
                }
                _ => Ok(()),
            }
        })?;
        let stream = FstackStream(Descriptor::watch(fd, false)?);
        // The socket is writable once it is connected or refused.
        poll_fn(|context| stream.0.poll(Direction::Write, context, || Ok(()))).await?;
        stream.take_error()?;
        stream.prepare()?;
        Ok(stream)
    }

    /// Sets the options of a connection. No delay: a frame is one vectored write, which Nagle's algorithm would only delay.
    pub(super) fn prepare(&self) -> io::Result<()> {
        self.0.set(libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)?;
        self.0.set(libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
        for (option, value) in KEEPALIVE {
            self.0.set(libc::IPPROTO_TCP, option, value)?;
        }
        Ok(())
    }

    fn take_error(&self) -> io::Result<()> {
        let mut error: c_int = 0;
        let mut length = size_of::<c_int>() as socklen_t;
        Reactor::for_socket(|_| {
            // SAFETY: memory for an int, and its length.
            check(unsafe {
                ff::ff_getsockopt(
                    self.0.fd,
                    libc::SOL_SOCKET,
                    libc::SO_ERROR,
                    (&raw mut error).cast::<c_void>(),
                    &raw mut length,
                )
            })
        })?;
        match error {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }
}

impl AsyncRead for FstackStream {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let fd = self.0.fd;
        let length = buffer.remaining().min(MAX_BYTES);
        let count = ready!(self.0.poll(Direction::Read, context, || {
            // SAFETY: nothing is read from the buffer before the call has written it.
            let unfilled: &mut [MaybeUninit<u8>] = unsafe { buffer.unfilled_mut() };
            // SAFETY: `unfilled` has at least `length` bytes.
            bytes(unsafe { ff::ff_read(fd, unfilled.as_mut_ptr().cast(), length) })
        }))?;
        Reactor::with(|reactor| {
            let mut sockets = reactor.sockets.borrow_mut();
            sockets.consumed(fd, count, count < length);
        });
        // SAFETY: `ff_read` has written `count` bytes.
        unsafe { buffer.assume_init(count) };
        buffer.advance(count);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for FstackStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[IoSlice::new(data)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let fd = self.0.fd;
        let share = Reactor::with(|reactor| reactor.write_quota(fd, context));
        if share == Some(0) {
            return Poll::Pending;
        }
        let written = ready!(self.0.poll(Direction::Write, context, || {
            // A copy, because F-Stack modifies the slices.
            let mut copy = [const { MaybeUninit::<libc::iovec>::uninit() }; MAX_SLICES];
            let (mut count, mut left) = (0, share.unwrap_or(0));
            for (to, slice) in copy.iter_mut().zip(slices) {
                let length = slice.len().min(left);
                to.write(libc::iovec { iov_base: slice.as_ptr().cast_mut().cast(), iov_len: length });
                left -= length;
                count += 1;
                if left == 0 {
                    break;
                }
            }
            // SAFETY: the first `count` slices are initialised; F-Stack only reads their bytes.
            bytes(unsafe { ff::ff_writev(fd, copy.as_ptr().cast(), count) })
        }))?;
        Reactor::with(|reactor| reactor.wrote(fd, written));
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Reactor::for_socket(|_| {
            // SAFETY: an open socket, on the reactor thread.
            check(unsafe { ff::ff_shutdown(self.0.fd, libc::SHUT_WR) }).map(drop)
        });
        Poll::Ready(match shut {
            // The peer has closed already.
            Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(()),
            shut => shut,
        })
    }
}
