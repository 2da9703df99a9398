//! The ARP table: Ethernet address and device of each neighbour, resolved on demand.
//!
//! | after | action |
//! | --- | --- |
//! | 10 ms | an unanswered request is repeated, if the address is still needed |
//! | 30 s | a resolved entry that is in use is refreshed by a request |
//! | 300 s | an entry without an answer is no longer used |

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::ethernet::{Arp, Mac};
use base::sync::lock;

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
