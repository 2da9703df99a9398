//! What a test of F-Stack needs around it: a configuration file, a veth pair in a network namespace, `innet-replay serve`.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub const SERVE: &str = env!("CARGO_BIN_EXE_innet-replay");

/// Waits longer than this are failures.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A port of F-Stack.
pub struct Port<'a> {
    /// Prefix of the files of this DPDK process.
    pub name: &'a str,
    /// The core of the loop.
    pub core: usize,
    /// Its address in a network of 24 bits.
    pub address: &'a str,
    /// The DPDK device.
    pub device: &'a str,
    /// Whether whole segments go through it.
    pub segments: bool,
}

impl Port<'_> {
    /// Writes the configuration into `folder`. The loop sleeps when idle: tests have few cores.
    pub fn configure(&self, folder: &Path) -> PathBuf {
        let network = self.address.rsplit_once('.').unwrap().0;
        let cores = std::thread::available_parallelism().unwrap().get();
        let text = format!(
            "[dpdk]\nlcore_mask={mask:x}\nchannel=4\npromiscuous=1\nnuma_on=0\nno_huge=1\nmemory=128\nfile_prefix={name}\n\
             port_list=0\nnb_vdev=0\npkt_tx_delay=0\nidle_sleep=20\n\
             [port0]\naddr={address}\nnetmask=255.255.255.0\nbroadcast={network}.255\ngateway={network}.254\n\
             [freebsd.boot]\nhz=100\nfd_reserve=1024\nkern.ipc.maxsockets=262144\n\
             [freebsd.sysctl]\nkern.ipc.maxsockbuf=16777216\n\
             [innet]\neal = --no-pci\neal = --no-telemetry\neal = --vdev={device}\nmemif_segments = {segments}\n",
            mask = 1 << (self.core % cores),
            name = self.name,
            address = self.address,
            device = self.device,
            segments = u8::from(self.segments),
        );
        let path = folder.join(format!("{}.ini", self.name));
        fs::write(&path, text).unwrap();
        path
    }
}

/// A veth pair: `v0` is the kernel's, without offloads (half-made checksums would be dropped at the other end); `v1`
/// is for F-Stack and has no address, or the kernel would answer there.
const VETH: &str = "set -e
echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6
ip link set lo up
ip link add v0 type veth peer name v1
ip address add 10.9.0.1/24 dev v0
ethtool -K v0 tx off gro off > /dev/null
ip link set v0 up
ip link set v1 up
exec \"$0\" \"$@\"";

/// A command that runs in a network namespace of its own, which has a veth pair and goes with it.
pub fn with_veth(program: &Path) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", VETH]).arg(program);
    // SAFETY: one system call between fork and exec.
    unsafe {
        command.pre_exec(|| match libc::unshare(libc::CLONE_NEWNET) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    command
}

/// Why no veth pair can be made here.
pub fn veth_is_missing() -> Option<String> {
    match with_veth(Path::new("true")).output() {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Some(format!("no network namespace can be made: {error}")),
    }
}

/// `innet-replay serve`, until it is dropped.
pub struct Serving {
    child: Child,
    log: Option<std::thread::JoinHandle<String>>,
    /// The line of standard output; empty when it ended before.
    pub ready: String,
}

impl Serving {
    pub fn start(arguments: &[&str]) -> Self {
        let mut command = Command::new(SERVE);
        command.arg("serve").args(arguments);
        let mut child =
            command.env_remove("INNET_TOKEN").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // Read all the time, or the server would wait for it.
        let mut errors = child.stderr.take().unwrap();
        let log = std::thread::spawn(move || {
            let mut log = String::new();
            let _ = errors.read_to_string(&mut log);
            log
        });
        let mut ready = String::new();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        output.read_line(&mut ready).unwrap();
        Serving { child, log: Some(log), ready }
    }

    /// A server with F-Stack at `address`, port 7710, and with further arguments.
    pub fn on_fstack(config: &Path, address: &str, more: &[&str]) -> Self {
        let config = config.to_str().unwrap();
        let listen = format!("{address}:7710");
        let own = ["--stack=fstack", "--stack-config", config, "--listen", &listen];
        let limits = ["--trusted-network", "--max-bytes=2GiB", "--drain-deadline-ms=500"];
        Self::start(&[&own[..], &limits, more].concat())
    }

    pub fn signal(&self, signal: libc::c_int) {
        // SAFETY: a child of this process that has not been waited for.
        unsafe { libc::kill(self.child.id() as libc::pid_t, signal) };
    }

    /// Processor time so far, of all threads.
    pub fn processor_time(&self) -> Duration {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let fields = stat.rsplit_once(") ").unwrap().1.split(' ');
        let ticks: u64 = fields.skip(11).take(2).map(|n| n.parse::<u64>().unwrap()).sum();
        // SAFETY: asks for a constant of the system.
        let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as u64;
        Duration::from_millis(ticks * 1000 / per_second)
    }

    /// Sleeps so far, of all threads: each is a voluntary switch to another program.
    pub fn sleeps(&self) -> u64 {
        let threads = fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let of_thread = |thread: std::io::Result<fs::DirEntry>| {
            // A thread that has ended in between has no status.
            let status = fs::read_to_string(thread.unwrap().path().join("status")).ok()?;
            let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
            count.trim().parse::<u64>().ok()
        };
        threads.filter_map(of_thread).sum()
    }

    /// Its exit code, or nothing after a signal, and its log.
    pub fn end(mut self) -> (Option<i32>, String) {
        let until = Instant::now() + PATIENCE;
        while self.child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < until, "the server does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        let log = self.log.take().unwrap().join().unwrap();
        (self.child.wait().unwrap().code(), log)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
