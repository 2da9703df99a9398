//! Transport time, first byte of a request to last byte of its reply, with both ends polling: F-Stack over memif, with
//! checksums and without, against the kernel's TCP over loopback, each a server and a client process on a core of their
//! own. No codec, no memory.
//!
//! Prints one JSON object with commit and versions. `--rounds N` alternates between them so often [default: 3].

#![allow(clippy::print_stdout, reason = "the record is its output")]

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use replay_core::net::fstack::{self, socket::Stream};
use replay_core::net::{Address, Stack, fstack_config::Config};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Bytes of request and reply, and how often they are exchanged in a round.
const CELLS: [(usize, usize, usize); 11] = [
    (64, 64, 40_000),
    (1_024, 64, 40_000),
    (4_096, 64, 20_000),
    (64, 4_096, 20_000),
    (65_536, 64, 4_000),
    (64, 65_536, 4_000),
    (1 << 20, 64, 400),
    (64, 1 << 20, 400),
    (13_170_000, 64, 40),
    (64, 13_170_000, 40),
    (13_170_000, 13_170_000, 20),
];

const FSTACK: &str = "fstack";
const SEGMENTS: &str = "fstack_segments";
const KERNEL: &str = "kernel";

const HEADER: usize = 16;
const SERVER: &str = "10.8.0.2:7711";
const LOOPBACK: &str = "127.0.0.1:7711";

fn header(request: usize, reply: usize) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(&(request as u64).to_le_bytes());
    header[8..].copy_from_slice(&(reply as u64).to_le_bytes());
    header
}

fn sizes(header: &[u8; HEADER]) -> (usize, usize) {
    let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap()) as usize;
    (number(&header[..8]), number(&header[8..]))
}

/// A kernel socket whose reads and writes poll in place of sleeping.
struct Spinning(TcpStream);

impl Spinning {
    fn new(stream: TcpStream) -> Self {
        stream.set_nodelay(true).unwrap();
        stream.set_nonblocking(true).unwrap();
        Spinning(stream)
    }

    fn read_exact(&mut self, mut buffer: &mut [u8]) -> io::Result<()> {
        while !buffer.is_empty() {
            match self.0.read(buffer) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => buffer = &mut buffer[count..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::hint::spin_loop(),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn write_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.0.write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::hint::spin_loop(),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn kernel_server() {
    let listener = TcpListener::bind(LOOPBACK).unwrap();
    println!("ready");
    let mut stream = Spinning::new(listener.accept().unwrap().0);
    let mut buffer = vec![1; 14_000_000];
    let mut head = [0; HEADER];
    while stream.read_exact(&mut head).is_ok() {
        let (request, reply) = sizes(&head);
        stream.read_exact(&mut buffer[..request - HEADER]).unwrap();
        stream.write_all(&buffer[..reply]).unwrap();
    }
}

fn kernel_client() -> Vec<Value> {
    let mut stream = Spinning::new(TcpStream::connect(LOOPBACK).unwrap());
    let mut sent = vec![2; 14_000_000];
    let mut received = sent.clone();
    let measure = |&(request, reply, count): &(usize, usize, usize)| {
        sent[..HEADER].copy_from_slice(&header(request, reply));
        let mut exchange = || {
            let begun = Instant::now();
            stream.write_all(&sent[..request]).unwrap();
            stream.read_exact(&mut received[..reply]).unwrap();
            begun.elapsed()
        };
        let warm = count / 10 + 1;
        let times: Vec<Duration> = (0..warm + count).map(|_| exchange()).skip(warm).collect();
        cell(request, reply, times)
    };
    CELLS.iter().map(measure).collect()
}

fn fstack_server(config: &Path) {
    let reactor = fstack::start(&Config::read(config).unwrap()).unwrap();
    let (end, ended) = std::sync::mpsc::channel();
    let serve = async move |stack: fstack::Fstack| {
        let address: Address = format!("innet://{SERVER}").parse().unwrap();
        let mut listener = stack.listen(&address).unwrap();
        println!("ready");
        let (stream, _) = stack.accept(&mut listener).await.unwrap();
        let mut stream = stack.open(stream).unwrap();
        let mut buffer = vec![1; 14_000_000];
        let mut head = [0; HEADER];
        while stream.read_exact(&mut head).await.is_ok() {
            let (request, reply) = sizes(&head);
            stream
                .read_exact(&mut buffer[..request - HEADER])
                .await
                .unwrap();
            stream.write_all(&buffer[..reply]).await.unwrap();
        }
        end.send(()).unwrap();
    };
    reactor.spawn(serve).unwrap();
    let _ = ended.recv();
}

fn fstack_client(config: &Path) -> Vec<Value> {
    let reactor = fstack::start(&Config::read(config).unwrap()).unwrap();
    let (end, ended) = std::sync::mpsc::channel();
    let measure = async move |_| {
        let server: SocketAddr = SERVER.parse().unwrap();
        let mut stream = Stream::connect(server).await.unwrap();
        let mut sent = vec![2; 14_000_000];
        let mut received = sent.clone();
        let mut cells = Vec::new();
        for (request, reply, count) in CELLS {
            sent[..HEADER].copy_from_slice(&header(request, reply));
            let warm = count / 10 + 1;
            let mut times = Vec::with_capacity(count);
            for number in 0..warm + count {
                let begun = Instant::now();
                stream.write_all(&sent[..request]).await.unwrap();
                stream.read_exact(&mut received[..reply]).await.unwrap();
                if number >= warm {
                    times.push(begun.elapsed());
                }
            }
            cells.push(cell(request, reply, times));
        }
        end.send(cells).unwrap();
    };
    reactor.spawn(measure).unwrap();
    ended.recv().unwrap()
}

fn cell(request: usize, reply: usize, mut times: Vec<Duration>) -> Value {
    times.sort_unstable();
    let at = |quantile: f64| {
        times[(quantile * (times.len() - 1) as f64) as usize].as_nanos() as f64 / 1e3
    };
    json!({"request": request, "reply": reply, "p50_us": at(0.5), "p99_us": at(0.99)})
}

/// A configuration for one end of the memif.
fn configure(folder: &Path, stack: &str, role: &str, core: usize, address: &str) -> PathBuf {
    let path = folder.join(format!("{stack}-{role}.ini"));
    let segments = u8::from(stack == SEGMENTS);
    let mac = address.rsplit('.').next().unwrap();
    let text = format!(
        "[dpdk]\nlcore_mask={:x}\nchannel=4\npromiscuous=1\nnuma_on=0\nno_huge=1\nmemory=256\nfile_prefix=transport-{}-{role}\n\
         port_list=0\nnb_vdev=0\npkt_tx_delay=0\nidle_sleep=0\n\
         [port0]\naddr={address}\nnetmask=255.255.255.0\nbroadcast=10.8.0.255\ngateway=10.8.0.254\n\
         [freebsd.boot]\nhz=100\nfd_reserve=1024\nkern.ipc.maxsockets=262144\n\
         [freebsd.sysctl]\nkern.ipc.maxsockbuf=16777216\n\
         [innet]\nmemif_segments = {segments}\neal = --no-pci\neal = --no-telemetry\n\
         eal = --vdev=net_memif0,role={role},id=0,mac=02:00:00:00:00:0{mac},socket={}\n",
        1 << core,
        std::process::id(),
        folder.join("memif.sock").display(),
    );
    fs::write(&path, text).unwrap();
    path
}

fn child(role: &str, config: &Path, core: usize) -> Child {
    let mut command = Command::new("taskset");
    // F-Stack pins its own thread.
    command
        .args(["-c", &core.to_string()])
        .arg(env::current_exe().unwrap());
    command.args([role, config.to_str().unwrap()]);
    command
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn run(stack: &str, folder: &Path) -> Value {
    let server = configure(folder, stack, "server", 0, "10.8.0.2");
    let client = configure(folder, stack, "client", 1, "10.8.0.1");
    let kind = stack.split('_').next().unwrap();
    let mut serving = child(&format!("{kind}-server"), &server, 0);
    let mut ready = [0; 6];
    serving
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut ready)
        .unwrap();
    let measured = child(&format!("{kind}-client"), &client, 1)
        .wait_with_output()
        .unwrap();
    // A server of F-Stack would wait for its loop.
    let _ = serving.kill();
    let _ = serving.wait();
    serde_json::from_slice(&measured.stdout).unwrap()
}

fn text(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let config = || Path::new(&arguments[1]);
    let print = |cells: Vec<Value>| println!("{}", Value::from(cells));
    match arguments.first().map(String::as_str) {
        Some("kernel-server") => return kernel_server(),
        Some("kernel-client") => return print(kernel_client()),
        Some("fstack-server") => return fstack_server(config()),
        Some("fstack-client") => return print(fstack_client(config())),
        _ => {}
    }
    let rounds = arguments.iter().skip_while(|a| *a != "--rounds").nth(1);
    let rounds: usize = rounds.map_or(3, |n| n.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let stacks = [FSTACK, SEGMENTS, KERNEL];
    let mut results: BTreeMap<&str, Vec<Value>> = BTreeMap::new();
    for _ in 0..rounds {
        for stack in stacks {
            results
                .entry(stack)
                .or_default()
                .push(run(stack, folder.path()));
        }
    }
    // The best of the rounds: noise of a shared machine only adds.
    let best = |stack: &str, cell: usize, what: &str| {
        let values = results[stack]
            .iter()
            .map(|cells| cells[cell][what].as_f64().unwrap());
        values.fold(f64::INFINITY, f64::min)
    };
    let rows = CELLS.iter().enumerate().map(|(cell, &(request, reply, _))| {
        let mut row = json!({"request": request, "reply": reply});
        for stack in stacks {
            let p50 = best(stack, cell, "p50_us");
            let lower = 1.0 - p50 / best(KERNEL, cell, "p50_us");
            row[stack] = json!({"p50_us": p50, "p99_us": best(stack, cell, "p99_us"), "p50_lower_by": lower});
        }
        row
    });
    let record = json!({
        "what": "transport time, both ends polling",
        "commit": text("git", &["describe", "--always", "--dirty"]),
        "fstack": fstack_sys::fstack::RELEASE,
        "dpdk": text("pkg-config", &["--modversion", "libdpdk"]),
        "machine": text("sh", &["-c", "grep -m1 'model name' /proc/cpuinfo | cut -d: -f2; nproc; uname -r"]),
        "links": {"fstack": "memif", "kernel": "loopback TCP"},
        "rounds": rounds,
        "rows": rows.collect::<Vec<_>>(),
    });
    println!("{}", serde_json::to_string_pretty(&record).unwrap());
}
