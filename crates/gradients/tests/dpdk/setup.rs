//! Devices, network namespaces, raw sockets.

use std::io;
use std::net::SocketAddrV4;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use base::wait::Wait;
use gradients::{
    AggregatorLimits, Arithmetic, DpdkConfig, JobWorker, JoinJob, RunningAggregator, Ticket, UdpTransport, Worker,
    dpdk_aggregators, dpdk_transport,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Deadline that only a hanging test reaches.
pub const LONG: Duration = Duration::from_secs(60);
pub const PORT: u16 = 7711;

/// A unique number for each device.
pub fn number() -> u32 {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    NUMBER.fetch_add(1, Ordering::Relaxed)
}

/// One test at a time: they share DPDK's memory, and the machine's cores.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A configuration whose threads sleep when idle, as tests have few cores.
pub fn config(address: &str, devices: &[String]) -> DpdkConfig {
    let eal = ["--no-huge", "-m", "384", "--no-pci"];
    DpdkConfig {
        eal: eal.map(str::to_owned).to_vec(),
        devices: devices.to_vec(),
        address: SocketAddrV4::new(address.parse().unwrap(), PORT),
        prefix: 24,
        gateway: None,
        threads: 1,
        cores: Vec::new(),
        idle_sleep: Duration::from_micros(20),
    }
}

pub fn start(config: &DpdkConfig) -> RunningAggregator {
    let mut all = dpdk_aggregators(config, AggregatorLimits::default()).unwrap();
    all.remove(0)
}

pub fn request(job: &str, worker: u16, workers: u16) -> JoinJob {
    JoinJob {
        job: job.into(),
        worker,
        workers,
        world: workers.into(),
        name: format!("host-{worker}"),
        arithmetic: Arithmetic::Float,
        segment_values: 360,
        deadline: LONG,
        asynchronous: None,
        below: None,
    }
}

/// A worker of an aggregator at `at`, on UDP or on the device of `dpdk`.
pub fn work(dpdk: Option<&DpdkConfig>, request: &JoinJob, ticket: &Ticket) -> Box<dyn JobWorker> {
    let wait = Wait::forever();
    match dpdk {
        None => {
            Box::new(Worker::join(UdpTransport::to(ticket.address).unwrap(), request, ticket, LONG, &wait).unwrap())
        }
        Some(dpdk) => Box::new(Worker::join(dpdk_transport(dpdk).unwrap(), request, ticket, LONG, &wait).unwrap()),
    }
}

/// Vectors of whole numbers, whose sums are exact in float32, in every order.
fn vector(worker: usize, length: usize, round: u64) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(round << 8 | worker as u64);
    (0..length).map(|_| rng.random_range(-1000..1000) as f32).collect()
}

/// Sums several rounds, each worker on a thread of its own, and checks the sums.
pub fn sum_all(workers: Vec<Box<dyn JobWorker>>, rounds: u64, length: usize) {
    let count = workers.len();
    thread::scope(|scope| {
        for (number, mut worker) in workers.into_iter().enumerate() {
            scope.spawn(move || {
                for round in 0..rounds {
                    let vectors: Vec<_> = (0..count).map(|w| vector(w, length, round)).collect();
                    let mut mine = vectors[number].clone();
                    let sum = worker.sum(&mut mine, false, LONG, &Wait::forever());
                    assert_eq!(sum.unwrap().workers, count as u32);
                    let sum = |i| vectors.iter().map(|v| v[i]).sum::<f32>();
                    assert!((0..length).all(|i| mine[i] == sum(i)), "round {round}");
                }
            });
        }
    });
}

/// Waits until `done`.
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !done() {
        assert!(Instant::now() < end, "{what}: not in time");
        thread::yield_now();
    }
}

/// Runs shell commands in this thread's network namespace.
pub fn shell(commands: &str) -> Result<(), String> {
    let output = Command::new("sh").args(["-ec", commands]).output();
    match output {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// Gives this thread, and threads that it starts, a network namespace of their own, which ends with them.
fn unshare() -> Result<(), String> {
    // SAFETY: a system call for this thread.
    match unsafe { libc::unshare(libc::CLONE_NEWNET) } {
        0 => shell("echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6; ip link set lo up"),
        _ => Err(format!("no network namespace can be made: {}", io::Error::last_os_error())),
    }
}

/// Runs a test in a namespace with veth pairs, `a0` to `a1` and so on. Ends with 0 are the kernel's, without offloads, as the other end drops
/// incomplete checksums. Without the right to create namespaces the test is skipped, with a message.
pub fn with_veth(pairs: &[&str], test: impl FnOnce() + Send) {
    let _alone = alone();
    thread::scope(|scope| {
        let run = || {
            let made = unshare().and_then(|()| {
                pairs.iter().try_for_each(|pair| {
                    shell(&format!(
                        "ip link add {pair}0 type veth peer name {pair}1
                         ethtool -K {pair}0 tx off gro off > /dev/null
                         ip link set {pair}0 up
                         ip link set {pair}1 up"
                    ))
                })
            });
            match made {
                Ok(()) => test(),
                Err(reason) => println!("skipped: {reason}"),
            }
        };
        if let Err(panic) = scope.spawn(run).join() {
            std::panic::resume_unwind(panic);
        }
    });
}

/// Runs the rest of a test in another namespace, to which the veth end `end` moves.
pub fn elsewhere<T: Send>(end: &str, rest: impl FnOnce() -> T + Send) -> T {
    let (tell, told) = std::sync::mpsc::channel();
    let (moved, go) = std::sync::mpsc::channel();
    thread::scope(|scope| {
        let other = scope.spawn(move || {
            unshare().unwrap();
            // SAFETY: a system call without arguments.
            tell.send(unsafe { libc::gettid() }).unwrap();
            go.recv().unwrap();
            rest()
        });
        let thread = told.recv().unwrap();
        shell(&format!("ip link set {end} netns {thread}")).unwrap();
        moved.send(()).unwrap();
        other.join().unwrap()
    })
}

/// Arguments of a device on an end of a veth pair.
pub fn af_packet(end: &str) -> String {
    format!("net_af_packet{},iface={end}", number())
}

/// Raw socket on an end of a veth pair.
pub struct Raw(OwnedFd);

impl Raw {
    pub fn open(end: &str) -> Self {
        let name = std::ffi::CString::new(end).unwrap();
        let every = libc::ETH_P_ALL as u16;
        // SAFETY: system calls with a string, and an address and an integer with their sizes.
        unsafe {
            let socket = libc::socket(libc::AF_PACKET, libc::SOCK_RAW, every.to_be().into());
            assert!(socket >= 0, "{}", io::Error::last_os_error());
            let socket = OwnedFd::from_raw_fd(socket);
            let mut address: libc::sockaddr_ll = std::mem::zeroed();
            address.sll_family = libc::AF_PACKET as u16;
            address.sll_protocol = every.to_be();
            address.sll_ifindex = libc::if_nametoindex(name.as_ptr()) as i32;
            let size = size_of_val(&address) as u32;
            assert_eq!(libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size), 0);
            // No frames that this end sends.
            const PACKET_IGNORE_OUTGOING: libc::c_int = 23;
            let yes: libc::c_int = 1;
            let seconds = libc::timeval { tv_sec: LONG.as_secs() as i64, tv_usec: 0 };
            let set = |level, option, value: *const libc::c_void, size| {
                assert_eq!(libc::setsockopt(socket.as_raw_fd(), level, option, value, size as u32), 0);
            };
            set(libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, (&raw const yes).cast(), size_of_val(&yes));
            set(libc::SOL_SOCKET, libc::SO_RCVTIMEO, (&raw const seconds).cast(), size_of_val(&seconds));
            Raw(socket)
        }
    }

    pub fn send(&self, frame: &[u8]) {
        // SAFETY: a slice and its length.
        let sent = unsafe { libc::send(self.0.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0) };
        assert_eq!(sent, frame.len() as isize, "{}", io::Error::last_os_error());
    }

    pub fn receive(&self) -> Vec<u8> {
        let mut frame = vec![0; 4096];
        // SAFETY: a slice and its length.
        let bytes = unsafe { libc::recv(self.0.as_raw_fd(), frame.as_mut_ptr().cast(), frame.len(), 0) };
        assert!(bytes >= 0, "no frame: {}", io::Error::last_os_error());
        frame.truncate(bytes as usize);
        frame
    }
}
