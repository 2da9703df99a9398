//! The only tests of this folder that run by themselves: each starts the others in a child process, on one link.
//!
//! With `INNET_FSTACK_RECORD=FILE` each adds what passed to that file, beside those of the same commit.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Instant;

use serde_json::{Value, json};

use crate::setup::{Port, veth_is_missing, with_veth};
use crate::support::{FSTACK_CONFIG, FSTACK_END, FSTACK_HOST};

/// One at a time: F-Stack's loops and their peers share the machine's cores.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Set where whole segments go through a memif.
pub const SEGMENTS: &str = "INNET_TEST_SEGMENTS";

/// Tests of this binary that need another link, or none.
const NOT_TCP: &str = "unix_socket";

fn run(link: &str, mut command: Command, filters: &[&str]) {
    let begun = Instant::now();
    command.args(filters).args(["--include-ignored", "--test-threads=1", "--skip", NOT_TCP]).stdin(Stdio::null());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let results: Vec<(&str, &str)> =
        text.lines().filter_map(|line| line.strip_prefix("test ")?.split_once(" ... ")).collect();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !results.is_empty(), "{link}\n{text}\n{errors}");
    println!("{link}: {} tests in {:.1?}", results.len(), begun.elapsed());
    let seconds = begun.elapsed().as_secs_f64();
    record(link, json!({"seconds": seconds, "tests": results.into_iter().collect::<BTreeMap<_, _>>()}));
}

fn record(link: &str, result: Value) {
    let Some(path) = env::var_os("INNET_FSTACK_RECORD").filter(|path| !path.is_empty()) else {
        return;
    };
    // Asked once: a record that lies in the repository is a change there.
    static OF: OnceLock<Value> = OnceLock::new();
    let of = OF.get_or_init(what_is_tested);
    let old = fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let mut record = match old {
        Some(old @ Value::Object(_)) if old["of"] == *of => old,
        _ => json!({"of": of, "links": {}}),
    };
    record["links"][link] = result;
    fs::write(&path, serde_json::to_string_pretty(&record).unwrap() + "\n").unwrap();
}

fn what_is_tested() -> Value {
    let said = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).output().unwrap();
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    };
    json!({
        "commit": said("git", &["describe", "--always", "--dirty", "--exclude=*"]),
        "fstack": fstack_sys::fstack::RELEASE,
        "dpdk": said("pkg-config", &["--modversion", "libdpdk"]),
        "kernel": said("uname", &["-sr"]),
        "cores": std::thread::available_parallelism().unwrap(),
    })
}

fn skipped(link: &str, reason: &str) {
    println!("skipped: {link}: {reason}");
}

fn over_veth(link: &str, end: &str, filters: &[&str]) {
    by_device("net_af_packet0,iface=v1", link, end, filters);
}

fn by_device(device: &str, link: &str, end: &str, filters: &[&str]) {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(reason) = veth_is_missing() {
        return skipped(link, &reason);
    }
    let folder = tempfile::tempdir().unwrap();
    let config = Port {
        name: &format!("innet-{}-{end}", std::process::id()),
        core: 1,
        address: FSTACK_HOST,
        device,
        segments: false,
    }
    .configure(folder.path());
    let mut command = with_veth(&env::current_exe().unwrap());
    command.env(FSTACK_END, end).env(FSTACK_CONFIG, config);
    run(link, command, filters);
}

#[test]
fn fstack_serves_clients_of_the_kernel() {
    let suites = ["client::", "client_faults::", "server::", "traffic::"];
    over_veth("veth, F-Stack serves", "server", &suites);
}

#[test]
fn fstack_dials_a_server_of_the_kernel() {
    let suites = ["client::", "client_faults::", "traffic::"];
    over_veth("veth, F-Stack dials", "client", &suites);
}

#[test]
fn fstack_serves_by_af_xdp() {
    // SAFETY: plain system calls; the descriptor is closed where there is one.
    let refused = unsafe {
        let socket = libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0);
        (socket < 0 || libc::close(socket) < 0).then(std::io::Error::last_os_error)
    };
    if let Some(error) = refused {
        return skipped("AF_XDP", &error.to_string());
    }
    by_device(
        "net_af_xdp0,iface=v1",
        "veth by AF_XDP, F-Stack serves",
        "server",
        &["client::", "server::", "traffic::"],
    );
}

#[test]
fn the_command_serves_by_fstack() {
    over_veth("veth, the command serves", "none", &["command::"]);
}

#[test]
fn fstack_is_at_both_ends() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    run("memif, F-Stack at both ends", Command::new(here()), &["memif::"]);
    let mut whole = Command::new(here());
    whole.env(SEGMENTS, "1");
    run("memif, whole segments", whole, &["memif::"]);
}

fn here() -> impl AsRef<Path> + AsRef<std::ffi::OsStr> {
    env::current_exe().unwrap()
}
