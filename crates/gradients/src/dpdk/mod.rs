//! The aggregator and its workers on DPDK's devices: bursts of frames between memory and device, without system calls where the device has
//! none.
//!
//! | module | subject |
//! | --- | --- |
//! | [`frame`] | Ethernet, IPv4, UDP and ARP |
//! | [`checksum`] | of IPv4 and UDP |
//! | [`neighbours`] | who is at which Ethernet address |
//! | [`eal`] | DPDK's environment, once in a process |
//! | [`device`] | devices, queues, packets |
//! | [`station`] | frames in and out of a station's devices, and through a switch |
//! | [`cores`] | which cores there are |
//! | [`aggregator`] | aggregators, one on each core |
//! | [`worker`] | a worker |
//!
//! # Which frames are taken
//!
//! Those that are marked ([`DSCP`](super::datagrams::DSCP)), UDP, and for the station's address; and ARP that asks for it or answers it. An
//! aggregator with two devices is a switch: it lets every other frame through unchanged, from one device to the other. So a marked frame
//! for somebody else passes, be it for an aggregator further up or of another service of that class. With one device, or more than two,
//! other frames are dropped and counted.
//!
//! # Several cores
//!
//! Each core has an aggregator of its own with its own jobs, at a UDP port of its own, and a queue of each device, over which the device
//! spreads flows (RSS) where it can. A core that receives what is for another one's port hands it over by a queue in memory. A device of one
//! queue is received by the first core, which deals out what comes.

pub mod aggregator;
pub mod checksum;
pub mod cores;
pub mod device;
pub mod eal;
pub mod frame;
pub mod neighbours;
pub mod station;
pub mod worker;

use std::sync::Arc;
use std::thread;
use std::time::Duration;

pub use aggregator::{DpdkAggregator, DpdkPlane};
pub use station::FrameCounters;
pub use worker::{DpdkEnd, DpdkWorker};

pub use super::plane::DpdkConfig;
use device::{Device, Pool, Receiver};
use replay_core::error::{Error, Result};
use station::Station;

impl DpdkConfig {
    fn check(&self) -> Result<()> {
        let refuse = |reason: String| Err(Error::Config(format!("gradients over DPDK: {reason}")));
        let ip = *self.address.ip();
        if self.devices.is_empty() {
            return refuse("name a device, such as net_af_packet0,iface=eth0".into());
        }
        if self.prefix > 32 || ip.is_unspecified() || ip.is_multicast() || ip.is_loopback() {
            return refuse(format!(
                "{}/{} is no station's address: DPDK's devices have none, so give one that is free in the network, such as 10.0.0.2/24",
                ip, self.prefix
            ));
        }
        let ports = usize::from(self.address.port()) + self.threads;
        if self.address.port() == 0 || self.threads == 0 || ports > 1 << 16 {
            return refuse(format!(
                "{} threads want as many UDP ports from that of {} on: give the address a port that leaves room for them",
                self.threads, self.address
            ));
        }
        let allowed = cores::allowed();
        if let Some(core) = self.cores.iter().find(|core| !allowed.contains(core)) {
            return refuse(format!(
                "this process may not use core {core}, only {allowed:?}"
            ));
        }
        if !self.cores.is_empty() && self.cores.len() != self.threads {
            return refuse(format!(
                "{} threads and the cores {:?}: name a core for each, or none",
                self.threads, self.cores
            ));
        }
        Ok(())
    }
}

/// What a thread does that polls in vain: it looks again at once, and where it may sleep, soon lets others run, then sleeps.
struct Idle {
    turns: u32,
    sleep: Duration,
}

impl Idle {
    /// Turns that are followed by the next one at once.
    const SPIN: u32 = 32;
    /// Turns until it sleeps: a thread that has nobody to give way to is back after a microsecond or less.
    const YIELD: u32 = 128;

    fn new(sleep: Duration) -> Self {
        Idle { turns: 0, sleep }
    }

    /// Something has come.
    fn end(&mut self) {
        self.turns = 0;
    }

    /// Nothing has come. Sleeps for `most` at most.
    fn wait(&mut self, most: Duration) {
        self.turns = self.turns.saturating_add(1);
        if self.turns < Self::SPIN || self.sleep.is_zero() {
            std::hint::spin_loop();
        } else if self.turns < Self::YIELD {
            thread::yield_now();
        } else {
            thread::sleep(self.sleep.min(most));
        }
    }
}

/// A station whose devices run, with the receivers of each.
struct Opened {
    station: Arc<Station>,
    pool: Arc<Pool>,
    devices: Vec<Arc<Device>>,
    receivers: Vec<Vec<Receiver>>,
}

impl Opened {
    fn new(config: &DpdkConfig) -> Result<Self> {
        config.check()?;
        eal::start(&config.eal)?;
        let cores = config.threads;
        let pool = Pool::new(config.devices.len() * cores, cores)?;
        let mut opened = Opened {
            station: Arc::new(Station::new(
                config.address,
                cores as u16,
                config.prefix,
                config.gateway,
            )),
            pool,
            devices: Vec::new(),
            receivers: Vec::new(),
        };
        for arguments in &config.devices {
            // As many as at its other end, which is another program's to say.
            let queues = if arguments.starts_with("net_memif") {
                1
            } else {
                cores
            };
            let (device, receivers) = Device::open(arguments, queues, &opened.pool)?;
            opened.devices.push(device);
            opened.receivers.push(receivers);
        }
        Ok(opened)
    }
}
