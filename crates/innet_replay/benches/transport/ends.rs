//! The two ends: the transport, and a process on a core of its own.

use std::fs;
use std::io::{BufRead, BufReader, Read, Seek};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

/// F-Stack's reactor at both ends of a memif.
pub const FSTACK: &str = "fstack";
/// The same with `memif_segments = 1`.
pub const FSTACK_SEGMENTS: &str = "fstack_segments";
/// The kernel's TCP over loopback as `innet-replay serve --spin` and a client with `spin` use it.
pub const KERNEL: &str = "kernel";
/// The kernel's TCP over loopback by sockets alone that spin.
pub const BARE_KERNEL: &str = "kernel_bare";

/// Whether it goes by F-Stack.
pub fn is_fstack(way: &str) -> bool {
    way.starts_with(FSTACK)
}

/// The transport.
pub fn link(way: &str) -> &'static str {
    if is_fstack(way) { "memif" } else { "loopback TCP" }
}

/// Where the server listens, without the scheme.
pub fn server(way: &str) -> &'static str {
    if is_fstack(way) { "10.8.0.2:7711" } else { "127.0.0.1:7711" }
}

/// How often an end may be lost to memif in one measurement.
const LOSSES: usize = 5;

/// Starts `server` on one core; when it has said that it is ready, runs `client` on another one, and takes the cells that
/// it prints. Both start again where DPDK's memif has ended the client by a segmentation fault, which it now and then does
/// when the other end comes or goes (docs/how-to/fstack.md).
pub fn run(mut server: Command, mut client: Command) -> Value {
    for _ in 0..LOSSES {
        let mut log = tempfile::tempfile().unwrap();
        server.stdout(Stdio::piped()).stderr(log.try_clone().unwrap());
        let mut serving = Serving(server.spawn().unwrap());
        let mut ready = String::new();
        let mut said = BufReader::new(serving.0.stdout.as_mut().unwrap());
        said.read_line(&mut ready).unwrap();
        let measured = client.output().unwrap();
        drop(serving);
        if let Ok(cells) = serde_json::from_slice(&measured.stdout) {
            return cells;
        }
        let mut server_said = String::new();
        log.rewind().unwrap();
        log.read_to_string(&mut server_said).unwrap();
        let client_said = String::from_utf8_lossy(&measured.stderr);
        let status = measured.status;
        eprintln!("{client:?} ({status}) said: {client_said}\n{server:?} said: {server_said}");
        assert_eq!(status.signal(), Some(libc::SIGSEGV), "the client failed");
    }
    panic!("{client:?} was ended by a segmentation fault {LOSSES} times")
}

/// A server of F-Stack would wait for its loop, so it is killed.
struct Serving(Child);

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A program of the server's end, with all of its threads on one core.
pub fn at_server(program: impl AsRef<Path>) -> Command {
    on_core(0, program.as_ref())
}

/// A program of the client's end.
pub fn at_client(program: impl AsRef<Path>) -> Command {
    on_core(1, program.as_ref())
}

fn on_core(core: usize, program: &Path) -> Command {
    let mut command = Command::new("taskset");
    command.args(["-c", &core.to_string()]).arg(program);
    command
}

/// F-Stack's configuration for the server's end of the memif.
pub fn server_config(folder: &Path, way: &str) -> PathBuf {
    configure(folder, way, "server", 0, 2)
}

/// That for the client's end.
pub fn client_config(folder: &Path, way: &str) -> PathBuf {
    configure(folder, way, "client", 1, 1)
}

fn configure(folder: &Path, way: &str, role: &str, core: usize, host: usize) -> PathBuf {
    let path = folder.join(format!("{way}-{role}.ini"));
    let segments = u8::from(way == FSTACK_SEGMENTS);
    let text = format!(
        "[dpdk]\nlcore_mask={:x}\nchannel=4\npromiscuous=1\nnuma_on=0\nno_huge=1\nmemory=256\nfile_prefix=transport-{}-{role}\n\
         port_list=0\nnb_vdev=0\npkt_tx_delay=0\nidle_sleep=0\n\
         [port0]\naddr=10.8.0.{host}\nnetmask=255.255.255.0\nbroadcast=10.8.0.255\ngateway=10.8.0.254\n\
         [freebsd.boot]\nhz=100\nfd_reserve=1024\nkern.ipc.maxsockets=262144\n\
         [freebsd.sysctl]\nkern.ipc.maxsockbuf=16777216\n\
         [innet]\nmemif_segments = {segments}\neal = --no-pci\neal = --no-telemetry\n\
         eal = --vdev=net_memif0,role={role},id=0,mac=02:00:00:00:00:0{host},socket={}\n",
        1 << core,
        std::process::id(),
        folder.join("memif.sock").display(),
    );
    fs::write(&path, text).unwrap();
    path
}

/// Measurements of one cell: p50 and p99 by nearest rank, so that of up to 100 times the p99 is the longest.
pub fn cell(what: Value, mut times: Vec<Duration>) -> Value {
    times.sort_unstable();
    let at = |percent: usize| {
        let rank = (percent * times.len()).div_ceil(100);
        times[rank - 1].as_nanos() as f64 / 1e3
    };
    let mut of = what;
    of["count"] = times.len().into();
    json!({"cell": of, "p50_us": at(50), "p99_us": at(99)})
}

/// How often something is done before it is timed `count` times.
pub fn warm_up(count: usize) -> usize {
    count / 10 + 1
}
