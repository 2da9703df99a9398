//! Frames: the subset of Ethernet, IPv4, UDP and ARP that gradients need. Checksums are computed in software, as most virtual devices have
//! no checksum offload.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::ops::Range;

use crate::datagrams::DSCP;
use crate::packet::MAX_DATAGRAM;

/// An Ethernet address.
pub type Mac = [u8; 6];
/// Ethernet's broadcast address.
pub const BROADCAST: Mac = [0xFF; 6];
/// Longest frame that is sent, in bytes without the frame check sequence.
pub const MAX_FRAME: usize = PAYLOAD_AT + MAX_DATAGRAM;
/// Bytes of an ARP frame.
pub const ARP_FRAME: usize = 42;

/// Bytes of headers.
const ETHERNET: usize = 14;
const IP: usize = 20;
const UDP: usize = 8;
/// Offset of a datagram's payload.
const PAYLOAD_AT: usize = ETHERNET + IP + UDP;
/// Shortest frame: Ethernet's 64 bytes without the frame check sequence. Shorter ones are padded.
const MIN_FRAME: usize = 60;
/// Ethertypes.
const IPV4: [u8; 2] = [0x08, 0x00];
const ARP: [u8; 2] = [0x08, 0x06];
const PROTOCOL_UDP: u8 = 17;
/// Time to live of sent datagrams.
const HOPS: u8 = 64;

/// A received frame, parsed for an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ParsedFrame {
    /// A UDP datagram for the interface with the protocol's DSCP.
    Datagram(ParsedDatagram),
    /// A datagram for its address with that DSCP, but damaged, truncated, fragmented, or for an unknown UDP port.
    Broken,
    /// ARP, for any address.
    Arp(Arp),
    /// Anything else.
    Other,
}

/// A UDP datagram for the interface with the protocol's DSCP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsedDatagram {
    /// Address of its sender.
    pub from: SocketAddrV4,
    /// Destination UDP port, numbered from 0 at the interface's first port.
    pub port: u16,
    /// Range of the payload in the frame.
    pub range: Range<usize>,
}

impl ParsedFrame {
    /// Parses `frame` for the interface at `here`, which has `ports` UDP ports from the port of `here` upwards.
    #[inline(always)]
    pub fn read(frame: &[u8], here: SocketAddrV4, ports: u16) -> ParsedFrame {
        match Headers::of(frame) {
            None => Arp::read(frame).map_or(ParsedFrame::Other, ParsedFrame::Arp),
            Some(headers) if !headers.is_for(*here.ip()) => ParsedFrame::Other,
            Some(headers) => {
                let datagram = headers.datagram(frame, here.port(), ports);
                datagram.map_or(ParsedFrame::Broken, ParsedFrame::Datagram)
            }
        }
    }
}

/// Headers of an IPv4 frame.
struct Headers<'a>(&'a [u8; PAYLOAD_AT]);

impl<'a> Headers<'a> {
    #[inline]
    fn of(frame: &'a [u8]) -> Option<Self> {
        let head: &[u8; PAYLOAD_AT] = frame.first_chunk()?;
        (head[12..14] == IPV4 && head[14] >> 4 == 4).then_some(Headers(head))
    }

    /// Whether it is a UDP datagram to `here` with the protocol's DSCP. The lower two bits of the traffic class are ECN (RFC 3168).
    #[inline]
    fn is_for(&self, here: Ipv4Addr) -> bool {
        u32::from(self.0[15] >> 2) == DSCP && self.0[23] == PROTOCOL_UDP && self.0[30..34] == here.octets()
    }

    #[inline(always)]
    fn datagram(&self, frame: &[u8], first_port: u16, ports: u16) -> Option<ParsedDatagram> {
        let head = self.0;
        let pair = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
        let ip_bytes = 4 * usize::from(head[14] & 15);
        let total = usize::from(pair(16));
        const MORE_OR_OFFSET: u16 = 0x3FFF;
        if ip_bytes != IP || pair(20) & MORE_OR_OFFSET != 0 {
            return None;
        }
        let udp = frame.get(ETHERNET + IP..ETHERNET + total)?;
        let length = usize::from(pair(38));
        let port = pair(36).wrapping_sub(first_port);
        if length < UDP || length > udp.len() || port >= ports {
            return None;
        }
        let udp = &udp[..length];
        let whole = |sum: u64| fold(sum) == u16::MAX;
        if !whole(sum(&head[ETHERNET..ETHERNET + IP])) {
            return None;
        }
        // 0 means no checksum, which IPv4 allows.
        let addresses_and_udp = sum(&head[26..PAYLOAD_AT]) + pseudo(length);
        if pair(40) != 0 && !whole(addresses_and_udp + sum(&udp[UDP..])) {
            return None;
        }
        let source = Ipv4Addr::new(head[26], head[27], head[28], head[29]);
        Some(ParsedDatagram {
            from: SocketAddrV4::new(source, pair(34)),
            port,
            range: PAYLOAD_AT..ETHERNET + IP + length,
        })
    }
}

/// Sum of UDP's pseudo header without the addresses.
fn pseudo(length: usize) -> u64 {
    let [high, low] = (length as u16).to_be_bytes();
    u64::from(u32::from_le_bytes([0, PROTOCOL_UDP, high, low]))
}

/// Headers of all datagrams from one address to another, except lengths and checksums.
#[derive(Debug, Clone)]
pub struct HeaderTemplate {
    headers: [u8; PAYLOAD_AT],
    ip_sum: u64,
    udp_sum: u64,
}

impl HeaderTemplate {
    /// Headers from one address to the other.
    pub fn new(from: (SocketAddrV4, Mac), to: (SocketAddrV4, Mac)) -> Self {
        let mut head = [0; PAYLOAD_AT];
        head[..6].copy_from_slice(&to.1);
        head[6..12].copy_from_slice(&from.1);
        head[12..14].copy_from_slice(&IPV4);
        head[14] = 0x45;
        head[15] = (DSCP << 2) as u8;
        // "Don't fragment": an aggregator drops fragments.
        head[20] = 0x40;
        head[22] = HOPS;
        head[23] = PROTOCOL_UDP;
        head[26..30].copy_from_slice(&from.0.ip().octets());
        head[30..34].copy_from_slice(&to.0.ip().octets());
        head[34..36].copy_from_slice(&from.0.port().to_be_bytes());
        head[36..38].copy_from_slice(&to.0.port().to_be_bytes());
        HeaderTemplate { ip_sum: sum(&head[14..34]), udp_sum: sum(&head[26..38]), headers: head }
    }

    /// Writes the frame of a datagram of two parts to the beginning of `buffer`, and returns its length; `None` if it is too long.
    #[inline]
    pub fn write<const HEAD: usize>(
        &self,
        buffer: &mut [u8; MAX_FRAME],
        head: &[u8; HEAD],
        body: &[u8],
    ) -> Option<usize> {
        self.write_summed(buffer, head, body, sum(body))
    }

    /// [`HeaderTemplate::write`] for a `body` whose sum (see `checksum`) is known.
    #[inline]
    pub fn write_summed<const HEAD: usize>(
        &self,
        buffer: &mut [u8; MAX_FRAME],
        head: &[u8; HEAD],
        body: &[u8],
        body_sum: u64,
    ) -> Option<usize> {
        let payload = HEAD + body.len();
        let end = PAYLOAD_AT + payload;
        let (start, rest) = buffer.split_first_chunk_mut::<PAYLOAD_AT>()?;
        let (head_bytes, rest) = rest.split_first_chunk_mut::<HEAD>()?;
        *start = self.headers;
        *head_bytes = *head;
        copy(rest.get_mut(..body.len())?, body);
        let word = |length: usize| u16::from_le_bytes((length as u16).to_be_bytes());
        let (total, length) = (word(IP + UDP + payload), word(UDP + payload));
        let ip = !fold(self.ip_sum + u64::from(total));
        // Summed at their source: reading bytes that were just written takes longer.
        let body_sum = match HEAD % 2 {
            0 => body_sum,
            _ => fold(body_sum).swap_bytes().into(),
        };
        let udp_sum = self.udp_sum + u64::from(length) + pseudo(UDP + payload);
        // 0 would mean no checksum; its complement is the same sum.
        let udp = match !fold(udp_sum + sum(head) + body_sum) {
            0 => u16::MAX,
            udp => udp,
        };
        for (at, word) in [(16, total), (24, ip), (38, length), (40, udp)] {
            start[at..at + 2].copy_from_slice(&word.to_le_bytes());
        }
        if end < MIN_FRAME {
            buffer[end..MIN_FRAME].fill(0);
        }
        Some(end.max(MIN_FRAME))
    }
}

/// Copies `from` to `to`, which is as long. Up to 16 bytes are copied inline, in less time than a call of `memcpy` takes.
#[inline]
fn copy(to: &mut [u8], from: &[u8]) {
    match (from.first_chunk::<8>(), from.last_chunk::<8>()) {
        (Some(first), Some(last)) if from.len() <= 16 => {
            let (first, last) = (*first, *last);
            to[..8].copy_from_slice(&first);
            let at = to.len() - 8;
            to[at..].copy_from_slice(&last);
        }
        _ => to.copy_from_slice(from),
    }
}

/// An ARP request for the Ethernet address of an IPv4 address, or the reply (RFC 826).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arp {
    /// Request, not reply.
    pub is_request: bool,
    /// Addresses of the sender.
    pub from: (Ipv4Addr, Mac),
    /// Addresses of the target; a request does not know the Ethernet address.
    pub to: (Ipv4Addr, Mac),
}

impl Arp {
    /// Hardware type Ethernet, protocol type IPv4, and the lengths of their addresses.
    const TYPES: [u8; 6] = [0, 1, IPV4[0], IPV4[1], 6, 4];

    #[cold]
    fn read(frame: &[u8]) -> Option<Self> {
        let head: &[u8; ARP_FRAME] = frame.first_chunk()?;
        if head[12..14] != ARP || head[14..20] != Self::TYPES {
            return None;
        }
        let addresses = |at: usize| {
            let mut mac = [0; 6];
            mac.copy_from_slice(&head[at..at + 6]);
            let ip = Ipv4Addr::new(head[at + 6], head[at + 7], head[at + 8], head[at + 9]);
            (ip, mac)
        };
        let is_request = match head[20..22] {
            [0, 1] => true,
            [0, 2] => false,
            _ => return None,
        };
        Some(Arp { is_request, from: addresses(22), to: addresses(32) })
    }

    /// Writes the frame to the beginning of `buffer`; returns its length.
    pub fn write(&self, buffer: &mut [u8; MAX_FRAME]) -> usize {
        buffer[..MIN_FRAME].fill(0);
        let to = if self.is_request { BROADCAST } else { self.to.1 };
        buffer[..6].copy_from_slice(&to);
        buffer[6..12].copy_from_slice(&self.from.1);
        buffer[12..14].copy_from_slice(&ARP);
        buffer[14..20].copy_from_slice(&Self::TYPES);
        buffer[21] = if self.is_request { 1 } else { 2 };
        for (at, (ip, mac)) in [(22, self.from), (32, self.to)] {
            buffer[at..at + 6].copy_from_slice(&mac);
            buffer[at + 6..at + 10].copy_from_slice(&ip.octets());
        }
        MIN_FRAME
    }

    /// Reply of the target, whose Ethernet address is `mac`.
    pub fn reply(&self, mac: Mac) -> Arp {
        Arp { is_request: false, from: (self.to.0, mac), to: self.from }
    }
}

/// One's complement sum of RFC 1071, not folded. Words are read in little-endian order, which gives the same sum with its bytes swapped.
#[inline(always)]
pub fn sum(bytes: &[u8]) -> u64 {
    // AVX2 halves the time of a whole frame. For a short one its setup costs more than it saves.
    #[cfg(target_arch = "x86_64")]
    if bytes.len() >= 128 && is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { sum_with_avx2(bytes) };
    }
    let (words, rest) = bytes.as_chunks::<8>();
    let words = words.iter().map(|word| u128::from(u64::from_le_bytes(*word)));
    let words: u128 = words.sum();
    let halves = |word: u64| (word >> 32) + (word & 0xFFFF_FFFF);
    halves(words as u64) + (words >> 64) as u64 + sum_rest(rest)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum_with_avx2(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<4>();
    let words = words.iter().map(|word| u64::from(u32::from_le_bytes(*word)));
    words.sum::<u64>() + sum_rest(rest)
}

/// Sum of fewer than eight bytes.
#[inline(always)]
fn sum_rest(rest: &[u8]) -> u64 {
    let (fours, rest) = rest.as_chunks::<4>();
    let (twos, ones) = rest.as_chunks::<2>();
    let four = fours.first().map_or(0, |four| u32::from_le_bytes(*four));
    let two = twos.first().map_or(0, |two| u16::from_le_bytes(*two));
    let one = ones.first().copied().unwrap_or(0);
    // In the order of the bytes: an odd last byte is the lower half of its word.
    u64::from(four) + u64::from(two) + u64::from(one)
}

/// Folds a [`sum`] to 16 bits. Adding the number to itself with its halves swapped leaves sum and carry in the upper half.
#[inline]
pub fn fold(sum: u64) -> u16 {
    let sum = (sum.wrapping_add(sum.rotate_left(32)) >> 32) as u32;
    (sum.wrapping_add(sum.rotate_left(16)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: (SocketAddrV4, Mac) = (SocketAddrV4::new(Ipv4Addr::new(10, 8, 0, 1), 40_000), [2, 0, 0, 0, 0, 1]);
    const B: (SocketAddrV4, Mac) = (SocketAddrV4::new(Ipv4Addr::new(10, 8, 0, 2), 7711), [2, 0, 0, 0, 0, 2]);

    fn frame<const HEAD: usize>(head: &[u8; HEAD], body: &[u8]) -> Vec<u8> {
        let mut buffer = [0xAA; MAX_FRAME];
        let bytes = HeaderTemplate::new(A, B).write(&mut buffer, head, body).unwrap();
        buffer[..bytes].to_vec()
    }

    fn read(frame: &[u8]) -> ParsedFrame {
        ParsedFrame::read(frame, B.0, 1)
    }

    fn survives<const HEAD: usize>(datagram: &[u8]) {
        let Some((head, body)) = datagram.split_first_chunk::<HEAD>() else {
            return;
        };
        let frame = frame(head, body);
        assert_eq!(frame.len(), (PAYLOAD_AT + datagram.len()).max(60));
        let ParsedFrame::Datagram(found) = read(&frame) else {
            panic!("{} bytes: {:?}", datagram.len(), read(&frame));
        };
        assert_eq!((found.from, found.port), (A.0, 0));
        assert_eq!(frame[found.range], *datagram);
    }

    #[test]
    fn frames_survive_the_wire_at_every_length() {
        let bytes: Vec<u8> = (0..MAX_DATAGRAM).map(|i| (i * 31 + 7) as u8).collect();
        for length in (0..64).chain(1400..=MAX_DATAGRAM).step_by(if cfg!(miri) { 13 } else { 1 }) {
            let datagram = &bytes[..length];
            let heads = [survives::<0>, survives::<7>, survives::<10>, survives::<18>];
            heads.iter().for_each(|survives| survives(datagram));
        }
        let mut buffer = [0; MAX_FRAME];
        let too_long = HeaderTemplate::new(A, B).write(&mut buffer, &[0; 10], &[0; MAX_DATAGRAM - 9]);
        assert_eq!(too_long, None);
    }

    /// A datagram of Linux to port 7711, captured on a veth pair whose sender had no checksum offload.
    const KERNEL: [u8; 47] = [
        0x02, 0x00, 0x00, 0x00, 0x00, 0x02, 0x02, 0x00, 0x00, 0x00, 0x00, 0x01, 0x08, 0x00, 0x45, 0xb8, 0x00, 0x21,
        0x4d, 0x5e, 0x40, 0x00, 0x40, 0x11, 0xd8, 0xa3, 0x0a, 0x08, 0x00, 0x01, 0x0a, 0x08, 0x00, 0x02, 0x9c, 0x40,
        0x1e, 0x1f, 0x00, 0x0d, 0xed, 0x8f, 0x68, 0x65, 0x6c, 0x6c, 0x6f,
    ];

    #[test]
    fn frames_equal_those_of_the_kernel() {
        let ParsedFrame::Datagram(found) = read(&KERNEL) else {
            panic!("{:?}", read(&KERNEL));
        };
        assert_eq!((found.from, &KERNEL[found.range]), (A.0, b"hello".as_slice()));
        let mut ours = frame(b"he", b"llo");
        assert_eq!(ours.split_off(KERNEL.len()), [0; 13]);
        // The kernel numbers its datagrams, which changes the checksum of IPv4, too.
        for but in [18..20, 24..26] {
            ours[but.clone()].copy_from_slice(&KERNEL[but]);
        }
        assert_eq!(ours, KERNEL);
    }

    #[test]
    fn one_wrong_bit_breaks_a_datagram() {
        let good = frame(b"0123456789", b"abcdefgh");
        for at in 14..good.len() {
            for bit in 0..8 {
                let mut bad = good.clone();
                bad[at] ^= 1 << bit;
                let found = read(&bad);
                let ecn = at == 15 && bit < 2;
                let elsewhere = at == 14 && bit >= 4 || at == 15 || at == 23 || (30..34).contains(&at);
                match found {
                    ParsedFrame::Other => assert!(elsewhere && !ecn, "byte {at}, bit {bit}"),
                    ParsedFrame::Broken => assert!(!elsewhere || ecn, "byte {at}, bit {bit}"),
                    // A checksum that became 0 means no checksum.
                    ParsedFrame::Datagram(..) => {
                        assert!(bad[40..42] == [0, 0], "byte {at}, bit {bit}")
                    }
                    ParsedFrame::Arp(_) => panic!("byte {at}, bit {bit}"),
                }
            }
        }
    }

    #[test]
    fn frames_for_other_hosts_and_ports_are_told_apart() {
        let good = frame(b"0123456789", b"abcdefgh");
        let at = |ip: [u8; 4], port| SocketAddrV4::new(ip.into(), port);
        assert_eq!(ParsedFrame::read(&good, at([10, 8, 0, 3], 7711), 9), ParsedFrame::Other);
        let first_port = |first, ports| ParsedFrame::read(&good, at([10, 8, 0, 2], first), ports);
        assert_eq!(first_port(7712, 9), ParsedFrame::Broken);
        assert_eq!(first_port(7709, 2), ParsedFrame::Broken);
        assert!(matches!(first_port(7709, 3), ParsedFrame::Datagram(ParsedDatagram { port: 2, .. })));
        for length in 0..PAYLOAD_AT {
            assert_eq!(read(&good[..length]), ParsedFrame::Other);
        }
        assert_eq!(read(&good[..PAYLOAD_AT + 17]), ParsedFrame::Broken);
        // A fragment, with a right checksum.
        let mut fragment = good.clone();
        fragment[20] = 0x20;
        fragment[24..26].fill(0);
        let sum = !fold(sum(&fragment[14..34]));
        fragment[24..26].copy_from_slice(&sum.to_le_bytes());
        assert_eq!(read(&fragment), ParsedFrame::Broken);
        // The path may mark congestion.
        let mut marked = good;
        marked[15] |= 3;
        marked[24..26].fill(0);
        let sum = !fold(super::sum(&marked[14..34]));
        marked[24..26].copy_from_slice(&sum.to_le_bytes());
        assert!(matches!(read(&marked), ParsedFrame::Datagram(..)));
    }

    #[test]
    fn arp_requests_survive_the_wire_and_are_answered() {
        let request = Arp { is_request: true, from: (*A.0.ip(), A.1), to: (*B.0.ip(), [0; 6]) };
        let mut buffer = [0xAA; MAX_FRAME];
        let bytes = request.write(&mut buffer);
        assert_eq!((bytes, &buffer[..6]), (60, &BROADCAST[..]));
        assert_eq!(read(&buffer[..bytes]), ParsedFrame::Arp(request));
        let reply = request.reply(B.1);
        let bytes = reply.write(&mut buffer);
        assert_eq!(buffer[..6], A.1);
        let ParsedFrame::Arp(heard) = ParsedFrame::read(&buffer[..bytes], A.0, 1) else {
            panic!("no reply");
        };
        assert_eq!(heard.from, (*B.0.ip(), B.1));
        assert_eq!(heard.to, (*A.0.ip(), A.1));
        buffer[21] = 3;
        assert_eq!(ParsedFrame::read(&buffer[..bytes], A.0, 1), ParsedFrame::Other);
    }

    #[test]
    fn sums_are_those_of_the_standard() {
        let bytes: Vec<u8> = (0..1500).map(|i| (i * 197 + 255) as u8).collect();
        for length in (0..bytes.len()).step_by(if cfg!(miri) { 101 } else { 1 }) {
            let pairs = bytes[..length].chunks(2);
            let plain = pairs.fold(0u32, |sum, pair| {
                let low = pair.get(1).copied().unwrap_or(0);
                sum + u32::from(u16::from_be_bytes([pair[0], low]))
            });
            let plain = (plain >> 16) + (plain & 0xFFFF);
            let plain = (plain >> 16) + (plain & 0xFFFF);
            let ours = fold(sum(&bytes[..length])).swap_bytes();
            assert_eq!(u32::from(ours), plain, "{length} bytes");
        }
        assert_eq!(fold(sum(&[0xFF; 40])), u16::MAX);
    }
}
