//! Who is at which Ethernet address, and behind which port: learned by ARP, asked when it is needed.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::frame::{Arp, Mac};

/// Stations that are remembered: more than workers that an aggregator has, fewer than a stranger can invent.
const MOST: usize = 4096;
/// Between two questions about the same address.
const ASK_EVERY: Duration = Duration::from_millis(10);
/// Then it is asked again, while the old answer goes on being used.
const STALE: Duration = Duration::from_secs(30);
/// Then the old answer is forgotten.
const GONE: Duration = Duration::from_secs(300);

/// A station's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Its Ethernet address.
    pub mac: Mac,
    /// The number of the port it was heard at.
    pub port: usize,
}

struct Known {
    place: Option<Place>,
    heard: Instant,
    asked: Option<Instant>,
}

/// The table, shared by all cores.
#[derive(Default)]
pub struct Neighbours {
    table: Mutex<HashMap<Ipv4Addr, Known>>,
    version: AtomicU64,
}

impl Neighbours {
    /// Changes whenever a place does: whoever keeps places looks at it first.
    pub fn version(&self) -> u64 {
        // Pairs with the addition in `changed`: who sees the new number finds the new place under the lock.
        self.version.load(Ordering::Acquire)
    }

    fn changed(&self) {
        // Pairs with the load in `version`.
        self.version.fetch_add(1, Ordering::Release);
    }

    /// A panic while it was held has left it whole: each change is one insertion or removal.
    fn table(&self) -> MutexGuard<'_, HashMap<Ipv4Addr, Known>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what ARP says of its sender. A stranger is remembered if it asks `here`, as it is about to talk to it; of others only what
    /// is known already is brought up to date (RFC 826).
    pub fn hear(&self, arp: &Arp, here: Ipv4Addr, port: usize, now: Instant) {
        let (ip, mac) = arp.from;
        let place = Some(Place { mac, port });
        let group = mac[0] & 1 == 1;
        if group || ip == here || ip.is_unspecified() {
            return;
        }
        let mut table = self.table();
        let room = table.len() < MOST;
        match table.get_mut(&ip) {
            Some(known) => {
                known.heard = now;
                known.asked = None;
                if known.place == place {
                    return;
                }
                known.place = place;
            }
            None if arp.to.0 == here && room => {
                let (heard, asked) = (now, None);
                table.insert(
                    ip,
                    Known {
                        place,
                        heard,
                        asked,
                    },
                );
            }
            None => return,
        }
        drop(table);
        self.changed();
    }

    /// Where a station is. `Err` says whether to ask for it now.
    pub fn find(&self, ip: Ipv4Addr, now: Instant) -> Result<Place, bool> {
        let mut table = self.table();
        let room = table.len() < MOST;
        match table.get_mut(&ip) {
            Some(Known {
                place: Some(place), ..
            }) => Ok(*place),
            Some(known) => Err(known.ask(now)),
            None if room => {
                let (place, heard, asked) = (None, now, Some(now));
                table.insert(
                    ip,
                    Known {
                        place,
                        heard,
                        asked,
                    },
                );
                Err(true)
            }
            None => Err(true),
        }
    }

    /// Forgets who has not been heard for long, and returns whom to ask whether they are still there.
    pub fn review(&self, now: Instant) -> Vec<Ipv4Addr> {
        let mut table = self.table();
        let before = table.len();
        let silent = |known: &Known| now.saturating_duration_since(known.heard);
        table.retain(|_, known| silent(known) < GONE);
        let forgotten = table.len() < before;
        let mut stale = Vec::new();
        for (ip, known) in table.iter_mut() {
            // An address that nobody has answered for is asked for when it is needed.
            if known.place.is_some() && silent(known) >= STALE && known.ask_slowly(now) {
                stale.push(*ip);
            }
        }
        drop(table);
        if forgotten {
            self.changed();
        }
        stale
    }
}

impl Known {
    fn ask(&mut self, now: Instant) -> bool {
        self.ask_after(ASK_EVERY, now)
    }

    fn ask_slowly(&mut self, now: Instant) -> bool {
        self.ask_after(STALE, now)
    }

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

    fn says(ip: Ipv4Addr, mac: Mac, about: Ipv4Addr) -> Arp {
        Arp {
            asks: true,
            from: (ip, mac),
            to: (about, [0; 6]),
        }
    }

    #[test]
    fn who_asks_for_this_station_is_known_and_who_moves_is_found() {
        let neighbours = Neighbours::default();
        let now = Instant::now();
        let worker = Ipv4Addr::new(10, 8, 0, 1);
        neighbours.hear(&says(worker, ONE, OTHER), HERE, 0, now);
        assert_eq!(neighbours.version(), 0, "it asked somebody else");
        neighbours.hear(&says(worker, ONE, HERE), HERE, 0, now);
        assert_eq!(
            neighbours.find(worker, now),
            Ok(Place { mac: ONE, port: 0 })
        );
        let version = neighbours.version();
        neighbours.hear(&says(worker, ONE, HERE), HERE, 0, now);
        assert_eq!(neighbours.version(), version, "nothing has changed");
        // It tells everybody of its new place.
        neighbours.hear(&says(worker, TWO, worker), HERE, 1, now);
        assert_ne!(neighbours.version(), version);
        assert_eq!(
            neighbours.find(worker, now),
            Ok(Place { mac: TWO, port: 1 })
        );
    }

    #[test]
    fn the_unknown_are_asked_for_now_and_then_and_the_silent_forgotten() {
        let neighbours = Neighbours::default();
        let mut now = Instant::now();
        assert_eq!(neighbours.find(OTHER, now), Err(true));
        assert_eq!(neighbours.find(OTHER, now), Err(false));
        now += ASK_EVERY;
        assert_eq!(neighbours.find(OTHER, now), Err(true));
        neighbours.hear(&says(OTHER, ONE, HERE), HERE, 0, now);
        assert!(neighbours.review(now).is_empty());
        now += STALE;
        assert_eq!(neighbours.review(now), [OTHER]);
        assert!(neighbours.review(now).is_empty());
        assert!(neighbours.find(OTHER, now).is_ok());
        now += GONE;
        let version = neighbours.version();
        assert!(neighbours.review(now).is_empty());
        assert_ne!(neighbours.version(), version);
        assert_eq!(neighbours.find(OTHER, now), Err(true));
    }

    #[test]
    fn addresses_that_cannot_be_are_not_learned() {
        let neighbours = Neighbours::default();
        let now = Instant::now();
        let group = [3, 0, 0, 0, 0, 1];
        neighbours.hear(&says(OTHER, group, HERE), HERE, 0, now);
        neighbours.hear(&says(HERE, ONE, HERE), HERE, 0, now);
        neighbours.hear(&says(Ipv4Addr::UNSPECIFIED, ONE, HERE), HERE, 0, now);
        assert_eq!(neighbours.version(), 0);
        for i in 0..2 * MOST as u32 {
            let ip = Ipv4Addr::from_bits(0x0B00_0000 + i);
            neighbours.hear(&says(ip, ONE, HERE), HERE, 0, now);
        }
        assert_eq!(neighbours.table().len(), MOST);
    }
}
