//! A simulated network that loses, duplicates, delays and so reorders datagrams, aggregators on it, and a clock that jumps from event to event.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use gradients::packet::{PacketHeader, PacketKind};
use gradients::{
    Aggregator, AggregatorCounters, AggregatorLimits, Arithmetic, Control, EXPIRE_EVERY, Exchange, JoinJob,
    ParentAggregator, Result, Round, Sum, Ticket, Transmit, WorkerSession,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Faults of the network.
#[derive(Debug, Clone, Copy)]
pub struct Faults {
    pub loss: f64,
    pub duplicate: f64,
    /// Longest delay in µs.
    pub delay_us: u64,
    /// Probability of a copy that is delayed a hundred times longer.
    pub straggler: f64,
}

impl Faults {
    pub const NONE: Faults = Faults { loss: 0.0, duplicate: 0.0, delay_us: 50, straggler: 0.0 };
    pub const MANY: Faults = Faults { loss: 0.1, duplicate: 0.1, delay_us: 500, straggler: 0.05 };
}

type Datagram = (Instant, u64, SocketAddr, SocketAddr, Vec<u8>);

pub struct Wire {
    pub now: Instant,
    pub faults: Faults,
    /// Hosts whose datagrams are lost, in both directions.
    pub dead: HashSet<SocketAddr>,
    /// Kinds of datagrams: for each entry, the next one of its kind is lost.
    pub lose: Vec<PacketKind>,
    pub sent: u64,
    queue: BinaryHeap<Reverse<Datagram>>,
    rng: StdRng,
}

/// A host on the wire.
pub struct Port<'a>(pub &'a mut Wire, pub SocketAddr);

impl Transmit for Port<'_> {
    fn send<const HEAD: usize>(&mut self, to: SocketAddr, head: &[u8; HEAD], body: &[u8]) {
        let Port(wire, from) = self;
        assert!(head.len() + body.len() <= 1472);
        let kind = PacketHeader::decode(head).map(|(header, _)| header.kind);
        if let Some(at) = wire.lose.iter().position(|&lost| Some(lost) == kind) {
            wire.lose.remove(at);
            return;
        }
        let faults = wire.faults;
        let chance = |wire: &mut Wire, chance| wire.rng.random_bool(chance);
        if chance(wire, faults.straggler) {
            wire.put(100 * faults.delay_us, to, *from, head, body);
        }
        if chance(wire, faults.duplicate) {
            wire.put(faults.delay_us, to, *from, head, body);
        }
        if !chance(wire, faults.loss) {
            wire.put(faults.delay_us, to, *from, head, body);
        }
    }
}

impl Wire {
    fn put(&mut self, most_us: u64, to: SocketAddr, from: SocketAddr, head: &[u8], body: &[u8]) {
        let delay = Duration::from_micros(self.rng.random_range(1..=most_us));
        self.sent += 1;
        let datagram = [head, body].concat();
        self.queue.push(Reverse((self.now + delay, self.sent, to, from, datagram)));
    }

    fn due(&mut self) -> Option<Datagram> {
        let due = self.queue.peek().is_some_and(|next| next.0.0 <= self.now);
        let datagram = due.then(|| self.queue.pop())??.0;
        Some(datagram)
    }
}

/// An exchange that continues after the network has run it.
pub struct Borrowed<'a, E>(pub &'a mut E);

impl<E: Exchange> Exchange for Borrowed<'_, E> {
    type Output = E::Output;

    fn receive<T: Transmit>(&mut self, now: Instant, from: SocketAddr, datagram: &[u8], out: &mut T) {
        self.0.receive(now, from, datagram, out);
    }

    fn poll<T: Transmit>(&mut self, now: Instant, out: &mut T) -> Option<Result<Self::Output>> {
        self.0.poll(now, out)
    }

    fn next_wake(&self) -> Instant {
        self.0.next_wake()
    }

    fn waits_for(&self, now: Instant) -> String {
        self.0.waits_for(now)
    }
}

/// Aggregators on a wire.
pub struct Network {
    pub wire: Wire,
    pub aggregators: Vec<(SocketAddr, Aggregator)>,
    /// Deadline of a sum.
    pub deadline: Duration,
    /// Last time at which the aggregators checked deadlines.
    expired: Instant,
    events: u64,
}

pub fn address(port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1], port))
}

/// Request of one of `workers` workers, with settings that tests change.
pub fn request(worker: u16, workers: u16) -> JoinJob {
    JoinJob {
        job: "job".into(),
        worker,
        workers,
        world: workers.into(),
        name: format!("host-{worker}"),
        arithmetic: Arithmetic::Float,
        segment_values: 7,
        deadline: Duration::from_secs(2),
        asynchronous: None,
        below: None,
    }
}

pub const RACKS: u16 = 2;
pub const PER_RACK: u16 = 3;
/// Workers of all racks.
pub const ALL: usize = (RACKS * PER_RACK) as usize;

/// Request of a rack to its parent.
pub fn rack_request(rack: u16, racks: u16, world: u32) -> JoinJob {
    let request = request(rack, racks);
    JoinJob {
        world,
        name: format!("rack-{rack}"),
        // As `Aggregators::join` extends it.
        deadline: request.deadline * 9 / 8,
        ..request
    }
}

/// Aggregator 0 is the parent of 1 and 2, which have `limits` and three workers each.
pub fn two_levels(network: &mut Network, arithmetic: Arithmetic, limits: AggregatorLimits) -> Vec<WorkerSession> {
    let mut workers = Vec::new();
    for rack in 0..RACKS {
        let child = network.add_aggregator(limits);
        let up = JoinJob { arithmetic, ..rack_request(rack, RACKS, ALL as u32) };
        let below = PER_RACK.into();
        let ticket = network.rack_ticket(0, &up, below, None).unwrap();
        let mut upstream = Some(ParentAggregator::new(&ticket, below));
        for worker in 0..PER_RACK {
            let request = JoinJob { arithmetic, world: ALL as u32, ..request(worker, PER_RACK) };
            let ticket = network.ticket(child, &request, upstream.take()).unwrap();
            workers.push(WorkerSession::new(&request, &ticket));
        }
    }
    workers
}

impl Network {
    pub fn new(seed: u64, faults: Faults, limits: AggregatorLimits) -> Self {
        let mut network = Network {
            wire: Wire {
                now: Instant::now(),
                faults,
                dead: HashSet::new(),
                lose: Vec::new(),
                sent: 0,
                queue: BinaryHeap::new(),
                rng: StdRng::seed_from_u64(seed),
            },
            aggregators: Vec::new(),
            deadline: Duration::from_secs(10),
            expired: Instant::now(),
            events: 0,
        };
        network.add_aggregator(limits);
        network
    }

    /// Another aggregator, and its number.
    pub fn add_aggregator(&mut self, limits: AggregatorLimits) -> usize {
        let number = self.aggregators.len();
        let at = address(1000 + number as u16);
        self.aggregators.push((at, Aggregator::new(at, limits)));
        number
    }

    /// Joins a worker.
    pub fn join(&mut self, aggregator: usize, request: &JoinJob) -> Result<WorkerSession> {
        let ticket = self.ticket(aggregator, request, None)?;
        Ok(WorkerSession::new(request, &ticket))
    }

    pub fn ticket(
        &mut self,
        aggregator: usize,
        request: &JoinJob,
        upstream: Option<ParentAggregator>,
    ) -> Result<Ticket> {
        let (at, aggregator) = &mut self.aggregators[aggregator];
        let ticket = aggregator.join(self.wire.now, request, upstream)?;
        aggregator.flush(&mut Port(&mut self.wire, *at));
        Ok(ticket)
    }

    pub fn leave(&mut self, aggregator: usize, session: u32) {
        let (at, aggregator) = &mut self.aggregators[aggregator];
        aggregator.leave(session);
        aggregator.flush(&mut Port(&mut self.wire, *at));
    }

    /// Joins a rack with `below` workers.
    pub fn rack_ticket(
        &mut self,
        aggregator: usize,
        request: &JoinJob,
        below: u32,
        upstream: Option<ParentAggregator>,
    ) -> Result<Ticket> {
        self.ticket(aggregator, &JoinJob { below: Some(below), ..request.clone() }, upstream)
    }

    /// Joins all workers of a job at the first aggregator.
    pub fn join_all(&mut self, requests: &[JoinJob]) -> Vec<WorkerSession> {
        let join = |request| self.join(0, request).unwrap();
        requests.iter().map(join).collect()
    }

    pub fn counters(&self) -> AggregatorCounters {
        self.aggregators[0].1.counters()
    }

    /// Sums the vectors; worker `i` is at port `i`. Returns when all have a result.
    pub fn sum(&mut self, workers: &mut [WorkerSession], vectors: &mut [Vec<f32>], mean: bool) -> Vec<Result<Sum>> {
        let now = self.wire.now;
        let deadline = now + self.deadline;
        let rounds = workers.iter_mut().zip(vectors).enumerate();
        let rounds = rounds.map(|(port, (worker, values))| {
            let round = Round::new(worker, values, mean, now, deadline);
            (address(port as u16), round)
        });
        let rounds = rounds.collect();
        self.drive(rounds)
    }

    /// Sums the values of one worker, at any port.
    pub fn sum_at(&mut self, port: u16, worker: &mut WorkerSession, values: &mut [f32]) -> Result<Sum> {
        let now = self.wire.now;
        let round = Round::new(worker, values, false, now, now + self.deadline);
        self.drive(vec![(address(port), round)]).remove(0)
    }

    pub fn call(&mut self, port: u16, worker: &mut WorkerSession, command: Control) -> Result<()> {
        let now = self.wire.now;
        let call = worker.call(command, now, now + Duration::from_secs(5));
        self.drive(vec![(address(port), call)]).remove(0)
    }

    /// Lets time pass without workers.
    pub fn pass(&mut self, time: Duration) {
        let until = self.wire.now + time;
        while let Some(next) = self.next_event().filter(|next| *next <= until) {
            self.wire.now = self.wire.now.max(next);
            self.step::<Round<'_>>(&mut []);
        }
        self.wire.now = until;
        self.step::<Round<'_>>(&mut []);
    }

    /// Runs exchanges for a time in which none ends.
    pub fn run_for<E: Exchange>(&mut self, exchanges: &mut [(SocketAddr, E)], time: Duration) {
        let until = self.wire.now + time;
        loop {
            for (at, exchange) in exchanges.iter_mut() {
                let mut port = Port(&mut self.wire, *at);
                let now = port.0.now;
                assert!(exchange.poll(now, &mut port).is_none());
            }
            let wakes = exchanges.iter().map(|(_, exchange)| exchange.next_wake());
            let next = wakes.chain(self.next_event()).min();
            let Some(next) = next.filter(|next| *next <= until) else {
                break;
            };
            self.wire.now = self.wire.now.max(next);
            let running = exchanges.iter_mut().map(|(at, e)| (*at, Some(Borrowed(e))));
            self.step(&mut running.collect::<Vec<_>>());
        }
        self.wire.now = until;
    }

    /// Runs exchanges until all have ended.
    pub fn drive<E: Exchange>(&mut self, exchanges: Vec<(SocketAddr, E)>) -> Vec<Result<E::Output>> {
        let mut results: Vec<_> = exchanges.iter().map(|_| None).collect();
        let mut exchanges: Vec<_> = exchanges.into_iter().map(|(a, e)| (a, Some(e))).collect();
        loop {
            for ((at, exchange), result) in exchanges.iter_mut().zip(&mut results) {
                let Some(running) = exchange else { continue };
                let mut port = Port(&mut self.wire, *at);
                let now = port.0.now;
                *result = running.poll(now, &mut port);
                if result.is_some() {
                    *exchange = None;
                }
            }
            let wakes = exchanges.iter().flat_map(|(_, e)| e).map(E::next_wake);
            let Some(wake) = wakes.min() else {
                break;
            };
            self.events += 1;
            assert!(self.events < 5_000_000, "no end of the exchanges");
            let next = self.next_event().map_or(wake, |event| event.min(wake));
            self.wire.now = self.wire.now.max(next);
            self.step(&mut exchanges);
        }
        results.into_iter().flatten().collect()
    }

    fn next_event(&self) -> Option<Instant> {
        let arrival = self.wire.queue.peek().map(|next| next.0.0);
        [Some(self.expired + EXPIRE_EVERY), arrival].into_iter().flatten().min()
    }

    fn step<E: Exchange>(&mut self, exchanges: &mut [(SocketAddr, Option<E>)]) {
        let now = self.wire.now;
        while let Some((_, _, to, from, datagram)) = self.wire.due() {
            if self.wire.dead.contains(&to) || self.wire.dead.contains(&from) {
                continue;
            }
            if let Some((at, aggregator)) = self.aggregators.iter_mut().find(|a| a.0 == to) {
                aggregator.receive(now, from, &datagram, &mut Port(&mut self.wire, *at));
            } else if let Some((at, Some(exchange))) = exchanges.iter_mut().find(|e| e.0 == to) {
                exchange.receive(now, from, &datagram, &mut Port(&mut self.wire, *at));
            }
        }
        self.expired = now;
        for (at, aggregator) in &mut self.aggregators {
            aggregator.expire(now, &mut Port(&mut self.wire, *at));
        }
    }
}

/// Vectors of whole numbers, whose sums are exact in float32, in every order.
pub fn whole_numbers(workers: usize, length: usize, seed: u64) -> Vec<Vec<f32>> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut vector = || {
        let numbers = (0..length).map(|_| rng.random_range(-1000..1000) as f32);
        numbers.collect()
    };
    (0..workers).map(|_| vector()).collect()
}

/// Vectors with values of many magnitudes, as in gradients.
pub fn gradients(workers: usize, length: usize, seed: u64) -> Vec<Vec<f32>> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut value = || {
        let magnitude = 10f32.powi(rng.random_range(-9..3));
        magnitude * (rng.random::<f32>() - 0.5)
    };
    let mut vector = || (0..length).map(|_| value()).collect();
    (0..workers).map(|_| vector()).collect()
}

/// Sum in float64.
pub fn exact(vectors: &[Vec<f32>]) -> Vec<f64> {
    let length = vectors.first().map_or(0, Vec::len);
    let sum = |i| vectors.iter().map(|v| f64::from(v[i])).sum();
    (0..length).map(sum).collect()
}

pub fn as_f32(sum: &[f64]) -> Vec<f32> {
    sum.iter().map(|&value| value as f32).collect()
}
