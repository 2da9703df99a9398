//! `innet-replay serve --stack fstack` in a namespace with a veth pair, and clients on the kernel's end of it.

use std::time::Duration;

use replay_client::{ConnectOptions, connect};
use replay_core::replay::Replay;

use crate::client::exercise;
use crate::setup::{Port, Serving};
use crate::support::{FSTACK_HOST, soon, until};

fn port(name: &str, device: &str) -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let config = Port {
        name: &format!("innet-{}-{name}", std::process::id()),
        core: 1,
        address: FSTACK_HOST,
        device,
        segments: false,
    }
    .configure(folder.path());
    (folder, config)
}

fn address() -> replay_link::stack::Address {
    format!("innet://{FSTACK_HOST}:7710").parse().unwrap()
}

#[test]
#[ignore = "run by `links`"]
fn it_serves_and_a_signal_ends_it_cleanly() {
    let (_folder, config) = port("serve", "net_af_packet0,iface=v1");
    let serving = Serving::on_fstack(&config, FSTACK_HOST, &[]);
    // F-Stack prints its configuration to standard output; there is one line there all the same.
    assert!(serving.ready.contains("ready on innet://"), "{}", serving.ready);
    exercise(&connect(&address(), ConnectOptions::default()).unwrap());
    serving.signal(libc::SIGTERM);
    let (code, log) = serving.end();
    assert_eq!(code, Some(0), "{log}");
    for part in ["sleeps when idle", "SIGTERM", "stopped"] {
        assert!(log.contains(part), "{part}: {log}");
    }
}

#[test]
#[ignore = "run by `links`"]
fn an_idle_server_that_may_sleep_sleeps_between_its_polls() {
    /// Processor time of one poll and the sleep after it, ten times what it takes: a server that polls makes thousands of
    /// polls between two sleeps.
    const POLL: Duration = Duration::from_micros(100);
    const SLEEPS: u32 = 20_000;

    let (_folder, config) = port("idle", "net_af_packet0,iface=v1");
    let serving = Serving::on_fstack(&config, FSTACK_HOST, &[]);
    let client = connect(&address(), ConnectOptions::default()).unwrap();
    client.stats(&soon()).unwrap();
    let (before, sleeps) = (serving.processor_time(), serving.sleeps());
    // However long the machine takes for them.
    until("sleeps", || serving.sleeps() >= sleeps + u64::from(SLEEPS));
    let polling = serving.processor_time() - before;
    println!("idle_sleep=20: {} µs for a poll", polling.as_micros() / u128::from(SLEEPS));
    assert!(polling < SLEEPS * POLL, "{polling:?}");
}

#[test]
#[ignore = "run by `links`"]
fn a_polling_server_says_that_it_takes_a_core() {
    let (_folder, config) = port("poll", "net_af_packet0,iface=v1");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text.replace("idle_sleep=20", "idle_sleep=0")).unwrap();
    let serving = Serving::on_fstack(&config, FSTACK_HOST, &[]);
    serving.signal(libc::SIGTERM);
    let (_, log) = serving.end();
    assert!(log.contains("takes a whole core"), "{log}");
}

#[test]
#[ignore = "run by `links`"]
fn a_device_that_is_not_there_is_named_at_the_end() {
    for (device, said) in
        [("net_af_packet0,iface=nowhere", "No such device"), ("net_no_such_driver0", "net_no_such_driver0")]
    {
        let (_folder, config) = port("wrong", device);
        let serving = Serving::on_fstack(&config, FSTACK_HOST, &[]);
        let ready = serving.ready.clone();
        let (code, log) = serving.end();
        assert!(matches!(code, Some(1 | 2)) && ready.is_empty(), "{code:?}: {log}");
        assert!(log.contains("F-Stack cannot start with ") && log.contains(said), "{log}");
    }
}

#[test]
#[ignore = "run by `links`"]
fn an_address_that_no_port_has_is_an_error_that_names_it() {
    let (_folder, config) = port("address", "net_af_packet0,iface=v1");
    let serving = Serving::on_fstack(&config, "10.9.0.77", &[]);
    let (code, log) = serving.end();
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("cannot listen on innet://10.9.0.77:7710"), "{log}");
}
