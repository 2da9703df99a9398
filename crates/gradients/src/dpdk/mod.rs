//! Aggregators and workers on DPDK devices, which they poll for bursts of frames instead of using the kernel's network stack.
//!
//! | module | subject |
//! | --- | --- |
//! | [`eal`] | DPDK's environment, started once in a process |
//! | [`packets`] | packets and their memory pool |
//! | [`device`] | devices and their queues |
//! | `interface` | IPv4 interface on the devices: frames to datagrams and back, and forwarding; ARP table |
//! | `transports` | aggregators, one for each thread; transport of a worker |
//!
//! # Received frames
//!
//! An interface receives UDP datagrams to its address that carry the protocol's traffic class (DSCP 46), and ARP
//! requests and replies for that address. An aggregator with two devices is a switch: it forwards every other frame unchanged from one
//! device to the other, so datagrams for another aggregator, or of another service in that traffic class, pass. With one device, or more
//! than two, other frames are dropped and counted.
//!
//! # Several cores
//!
//! Each core has its own aggregator with its own jobs, its own UDP port, and its own queue of each device, over which the device
//! distributes flows (RSS) if it can. A core that receives a datagram for another core's port hands it over by a queue in memory. The
//! first core receives all frames of a device with one queue, and hands over the datagrams of the other cores.

pub mod device;
pub mod eal;
mod interface;
pub mod packets;
mod transports;

use std::sync::Arc;
use std::time::Duration;
use std::{thread, vec};

pub use transports::{DpdkTransport, start_aggregators};

pub use super::settings::DpdkConfig;
use super::{Error, Result};
use device::{Device, RxQueue};
use interface::Interface;
use interface::Neighbours;
use packets::PacketPool;

impl DpdkConfig {
    fn check(&self) -> Result<()> {
        let refuse = |reason: String| Err(Error::Config(format!("gradients over DPDK: {reason}")));
        let ip = *self.address.ip();
        if self.devices.is_empty() {
            return refuse("name a device, such as net_af_packet0,iface=eth0".into());
        }
        if self.prefix > 32 || ip.is_unspecified() || ip.is_multicast() || ip.is_loopback() {
            return refuse(format!(
                "{}/{} is no address of a host: a DPDK device has none of its own, so give it one that is free in the network, such as \
                 10.0.0.2/24",
                ip, self.prefix
            ));
        }
        let ports = usize::from(self.address.port()) + self.threads;
        if self.address.port() == 0 || self.threads == 0 || ports > 1 << 16 {
            return refuse(format!(
                "{} threads use as many UDP ports, the first one of {}: give at least one thread, and a port with enough ports above it",
                self.threads, self.address
            ));
        }
        let allowed = eal::allowed();
        if let Some(core) = self.cores.iter().find(|core| !allowed.contains(core)) {
            return refuse(format!("this process may not use core {core}, only {allowed:?}"));
        }
        if !self.cores.is_empty() && self.cores.len() != self.threads {
            return refuse(format!(
                "{} threads and the cores {:?}: name a core for each thread, or none",
                self.threads, self.cores
            ));
        }
        Ok(())
    }
}

/// Backoff of an idle polling thread: it spins and, unless `sleep` is 0, later yields its core, then sleeps.
struct IdleBackoff {
    polls: u32,
    sleep: Duration,
}

impl IdleBackoff {
    /// Polls without a pause.
    const SPINS: u32 = 32;
    /// Polls before the first sleep. Yielding costs at most a microsecond if no other thread wants the core.
    const YIELDS: u32 = 128;

    fn new(sleep: Duration) -> Self {
        IdleBackoff { polls: 0, sleep }
    }

    /// Starts over, after something arrived.
    fn reset(&mut self) {
        self.polls = 0;
    }

    /// Pauses, for `most` at most.
    fn wait(&mut self, most: Duration) {
        self.polls = self.polls.saturating_add(1);
        if self.polls < Self::SPINS || self.sleep.is_zero() {
            std::hint::spin_loop();
        } else if self.polls < Self::YIELDS {
            thread::yield_now();
        } else {
            thread::sleep(self.sleep.min(most));
        }
    }
}

/// Started devices of an interface, with the receive queues of each that no core has taken yet.
struct OpenDevices {
    interface: Arc<Interface>,
    pool: Arc<PacketPool>,
    devices: Vec<Arc<Device>>,
    queues: Vec<vec::IntoIter<RxQueue>>,
}

impl OpenDevices {
    fn new(config: &DpdkConfig) -> Result<Self> {
        config.check()?;
        eal::start(&config.eal)?;
        let threads = config.threads;
        let pool = PacketPool::new(config.devices.len() * threads, threads)?;
        let interface = Interface { config: config.clone(), neighbours: Neighbours::default() };
        let mut opened = OpenDevices { interface: Arc::new(interface), pool, devices: Vec::new(), queues: Vec::new() };
        for arguments in &config.devices {
            // Both ends of a memif need the same number of queues, and the peer may be another program: all have one.
            let queues = match arguments.starts_with("net_memif") {
                true => 1,
                false => threads,
            };
            let (device, queues) = Device::open(arguments, queues, &opened.pool)?;
            opened.devices.push(device);
            opened.queues.push(queues.into_iter());
        }
        Ok(opened)
    }
}
