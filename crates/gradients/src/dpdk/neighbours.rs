//! The ARP table: Ethernet address and device of each neighbour, resolved on demand.
//!
//! | after | action |
//! | --- | --- |
//! | 10 ms | an unanswered request is repeated, if the address is still needed |
//! | 30 s | a resolved entry is refreshed by a request |
//! | 300 s | an entry without an answer is removed |

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::ethernet::{Arp, Mac};
use base::sync::lock;

/// Most entries: more than an aggregator has workers, few enough that forged requests cannot exhaust memory. In a full table a new entry
/// replaces one that was never sent to, so that forged senders cannot lock out real ones.
const MAX_ENTRIES: usize = 4096;
/// Time between two requests for an unknown address.
const ASK_EVERY: Duration = Duration::from_millis(10);
/// Age from which an entry is refreshed.
const STALE: Duration = Duration::from_secs(30);
/// Age at which an entry is removed.
const EXPIRED: Duration = Duration::from_secs(300);

/// A host on one of the networks of the interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Neighbour {
    pub mac: Mac,
    /// Number of the device that it was heard on.
    pub device: usize,
}

/// An entry, without a neighbour until a reply arrives.
struct ArpEntry {
    neighbour: Option<Neighbour>,
    last_heard: Instant,
    /// Last request, if there was no reply since.
    asked: Option<Instant>,
    /// Whether it was ever looked up, to send a frame.
    used: bool,
}

/// The ARP table, shared by all cores.
#[derive(Default)]
pub struct Neighbours {
    /// A panic leaves it whole: each change is one insertion or removal.
    table: Mutex<HashMap<Ipv4Addr, ArpEntry>>,
    version: AtomicU64,
}

impl Neighbours {
    /// A number that rises with every change, for caches of neighbours.
    pub fn version(&self) -> u64 {
        // Acquire pairs with the addition in `changed`: a reader of the new number finds the new entry under the lock.
        self.version.load(Ordering::Acquire)
    }

    fn changed(&self) {
        // Release pairs with the load in `version`.
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Learns the sender of an ARP frame. A new sender is added if it asks for `here`, as it is about to send something; otherwise only
    /// known entries are updated (RFC 826).
    pub fn learn(&self, arp: &Arp, here: Ipv4Addr, device: usize, now: Instant) {
        let (ip, mac) = arp.from;
        let neighbour = Some(Neighbour { mac, device });
        let is_group = mac[0] & 1 == 1;
        if is_group || ip == here || ip.is_unspecified() {
            return;
        }
        let mut table = lock(&self.table);
        let Some(entry) = table.get_mut(&ip) else {
            // Routes are cached for known neighbours alone: a new one makes none wrong.
            if arp.to.0 == here && make_room(&mut table) {
                table.insert(ip, ArpEntry::new(neighbour, now, None));
            }
            return;
        };
        entry.last_heard = now;
        entry.asked = None;
        if entry.neighbour != neighbour {
            entry.neighbour = neighbour;
            drop(table);
            self.changed();
        }
    }

    /// The neighbour with an address. `Err` says whether to send a request now.
    pub fn find(&self, ip: Ipv4Addr, now: Instant) -> Result<Neighbour, bool> {
        let mut table = lock(&self.table);
        if let Some(entry) = table.get_mut(&ip) {
            entry.used = true;
            return match entry.neighbour {
                Some(neighbour) => Ok(neighbour),
                None => Err(entry.ask_after(ASK_EVERY, now)),
            };
        }
        if make_room(&mut table) {
            let mut entry = ArpEntry::new(None, now, Some(now));
            entry.used = true;
            table.insert(ip, entry);
        }
        Err(true)
    }

    /// Removes expired entries. Returns the addresses of stale ones, to send a request for each.
    pub fn expire(&self, now: Instant) -> Vec<Ipv4Addr> {
        let mut table = lock(&self.table);
        let before = table.len();
        let age = |entry: &ArpEntry| now.saturating_duration_since(entry.last_heard);
        table.retain(|_, entry| age(entry) < EXPIRED);
        let any_expired = table.len() < before;
        let mut stale = Vec::new();
        for (ip, entry) in table.iter_mut() {
            // Unresolved addresses are requested on demand.
            if entry.neighbour.is_some() && age(entry) >= STALE && entry.ask_after(STALE, now) {
                stale.push(*ip);
            }
        }
        drop(table);
        if any_expired {
            self.changed();
        }
        stale
    }
}

/// Makes room for an entry: a full table evicts the unused entry that was silent longest. `false` if all are in use.
fn make_room(table: &mut HashMap<Ipv4Addr, ArpEntry>) -> bool {
    if table.len() < MAX_ENTRIES {
        return true;
    }
    let unused = table.iter().filter(|(_, entry)| !entry.used);
    let oldest = unused.min_by_key(|(_, entry)| entry.last_heard);
    let Some(oldest) = oldest.map(|(ip, _)| *ip) else {
        return false;
    };
    table.remove(&oldest);
    true
}

impl ArpEntry {
    fn new(neighbour: Option<Neighbour>, now: Instant, asked: Option<Instant>) -> Self {
        ArpEntry { neighbour, last_heard: now, asked, used: false }
    }

    /// Whether a request is due, `time` after the last one; notes a due request as sent.
    fn ask_after(&mut self, time: Duration, now: Instant) -> bool {
        let due = self.asked.is_none_or(|asked| now >= asked + time);
        if due {
            self.asked = Some(now);
        }
        due
    }
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
        assert_eq!(neighbours.version(), 0, "the request was for another host");
        neighbours.learn(&request(worker, ONE, HERE), HERE, 0, now);
        assert_eq!(neighbours.find(worker, now), Ok(Neighbour { mac: ONE, device: 0 }));
        let version = neighbours.version();
        neighbours.learn(&request(worker, ONE, HERE), HERE, 0, now);
        assert_eq!(neighbours.version(), version, "nothing has changed");
        // A gratuitous announcement after a move.
        neighbours.learn(&request(worker, TWO, worker), HERE, 1, now);
        assert_ne!(neighbours.version(), version);
        assert_eq!(neighbours.find(worker, now), Ok(Neighbour { mac: TWO, device: 1 }));
    }

    #[test]
    fn unknown_addresses_are_asked_for_at_intervals_and_silent_ones_expire() {
        let neighbours = Neighbours::default();
        let mut now = Instant::now();
        assert_eq!(neighbours.find(OTHER, now), Err(true));
        assert_eq!(neighbours.find(OTHER, now), Err(false));
        now += ASK_EVERY;
        assert_eq!(neighbours.find(OTHER, now), Err(true));
        neighbours.learn(&request(OTHER, ONE, HERE), HERE, 0, now);
        assert!(neighbours.expire(now).is_empty());
        now += STALE;
        assert_eq!(neighbours.expire(now), [OTHER]);
        assert!(neighbours.expire(now).is_empty());
        assert!(neighbours.find(OTHER, now).is_ok());
        now += EXPIRED;
        let version = neighbours.version();
        assert!(neighbours.expire(now).is_empty());
        assert_ne!(neighbours.version(), version);
        assert_eq!(neighbours.find(OTHER, now), Err(true));
    }

    #[test]
    fn invalid_addresses_are_not_learned() {
        let neighbours = Neighbours::default();
        let now = Instant::now();
        let group = [3, 0, 0, 0, 0, 1];
        neighbours.learn(&request(OTHER, group, HERE), HERE, 0, now);
        neighbours.learn(&request(HERE, ONE, HERE), HERE, 0, now);
        neighbours.learn(&request(Ipv4Addr::UNSPECIFIED, ONE, HERE), HERE, 0, now);
        assert_eq!(neighbours.version(), 0);
        for i in 0..2 * MAX_ENTRIES as u32 {
            let ip = Ipv4Addr::from_bits(0x0B00_0000 + i);
            neighbours.learn(&request(ip, ONE, HERE), HERE, 0, now);
        }
        assert_eq!(lock(&neighbours.table).len(), MAX_ENTRIES);
    }

    #[test]
    fn invented_senders_lock_out_no_worker() {
        let neighbours = Neighbours::default();
        let mut now = Instant::now();
        let worker = Ipv4Addr::new(10, 8, 0, 1);
        neighbours.learn(&request(worker, ONE, HERE), HERE, 0, now);
        assert!(neighbours.find(worker, now).is_ok());
        for i in 0..2 * MAX_ENTRIES as u32 {
            now += Duration::from_micros(1);
            let ip = Ipv4Addr::from_bits(0x0B00_0000 + i);
            neighbours.learn(&request(ip, TWO, HERE), HERE, 0, now);
        }
        assert!(neighbours.find(worker, now).is_ok(), "it is in use");
        neighbours.learn(&request(OTHER, ONE, HERE), HERE, 0, now);
        assert!(neighbours.find(OTHER, now).is_ok(), "it is new");
        assert_eq!(lock(&neighbours.table).len(), MAX_ENTRIES);
    }
}
