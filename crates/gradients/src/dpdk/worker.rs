//! A worker on a DPDK device.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::station::{Inbox, Outbox};
use super::{DpdkConfig, FrameCounters, Idle, Opened};
use crate::link::{self, Link};
use crate::worker::{Command, Failure, Worker};
use crate::{JoinJob, Round, Sum, Ticket};
use replay_core::error::{Error, Result};
use replay_core::replay::Wait;

/// How often a memif without a peer looks for one.
const LOOK_FOR_PEER: Duration = Duration::from_millis(500);

/// A worker's end of the network: a station with one device, which polls while it waits.
pub struct DpdkEnd {
    inbox: Inbox,
    out: Outbox,
    idle_sleep: Duration,
    look_for_peer: Instant,
}

impl DpdkEnd {
    /// Plugs the device in. Its cores are not used: it runs on the caller's.
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
        let Opened {
            station,
            pool,
            devices,
            receivers,
        } = Opened::new(config)?;
        let receivers = receivers
            .into_iter()
            .map(|queues| queues.into_iter().next());
        Ok(DpdkEnd {
            inbox: Inbox::new(station.clone(), 0, receivers.collect(), pool.clone()),
            out: Outbox::new(station, &devices, 0, pool),
            idle_sleep: config.idle_sleep,
            look_for_peer: Instant::now() + LOOK_FOR_PEER,
        })
    }

    /// What has passed its port.
    pub fn frames(&self) -> FrameCounters {
        self.out.counters()
    }
}

impl Link for DpdkEnd {
    type Out = Outbox;

    fn wait(&mut self, time: Duration) -> io::Result<()> {
        let until = Instant::now() + time;
        let mut idle = Idle::new(self.idle_sleep);
        loop {
            let now = Instant::now();
            self.out.begin(now);
            self.out.flush();
            if self.inbox.fetch() > 0 || now >= until {
                return Ok(());
            }
            if now >= self.look_for_peer {
                self.inbox.look_for_peers();
                self.look_for_peer = now + LOOK_FOR_PEER;
            }
            idle.wait(until - now);
        }
    }

    fn receive(&mut self, take: impl FnMut(SocketAddr, &[u8], &mut Outbox)) {
        // A worker has one port, so that nothing is anybody else's.
        self.inbox.read(&mut self.out, take, |_, _| {});
    }

    fn out(&mut self) -> &mut Outbox {
        &mut self.out
    }

    fn flush(&mut self) {
        self.out.flush();
    }
}

/// A worker on a DPDK device. Calls block until they are done, their deadline, or an interrupt.
pub struct DpdkWorker {
    worker: Worker,
    end: DpdkEnd,
}

impl DpdkWorker {
    /// The worker that joined the aggregator at `aggregator` with `request` and was given `ticket`. Returns when the aggregator
    /// knows where it is.
    ///
    /// # Errors
    /// [`Failure::Silent`] when it does not answer within `deadline`.
    pub fn new(
        end: DpdkEnd,
        aggregator: SocketAddr,
        request: &JoinJob,
        ticket: &Ticket,
        deadline: Duration,
        wait: &Wait<'_>,
    ) -> std::result::Result<Self, Failure> {
        let worker = Worker::new(aggregator, request, ticket);
        let mut worker = DpdkWorker { worker, end };
        worker.call(Command::Join, deadline, wait)?;
        Ok(worker)
    }

    /// The number of the round that comes next.
    pub fn next_round(&self) -> u64 {
        self.worker.next_round()
    }

    /// See [`UdpWorker::sum`](crate::UdpWorker::sum).
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn sum(
        &mut self,
        values: &mut [f32],
        mean: bool,
        deadline: Duration,
        wait: &Wait<'_>,
    ) -> std::result::Result<Sum, Failure> {
        let now = Instant::now();
        let round = Round::new(&mut self.worker, values, mean, now, now + deadline);
        link::drive(round, &mut self.end, wait)
    }

    /// See [`UdpWorker::call`](crate::UdpWorker::call).
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn call(
        &mut self,
        command: Command,
        deadline: Duration,
        wait: &Wait<'_>,
    ) -> std::result::Result<(), Failure> {
        let now = Instant::now();
        let call = self.worker.call(command, now, now + deadline);
        link::drive(call, &mut self.end, wait)
    }

    /// What has passed its port.
    pub fn frames(&self) -> FrameCounters {
        self.end.frames()
    }
}
