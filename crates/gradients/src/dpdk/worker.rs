//! A worker's DPDK device, which the calling thread polls while it waits.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::interface::{FrameReceiver, FrameSender};
use super::{DpdkConfig, IdleBackoff, OpenDevices};
use crate::worker::Exchange;
use crate::worker_transport::WorkerTransport;
use crate::{Error, Result, Transmit};

/// Time between two attempts of a memif to connect to its peer.
const RECONNECT_EVERY: Duration = Duration::from_millis(500);

/// A worker's DPDK device.
pub struct DpdkTransport {
    receiver: FrameReceiver,
    sender: FrameSender,
    idle_sleep: Duration,
    next_reconnect: Instant,
}

impl DpdkTransport {
    /// Opens the device. `cores` is ignored, as the calling thread polls.
    ///
    /// # Errors
    /// [`Error::Config`] for a configuration or a device that cannot be used.
    pub fn open(config: &DpdkConfig) -> Result<Self> {
        if config.devices.len() != 1 || config.threads != 1 {
            return Err(Error::Config(format!(
                "gradients over DPDK: a worker has one device and one thread, not {:?} and {}",
                config.devices, config.threads
            )));
        }
        let mut opened = OpenDevices::new(config)?;
        Ok(DpdkTransport {
            receiver: FrameReceiver::new(&mut opened, 0),
            sender: FrameSender::new(&opened, 0),
            idle_sleep: config.idle_sleep,
            next_reconnect: Instant::now() + RECONNECT_EVERY,
        })
    }
}

impl Transmit for DpdkTransport {
    fn send<const HEAD: usize>(&mut self, to: SocketAddr, head: &[u8; HEAD], body: &[u8]) {
        self.sender.send(to, head, body);
    }
}

impl WorkerTransport for DpdkTransport {
    fn wait(&mut self, time: Duration) -> io::Result<()> {
        let until = Instant::now() + time;
        let mut idle = IdleBackoff::new(self.idle_sleep);
        loop {
            let now = Instant::now();
            self.sender.begin(now);
            self.sender.flush();
            if self.receiver.fetch() > 0 || now >= until {
                return Ok(());
            }
            if now >= self.next_reconnect {
                self.receiver.reconnect_memifs();
                self.next_reconnect = now + RECONNECT_EVERY;
            }
            idle.wait(until - now);
        }
    }

    fn deliver<E: Exchange>(&mut self, now: Instant, exchange: &mut E) {
        let receive = |from, datagram: &[u8], out: &mut FrameSender| {
            exchange.receive(now, from, datagram, out);
        };
        // A worker has one UDP port, so no datagram is for another core.
        self.receiver.read(&mut self.sender, receive, |_, _| {});
    }

    fn flush(&mut self) {
        self.sender.flush();
    }
}
