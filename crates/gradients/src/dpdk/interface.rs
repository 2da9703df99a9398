//! The IPv4 interface on DPDK devices, for each core: frames to datagrams and back, ARP, and forwarding between two ports. The ARP table has the Ethernet address
//! and device of each neighbour, resolved on demand:
//!
//! | after | action |
//! | --- | --- |
//! | 10 ms | an unanswered request is repeated, if the address is still needed |
//! | 30 s | a resolved entry that is in use is refreshed by a request |
//! | 300 s | an entry without an answer is no longer used |

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use base::wait::lock;

use super::device::{self, Device, RxQueue, TxQueue};
use super::packets::{FreePackets, Packet};
use super::{DpdkConfig, OpenDevices};
use crate::ethernet::{Arp, HeaderTemplate, MAX_FRAME, Mac, ParsedDatagram, ParsedFrame, sum};
use crate::{FrameCounters, Transmit};

/// Cached routes of a core. The cache is direct-mapped: each address has one entry, which others may overwrite.
const CACHED_ROUTES: usize = 1024;
/// Age at which the cache is cleared, so that moved neighbours are noticed.
const ROUTES_FOR: Duration = Duration::from_millis(100);

/// An IPv4 interface on one or more devices, which are its ports.
pub struct Interface {
    pub config: DpdkConfig,
    pub neighbours: Neighbours,
}

impl Interface {
    /// Address of one of its UDP ports, numbered from 0.
    pub fn at(&self, port: u16) -> SocketAddrV4 {
        SocketAddrV4::new(*self.config.address.ip(), self.config.address.port() + port)
    }

    fn next_hop(&self, to: Ipv4Addr) -> Option<Ipv4Addr> {
        let DpdkConfig { address, prefix, gateway, .. } = &self.config;
        let mask = u32::MAX.checked_shl(32 - u32::from(*prefix)).unwrap_or(0);
        let beyond = (to.to_bits() ^ address.ip().to_bits()) & mask != 0;
        if beyond { *gateway } else { Some(to) }
    }
}

/// A received datagram, in its packet.
pub struct ReceivedDatagram {
    packet: Packet,
    pub parsed: ParsedDatagram,
}

impl ReceivedDatagram {
    pub fn bytes(&self) -> &[u8] {
        let frame = self.packet.frame().unwrap_or_default();
        frame.get(self.parsed.range.clone()).unwrap_or_default()
    }
}

/// Receive side of one core.
pub struct FrameReceiver {
    interface: Arc<Interface>,
    /// UDP port of this core, numbered from 0.
    port: u16,
    /// One queue of each device, in the order of the devices; `None` where there are fewer queues than cores.
    queues: Vec<Option<RxQueue>>,
}

impl FrameReceiver {
    /// Receives datagrams for UDP port `core` of the interface, from one queue of each device.
    pub fn new(opened: &mut OpenDevices, core: usize) -> Self {
        FrameReceiver {
            interface: opened.interface.clone(),
            port: core as u16,
            queues: opened.queues.iter_mut().map(Iterator::next).collect(),
        }
    }

    /// Replaces the bursts by the next ones, one of each device. Returns the number of frames.
    pub fn fetch(&mut self) -> usize {
        let queues = self.queues.iter_mut().flatten();
        queues.map(RxQueue::fetch).sum()
    }

    /// Reads the bursts: passes datagrams for this core to `take`, with their senders, and those for other cores to `hand_over`; answers
    /// ARP, and forwards or counts all other frames.
    #[inline]
    pub fn read(
        &mut self,
        out: &mut FrameSender,
        mut take: impl FnMut(SocketAddr, &[u8], &mut FrameSender),
        mut hand_over: impl FnMut(ReceivedDatagram, &mut FrameSender),
    ) {
        let is_switch = self.queues.len() == 2;
        let (here, ports) = (self.interface.config.address, self.interface.config.threads as u16);
        for (device, queue) in self.queues.iter_mut().enumerate() {
            let Some(queue) = queue else { continue };
            out.counters.received += queue.count() as u64;
            for at in 0..queue.count() {
                let frame = queue.frame(at).unwrap_or_default();
                match ParsedFrame::read(frame, here, ports) {
                    ParsedFrame::Datagram(parsed) if parsed.port == self.port => {
                        take(parsed.from.into(), &frame[parsed.range], out);
                    }
                    ParsedFrame::Datagram(parsed) => {
                        if let Some(packet) = queue.take(at) {
                            hand_over(ReceivedDatagram { packet, parsed }, out);
                        }
                    }
                    ParsedFrame::Arp(arp) if out.receive_arp(&arp, device) => {}
                    ParsedFrame::Broken => out.counters.broken += 1,
                    _ if is_switch => {
                        if let Some(packet) = queue.take(at) {
                            out.forward(1 - device, packet);
                        }
                    }
                    _ => out.counters.others += 1,
                }
            }
        }
    }

    /// Reconnects memifs without a peer: see [`device::reconnect_memif`].
    pub fn reconnect_memifs(&mut self) {
        for queue in self.queues.iter_mut().flatten() {
            device::reconnect_memif(std::slice::from_mut(queue));
        }
    }
}

struct CachedRoute {
    to: SocketAddrV4,
    device: usize,
    headers: HeaderTemplate,
}

/// Send side of one core.
pub struct FrameSender {
    interface: Arc<Interface>,
    from: SocketAddrV4,
    /// One queue of each device, in the order of the devices.
    queues: Vec<TxQueue>,
    free_packets: FreePackets,
    routes: Vec<Option<CachedRoute>>,
    /// Time at which the routes are cleared.
    next_clear: Instant,
    now: Instant,
    counters: FrameCounters,
}

impl FrameSender {
    /// Sends from UDP port `core` of the interface, by that core's queue of each device.
    pub fn new(opened: &OpenDevices, core: usize) -> Self {
        let interface = opened.interface.clone();
        let queue = |device: &Arc<Device>| TxQueue::new(device.clone(), core);
        FrameSender {
            from: interface.at(core as u16),
            interface,
            queues: opened.devices.iter().map(queue).collect(),
            free_packets: FreePackets::new(opened.pool.clone()),
            routes: (0..CACHED_ROUTES).map(|_| None).collect(),
            next_clear: Instant::now(),
            now: Instant::now(),
            counters: FrameCounters::default(),
        }
    }

    /// Frames received and sent by this core.
    pub fn counters(&self) -> FrameCounters {
        let sum = |of: fn(&TxQueue) -> u64| self.queues.iter().map(of).sum::<u64>();
        FrameCounters {
            sent: sum(|queue| queue.sent),
            refused: self.counters.refused + sum(|queue| queue.refused),
            ..self.counters
        }
    }

    /// Begins a poll at `now`.
    pub fn begin(&mut self, now: Instant) {
        self.now = now;
        if now >= self.next_clear {
            self.routes.fill_with(|| None);
            self.next_clear = now + ROUTES_FOR;
        }
    }

    pub fn flush(&mut self) {
        self.queues.iter_mut().for_each(TxQueue::flush);
    }

    /// Counts a datagram for another core whose handover queue was full.
    pub fn count_overrun(&mut self) {
        self.counters.overrun += 1;
    }

    fn forward(&mut self, device: usize, packet: Packet) {
        self.counters.forwarded += 1;
        self.queues[device].send(packet);
    }

    /// Learns from an ARP frame, and answers a request. `true` if it was addressed to this interface.
    fn receive_arp(&mut self, arp: &Arp, device: usize) -> bool {
        let here = *self.interface.config.address.ip();
        self.interface.neighbours.learn(arp, here, device, self.now);
        let own = arp.to.0 == here && arp.from.0 != here;
        if own && arp.is_request {
            let reply = arp.reply(self.queues[device].device().mac());
            self.send_frame(device, |buffer| Some(reply.write(buffer)));
        }
        own
    }

    /// Broadcasts an ARP request for `ip` on all devices.
    fn request_arp(&mut self, ip: Ipv4Addr) {
        for device in 0..self.queues.len() {
            let mac = self.queues[device].device().mac();
            let request = Arp { is_request: true, from: (*self.interface.config.address.ip(), mac), to: (ip, [0; 6]) };
            self.send_frame(device, |buffer| Some(request.write(buffer)));
        }
    }

    fn send_frame(&mut self, device: usize, write: impl FnOnce(&mut [u8; MAX_FRAME]) -> Option<usize>) {
        match self.free_packets.fill(write) {
            Some(packet) => self.queues[device].send(packet),
            None => self.counters.refused += 1,
        }
    }

    /// The route to an address; `None` without one, or while ARP has not answered.
    fn route(&mut self, to: SocketAddrV4) -> Option<CachedRoute> {
        let hop = self.interface.next_hop(*to.ip())?;
        let (neighbour, ask) = self.interface.neighbours.find(hop, self.now);
        if ask {
            self.request_arp(hop);
        }
        let Neighbour { mac, device } = neighbour?;
        let from = (self.from, self.queues.get(device)?.device().mac());
        Some(CachedRoute { to, device, headers: HeaderTemplate::new(from, (to, mac)) })
    }

    /// Sends a datagram of two parts; `body_sum` is the [`sum`] of `body`, so that a loop over receivers computes it once.
    #[inline(always)]
    fn send_summed<const HEAD: usize>(&mut self, to: SocketAddr, head: &[u8; HEAD], body: &[u8], body_sum: u64) {
        let SocketAddr::V4(to) = to else {
            self.counters.unresolved += 1;
            return;
        };
        let at = (to.ip().to_bits() as usize).wrapping_add(to.port().into()) % CACHED_ROUTES;
        let route = match &self.routes[at] {
            Some(route) if route.to == to => route,
            _ => match self.route(to) {
                Some(route) => self.routes[at].insert(route),
                None => return self.counters.unresolved += 1,
            },
        };
        let headers = &route.headers;
        let write = |buffer: &mut _| headers.write_summed(buffer, head, body, body_sum);
        match self.free_packets.fill(write) {
            Some(packet) => self.queues[route.device].send(packet),
            None => self.counters.refused += 1,
        }
    }
}

impl Transmit for FrameSender {
    fn send<const HEAD: usize>(&mut self, to: SocketAddr, head: &[u8; HEAD], body: &[u8]) {
        self.send_summed(to, head, body, sum(body));
    }

    #[inline]
    fn send_each<const HEAD: usize>(&mut self, to: impl Iterator<Item = (SocketAddr, [u8; HEAD])>, body: &[u8]) {
        let body_sum = sum(body);
        to.for_each(|(to, head)| self.send_summed(to, &head, body, body_sum));
    }
}

/// Most entries: more than an aggregator has workers, few enough that forged requests cannot exhaust memory. A full table is cleared:
/// addresses in use are resolved again.
const MAX_ENTRIES: usize = 4096;
/// Time between two requests for an unknown address.
const ASK_EVERY: Duration = Duration::from_millis(10);
/// Age from which an entry is refreshed.
const STALE: Duration = Duration::from_secs(30);
/// Age from which an entry is not used.
const EXPIRED: Duration = Duration::from_secs(300);

/// A host on one of the networks of the interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Neighbour {
    pub mac: Mac,
    /// Number of the device that it was heard on.
    pub device: usize,
}

/// An entry, without a neighbour until a reply arrives.
#[derive(Default)]
struct ArpEntry {
    /// The neighbour, and the arrival of its last ARP frame.
    heard: Option<(Neighbour, Instant)>,
    /// Last request, if there was no reply since.
    asked: Option<Instant>,
}

/// The ARP table, shared by all cores.
#[derive(Default)]
pub struct Neighbours {
    /// A panic leaves it whole: each change is one insertion or removal.
    table: Mutex<HashMap<Ipv4Addr, ArpEntry>>,
}

impl Neighbours {
    /// Learns the sender of an ARP frame. A new sender is added if it asks for `here`, as it is about to send something; otherwise only
    /// known entries are updated (RFC 826).
    pub fn learn(&self, arp: &Arp, here: Ipv4Addr, device: usize, now: Instant) {
        let (ip, mac) = arp.from;
        let is_group = mac[0] & 1 == 1;
        if is_group || ip == here || ip.is_unspecified() {
            return;
        }
        let mut table = lock(&self.table);
        if arp.to.0 == here || table.contains_key(&ip) {
            *entry(&mut table, ip) = ArpEntry { heard: Some((Neighbour { mac, device }, now)), asked: None };
        }
    }

    /// The neighbour with an address, if it is known, and whether to send a request now.
    pub fn find(&self, ip: Ipv4Addr, now: Instant) -> (Option<Neighbour>, bool) {
        let mut table = lock(&self.table);
        let entry = entry(&mut table, ip);
        let heard = entry.heard.map(|(neighbour, at)| (neighbour, now.saturating_duration_since(at)));
        let (neighbour, interval) = match heard {
            Some((neighbour, age)) if age < STALE => return (Some(neighbour), false),
            Some((neighbour, age)) if age < EXPIRED => (Some(neighbour), STALE),
            _ => (None, ASK_EVERY),
        };
        let due = entry.asked.is_none_or(|asked| now >= asked + interval);
        if due {
            entry.asked = Some(now);
        }
        (neighbour, due)
    }
}

/// The entry of an address, new if it has none.
fn entry(table: &mut HashMap<Ipv4Addr, ArpEntry>, ip: Ipv4Addr) -> &mut ArpEntry {
    if table.len() == MAX_ENTRIES && !table.contains_key(&ip) {
        table.clear();
    }
    table.entry(ip).or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_networks_are_reached_by_the_gateway() {
        let ip = |last| Ipv4Addr::new(10, 8, 1, last);
        let next_hop = |prefix, gateway| {
            let config = DpdkConfig {
                eal: Vec::new(),
                devices: Vec::new(),
                address: SocketAddrV4::new(ip(2), 7711),
                prefix,
                gateway,
                threads: 1,
                cores: Vec::new(),
                idle_sleep: Duration::ZERO,
            };
            let interface = Interface { config, neighbours: Neighbours::default() };
            interface.next_hop(ip(130))
        };
        assert_eq!(next_hop(24, None), Some(ip(130)));
        assert_eq!(next_hop(25, None), None);
        assert_eq!(next_hop(25, Some(ip(1))), Some(ip(1)));
        assert_eq!(next_hop(32, Some(ip(1))), Some(ip(1)));
        assert_eq!(next_hop(0, None), Some(ip(130)));
    }

    const HERE: Ipv4Addr = Ipv4Addr::new(10, 8, 0, 2);
    const OTHER: Ipv4Addr = Ipv4Addr::new(10, 8, 0, 9);
    const ONE: Mac = [2, 0, 0, 0, 0, 1];
    const TWO: Mac = [2, 0, 0, 0, 0, 2];

    fn request(ip: Ipv4Addr, mac: Mac, target: Ipv4Addr) -> Arp {
        Arp { is_request: true, from: (ip, mac), to: (target, [0; 6]) }
    }

    #[test]
    fn senders_of_requests_are_learned_and_moves_are_noticed() {
        let neighbours = Neighbours::default();
        let now = Instant::now();
        let worker = Ipv4Addr::new(10, 8, 0, 1);
        neighbours.learn(&request(worker, ONE, OTHER), HERE, 0, now);
        assert!(lock(&neighbours.table).is_empty(), "the request was for another host");
        neighbours.learn(&request(worker, ONE, HERE), HERE, 0, now);
        assert_eq!(neighbours.find(worker, now), (Some(Neighbour { mac: ONE, device: 0 }), false));
        // A gratuitous announcement after a move.
        neighbours.learn(&request(worker, TWO, worker), HERE, 1, now);
        assert_eq!(neighbours.find(worker, now), (Some(Neighbour { mac: TWO, device: 1 }), false));
    }

    #[test]
    fn unknown_addresses_are_asked_for_at_intervals_and_silent_ones_expire() {
        let neighbours = Neighbours::default();
        let mut now = Instant::now();
        assert_eq!(neighbours.find(OTHER, now), (None, true));
        assert_eq!(neighbours.find(OTHER, now), (None, false));
        now += ASK_EVERY;
        assert_eq!(neighbours.find(OTHER, now), (None, true));
        neighbours.learn(&request(OTHER, ONE, HERE), HERE, 0, now);
        let known = Some(Neighbour { mac: ONE, device: 0 });
        assert_eq!(neighbours.find(OTHER, now), (known, false));
        now += STALE;
        assert_eq!(neighbours.find(OTHER, now), (known, true));
        assert_eq!(neighbours.find(OTHER, now), (known, false));
        now += EXPIRED;
        assert_eq!(neighbours.find(OTHER, now), (None, true));
    }

    #[test]
    fn invalid_addresses_are_not_learned() {
        let neighbours = Neighbours::default();
        let now = Instant::now();
        let group = [3, 0, 0, 0, 0, 1];
        neighbours.learn(&request(OTHER, group, HERE), HERE, 0, now);
        neighbours.learn(&request(HERE, ONE, HERE), HERE, 0, now);
        neighbours.learn(&request(Ipv4Addr::UNSPECIFIED, ONE, HERE), HERE, 0, now);
        assert!(lock(&neighbours.table).is_empty());
    }

    #[test]
    fn invented_senders_neither_exhaust_memory_nor_lock_a_worker_out() {
        let neighbours = Neighbours::default();
        let now = Instant::now();
        for i in 0..2 * MAX_ENTRIES as u32 + 9 {
            let ip = Ipv4Addr::from_bits(0x0B00_0000 + i);
            neighbours.learn(&request(ip, TWO, HERE), HERE, 0, now);
            assert!(lock(&neighbours.table).len() <= MAX_ENTRIES);
        }
        assert_eq!(neighbours.find(OTHER, now), (None, true));
        neighbours.learn(&request(OTHER, ONE, HERE), HERE, 0, now);
        assert_eq!(neighbours.find(OTHER, now), (Some(Neighbour { mac: ONE, device: 0 }), false));
    }
}
