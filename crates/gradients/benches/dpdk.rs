//! How many packets one core takes and sends over DPDK's memif. Prints one JSON object a line: `{"benchmark", "workers", "hugepages",
//! "values", "frame_bytes", "received_per_s", "sent_per_s", "packets_per_s", "payload_bytes_per_s"}`. `memif_sum` is the aggregator, which
//! sums frames of so many float32 values; `memif_echo`, the control, sends each frame back as it came. Packets received and sent are those
//! of that core; the length of frames is Ethernet's, with the check sequence; payload is the values, of both directions. Another core plays
//! all workers, with frames that it has prepared. `cargo bench --features dpdk --bench dpdk`; without `--bench` everything is done once, to
//! show that it works.

use std::io::Write;
use std::net::SocketAddrV4;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use gradients::dpdk::device::{Blanks, Device, Pool, Receiver, Sender};
use gradients::dpdk::frame::{Arp, Frame, MAX_FRAME, Mac, Route};
use gradients::dpdk::{DpdkAggregator, DpdkConfig, cores, eal};
use gradients::packet::{HEADER_BYTES, Header, Kind, MAX_SEGMENT_VALUES};
use gradients::{Arithmetic, JoinJob, Limits};

const WORKERS: u16 = 4;
const AGGREGATOR: &str = "10.8.0.1:7711";
const PLAYER: &str = "10.8.0.2:40000";
/// Segments sent with one look at what has come back, and frames that may be under way: fewer than memif's ring has.
const CHUNK: u32 = 32;
const UNDER_WAY: u64 = 512;
const PATIENCE: Duration = Duration::from_secs(10);

fn main() {
    let measure = std::env::args().any(|argument| argument == "--bench");
    let huge = free_hugepages() >= 256;
    let pages = if huge { "--in-memory" } else { "--no-huge" };
    let eal = [pages, "-m", "512", "--no-pci"].map(str::to_owned);
    // Before anything is pinned.
    let allowed = cores::allowed();
    let places = Places {
        taking: allowed[0],
        playing: allowed[allowed.len() - 1],
        huge,
    };
    eal::start(&eal).expect("DPDK starts");
    for values in [2, MAX_SEGMENT_VALUES as u16] {
        let rounds = match (measure, values) {
            (false, _) => 1,
            (true, 2) => 40_000,
            (true, _) => 4_000,
        };
        echo(&places, values, rounds);
        sum(&eal, &places, values, rounds);
    }
}

/// Of 2 MiB each; with them a figure is a tenth higher.
fn free_hugepages() -> u64 {
    let free = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
    let count = std::fs::read_to_string(free).ok();
    count.and_then(|n| n.trim().parse().ok()).unwrap_or(0)
}

/// The core that takes and sends, and the one that plays the workers.
struct Places {
    taking: usize,
    playing: usize,
    /// Whether DPDK's memory is in hugepages.
    huge: bool,
}

/// Both devices of a memif, and the folder of its socket.
fn memif(number: usize) -> (tempfile::TempDir, [String; 2]) {
    let folder = tempfile::tempdir().expect("a folder for a socket");
    let socket = folder.path().join("memif.sock");
    let device = |role, number| {
        format!(
            "net_memif{number},role={role},id=0,socket={}",
            socket.display()
        )
    };
    let devices = [
        device("server", 2 * number),
        device("client", 2 * number + 1),
    ];
    (folder, devices)
}

fn print(benchmark: &str, places: &Places, values: u16, took: Duration, received: u64, sent: u64) {
    let seconds = took.as_secs_f64();
    let per_s = |packets: u64| packets as f64 / seconds;
    let line = serde_json::json!({
        "benchmark": benchmark,
        "workers": WORKERS,
        "hugepages": places.huge,
        "values": values,
        "frame_bytes": 14 + 20 + 8 + HEADER_BYTES + 4 * usize::from(values) + 4,
        "received_per_s": per_s(received),
        "sent_per_s": per_s(sent),
        "packets_per_s": per_s(received + sent),
        "payload_bytes_per_s": per_s((received + sent) * 4 * u64::from(values)),
    });
    // A closed pipe is the reader's wish.
    let _ = writeln!(std::io::stdout(), "{line}");
}

fn sum(eal: &[String], places: &Places, values: u16, rounds: u32) {
    // Or the aggregator would find only the core that this thread was kept on.
    cores::pin(places.taking).expect("a core");
    let (_folder, [server, client]) = memif(0);
    let limits = Limits::default();
    let config = DpdkConfig {
        eal: eal.to_vec(),
        devices: vec![server],
        address: AGGREGATOR.parse().expect("an address"),
        prefix: 24,
        gateway: None,
        threads: 1,
        cores: vec![places.taking],
        idle_sleep: Duration::ZERO,
    };
    let aggregator = DpdkAggregator::start(&config, limits).expect("a memif");
    let mut player = Player::new(&client, places.playing);
    let mac = player.find(*config.address.ip());
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
        };
        let ticket = aggregator.join(&request, None).expect("there is room");
        let from: SocketAddrV4 = PLAYER.parse().expect("an address");
        let from = SocketAddrV4::new(*from.ip(), from.port() + worker);
        let route = Route::new((from, player.mac), (config.address, mac));
        player.prove(&route, ticket.session, &ticket.key);
        templates.push(Template::new(&route, ticket.session, values));
    }
    let before = aggregator.counters();
    let took = player.play(&templates, limits.window, rounds);
    let sums: Vec<f32> = player.last_values(config.address);
    assert_eq!(sums, vec![f32::from(WORKERS); values.into()]);
    let counters = aggregator.counters();
    let packets = u64::from(rounds) * u64::from(limits.window) * u64::from(WORKERS);
    assert_eq!(counters.counted, packets, "{counters:?}");
    assert_eq!(counters.sums * u64::from(WORKERS), packets);
    assert_eq!(counters.received - before.received, packets);
    print("memif_sum", places, values, took, packets, packets);
}

fn echo(places: &Places, values: u16, rounds: u32) {
    let (_folder, [server, client]) = memif(1);
    let stop = Arc::new(AtomicBool::new(false));
    let pool = Pool::new(1, 1).expect("memory");
    let (device, mut receivers) = Device::open(&server, 1, &pool).expect("a memif");
    let echoing = thread::spawn({
        let stop = stop.clone();
        let taking = places.taking;
        move || {
            cores::pin(taking).expect("a core");
            let _registered = eal::Registered::new();
            let mut sender = Sender::new(device, 0);
            // Pairs with the store below; nothing is published with it.
            while !stop.load(Ordering::Relaxed) {
                for at in 0..receivers[0].fetch() {
                    receivers[0]
                        .take(at)
                        .into_iter()
                        .for_each(|p| sender.send(p));
                }
                sender.flush();
            }
            drop(pool);
        }
    });
    let mut player = Player::new(&client, places.playing);
    let to: SocketAddrV4 = AGGREGATOR.parse().expect("an address");
    let from = PLAYER.parse().expect("an address");
    let route = Route::new((from, player.mac), (to, player.mac));
    let templates = (0..WORKERS).map(|worker| Template::new(&route, worker.into(), values));
    let templates: Vec<_> = templates.collect();
    player.wait_for_peer(&templates[0]);
    let took = player.play(&templates, 256, rounds);
    let packets = u64::from(rounds) * 256 * u64::from(WORKERS);
    print("memif_echo", places, values, took, packets, packets);
    // Pairs with the load above.
    stop.store(true, Ordering::Relaxed);
    echoing.join().expect("it echoes");
}

/// A contribution, but for its round and segment.
struct Template {
    frame: [u8; MAX_FRAME],
    bytes: usize,
    /// The one's complement sum of everything else.
    rest: u32,
}

impl Template {
    const CHECKSUM: usize = 40;
    const PLACE: usize = 42 + 5;

    fn new(route: &Route, session: u32, values: u16) -> Self {
        let mut frame = [0; MAX_FRAME];
        let body = 1f32.to_le_bytes().repeat(values.into());
        let header = Header::new(Kind::Float, session, 0, 0).encode();
        let bytes = route.write(&mut frame, &header, &body).expect("it fits");
        let sum = u16::from_be_bytes([frame[Self::CHECKSUM], frame[Self::CHECKSUM + 1]]);
        Template {
            frame,
            bytes,
            rest: (!sum).into(),
        }
    }

    fn write(&self, room: &mut [u8; MAX_FRAME], round: u32, segment: u32) -> usize {
        room[..self.bytes].copy_from_slice(&self.frame[..self.bytes]);
        let place = u64::from(round & 0xF_FFFF) | u64::from(segment) << 20;
        let place = &place.to_le_bytes()[..5];
        room[Self::PLACE..Self::PLACE + 5].copy_from_slice(place);
        let [a, b, c, d, e] = [0, 1, 2, 3, 4].map(|i| u32::from(place[i]));
        let sum = self.rest + a + c + e + ((b + d) << 8);
        let sum = (sum & 0xFFFF) + (sum >> 16);
        let sum = !((sum & 0xFFFF) + (sum >> 16)) as u16;
        room[Self::CHECKSUM..Self::CHECKSUM + 2].copy_from_slice(&sum.to_be_bytes());
        self.bytes
    }
}

/// All workers, on one core.
struct Player {
    mac: Mac,
    receiver: Receiver,
    sender: Sender,
    blanks: Blanks,
    _registered: Option<eal::Registered>,
}

impl Player {
    fn new(device: &str, core: usize) -> Self {
        cores::pin(core).expect("a core");
        let pool = Pool::new(1, 1).expect("memory");
        let (device, mut receivers) = Device::open(device, 1, &pool).expect("a memif");
        Player {
            mac: device.mac(),
            receiver: receivers.remove(0),
            sender: Sender::new(device, 0),
            blanks: Blanks::new(pool),
            _registered: eal::Registered::new(),
        }
    }

    fn send(&mut self, write: impl FnOnce(&mut [u8; MAX_FRAME]) -> usize) {
        let packet = self.blanks.fill(|room| Some(write(room)));
        self.sender.send(packet.expect("memory for packets"));
    }

    /// Sends until something comes back that `answer` takes.
    fn ask<T>(
        &mut self,
        write: impl Fn(&mut [u8; MAX_FRAME]) -> usize,
        answer: impl Fn(&[u8]) -> Option<T>,
    ) -> T {
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            self.send(&write);
            self.sender.flush();
            let sent = Instant::now();
            while sent.elapsed() < Duration::from_millis(20) {
                let count = self.receiver.fetch();
                let mut frames = (0..count).filter_map(|at| self.receiver.frame(at));
                if let Some(taken) = frames.find_map(&answer) {
                    return taken;
                }
            }
        }
        panic!("no answer");
    }

    /// Both ends of a memif find each other in their own time.
    fn wait_for_peer(&mut self, template: &Template) {
        self.ask(|room| template.write(room, 0, 0), |_| Some(()));
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(20) {
            self.receiver.fetch();
        }
        self.sender.refused = 0;
    }

    fn find(&mut self, ip: std::net::Ipv4Addr) -> Mac {
        let here: SocketAddrV4 = PLAYER.parse().expect("an address");
        let question = Arp {
            asks: true,
            from: (*here.ip(), self.mac),
            to: (ip, [0; 6]),
        };
        self.ask(
            |room| question.write(room),
            |frame| match Frame::read(frame, here, 1) {
                Frame::Arp(arp) if !arp.asks => Some(arp.from.1),
                _ => None,
            },
        )
    }

    /// Shows the aggregator where a worker is.
    fn prove(&mut self, route: &Route, session: u32, key: &[u8]) {
        let header = Header::new(Kind::Join, session, 0, 0).encode();
        let payload = |frame: &[u8], kind| {
            let (header, body) = Header::decode(frame.get(42..)?)?;
            (header.kind == kind && header.session == session).then(|| body.to_vec())
        };
        let ask = |player: &mut Self, cookie: &[u8], kind| {
            player.ask(
                |room| {
                    let body = [key, cookie].concat();
                    route.write(room, &header, &body).expect("it fits")
                },
                |frame| payload(frame, kind),
            )
        };
        let cookie = ask(self, &[0; 8], Kind::Join);
        ask(self, &cookie[..8], Kind::Ack);
        self.sender.refused = 0;
    }

    /// Sends all segments of so many rounds, and takes as many frames as it has sent.
    fn play(&mut self, templates: &[Template], window: u32, rounds: u32) -> Duration {
        let (mut sent, mut taken) = (0, 0);
        let begun = Instant::now();
        for round in 1..=rounds {
            for chunk in (0..window).step_by(CHUNK as usize) {
                for segment in chunk..chunk + CHUNK {
                    for template in templates {
                        self.send(|room| template.write(room, round, segment));
                        sent += 1;
                    }
                }
                self.sender.flush();
                self.take(&mut taken, sent - UNDER_WAY.min(sent));
            }
        }
        self.take(&mut taken, sent);
        assert_eq!(self.sender.refused, 0);
        begun.elapsed()
    }

    fn take(&mut self, taken: &mut u64, at_least: u64) {
        let begun = Instant::now();
        let mut turns = 0u32;
        while *taken < at_least {
            *taken += self.receiver.fetch() as u64;
            turns = turns.wrapping_add(1);
            assert!(
                !turns.is_multiple_of(1 << 20) || begun.elapsed() < PATIENCE,
                "{taken} of {at_least} came back"
            );
        }
    }

    fn last_values(&self, from: SocketAddrV4) -> Vec<f32> {
        let last = self.receiver.count() - 1;
        let frame = self.receiver.frame(last).expect("a burst");
        let worker: SocketAddrV4 = PLAYER.parse().expect("an address");
        let to = SocketAddrV4::new(*worker.ip(), worker.port() + WORKERS - 1);
        let Frame::Datagram(found) = Frame::read(frame, to, 1) else {
            panic!("no datagram: {frame:?}");
        };
        assert_eq!(found.from, from);
        let (words, _) = frame[found.at.start + HEADER_BYTES..found.at.end].as_chunks::<4>();
        words.iter().map(|word| f32::from_le_bytes(*word)).collect()
    }
}
