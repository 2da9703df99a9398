//! The kernel's TCP and Unix sockets through tokio. Each I/O thread has a current-thread runtime with a `LocalSet`.

use std::future::Future;
use std::net::{TcpListener as StdTcpListener, TcpStream as StdTcpStream, ToSocketAddrs};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener as StdUnixListener, UnixStream as StdUnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, io};

use socket2::{Domain, SockAddr, SockRef, Socket, TcpKeepalive, Type};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

use super::{Address, ByteStream, Stack, StackName};
use crate::error::{Result, io_error, refuse};
use base::fork::close_in_children;

/// Length of the listen queue.
const BACKLOG: i32 = 1024;

/// Idle time before the first TCP keepalive probe. With a user timeout, Linux closes the connection at the first unanswered probe after it;
/// other systems close it after [`KEEPALIVE_RETRIES`] probes. Both take 60 s for a server.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_RETRIES: u32 = 3;

/// TCP user timeout of a server: closes the connection if sent data stays unacknowledged. Keepalive probes are not sent meanwhile.
pub const SERVER_USER_TIMEOUT: Duration = Duration::from_secs(60);

/// TCP user timeout of a client. Linux also counts the time of a zero receive window, and a server does not read waiting pushes. After the
/// timeout the writer reconnects.
pub const CLIENT_USER_TIMEOUT: Duration = Duration::from_secs(300);

/// The kernel's sockets.
#[derive(Debug, Clone, Copy, Default)]
pub struct Kernel;

/// A bound TCP or Unix socket.
pub enum KernelListener {
    /// TCP, with the bound address.
    Tcp(TcpListener, Address),
    /// Unix; the file is removed with the listener.
    Unix(UnixListener, SocketFile),
}

/// An accepted connection, not yet on its I/O thread.
pub enum KernelIncoming {
    /// TCP.
    Tcp(StdTcpStream),
    /// Unix.
    Unix(StdUnixStream),
}

impl Stack for Kernel {
    type Stream = Box<dyn ByteStream>;
    type Listener = KernelListener;
    type Incoming = KernelIncoming;

    fn listen(&self, address: &Address) -> Result<KernelListener> {
        let failed = |error| io_error(format!("cannot listen on {address}"))(error);
        match address {
            Address::Tcp { host, port, tls, .. } => {
                let bind = || -> io::Result<_> {
                    let listener = TcpListener::from_std(bind_tcp(host, *port)?)?;
                    let bound = listener.local_addr()?;
                    Ok((listener, bound))
                };
                let (listener, bound) = bind().map_err(failed)?;
                let address = Address::Tcp {
                    host: bound.ip().to_string(),
                    port: bound.port(),
                    tls: *tls,
                    stack: StackName::KERNEL,
                };
                Ok(KernelListener::Tcp(listener, address))
            }
            Address::Unix { path } => {
                let (listener, file) = bind_unix(path)?;
                Ok(KernelListener::Unix(UnixListener::from_std(listener).map_err(failed)?, file))
            }
        }
    }

    fn address(&self, listener: &KernelListener) -> Address {
        match listener {
            KernelListener::Tcp(_, address) => address.clone(),
            KernelListener::Unix(_, file) => Address::Unix { path: file.path.clone() },
        }
    }

    async fn accept(&self, listener: &mut KernelListener) -> io::Result<(KernelIncoming, String)> {
        match listener {
            KernelListener::Tcp(listener, _) => {
                let (stream, peer) = listener.accept().await?;
                Ok((KernelIncoming::Tcp(stream.into_std()?), peer.to_string()))
            }
            KernelListener::Unix(listener, _) => {
                let (stream, _) = listener.accept().await?;
                close_in_children(&stream);
                let peer = match stream.peer_cred().ok().and_then(|peer| peer.pid()) {
                    Some(pid) => format!("process {pid}"),
                    None => "a local process".to_owned(),
                };
                Ok((KernelIncoming::Unix(stream.into_std()?), peer))
            }
        }
    }

    fn open(&self, incoming: KernelIncoming) -> io::Result<Self::Stream> {
        match incoming {
            KernelIncoming::Tcp(stream) => {
                prepare_tcp(&SockRef::from(&stream), SERVER_USER_TIMEOUT)?;
                Ok(Box::new(TcpStream::from_std(stream)?))
            }
            KernelIncoming::Unix(stream) => Ok(Box::new(UnixStream::from_std(stream)?)),
        }
    }

    fn now(&self) -> Instant {
        tokio::time::Instant::now().into_std()
    }

    fn sleep_until(&self, deadline: Instant) -> impl Future<Output = ()> + 'static {
        tokio::time::sleep_until(deadline.into())
    }

    fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        tokio::task::spawn_local(task);
    }
}

/// Sets the options of a connected TCP socket: no Nagle delay, keepalive, and on Linux the user timeout.
pub fn prepare_tcp(socket: &SockRef<'_>, user_timeout: Duration) -> io::Result<()> {
    // A request or reply is one vectored write, so Nagle's algorithm would only delay it.
    socket.set_tcp_nodelay(true)?;
    close_in_children(&**socket);
    let keepalive =
        TcpKeepalive::new().with_time(KEEPALIVE_IDLE).with_interval(KEEPALIVE_INTERVAL).with_retries(KEEPALIVE_RETRIES);
    socket.set_tcp_keepalive(&keepalive)?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(user_timeout))?;
    #[cfg(not(target_os = "linux"))]
    let _ = user_timeout;
    Ok(())
}

/// Busy-polls the runtime's sockets: a task that never sleeps. Avoids wake-ups, at the cost of a whole core.
pub async fn spin() {
    loop {
        tokio::task::yield_now().await;
    }
}

/// Checks that an address can be bound: binds it and releases it again.
///
/// # Errors
/// [`Error::Io`](crate::error::Error::Io) or [`Error::Config`](crate::error::Error::Config) with the address.
pub fn try_bind(address: &Address) -> Result<()> {
    match address {
        Address::Tcp { host, port, .. } => {
            bind_tcp(host, *port).map(drop).map_err(io_error(format!("cannot listen on {address}")))
        }
        Address::Unix { path } => bind_unix(path).map(drop),
    }
}

/// Binds the first address that `host` resolves to.
pub fn bind_tcp(host: &str, port: u16) -> io::Result<StdTcpListener> {
    let address = (host, port)
        .to_socket_addrs()?
        .next()
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the host has no address"))?;
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    // Lets a restarted server bind while old connections are in TIME_WAIT.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    close_in_children(&socket);
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// Binds a socket file that only this user can connect to.
fn bind_unix(path: &Path) -> Result<(StdUnixListener, SocketFile)> {
    remove_stale(path)?;
    let bind = || -> io::Result<_> {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        close_in_children(&socket);
        socket.bind(&SockAddr::unix(path)?)?;
        let file = SocketFile::new(path, &fs::symlink_metadata(path)?);
        // Before `listen`, so that no other user can connect in between.
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        socket.listen(BACKLOG)?;
        socket.set_nonblocking(true)?;
        Ok((socket.into(), file))
    };
    let what = format!("cannot listen on the socket file {}", path.display());
    bind().map_err(io_error(what))
}

/// Removes the socket file of a server that has ended.
///
/// # Errors
/// `Error::Config` for a file of another kind, `Error::Io` for one of a running server; the file stays.
fn remove_stale(path: &Path) -> Result<()> {
    let what = format!("cannot listen on the socket file {}", path.display());
    let in_use = |reason: &str| Err(io_error(&*what)(io::Error::new(io::ErrorKind::AddrInUse, reason)));
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => {
            let what = format!("cannot look at {}", path.display());
            return Err(io_error(what)(error));
        }
    };
    if !found.file_type().is_socket() {
        return refuse(format!("{what}: a file that is not a socket is there; choose another path"));
    }
    match StdUnixStream::connect(path) {
        Ok(_) => in_use("a server is running there; stop it, or choose another path"),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            drop(SocketFile::new(path, &found));
            Ok(())
        }
        Err(error) => in_use(&format!("it exists and does not answer ({error}); remove it, or choose another path")),
    }
}

/// A socket file, by path and inode, so that another server's file at the same path is never removed.
pub struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl SocketFile {
    fn new(path: &Path, metadata: &fs::Metadata) -> Self {
        SocketFile { path: path.to_owned(), device: metadata.dev(), inode: metadata.ino() }
    }
}

impl Drop for SocketFile {
    /// Removes the file unless another server has replaced it. Errors are ignored: a stale file is harmless.
    fn drop(&mut self) {
        if let Ok(now) = fs::symlink_metadata(&self.path)
            && (now.dev(), now.ino()) == (self.device, self.inode)
        {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_that_spins_never_sleeps_and_misses_nothing() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .on_thread_park(|| panic!("it sleeps"))
            .build()
            .unwrap();
        runtime.spawn(spin());
        let listener = StdUnixStream::pair().unwrap();
        let (near, mut far) = listener;
        near.set_nonblocking(true).unwrap();
        let sender = std::thread::spawn(move || std::io::Write::write_all(&mut far, b"x"));
        let got = runtime.block_on(async {
            let mut stream = UnixStream::from_std(near).unwrap();
            tokio::io::AsyncReadExt::read_u8(&mut stream).await
        });
        assert_eq!(got.unwrap(), b'x');
        sender.join().unwrap().unwrap();
    }

    #[test]
    fn a_vanished_peer_is_noticed_within_a_minute() {
        let listener = StdTcpListener::bind("127.0.0.1:0").unwrap();
        let client = StdTcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        let _inside = runtime.enter();
        server.set_nonblocking(true).unwrap();
        let same = server.try_clone().unwrap();
        let _stream = Kernel.open(KernelIncoming::Tcp(server)).unwrap();
        prepare_tcp(&SockRef::from(&client), CLIENT_USER_TIMEOUT).unwrap();
        let limits =
            [(SockRef::from(&same), Duration::from_secs(60)), (SockRef::from(&client), Duration::from_secs(300))];
        for (socket, user_timeout) in limits {
            let silence = socket.tcp_keepalive_time().unwrap()
                + socket.tcp_keepalive_interval().unwrap() * socket.tcp_keepalive_retries().unwrap();
            assert!(socket.keepalive().unwrap());
            assert_eq!(silence, Duration::from_secs(60));
            #[cfg(target_os = "linux")]
            assert_eq!(socket.tcp_user_timeout().unwrap(), Some(user_timeout));
            #[cfg(not(target_os = "linux"))]
            let _ = user_timeout;
            assert!(socket.tcp_nodelay().unwrap());
        }
    }

    #[test]
    fn a_stale_socket_file_is_replaced_and_removed_at_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        // A std listener leaves its file behind, as a killed server does.
        drop(StdUnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let (listener, file) = bind_unix(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        StdUnixStream::connect(&path).unwrap();
        drop((listener, file));
        assert!(!path.exists());
    }

    #[test]
    fn a_file_that_is_not_ours_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        fs::write(&path, "notes").unwrap();
        let error = bind_unix(&path).err().unwrap().to_string();
        assert!(error.contains("not a socket"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"notes");
    }

    #[test]
    fn a_running_server_keeps_its_socket_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        let running = bind_unix(&path).unwrap();
        let error = bind_unix(&path).err().unwrap().to_string();
        assert!(error.contains("a server is running there"), "{error}");
        // A successor took the name: the first one's end must not remove the successor's file.
        fs::remove_file(&path).unwrap();
        let successor = bind_unix(&path).unwrap();
        drop(running);
        assert!(path.exists());
        drop(successor);
        assert!(!path.exists());
    }

    #[test]
    fn a_path_that_is_too_long_is_an_error() {
        let path = PathBuf::from(format!("/tmp/{}.sock", "a".repeat(200)));
        let error = bind_unix(&path).err().unwrap().to_string();
        assert!(error.contains("cannot listen on the socket file"), "{error}");
    }
}
