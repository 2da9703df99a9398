//! Speed of sums of gradients. Prints one JSON object a line: the aggregator on one core without a network, in datagrams of `values` float32
//! values, `{"benchmark": "aggregator", "workers", "values", "received_per_s", "sent_per_s"}`; and sums over UDP on loopback, with a
//! thread for each worker, `{"benchmark": "udp_sum", "workers", "bytes", "p50_ms", "best_ms"}`. Run `cargo bench --bench gradients`. Without
//! `--bench`, as from `cargo test`, everything runs once, as a check.

use std::hint::black_box;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use base::wait::Wait;
use gradients::packet::{HEADER_BYTES, PacketHeader, PacketKind};
use gradients::{
    Aggregator, AggregatorLimits, Arithmetic, JobWorker, JoinJob, Transmit, UdpTransport, Worker, udp_aggregators,
};

const WORKERS: u16 = 4;
/// The paper's gradients: DQN, A2C, DDPG and PPO, in bytes (iSwitch).
const SIZES: [usize; 4] = [6_410_000, 3_310_000, 157_520, 40_020];
const LONG: Duration = Duration::from_secs(60);

fn main() {
    let measure = std::env::args().any(|argument| argument == "--bench");
    for values in [2, 360] {
        aggregator(values, if measure { 2000 } else { 1 });
    }
    for bytes in SIZES {
        let rounds = match measure {
            true => (200_000_000 / bytes).clamp(40, 1000),
            false => 1,
        };
        udp_sum(bytes, rounds);
    }
}

fn request(worker: u16, values: u16) -> JoinJob {
    JoinJob {
        job: "bench".into(),
        worker,
        workers: WORKERS,
        world: WORKERS.into(),
        name: "bench".into(),
        arithmetic: Arithmetic::Float,
        segment_values: values,
        deadline: LONG,
        asynchronous: None,
        below: None,
    }
}

fn print(line: &serde_json::Value) {
    // A closed pipe is no error.
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Copies datagrams, as a network's ring does, and keeps the last one.
#[derive(Default)]
struct Ring {
    last: Vec<u8>,
    sent: u64,
}

impl Transmit for Ring {
    fn send<const HEAD: usize>(&mut self, _to: SocketAddr, head: &[u8; HEAD], body: &[u8]) {
        self.last.clear();
        self.last.extend_from_slice(head);
        self.last.extend_from_slice(body);
        self.sent += 1;
    }
}

fn aggregator(values: u16, rounds: u64) {
    let limits = AggregatorLimits::default();
    let mut aggregator = Aggregator::new(SocketAddr::from(([10, 0, 0, 1], 1000)), limits);
    let mut ring = Ring::default();
    let now = Instant::now();
    let mut workers = Vec::new();
    for worker in 0..WORKERS {
        let from = SocketAddr::from(([10, 0, 0, 1], worker + 1));
        let join = aggregator.join(now, &request(worker, values), None);
        let ticket = join.expect("there is room for one job");
        let header = PacketHeader::new(PacketKind::Join, ticket.session, 0, 0).encode();
        let mut cookie = vec![0; 8];
        // The first datagram requests the cookie, the second one returns it.
        for _ in 0..2 {
            let proof = [header.as_slice(), &ticket.key, &cookie].concat();
            aggregator.receive(now, from, &proof, &mut ring);
            cookie = ring.last[HEADER_BYTES..].to_vec();
        }
        workers.push((from, ticket.session));
    }
    ring.sent = 0;
    let mut datagram = vec![0; HEADER_BYTES + 4 * usize::from(values)];
    let begun = Instant::now();
    for round in 1..=rounds {
        for segment in 0..limits.window {
            for (from, session) in &workers {
                let header = PacketHeader::new(PacketKind::Float, *session, round, segment);
                datagram[..HEADER_BYTES].copy_from_slice(&header.encode());
                aggregator.receive(now, *from, &datagram, &mut ring);
            }
        }
    }
    black_box(&ring.last);
    let took = begun.elapsed().as_secs_f64();
    let received = rounds * u64::from(limits.window) * u64::from(WORKERS);
    assert_eq!(aggregator.counters().counted, received);
    assert_eq!(ring.sent, received);
    print(&serde_json::json!({
        "benchmark": "aggregator",
        "workers": WORKERS,
        "values": values,
        "received_per_s": received as f64 / took,
        "sent_per_s": ring.sent as f64 / took,
    }));
}

fn udp_sum(bytes: usize, rounds: usize) {
    let here = SocketAddr::from(([127, 0, 0, 1], 0));
    let aggregator = udp_aggregators(here, 1, AggregatorLimits::default()).expect("a port on this machine").remove(0);
    let together = Barrier::new(WORKERS.into());
    let work = |number| {
        let request = request(number, 360);
        let ticket = aggregator.join(&request, None).expect("there is room");
        let wait = Wait::forever();
        let transport = UdpTransport::to(ticket.address).expect("a socket");
        let worker = Worker::join(transport, &request, &ticket, LONG, &wait);
        let mut worker = worker.expect("it answers");
        let mut values = vec![1.0; bytes / 4];
        let mut times = Vec::with_capacity(rounds);
        for _ in 0..rounds {
            together.wait();
            let begun = Instant::now();
            let sum = worker.sum(&mut values, true, LONG, &wait);
            sum.expect("everybody takes part");
            times.push(begun.elapsed());
        }
        assert!(values.iter().all(|&value| value == 1.0));
        times
    };
    let mut times = thread::scope(|scope| {
        let work = |number| {
            scope.spawn({
                let work = &work;
                move || work(number)
            })
        };
        let threads: Vec<_> = (0..WORKERS).map(work).collect();
        let times = threads.into_iter().map(|t| t.join().expect("a worker"));
        times.flatten().collect::<Vec<_>>()
    });
    times.sort();
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    print(&serde_json::json!({
        "benchmark": "udp_sum",
        "workers": WORKERS,
        "bytes": bytes,
        "p50_ms": ms(times[times.len() / 2]),
        "best_ms": ms(times[0]),
    }));
}
