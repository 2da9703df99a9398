//! `innet-replay serve --gradients-devices`, and workers that join over TCP: on UDP over a veth pair, and on memif.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};

use base::wait::Wait;
use gradients::dpdk::DpdkConfig;
use gradients_net::GradientWorker;
use replay_client::{ConnectOptions, connect};
use replay_core::replay::Replay;

use crate::setup::*;

/// The command, until it is dropped.
struct Serving {
    child: Child,
    /// Line on standard output; empty if the command ended before.
    ready: String,
}

impl Serving {
    fn start(arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_innet-replay"))
            .args(["serve", "--gradients-only", "--trusted-network"])
            .args(["--listen=127.0.0.1:0", "--gradients-idle-sleep-us=20"])
            .args(["--gradients-eal=--no-huge -m 128 --no-pci"])
            .args(arguments)
            .env_remove("INNET_TOKEN")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut ready = String::new();
        let output = child.stdout.take().unwrap();
        BufReader::new(output).read_line(&mut ready).unwrap();
        Serving { child, ready }
    }

    /// Its TCP address.
    fn address(&self) -> String {
        let mut words = self.ready.split_whitespace();
        let found = words.find(|word| word.starts_with("innet://"));
        found.unwrap_or_else(|| panic!("{:?}", self.ready)).to_owned()
    }

    /// Standard error, once the command has ended.
    fn log(&mut self) -> String {
        let mut log = String::new();
        let errors = self.child.stderr.take().unwrap();
        BufReader::new(errors).read_to_string(&mut log).unwrap();
        log
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Two workers sum at the server, each on UDP or on a device.
fn sum_through(serving: &Serving, devices: [Option<&DpdkConfig>; 2]) {
    let client = connect(&serving.address().parse().unwrap(), ConnectOptions::default()).unwrap();
    let (client, wait) = (&client, &Wait::forever());
    std::thread::scope(|scope| {
        for (number, dpdk) in (0u16..).zip(devices) {
            scope.spawn(move || {
                let request = request("job", number, 2);
                let worker = match dpdk {
                    None => GradientWorker::join(client, &request, None, None, wait),
                    dpdk => GradientWorker::join(client, &request, None, dpdk, wait),
                };
                let mut worker = worker.unwrap();
                for _ in 0..3 {
                    let mut values = vec![1.0 + f32::from(number); 10_000];
                    assert_eq!(worker.sum(&mut values, false, wait).unwrap().workers, 2);
                    assert!(values.iter().all(|&value| value == 3.0));
                }
                worker.leave(wait).unwrap();
            });
        }
    });
    let stats = client.stats(wait).unwrap();
    let gradients = &stats["gradients"];
    assert_eq!(gradients["counted"], gradients["sums"].as_u64().unwrap() * 2);
    assert!(gradients["frames"]["received"].as_u64() >= gradients["received"].as_u64());
}

#[test]
fn the_command_sums_on_a_veth_pair() {
    with_veth(&["a"], || {
        shell("ip address add 10.9.0.1/24 dev a0").unwrap();
        let device = af_packet("a1");
        let serving =
            Serving::start(&["--gradients=10.9.0.2:7711", "--gradients-threads=2", "--gradients-devices", &device]);
        sum_through(&serving, [None, None]);
    });
}

#[test]
fn the_command_sums_on_memifs() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let device = |role: &str, number: usize| {
        let socket = folder.path().join(format!("{number}.sock"));
        let name = if role == "server" { number as u32 } else { crate::setup::number() };
        format!("net_memif{name},role={role},id=0,socket={}", socket.display())
    };
    let serving = Serving::start(&[
        "--gradients=10.8.0.1:7711",
        "--gradients-devices",
        &device("server", 0),
        "--gradients-devices",
        &device("server", 1),
    ]);
    let configs = [0, 1].map(|number| config(&format!("10.8.0.{}", 2 + number), &[device("client", number)]));
    sum_through(&serving, [Some(&configs[0]), Some(&configs[1])]);
}

#[test]
fn a_missing_device_ends_the_command_with_the_reason() {
    let mut serving =
        Serving::start(&["--gradients=10.9.0.2:7711", "--gradients-devices=net_af_packet0,iface=nowhere"]);
    assert_eq!(serving.ready, "");
    let log = serving.log();
    assert!(log.contains("innet-replay: ") && log.contains("iface=nowhere"), "{log}");
}
