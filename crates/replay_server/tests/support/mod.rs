//! What tests of client and server share: servers, a table, pushes for it, and a proxy that cuts connections; and
//! whose TCP is between them, so that the same tests go through F-Stack (`tests/fstack` of `stack_fstack`).
#![allow(dead_code)]

pub mod breaking;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;

use base::wait::Wait;
use replay_client::{Address, Client, ConnectOptions};
use replay_core::memory::{Memory, MemoryLimits};
use replay_core::replay::*;
use replay_core::schema::{Codec, Column, Dtype, Sampler, TableConfig, flags};
use replay_link::error::{Error, Result};
use replay_link::stack::StackName;
use replay_server::config::ServerConfig;
use replay_server::server::{RunningServer, Server};
use replay_wire::ErrorCode;

/// Long enough that a test that reaches it has failed.
pub fn soon() -> Wait<'static> {
    Wait::until(Some(Instant::now() + Duration::from_secs(60)))
}

/// Waits until `done`, which `what` names.
pub fn until(what: &str, done: impl Fn() -> bool) {
    let late = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < late, "{what}: not in time");
        thread::sleep(Duration::from_millis(1));
    }
}

/// An instant that is over at once.
pub fn one_try() -> Wait<'static> {
    Wait::until(Some(Instant::now()))
}

/// Which end of a veth pair F-Stack has: `server` or `client`. Neither where the tests are run by themselves.
pub const FSTACK_END: &str = "INNET_TEST_FSTACK";
/// F-Stack's configuration file for that.
pub const FSTACK_CONFIG: &str = "INNET_TEST_FSTACK_CONFIG";
/// The kernel's end of the veth pair.
pub const KERNEL_HOST: &str = "10.9.0.1";
/// F-Stack's end of the veth pair.
pub const FSTACK_HOST: &str = "10.9.0.2";

fn fstack_has(end: &str) -> bool {
    std::env::var(FSTACK_END).is_ok_and(|has| has == end)
}

fn fstack_config() -> Option<PathBuf> {
    std::env::var_os(FSTACK_CONFIG).map(PathBuf::from)
}

/// The stack's name, which `tests/fstack` has plugged in.
fn fstack() -> StackName {
    "fstack".parse().unwrap()
}

/// Whether this process was started to go through F-Stack.
pub fn goes_through_fstack() -> bool {
    fstack_config().is_some()
}

/// The address at which servers listen.
pub fn host() -> &'static str {
    match (fstack_has("server"), fstack_has("client")) {
        (true, _) => FSTACK_HOST,
        (_, true) => KERNEL_HOST,
        _ => "127.0.0.1",
    }
}

/// The address at which clients reach the kernel's sockets of this process.
pub fn kernel_host() -> &'static str {
    match fstack_has("client") {
        true => KERNEL_HOST,
        false => "127.0.0.1",
    }
}

/// Where a server listens that is reached by `scheme`, at any port.
pub fn any_port(scheme: &str) -> String {
    format!("{scheme}://{}:0", host())
}

/// Where one server after the other listens: a socket file, or over F-Stack a port that nobody else uses.
pub fn fixed_address(folder: &tempfile::TempDir) -> String {
    static PORT: AtomicU16 = AtomicU16::new(20_000);
    if !goes_through_fstack() {
        return format!("unix://{}/replay.sock", folder.path().display());
    }
    let port = PORT.fetch_add(1, Ordering::Relaxed);
    format!("innet://{}:{port}", host())
}

/// The address as a client of this test goes there.
pub fn dialed(address: &Address) -> Address {
    let mut address = address.clone();
    if let Address::Tcp { stack, .. } = &mut address
        && fstack_has("client")
    {
        *stack = fstack();
    }
    address
}

/// A client, by the kernel's TCP or by F-Stack's.
pub fn connect(address: &Address, options: ConnectOptions) -> Result<Client> {
    let address = dialed(address);
    let stack_config = address.stack().plugged().and_then(|_| fstack_config());
    replay_client::connect(&address, ConnectOptions { stack_config, ..options })
}

/// The configuration with the sockets that this process tests: the kernel's, or F-Stack's.
pub fn with_sockets_under_test(config: ServerConfig) -> ServerConfig {
    let (stack, stack_config) = match fstack_has("server") {
        true => (fstack(), fstack_config()),
        false => (StackName::KERNEL, None),
    };
    ServerConfig { io_threads: 1, stack, stack_config, trusted_network: goes_through_fstack(), ..config }
}

/// A server on these addresses, with a new memory.
pub fn serve(listen: &[&str], change: impl FnOnce(&mut ServerConfig)) -> RunningServer {
    let mut config = with_sockets_under_test(ServerConfig {
        listen: listen.iter().map(|address| address.parse().unwrap()).collect(),
        ..ServerConfig::default()
    });
    change(&mut config);
    Server::start(&config, Memory::new(MemoryLimits::default())).unwrap()
}

/// The port of a server's first address.
pub fn port(server: &RunningServer) -> u16 {
    match &server.addresses()[0] {
        Address::Tcp { port, .. } => *port,
        other => panic!("{other} has no port"),
    }
}

/// A queue: each item is sampled once, in the order of insertion. A step is its number and a blob.
pub fn queue(name: &str) -> TableConfig {
    let column = |name: &str, dtype, shape: &[u32], codec| Column {
        name: name.into(),
        dtype,
        shape: shape.into(),
        codec,
        finite: true,
        max_length: 0,
    };
    TableConfig {
        sampler: Sampler::Fifo,
        max_times_sampled: 1,
        ..TableConfig::new(
            name,
            vec![
                column("number", Dtype::Uint64, &[], Codec::None),
                column("frame", Dtype::Uint8, &[FRAME as u32], Codec::Lz4),
            ],
            4096,
        )
    }
}

const FRAME: usize = 16;

/// A writer of one stream whose items are single steps.
pub fn writer(writer: u64) -> OpenWriter {
    OpenWriter { writer, name: format!("writer {writer}"), server: None, streams: 1, window_before: 0, window_after: 0 }
}

/// Steps `first..first + rows`, each an item.
pub fn steps(first: u64, rows: u32) -> PushBody {
    let numbers = first..first + u64::from(rows);
    let (mut head, mut blobs) = (Vec::new(), Vec::new());
    for number in numbers.clone() {
        head.push(if number == 0 { flags::FIRST } else { 0 });
        head.extend(number.to_le_bytes());
        head.extend((FRAME as u32).to_le_bytes());
        blobs.extend(frame(number));
    }
    head.extend(blobs);
    PushBody {
        chunks: vec![ChunkHead { stream: 0, rows, first_step: first, bytes: head.len() as u32, version: 0 }],
        items: numbers.map(|anchor| NewItem { anchor, stream: 0, before: 0, after: 0, priority: None }).collect(),
        payload: Bytes::from(head),
    }
}

/// The raw frame of a step: a blob as long as its column is not packed.
fn frame(number: u64) -> [u8; FRAME] {
    std::array::from_fn(|i| (number as u8).wrapping_mul(31).wrapping_add(i as u8))
}

/// A sample of single steps.
pub fn sample_request(count: u32) -> SampleRequest {
    SampleRequest { count, ..SampleRequest::default() }
}

/// The step numbers of a batch, after every byte of it is checked.
pub fn numbers(sampled: &Sampled) -> Vec<u64> {
    const ROW: usize = 1 + 8 + 4;
    let blobs: Vec<u8> = sampled.blobs.iter().flat_map(|b| b.as_ref().to_vec()).collect();
    assert_eq!(sampled.rows.len(), ROW * sampled.items.len());
    assert_eq!(blobs.len(), FRAME * sampled.items.len());
    let rows = sampled.rows.chunks_exact(ROW).zip(blobs.chunks_exact(FRAME));
    rows.map(|(row, blob)| {
        let number = u64::from_le_bytes(row[1..9].try_into().unwrap());
        assert_eq!(row[0], if number == 0 { flags::FIRST } else { 0 });
        assert_eq!(row[9..], (FRAME as u32).to_le_bytes());
        assert_eq!(blob, frame(number));
        number
    })
    .collect()
}

/// Everything that is left in a queue.
pub fn drain(replay: &dyn Replay<Error>, table: &str) -> Vec<u64> {
    let request = SampleRequest { allow_short: true, ..sample_request(1000) };
    let mut all = Vec::new();
    loop {
        match replay.sample(table, &request, &one_try()) {
            Ok(sampled) => all.extend(numbers(&sampled)),
            Err(error) if error.code() == ErrorCode::Deadline => return all,
            Err(error) => panic!("{error}"),
        }
    }
}

/// A safetensors file with one tensor of `bytes` bytes.
pub fn parameters(bytes: usize) -> Bytes {
    let header = format!(r#"{{"w":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend((0..bytes).map(|i| i as u8));
    file.into()
}

/// Forwards connections to a port, and cuts the n-th one after the n-th number of bytes, counted over both
/// directions; those after the last number are let through.
pub struct Proxy {
    /// Where it listens.
    pub address: Address,
    connections: Arc<AtomicUsize>,
    hangs: Arc<AtomicBool>,
    /// The clients' ends.
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl Proxy {
    /// Starts forwarding to `port`.
    pub fn start(port: u16, cuts: Vec<usize>) -> Self {
        Self::forward(port, cuts, false)
    }

    /// As [`Self::start`], but counts what clients send, keeps the connections, and forwards no more of the clients' bytes.
    pub fn pausing(port: u16, after: Vec<usize>) -> Self {
        Self::forward(port, after, true)
    }

    fn forward(port: u16, cuts: Vec<usize>, pauses: bool) -> Self {
        let listener = TcpListener::bind((kernel_host(), 0)).unwrap();
        let address = format!("innet://{}", listener.local_addr().unwrap());
        let connections = Arc::new(AtomicUsize::new(0));
        let hangs = Arc::new(AtomicBool::new(false));
        let open = Arc::<Mutex<Vec<TcpStream>>>::default();
        let (count, hung, opened) = (connections.clone(), hangs.clone(), open.clone());
        thread::spawn(move || {
            for client in listener.incoming() {
                let n = count.fetch_add(1, Ordering::Relaxed);
                let left = Arc::new(Mutex::new(cuts.get(n).copied().unwrap_or(usize::MAX)));
                let (client, server) = (client.unwrap(), TcpStream::connect((host(), port)));
                let Ok(server) = server else { continue };
                opened.lock().unwrap().push(client.try_clone().unwrap());
                let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let (up, down) = (hung.clone(), hung.clone());
                let back = if pauses { Arc::new(Mutex::new(usize::MAX)) } else { left.clone() };
                thread::spawn(move || forward(from, to, &left, &up, pauses));
                thread::spawn(move || forward(server, client, &back, &down, pauses));
            }
        });
        Proxy { address: address.parse().unwrap(), connections, hangs, open }
    }

    /// Cuts all connections that are open; new ones are let through.
    pub fn cut(&self) {
        for client in self.open.lock().unwrap().drain(..) {
            // An error means that the connection has ended.
            let _ = client.shutdown(Shutdown::Both);
        }
    }

    /// From now on takes every byte and forwards none.
    pub fn hang(&self) {
        self.hangs.store(true, Ordering::Relaxed);
    }

    /// Connections so far.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }
}

fn forward(mut from: TcpStream, mut to: TcpStream, left: &Mutex<usize>, hangs: &AtomicBool, pauses: bool) {
    to.set_nodelay(true).unwrap();
    let mut buffer = [0; 4096];
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        if hangs.load(Ordering::Relaxed) {
            continue;
        }
        let mut left = left.lock().unwrap();
        let n = n.min(*left);
        *left -= n;
        if to.write_all(&buffer[..n]).is_err() || (*left == 0 && !pauses) {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

/// A self-signed certificate for `localhost` and its key, as PEM files.
pub fn certificate(folder: &Path) -> (PathBuf, PathBuf) {
    let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
    let made = rcgen::generate_simple_self_signed(names).unwrap();
    let (certificate, key) = (folder.join("cert.pem"), folder.join("key.pem"));
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    (certificate, key)
}
