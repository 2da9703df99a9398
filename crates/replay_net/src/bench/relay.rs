//! A relay on loopback that emulates a link in front of a server, for TCP connections or UDP datagrams. [`Link`] computes the
//! arrivals; here are the sockets, and threads that sleep: tokio's timers have a resolution of 1 ms.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use base::sync::lock;
use gradients::packet::MAX_DATAGRAM;
use socket2::SockRef;

use super::link::{Link, LinkConfig, StreamOrder};

/// Bytes of one read from a connection.
const PIECE: usize = 64 << 10;
/// Pieces of a connection that are under way in one direction: 64 MiB, then the sender waits.
const PIECES: usize = 1024;
/// Time for connecting to the server.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);
/// Interval in which threads without data look whether the relay has ended.
const CHECK_EVERY: Duration = Duration::from_millis(50);

/// A relay to one server. Dropped, it ends, with its connections.
pub struct Relay {
    address: SocketAddr,
    /// Of a relay of connections.
    listener: Option<TcpListener>,
    shared: Arc<Shared>,
}

/// The state of a relay's threads.
struct Shared {
    to: SocketAddr,
    began: Instant,
    /// Towards the server, and back.
    directions: [Direction; 2],
    /// Both ends of the open connections.
    connections: Mutex<Vec<[TcpStream; 2]>>,
    late: Mutex<BinaryHeap<Reverse<LateDatagram>>>,
    more_late: Condvar,
    /// Relaxed: it publishes nothing else.
    ended: AtomicBool,
}

struct Direction {
    link: Mutex<Link>,
    /// Accepted bytes, also of datagrams that the link loses. Relaxed: it publishes nothing else.
    bytes: AtomicU64,
}

const TO_SERVER: usize = 0;
const BACK: usize = 1;

impl Relay {
    /// Relays TCP connections to the server at `to`.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn streams(to: SocketAddr, config: LinkConfig, seed: u64) -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        let address = listener.local_addr()?;
        let shared = Shared::new(to, config, seed);
        let (accepting, of_thread) = (listener.try_clone()?, shared.clone());
        spawn(move || accept(&accepting, &of_thread))?;
        Ok(Relay {
            address,
            listener: Some(listener),
            shared,
        })
    }

    /// Relays datagrams to the server at `to`, and its answers to each sender.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn datagrams(to: SocketAddr, config: LinkConfig, seed: u64) -> io::Result<Self> {
        let front = UdpSocket::bind(("127.0.0.1", 0))?;
        front.set_read_timeout(Some(CHECK_EVERY))?;
        let address = front.local_addr()?;
        let shared = Shared::new(to, config, seed);
        let (receiving, sending) = (shared.clone(), shared.clone());
        spawn(move || sending.send_late())?;
        spawn(move || receiving.relay_datagrams(&Arc::new(front)))?;
        Ok(Relay {
            address,
            listener: None,
            shared,
        })
    }

    /// Address for clients.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Bytes carried so far: towards the server, and back.
    pub fn bytes(&self) -> [u64; 2] {
        let of = |direction: &Direction| direction.bytes.load(Ordering::Relaxed);
        self.shared.directions.each_ref().map(of)
    }

    /// Cuts all open connections; data in flight are lost. New ones are let through.
    pub fn cut(&self) {
        self.shared.cut();
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        if let Some(listener) = &self.listener {
            // Ends a waiting `accept`.
            let _ = SockRef::from(listener).shutdown(Shutdown::Both);
        }
        self.cut();
        self.shared.more_late.notify_all();
    }
}

impl Shared {
    fn new(to: SocketAddr, config: LinkConfig, seed: u64) -> Arc<Self> {
        let direction = |seed| Direction {
            link: Mutex::new(Link::new(config, seed)),
            bytes: AtomicU64::new(0),
        };
        Arc::new(Shared {
            to,
            began: Instant::now(),
            directions: [direction(seed), direction(!seed)],
            connections: Mutex::default(),
            late: Mutex::default(),
            more_late: Condvar::new(),
            ended: AtomicBool::new(false),
        })
    }

    /// The time of the links.
    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn sleep_until(&self, due: Duration) {
        thread::sleep(due.saturating_sub(self.now()));
    }

    fn cut(&self) {
        for end in lock(&self.connections).drain(..).flatten() {
            // An error means that it has ended.
            let _ = end.shutdown(Shutdown::Both);
        }
    }

    fn ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    fn link(&self, direction: usize, bytes: usize) -> MutexGuard<'_, Link> {
        let direction = &self.directions[direction];
        direction.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        lock(&direction.link)
    }

    /// Connects a client to the server, with two threads for each direction.
    fn relay_connection(self: &Arc<Self>, client: TcpStream) -> io::Result<()> {
        let server = TcpStream::connect_timeout(&self.to, CONNECT_WITHIN)?;
        for end in [&client, &server] {
            end.set_nodelay(true)?;
        }
        {
            let mut connections = lock(&self.connections);
            // Connections whose ends are both closed are forgotten.
            connections.retain(|ends| ends.iter().any(|end| end.peer_addr().is_ok()));
            connections.push([client.try_clone()?, server.try_clone()?]);
        }
        let ends = [(client.try_clone()?, server.try_clone()?), (server, client)];
        for (direction, (from, to)) in ends.into_iter().enumerate() {
            let (sender, receiver) = sync_channel(PIECES);
            let (reading, writing) = (self.clone(), self.clone());
            spawn(move || reading.read(direction, from, &sender))?;
            spawn(move || writing.write(to, &receiver))?;
        }
        if self.ended() {
            // The relay was dropped meanwhile.
            self.cut();
        }
        Ok(())
    }

    fn read(&self, direction: usize, mut from: TcpStream, pieces: &SyncSender<StreamPiece>) {
        let (mut buffer, mut order) = (vec![0; PIECE], StreamOrder::default());
        loop {
            let ready = self.link(direction, 0).ready();
            self.sleep_until(ready);
            // The end of a broken connection is relayed as an end.
            let length = from.read(&mut buffer).unwrap_or(0);
            let due = self
                .link(direction, length)
                .stream(self.now(), length, &mut order);
            let piece = StreamPiece {
                due,
                bytes: buffer[..length].to_vec(),
            };
            if pieces.send(piece).is_err() {
                // The writer's connection broke.
                let _ = from.shutdown(Shutdown::Both);
                return;
            }
            if length == 0 {
                return;
            }
        }
    }

    fn write(&self, mut to: TcpStream, pieces: &Receiver<StreamPiece>) {
        for piece in pieces {
            self.sleep_until(piece.due);
            if piece.bytes.is_empty() {
                let _ = to.shutdown(Shutdown::Write);
            } else if to.write_all(&piece.bytes).is_err() {
                let _ = to.shutdown(Shutdown::Both);
                return;
            }
        }
    }

    fn relay_datagrams(self: &Arc<Self>, front: &Arc<UdpSocket>) {
        let mut clients: HashMap<SocketAddr, Arc<UdpSocket>> = HashMap::new();
        let mut buffer = [0; MAX_DATAGRAM + 1];
        while !self.ended() {
            // Also errors by ICMP: a client that is gone.
            let Ok((length, from)) = front.recv_from(&mut buffer) else {
                continue;
            };
            let back = match clients.get(&from) {
                Some(back) => back.clone(),
                None => match self.answers(front, from) {
                    Ok(back) => clients.entry(from).or_insert(back).clone(),
                    Err(error) => {
                        tracing::warn!(%error, "a relay has no socket for another client");
                        continue;
                    }
                },
            };
            self.datagram(TO_SERVER, &buffer[..length], &back, self.to);
        }
    }

    /// A socket towards the server for one client, and a thread that relays its answers.
    fn answers(
        self: &Arc<Self>,
        front: &Arc<UdpSocket>,
        client: SocketAddr,
    ) -> io::Result<Arc<UdpSocket>> {
        let back = Arc::new(UdpSocket::bind(("127.0.0.1", 0))?);
        back.set_read_timeout(Some(CHECK_EVERY))?;
        let (relay, front, of_thread) = (self.clone(), front.clone(), back.clone());
        spawn(move || {
            let mut buffer = [0; MAX_DATAGRAM + 1];
            while !relay.ended() {
                // Also errors by ICMP: a server that is restarted.
                if let Ok((length, _)) = of_thread.recv_from(&mut buffer) {
                    relay.datagram(BACK, &buffer[..length], &front, client);
                }
            }
        })?;
        Ok(back)
    }

    fn datagram(&self, direction: usize, bytes: &[u8], from: &Arc<UdpSocket>, to: SocketAddr) {
        let now = self.now();
        let Some(due) = self.link(direction, bytes.len()).datagram(now, bytes.len()) else {
            return;
        };
        if due <= now {
            // A datagram that cannot be sent is lost, too.
            let _ = from.send_to(bytes, to);
            return;
        }
        lock(&self.late).push(Reverse(LateDatagram {
            due,
            bytes: bytes.to_vec(),
            from: from.clone(),
            to,
        }));
        self.more_late.notify_one();
    }

    fn send_late(&self) {
        let mut late = lock(&self.late);
        while !self.ended() {
            let wait = match late.peek() {
                Some(Reverse(first)) => first.due.saturating_sub(self.now()),
                None => CHECK_EVERY,
            };
            if wait.is_zero() {
                if let Some(Reverse(datagram)) = late.pop() {
                    let _ = datagram.from.send_to(&datagram.bytes, datagram.to);
                }
                continue;
            }
            late = (self.more_late.wait_timeout(late, wait))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

/// A piece of a connection; empty at its end.
struct StreamPiece {
    due: Duration,
    bytes: Vec<u8>,
}

/// A datagram that is sent later, ordered by its time.
struct LateDatagram {
    due: Duration,
    bytes: Vec<u8>,
    from: Arc<UdpSocket>,
    to: SocketAddr,
}

impl Ord for LateDatagram {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.due.cmp(&other.due)
    }
}

impl PartialOrd for LateDatagram {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for LateDatagram {
    fn eq(&self, other: &Self) -> bool {
        self.due == other.due
    }
}

impl Eq for LateDatagram {}

/// Accepts connections until the relay ends.
fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    while !shared.ended() {
        match listener.accept() {
            Ok((client, _)) => {
                // The client of a server that is away sees its connection end.
                if let Err(error) = shared.relay_connection(client) {
                    tracing::debug!(%error, "a relayed connection failed");
                }
            }
            // The end of the relay, or a connection that has ended already.
            Err(error) => tracing::debug!(%error, "no connection accepted"),
        }
    }
}

fn spawn(run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = thread::Builder::new().name("innet-relay".to_owned());
    thread.spawn(move || {
        // Without it the kernel may add 50 µs to each sleep.
        // SAFETY: sets an attribute of this thread, and has no pointers.
        unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_000_u64) };
        run();
    })?;
    Ok(())
}
