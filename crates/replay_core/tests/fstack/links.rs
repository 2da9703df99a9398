//! The only tests of this folder that run by themselves: each starts the others in a child process, on one link.
//!
//! With `INNET_FSTACK_RECORD=FOLDER` each leaves a record of what passed in that folder, as JSON.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use serde_json::json;

use crate::setup::{Port, veth_is_missing, with_veth};
use crate::support::{FSTACK_CONFIG, FSTACK_END, FSTACK_HOST};

/// One at a time: F-Stack's loops and their peers share the machine's cores.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Tests of this binary that need another link, or none.
const NOT_TCP: &str = "unix_socket";

fn run(link: &str, mut command: Command, filters: &[&str]) {
    let begun = Instant::now();
    command
        .args(filters)
        .args(["--include-ignored", "--test-threads=1", "--skip", NOT_TCP])
        .stdin(Stdio::null());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let results: Vec<(&str, &str)> = text
        .lines()
        .filter_map(|line| line.strip_prefix("test ")?.split_once(" ... "))
        .collect();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && !results.is_empty(),
        "{link}\n{text}\n{errors}"
    );
    println!("{link}: {} tests in {:.1?}", results.len(), begun.elapsed());
    if let Some(folder) = env::var_os("INNET_FSTACK_RECORD") {
        let record = json!({
            "link": link,
            "seconds": begun.elapsed().as_secs_f64(),
            "tests": results.iter().map(|(name, result)| json!({"name": name, "result": result})).collect::<Vec<_>>(),
        });
        let name = format!("{}.json", link.replace([' ', ','], "-"));
        fs::write(PathBuf::from(folder).join(name), record.to_string()).unwrap();
    }
}

fn skipped(link: &str, reason: &str) {
    println!("skipped: {link}: {reason}");
}

fn over_veth(link: &str, end: &str, filters: &[&str]) {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(reason) = veth_is_missing() {
        return skipped(link, &reason);
    }
    let folder = tempfile::tempdir().unwrap();
    let config = Port {
        name: &format!("innet-{}-{end}", std::process::id()),
        core: 1,
        address: FSTACK_HOST,
        device: "net_af_packet0,iface=v1",
    }
    .configure(folder.path());
    let mut command = with_veth(&env::current_exe().unwrap());
    command.env(FSTACK_END, end).env(FSTACK_CONFIG, config);
    run(link, command, filters);
}

#[test]
fn fstack_serves_clients_of_the_kernel() {
    let suites = ["client::", "client_faults::", "wire::", "traffic::"];
    over_veth("veth, F-Stack serves", "server", &suites);
}

#[test]
fn fstack_dials_a_server_of_the_kernel() {
    let suites = ["client::", "client_faults::", "traffic::"];
    over_veth("veth, F-Stack dials", "client", &suites);
}

#[test]
fn the_command_serves_by_fstack() {
    over_veth("veth, the command serves", "none", &["command::"]);
}

#[test]
fn fstack_is_at_both_ends() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    run(
        "memif, F-Stack at both ends",
        Command::new(here()),
        &["memif::"],
    );
}

fn here() -> impl AsRef<Path> + AsRef<std::ffi::OsStr> {
    env::current_exe().unwrap()
}
