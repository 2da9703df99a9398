//! Machines that take time: processors and a network port, each with a queue.

use std::time::{Duration, Instant};

/// What a machine takes for the messages of its connections.
#[derive(Debug, Clone, Copy)]
pub struct ServiceTimes {
    /// Number of processors, at least 1.
    pub processors: usize,
    /// Time of a processor for a message, received or sent.
    pub message: Duration,
    /// Nanoseconds of a processor for a byte, received or sent.
    pub nanoseconds_per_byte: f64,
    /// Nanoseconds of the port for a byte, in each direction.
    pub port_nanoseconds_per_byte: f64,
}

/// Direction of a message, as its machine sees it.
#[derive(Clone, Copy)]
pub(super) enum Direction {
    Received,
    Sent,
}

/// Queues of a machine.
pub(super) struct Queues {
    times: ServiceTimes,
    /// Times at which the processors are free.
    processors: Vec<Instant>,
    /// Times at which the port is free, for received and for sent bytes.
    ports: [Instant; 2],
    busy: Duration,
}

impl Queues {
    pub fn new(times: ServiceTimes, now: Instant) -> Self {
        Queues { times, processors: vec![now; times.processors.max(1)], ports: [now; 2], busy: Duration::ZERO }
    }

    /// Time at which a part of a message that comes at `at` has passed port and processor, in the order of its direction; `begins` if it is
    /// the first part. Messages are served in the order of the calls: a processor waits for one that is still on its way.
    pub fn pass(&mut self, direction: Direction, begins: bool, bytes: usize, at: Instant) -> Instant {
        match direction {
            Direction::Received => {
                let received = self.pass_port(direction, bytes, at);
                self.process(begins, bytes, received)
            }
            Direction::Sent => {
                let processed = self.process(begins, bytes, at);
                self.pass_port(direction, bytes, processed)
            }
        }
    }

    /// Time that the processors have worked.
    pub fn busy(&self) -> Duration {
        self.busy
    }

    fn pass_port(&mut self, direction: Direction, bytes: usize, at: Instant) -> Instant {
        let port = &mut self.ports[direction as usize];
        *port = at.max(*port) + for_bytes(self.times.port_nanoseconds_per_byte, bytes);
        *port
    }

    fn process(&mut self, begins: bool, bytes: usize, at: Instant) -> Instant {
        let message = if begins { self.times.message } else { Duration::ZERO };
        let work = message + for_bytes(self.times.nanoseconds_per_byte, bytes);
        self.busy += work;
        let free = self.processors.iter_mut().min();
        let free = free.expect("a machine has a processor");
        *free = at.max(*free) + work;
        *free
    }
}

fn for_bytes(nanoseconds: f64, bytes: usize) -> Duration {
    Duration::from_nanos((nanoseconds * bytes as f64) as u64)
}
