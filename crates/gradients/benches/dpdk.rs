//! Packets that one core receives and sends over DPDK's memif. Prints one JSON object a line: `{"benchmark", "workers", "hugepages",
//! "values", "frame_bytes", "received_per_s", "sent_per_s", "packets_per_s", "payload_bytes_per_s"}`.
//!
//! `memif_sum` is the aggregator, which sums frames of `values` float32 values; `memif_echo`, the control, sends each frame back. The
//! figures are of that core; frames are counted with Ethernet's check sequence; payload is the values, in both directions. Another core
//! generates the traffic of all workers from prepared frames. Run `cargo bench --features dpdk --bench dpdk`. Without `--bench` everything runs
//! once, as a check.

use std::io::Write;
use std::net::SocketAddrV4;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use gradients::dpdk::device::{Device, RxQueue, TxQueue};
use gradients::dpdk::eal;
use gradients::dpdk::packets::{FreePackets, PacketPool};
use gradients::ethernet::{Arp, HeaderTemplate, MAX_FRAME, Mac, ParsedFrame};
use gradients::packet::{HEADER_BYTES, MAX_SEGMENT_VALUES, PacketHeader, PacketKind};
use gradients::{AggregatorLimits, Arithmetic, DpdkConfig, JoinJob, dpdk_aggregators};

const WORKERS: u16 = 4;
const AGGREGATOR: &str = "10.8.0.1:7711";
const GENERATOR: &str = "10.8.0.2:40000";
/// Segments sent between two polls, and most frames in flight: fewer than memif's ring has.
const CHUNK: u32 = 32;
const IN_FLIGHT: u64 = 512;
const PATIENCE: Duration = Duration::from_secs(10);

fn main() {
    let measure = std::env::args().any(|argument| argument == "--bench");
    let huge = free_hugepages() >= 256;
    let pages = if huge { "--in-memory" } else { "--no-huge" };
    let eal = [pages, "-m", "512", "--no-pci"].map(str::to_owned);
    // Before a thread is pinned.
    let allowed = eal::allowed();
    let cores = Cores { receiving: allowed[0], generating: allowed[allowed.len() - 1], huge };
    eal::start(&eal).expect("DPDK starts");
    for values in [2, MAX_SEGMENT_VALUES as u16] {
        let rounds = match (measure, values) {
            (false, _) => 1,
            (true, 2) => 40_000,
            (true, _) => 4_000,
        };
        echo(&cores, values, rounds);
        sum(&eal, &cores, values, rounds);
    }
}

/// Free hugepages of 2 MiB. With them figures are a tenth higher.
fn free_hugepages() -> u64 {
    let free = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
    let count = std::fs::read_to_string(free).ok();
    count.and_then(|n| n.trim().parse().ok()).unwrap_or(0)
}

/// Core under test, and core of the traffic generator.
struct Cores {
    receiving: usize,
    generating: usize,
    /// Whether DPDK's memory is in hugepages.
    huge: bool,
}

/// Both devices of a memif, and the folder of its socket.
fn memif(number: usize) -> (tempfile::TempDir, [String; 2]) {
    let folder = tempfile::tempdir().expect("a folder for a socket");
    let socket = folder.path().join("memif.sock");
    let device = |role, number| format!("net_memif{number},role={role},id=0,socket={}", socket.display());
    let devices = [device("server", 2 * number), device("client", 2 * number + 1)];
    (folder, devices)
}

fn print(benchmark: &str, used: &Cores, values: u16, took: Duration, received: u64, sent: u64) {
    let seconds = took.as_secs_f64();
    let per_s = |packets: u64| packets as f64 / seconds;
    let line = serde_json::json!({
        "benchmark": benchmark,
        "workers": WORKERS,
        "hugepages": used.huge,
        "values": values,
        "frame_bytes": 14 + 20 + 8 + HEADER_BYTES + 4 * usize::from(values) + 4,
        "received_per_s": per_s(received),
        "sent_per_s": per_s(sent),
        "packets_per_s": per_s(received + sent),
        "payload_bytes_per_s": per_s((received + sent) * 4 * u64::from(values)),
    });
    // A closed pipe is no error.
    let _ = writeln!(std::io::stdout(), "{line}");
}

fn sum(eal: &[String], used: &Cores, values: u16, rounds: u32) {
    // `echo` has pinned this thread to the generator's core, and the aggregator may use the cores of the thread that starts it.
    eal::pin(used.receiving).expect("a core");
    let (_folder, [server, client]) = memif(0);
    let limits = AggregatorLimits::default();
    let config = DpdkConfig {
        eal: eal.to_vec(),
        devices: vec![server],
        address: AGGREGATOR.parse().expect("an address"),
        prefix: 24,
        gateway: None,
        threads: 1,
        cores: vec![used.receiving],
        idle_sleep: Duration::ZERO,
    };
    let aggregators = dpdk_aggregators(&config, limits).expect("a memif");
    let aggregator = &aggregators[0];
    let mut generator = TrafficGenerator::new(&client, used.generating);
    let mac = generator.find(*config.address.ip());
    let mut templates = Vec::new();
    for worker in 0..WORKERS {
        let request = JoinJob {
            job: "bench".into(),
            worker,
            workers: WORKERS,
            world: WORKERS.into(),
            name: "bench".into(),
            arithmetic: Arithmetic::Float,
            segment_values: values,
            deadline: PATIENCE,
            asynchronous: None,
            below: None,
        };
        let ticket = aggregator.join(&request, None).expect("there is room");
        let from: SocketAddrV4 = GENERATOR.parse().expect("an address");
        let from = SocketAddrV4::new(*from.ip(), from.port() + worker);
        let route = HeaderTemplate::new((from, generator.mac), (config.address, mac));
        generator.validate_path(&route, ticket.session, &ticket.key);
        templates.push(ContributionTemplate::new(&route, ticket.session, values));
    }
    let before = aggregator.aggregator().counters();
    let took = generator.run(&templates, limits.window, rounds);
    let sums: Vec<f32> = generator.last_values(config.address);
    assert_eq!(sums, vec![f32::from(WORKERS); values.into()]);
    let counters = aggregator.aggregator().counters();
    let packets = u64::from(rounds) * u64::from(limits.window) * u64::from(WORKERS);
    assert_eq!(counters.counted, packets, "{counters:?}");
    assert_eq!(counters.sums * u64::from(WORKERS), packets);
    assert_eq!(counters.received - before.received, packets);
    print("memif_sum", used, values, took, packets, packets);
}

fn echo(used: &Cores, values: u16, rounds: u32) {
    let (_folder, [server, client]) = memif(1);
    let stop = Arc::new(AtomicBool::new(false));
    let pool = PacketPool::new(1, 1).expect("memory");
    let (device, mut queues) = Device::open(&server, 1, &pool).expect("a memif");
    let echoing = thread::spawn({
        let stop = stop.clone();
        let taking = used.receiving;
        move || {
            eal::pin(taking).expect("a core");
            let _registered = eal::Registered::new();
            let mut sender = TxQueue::new(device, 0);
            // Pairs with the store below; nothing is published with it.
            while !stop.load(Ordering::Relaxed) {
                for at in 0..queues[0].fetch() {
                    queues[0].take(at).into_iter().for_each(|p| sender.send(p));
                }
                sender.flush();
            }
            drop(pool);
        }
    });
    let mut generator = TrafficGenerator::new(&client, used.generating);
    let to: SocketAddrV4 = AGGREGATOR.parse().expect("an address");
    let from = GENERATOR.parse().expect("an address");
    let route = HeaderTemplate::new((from, generator.mac), (to, generator.mac));
    let templates = (0..WORKERS).map(|worker| ContributionTemplate::new(&route, worker.into(), values));
    let templates: Vec<_> = templates.collect();
    generator.wait_for_peer(&templates[0]);
    let took = generator.run(&templates, 256, rounds);
    let packets = u64::from(rounds) * 256 * u64::from(WORKERS);
    print("memif_echo", used, values, took, packets, packets);
    // Pairs with the load above.
    stop.store(true, Ordering::Relaxed);
    echoing.join().expect("it echoes");
}

/// Frame of a contribution, in which round and segment are filled in.
struct ContributionTemplate {
    frame: [u8; MAX_FRAME],
    bytes: usize,
    /// One's complement sum of all other bytes.
    rest: u32,
}

impl ContributionTemplate {
    const CHECKSUM: usize = 40;
    const FIELDS: usize = 42 + 5;

    fn new(route: &HeaderTemplate, session: u32, values: u16) -> Self {
        let mut frame = [0; MAX_FRAME];
        let body = 1f32.to_le_bytes().repeat(values.into());
        let header = PacketHeader::new(PacketKind::Float, session, 0, 0).encode();
        let bytes = route.write(&mut frame, &header, &body).expect("it fits");
        let sum = u16::from_be_bytes([frame[Self::CHECKSUM], frame[Self::CHECKSUM + 1]]);
        ContributionTemplate { frame, bytes, rest: (!sum).into() }
    }

    fn write(&self, room: &mut [u8; MAX_FRAME], round: u32, segment: u32) -> usize {
        room[..self.bytes].copy_from_slice(&self.frame[..self.bytes]);
        let fields = u64::from(round & 0xF_FFFF) | u64::from(segment) << 20;
        let fields = &fields.to_le_bytes()[..5];
        room[Self::FIELDS..Self::FIELDS + 5].copy_from_slice(fields);
        let [a, b, c, d, e] = [0, 1, 2, 3, 4].map(|i| u32::from(fields[i]));
        let sum = self.rest + a + c + e + ((b + d) << 8);
        let sum = (sum & 0xFFFF) + (sum >> 16);
        let sum = !((sum & 0xFFFF) + (sum >> 16)) as u16;
        room[Self::CHECKSUM..Self::CHECKSUM + 2].copy_from_slice(&sum.to_be_bytes());
        self.bytes
    }
}

/// All workers, on one core.
struct TrafficGenerator {
    mac: Mac,
    received: RxQueue,
    sent: TxQueue,
    free_packets: FreePackets,
    _registered: Option<eal::Registered>,
}

impl TrafficGenerator {
    fn new(device: &str, core: usize) -> Self {
        eal::pin(core).expect("a core");
        let pool = PacketPool::new(1, 1).expect("memory");
        let (device, mut queues) = Device::open(device, 1, &pool).expect("a memif");
        TrafficGenerator {
            mac: device.mac(),
            received: queues.remove(0),
            sent: TxQueue::new(device, 0),
            free_packets: FreePackets::new(pool),
            _registered: eal::Registered::new(),
        }
    }

    fn send(&mut self, write: impl FnOnce(&mut [u8; MAX_FRAME]) -> usize) {
        let packet = self.free_packets.fill(|room| Some(write(room)));
        self.sent.send(packet.expect("memory for packets"));
    }

    /// Sends a frame again and again until `answer` accepts a received one.
    fn ask<T>(&mut self, write: impl Fn(&mut [u8; MAX_FRAME]) -> usize, answer: impl Fn(&[u8]) -> Option<T>) -> T {
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            self.send(&write);
            self.sent.flush();
            let sent = Instant::now();
            while sent.elapsed() < Duration::from_millis(20) {
                let count = self.received.fetch();
                let mut frames = (0..count).filter_map(|at| self.received.frame(at));
                if let Some(taken) = frames.find_map(&answer) {
                    return taken;
                }
            }
        }
        panic!("no answer");
    }

    /// Waits until both ends of the memif are connected.
    fn wait_for_peer(&mut self, template: &ContributionTemplate) {
        self.ask(|room| template.write(room, 0, 0), |_| Some(()));
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(20) {
            self.received.fetch();
        }
        self.sent.refused = 0;
    }

    fn find(&mut self, ip: std::net::Ipv4Addr) -> Mac {
        let here: SocketAddrV4 = GENERATOR.parse().expect("an address");
        let request = Arp { is_request: true, from: (*here.ip(), self.mac), to: (ip, [0; 6]) };
        self.ask(
            |room| request.write(room),
            |frame| match ParsedFrame::read(frame, here, 1) {
                ParsedFrame::Arp(arp) if !arp.is_request => Some(arp.from.1),
                _ => None,
            },
        )
    }

    /// Validates the path of a worker.
    fn validate_path(&mut self, route: &HeaderTemplate, session: u32, key: &[u8]) {
        let header = PacketHeader::new(PacketKind::Join, session, 0, 0).encode();
        let payload = |frame: &[u8], kind| {
            let (header, body) = PacketHeader::decode(frame.get(42..)?)?;
            (header.kind == kind && header.session == session).then(|| body.to_vec())
        };
        let ask = |generator: &mut Self, cookie: &[u8], kind| {
            generator.ask(
                |room| {
                    let body = [key, cookie].concat();
                    route.write(room, &header, &body).expect("it fits")
                },
                |frame| payload(frame, kind),
            )
        };
        let cookie = ask(self, &[0; 8], PacketKind::Join);
        ask(self, &cookie[..8], PacketKind::Ack);
        self.sent.refused = 0;
    }

    /// Sends all segments of the rounds, and receives as many frames as it has sent.
    fn run(&mut self, templates: &[ContributionTemplate], window: u32, rounds: u32) -> Duration {
        let (mut sent, mut count) = (0, 0);
        let begun = Instant::now();
        for round in 1..=rounds {
            for chunk in (0..window).step_by(CHUNK as usize) {
                for segment in chunk..chunk + CHUNK {
                    for template in templates {
                        self.send(|room| template.write(room, round, segment));
                        sent += 1;
                    }
                }
                self.sent.flush();
                self.receive(&mut count, sent - IN_FLIGHT.min(sent));
            }
        }
        self.receive(&mut count, sent);
        assert_eq!(self.sent.refused, 0);
        begun.elapsed()
    }

    fn receive(&mut self, count: &mut u64, at_least: u64) {
        let begun = Instant::now();
        let mut turns = 0u32;
        while *count < at_least {
            *count += self.received.fetch() as u64;
            turns = turns.wrapping_add(1);
            assert!(!turns.is_multiple_of(1 << 20) || begun.elapsed() < PATIENCE, "{count} of {at_least} came back");
        }
    }

    fn last_values(&self, from: SocketAddrV4) -> Vec<f32> {
        let last = self.received.count() - 1;
        let frame = self.received.frame(last).expect("a burst");
        let worker: SocketAddrV4 = GENERATOR.parse().expect("an address");
        let to = SocketAddrV4::new(*worker.ip(), worker.port() + WORKERS - 1);
        let ParsedFrame::Datagram(found) = ParsedFrame::read(frame, to, 1) else {
            panic!("no datagram: {frame:?}");
        };
        assert_eq!(found.from, from);
        let (words, _) = frame[found.range.start + HEADER_BYTES..found.range.end].as_chunks::<4>();
        words.iter().map(|word| f32::from_le_bytes(*word)).collect()
    }
}
