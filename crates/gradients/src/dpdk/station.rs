//! One core's end of the network: frames in and out of a station's devices, ARP, and the frames that go on to the other port.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::checksum::sum;
use super::device::{self, Blanks, Device, Packet, Pool, Receiver, Sender};
use super::frame::{Arp, Found, Frame, MAX_FRAME, Route};
use super::neighbours::{Neighbours, Place};
use crate::Transmit;

/// Routes that a core keeps, each at a place of its own, which others may take.
const ROUTES: usize = 1024;

/// A place in an IPv4 network, behind one or more ports.
pub struct Station {
    /// Its address, and the first port of its datagrams.
    pub address: SocketAddrV4,
    /// How many ports it has, from that one on.
    pub ports: u16,
    /// Bits of the network's part of the address.
    pub prefix: u8,
    /// Who takes what goes to other networks.
    pub gateway: Option<Ipv4Addr>,
    /// Who is where.
    pub neighbours: Neighbours,
}

impl Station {
    /// A station that knows nobody yet.
    pub fn new(address: SocketAddrV4, ports: u16, prefix: u8, gateway: Option<Ipv4Addr>) -> Self {
        Station {
            address,
            ports,
            prefix,
            gateway,
            neighbours: Neighbours::default(),
        }
    }

    /// Its address at one of its ports, from 0.
    pub fn at(&self, port: u16) -> SocketAddrV4 {
        SocketAddrV4::new(*self.address.ip(), self.address.port() + port)
    }

    fn next_hop(&self, to: Ipv4Addr) -> Option<Ipv4Addr> {
        let mask = u32::MAX
            .checked_shl(32 - u32::from(self.prefix))
            .unwrap_or(0);
        let beyond = (to.to_bits() ^ self.address.ip().to_bits()) & mask != 0;
        if beyond { self.gateway } else { Some(to) }
    }
}

/// What has passed a plane's ports, in frames.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct FrameCounters {
    /// Received.
    pub received: u64,
    /// Sent, with those that were forwarded.
    pub sent: u64,
    /// Forwarded from one port of a switch to the other.
    pub forwarded: u64,
    /// Received, of no use here, and not forwarded.
    pub others: u64,
    /// Marked and for this station, but damaged, cut short, in fragments, or for a UDP port that it does not have.
    pub broken: u64,
    /// Not sent, for nobody knows yet where they should go.
    pub unresolved: u64,
    /// Not sent, as the device's queue stayed full, or for want of packets.
    pub refused: u64,
    /// Handed to another core, whose queue was full.
    pub overrun: u64,
}

impl std::ops::AddAssign for FrameCounters {
    fn add_assign(&mut self, other: Self) {
        self.received += other.received;
        self.sent += other.sent;
        self.forwarded += other.forwarded;
        self.others += other.others;
        self.broken += other.broken;
        self.unresolved += other.unresolved;
        self.refused += other.refused;
        self.overrun += other.overrun;
    }
}

/// A datagram that has arrived, in its packet.
pub struct Datagram {
    packet: Packet,
    from: SocketAddrV4,
    /// Which of the station's ports it is for, from 0.
    pub port: u16,
    at: Range<u16>,
}

impl Datagram {
    /// Where it is from.
    pub fn from(&self) -> SocketAddr {
        self.from.into()
    }

    /// What it says.
    pub fn bytes(&self) -> &[u8] {
        let frame = self.packet.frame().unwrap_or_default();
        let at = usize::from(self.at.start)..usize::from(self.at.end);
        frame.get(at).unwrap_or_default()
    }
}

/// What arrives at one core.
pub struct Inbox {
    station: Arc<Station>,
    /// Of the station's ports, from 0.
    number: u16,
    /// One queue of each device, by the device's number; none where cores outnumber queues.
    receivers: Vec<Option<Receiver>>,
    /// Of the packets: freed after them.
    _pool: Arc<Pool>,
}

impl Inbox {
    /// Takes what is for port `number` of the station, from one queue of each device.
    pub fn new(
        station: Arc<Station>,
        number: usize,
        receivers: Vec<Option<Receiver>>,
        pool: Arc<Pool>,
    ) -> Self {
        Inbox {
            _pool: pool,
            number: number as u16,
            station,
            receivers,
        }
    }

    /// Fetches one burst of each device, in place of those before: the number of frames.
    pub fn fetch(&mut self) -> usize {
        let receivers = self.receivers.iter_mut().flatten();
        receivers.map(Receiver::fetch).sum()
    }

    /// Reads what was fetched. `take` is given the datagrams for this core, and where they are from; `pass` those for others.
    #[inline]
    pub fn read(
        &mut self,
        out: &mut Outbox,
        mut take: impl FnMut(SocketAddr, &[u8], &mut Outbox),
        mut pass: impl FnMut(Datagram, &mut Outbox),
    ) {
        let is_switch = self.receivers.len() == 2;
        let (here, ports) = (self.station.address, self.station.ports);
        for (port, receiver) in self.receivers.iter_mut().enumerate() {
            let Some(receiver) = receiver else { continue };
            out.counters.received += receiver.count() as u64;
            for at in 0..receiver.count() {
                let frame = receiver.frame(at);
                let found = frame.and_then(|frame| Found::read(frame, here, ports));
                match (found, frame) {
                    (Some(found), Some(frame)) if found.port == self.number => {
                        take(found.from.into(), &frame[found.at], out);
                    }
                    (Some(found), _) => {
                        let datagram = receiver.take(at).map(|packet| Datagram {
                            packet,
                            from: found.from,
                            port: found.port,
                            at: found.at.start as u16..found.at.end as u16,
                        });
                        datagram.into_iter().for_each(|one| pass(one, out));
                    }
                    (None, _) => {
                        Self::read_other(&self.station, receiver, at, port, is_switch, out)
                    }
                }
            }
        }
    }

    /// Takes a frame that has no datagram for this station.
    #[inline(never)]
    fn read_other(
        station: &Station,
        receiver: &mut Receiver,
        at: usize,
        port: usize,
        is_switch: bool,
        out: &mut Outbox,
    ) {
        let frame = receiver.frame(at);
        let read = |frame| Frame::read(frame, station.address, station.ports);
        match frame.map_or(Frame::Other, read) {
            Frame::Arp(arp) if out.hear(&arp, port) => {}
            Frame::Broken => out.counters.broken += 1,
            _ if is_switch => {
                let packet = receiver.take(at);
                packet
                    .into_iter()
                    .for_each(|one| out.forward(1 - port, one));
            }
            _ => out.counters.others += 1,
        }
    }

    /// Lets memifs look for their other end: see [`device::look_for_peer`].
    pub fn look_for_peers(&mut self) {
        for receiver in self.receivers.iter_mut().flatten() {
            device::look_for_peer(std::slice::from_mut(receiver));
        }
    }
}

/// How an address is reached.
struct Reach {
    to: SocketAddrV4,
    /// Number of the device.
    port: usize,
    route: Route,
}

/// What one core sends.
pub struct Outbox {
    station: Arc<Station>,
    /// Where its datagrams are from.
    from: SocketAddrV4,
    /// By the port's number.
    senders: Vec<Sender>,
    blanks: Blanks,
    routes: Vec<Option<Reach>>,
    /// Of the neighbours, when the routes were made.
    version: u64,
    now: Instant,
    counters: FrameCounters,
}

impl Outbox {
    /// Sends from port `core` of the station, by the core's queue of each device.
    pub fn new(
        station: Arc<Station>,
        devices: &[Arc<Device>],
        core: usize,
        pool: Arc<Pool>,
    ) -> Self {
        let sender = |device: &Arc<Device>| Sender::new(device.clone(), core);
        Outbox {
            version: station.neighbours.version(),
            from: station.at(core as u16),
            station,
            senders: devices.iter().map(sender).collect(),
            blanks: Blanks::new(pool),
            routes: (0..ROUTES).map(|_| None).collect(),
            now: Instant::now(),
            counters: FrameCounters::default(),
        }
    }

    /// What has passed.
    pub fn counters(&self) -> FrameCounters {
        let sum = |of: fn(&Sender) -> u64| self.senders.iter().map(of).sum::<u64>();
        FrameCounters {
            sent: sum(|sender| sender.sent),
            refused: self.counters.refused + sum(|sender| sender.refused),
            ..self.counters
        }
    }

    /// A turn begins.
    pub fn begin(&mut self, now: Instant) {
        self.now = now;
        let version = self.station.neighbours.version();
        if version != self.version {
            self.routes.fill_with(|| None);
            self.version = version;
        }
    }

    /// Hands everything to the devices.
    pub fn flush(&mut self) {
        self.senders.iter_mut().for_each(Sender::flush);
    }

    /// A datagram for another core found its queue full.
    pub fn overrun(&mut self) {
        self.counters.overrun += 1;
    }

    /// Asks whether those who have been silent for long are still there. Now and then, on one core.
    pub fn review_neighbours(&mut self) {
        for ip in self.station.neighbours.review(self.now) {
            self.ask(ip);
        }
    }

    fn forward(&mut self, port: usize, packet: Packet) {
        self.counters.forwarded += 1;
        self.senders[port].send(packet);
    }

    /// Takes what ARP says, and answers; `true` where it is for this station alone.
    fn hear(&mut self, arp: &Arp, port: usize) -> bool {
        let here = *self.station.address.ip();
        self.station.neighbours.hear(arp, here, port, self.now);
        let mine = arp.to.0 == here && arp.from.0 != here;
        if mine && arp.asks {
            let answer = arp.answer(self.senders[port].device().mac());
            self.send_frame(port, |room| Some(answer.write(room)));
        }
        mine
    }

    /// Asks everybody where `ip` is.
    fn ask(&mut self, ip: Ipv4Addr) {
        for port in 0..self.senders.len() {
            let mac = self.senders[port].device().mac();
            let question = Arp {
                asks: true,
                from: (*self.station.address.ip(), mac),
                to: (ip, [0; 6]),
            };
            self.send_frame(port, |room| Some(question.write(room)));
        }
    }

    fn send_frame(
        &mut self,
        port: usize,
        write: impl FnOnce(&mut [u8; MAX_FRAME]) -> Option<usize>,
    ) {
        match self.blanks.fill(write) {
            Some(packet) => self.senders[port].send(packet),
            None => self.counters.refused += 1,
        }
    }

    /// Finds the way to an address, or asks for it.
    fn find(&mut self, to: SocketAddrV4) -> Option<Reach> {
        let hop = self.station.next_hop(*to.ip())?;
        match self.station.neighbours.find(hop, self.now) {
            Ok(Place { mac, port }) => {
                let from = (self.from, self.senders.get(port)?.device().mac());
                Some(Reach {
                    to,
                    port,
                    route: Route::new(from, (to, mac)),
                })
            }
            Err(ask) => {
                if ask {
                    self.ask(hop);
                }
                None
            }
        }
    }
}

impl Outbox {
    /// Sends a datagram of two parts, of which the second one's [`sum`] is known. In the loop over who gets it, all that is of the second
    /// part is done once.
    #[inline(always)]
    fn send_summed<const HEAD: usize>(
        &mut self,
        to: SocketAddr,
        head: &[u8; HEAD],
        body: &[u8],
        body_sum: u64,
    ) {
        let SocketAddr::V4(to) = to else {
            self.counters.unresolved += 1;
            return;
        };
        let at = (to.ip().to_bits() as usize).wrapping_add(to.port().into()) % ROUTES;
        let reach = match &self.routes[at] {
            Some(reach) if reach.to == to => reach,
            _ => match self.find(to) {
                Some(reach) => self.routes[at].insert(reach),
                None => return self.counters.unresolved += 1,
            },
        };
        let route = &reach.route;
        let write = |room: &mut _| route.write_summed(room, head, body, body_sum);
        match self.blanks.fill(write) {
            Some(packet) => self.senders[reach.port].send(packet),
            None => self.counters.refused += 1,
        }
    }
}

impl Transmit for Outbox {
    fn send<const HEAD: usize>(&mut self, to: SocketAddr, head: &[u8; HEAD], body: &[u8]) {
        self.send_summed(to, head, body, sum(body));
    }

    #[inline]
    fn send_each<const HEAD: usize>(
        &mut self,
        to: impl Iterator<Item = (SocketAddr, [u8; HEAD])>,
        body: &[u8],
    ) {
        let body_sum = sum(body);
        to.for_each(|(to, head)| self.send_summed(to, &head, body, body_sum));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_networks_are_reached_by_the_gateway() {
        let ip = |last| Ipv4Addr::new(10, 8, 1, last);
        let station = |prefix, gateway| {
            Station::new(SocketAddrV4::new(ip(2), 7711), 1, prefix, gateway).next_hop(ip(130))
        };
        assert_eq!(station(24, None), Some(ip(130)));
        assert_eq!(station(25, None), None);
        assert_eq!(station(25, Some(ip(1))), Some(ip(1)));
        assert_eq!(station(32, Some(ip(1))), Some(ip(1)));
        assert_eq!(station(0, None), Some(ip(130)));
    }
}
