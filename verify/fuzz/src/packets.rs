//! Datagrams to an aggregator of gradients, and frames to its DPDK interface.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::time::{Duration, Instant};

use bolero::TypeGenerator;

use crate::allocations;
use gradients::ethernet::{Arp, HeaderTemplate, MAX_FRAME, ParsedFrame};
use gradients::packet::{HEADER_BYTES, MAX_DATAGRAM, PacketHeader};
use gradients::{Aggregator, AggregatorLimits, Arithmetic, Asynchronous, JoinJob, Ticket, Transmit};

/// Limit of a job's segments.
const JOB: usize = 1 << 20;

/// An event at an aggregator.
#[derive(Debug, Clone, TypeGenerator)]
pub enum Event {
    /// A worker joins a job.
    Join {
        /// The job.
        #[generator(0..3u8)]
        job: u8,
        /// Number of the worker.
        #[generator(0..4u16)]
        worker: u16,
        /// Workers of the job.
        #[generator(0..4u16)]
        workers: u16,
        /// Number format.
        fixed: bool,
        /// Values of a segment.
        #[generator(0..400u16)]
        segment_values: u16,
        /// Values, threshold and staleness of an asynchronous job.
        asynchronous: Option<(u16, u8, u8)>,
    },
    /// A worker of a session, by its index, leaves.
    Leave(u8),
    /// A datagram.
    Datagram {
        /// Index of the session; above the last one, a random number.
        session: u8,
        /// Port of the sender.
        #[generator(0..4u8)]
        from: u8,
        /// First byte: version and kind.
        kind: u8,
        /// Round.
        #[generator(0..6u32)]
        round: u32,
        /// Segment.
        #[generator(0..6u32)]
        segment: u32,
        /// Whether the body begins with the session's key.
        key: bool,
        /// The rest.
        body: Vec<u8>,
    },
    /// Any bytes.
    Bytes(Vec<u8>),
    /// Time passes, in milliseconds.
    Time(u16),
}

/// Datagrams that an aggregator sends.
struct Sent {
    datagrams: usize,
}

impl Transmit for Sent {
    fn send<const HEAD: usize>(&mut self, _to: SocketAddr, head: &[u8; HEAD], body: &[u8]) {
        assert!(HEAD + body.len() <= MAX_DATAGRAM);
        assert!(PacketHeader::decode(&[head, body].concat()).is_some());
        self.datagrams += 1;
    }
}

fn from(port: u8) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1], 40_000 + u16::from(port)))
}

/// Lets the events happen to an aggregator.
///
/// # Panics
/// When it allocates more than its limit, answers a datagram with more than one for each worker and segment, or a job without members stays.
pub fn aggregate(events: &[Event]) {
    let mut now = Instant::now();
    let limits = AggregatorLimits { jobs: 2, window: 4, job_bytes: JOB };
    let mut aggregator = Aggregator::new(from(9), limits);
    let mut tickets: Vec<Ticket> = Vec::new();
    let mut sent = Sent { datagrams: 0 };
    for event in events {
        match event {
            &Event::Join { job, worker, workers, fixed, segment_values, asynchronous } => {
                let request = JoinJob {
                    job: format!("job {job}"),
                    worker,
                    workers,
                    world: workers.into(),
                    name: format!("worker {worker}"),
                    arithmetic: match fixed {
                        true => Arithmetic::Fixed,
                        false => Arithmetic::Float,
                    },
                    segment_values,
                    deadline: Duration::from_millis(500),
                    asynchronous: asynchronous.map(|(values, threshold, staleness)| Asynchronous {
                        values: values.into(),
                        threshold: threshold.into(),
                        staleness: staleness.into(),
                    }),
                    below: None,
                };
                let join = || aggregator.join(now, &request, None);
                let limit = limits.bytes() as u64 + (64 << 10);
                tickets.extend(allocations::within(limit, "a join", join));
            }
            &Event::Leave(ticket) => {
                if let Some(ticket) = tickets.get(usize::from(ticket)) {
                    aggregator.leave(ticket.session);
                }
            }
            Event::Datagram { session, from: port, kind, round, segment, key, body } => {
                let ticket = tickets.get(usize::from(*session));
                let number = ticket.map_or(u32::from(*session) << 8, |ticket| ticket.session);
                let fields = u64::from(*round) | u64::from(*segment) << 20;
                let mut datagram = vec![*kind];
                datagram.extend(number.to_le_bytes());
                datagram.extend(&fields.to_le_bytes()[..HEADER_BYTES - 5]);
                if let (true, Some(ticket)) = (*key, ticket) {
                    datagram.extend(ticket.key);
                }
                datagram.extend(body);
                receive(&mut aggregator, now, from(*port), &datagram, &mut sent);
            }
            Event::Bytes(bytes) => receive(&mut aggregator, now, from(0), bytes, &mut sent),
            &Event::Time(ms) => {
                now += Duration::from_millis(ms.into());
                aggregator.expire(now, &mut sent);
            }
        }
    }
    aggregator.expire(now + Duration::from_secs(60), &mut sent);
    tickets.iter().for_each(|ticket| aggregator.leave(ticket.session));
    assert_eq!(aggregator.jobs(), 0, "a job ends with its last member");
}

fn receive(aggregator: &mut Aggregator, now: Instant, from: SocketAddr, datagram: &[u8], sent: &mut Sent) {
    sent.datagrams = 0;
    let receive = || aggregator.receive(now, from, datagram, sent);
    allocations::within(64 << 10, "a datagram", receive);
    // A sum goes to every worker; a forced one, each segment of the window.
    assert!(sent.datagrams <= 4 * 8 + 1, "{} datagrams", sent.datagrams);
}

/// Parses a frame of the network. A datagram in it lies inside of the frame, and is the same in a frame of our own; so is ARP.
///
/// # Panics
/// When it is not.
pub fn frame(input: &[u8]) {
    let here = SocketAddrV4::new(Ipv4Addr::new(10, 8, 0, 2), 7711);
    let mac = [2, 0, 0, 0, 0, 2];
    let mut room = [0; MAX_FRAME];
    match ParsedFrame::read(input, here, 4) {
        ParsedFrame::Datagram(datagram) => {
            let body = &input[datagram.range];
            let to = SocketAddrV4::new(*here.ip(), here.port() + datagram.port);
            let template = HeaderTemplate::new((datagram.from, mac), (to, mac));
            let Some(bytes) = template.write(&mut room, &[], body) else {
                assert!(body.len() > MAX_DATAGRAM);
                return;
            };
            let ParsedFrame::Datagram(again) = ParsedFrame::read(&room[..bytes], here, 4) else {
                panic!("a frame of our own");
            };
            assert_eq!((again.from, again.port), (datagram.from, datagram.port));
            assert_eq!(&room[again.range], body);
        }
        ParsedFrame::Arp(arp) => {
            let bytes = arp.write(&mut room);
            assert_eq!(ParsedFrame::read(&room[..bytes], here, 4), ParsedFrame::Arp(arp));
            let reply: Arp = arp.reply(mac);
            assert_eq!((reply.to, reply.from.1), (arp.from, mac));
        }
        ParsedFrame::Broken | ParsedFrame::Other => {}
    }
}
