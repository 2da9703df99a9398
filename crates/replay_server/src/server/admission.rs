//! Limits on connections, and log lines about unauthenticated clients, at most one of a kind a second. Limits: handshakes in progress, in total and per address, and authenticated connections. Unauthenticated clients occupy
//! only the limit of handshakes: at a limit the oldest of them makes room for a new one.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::future::pending;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use event_listener::Event;
use tokio::sync::Notify;

use base::wait::lock;
use replay_link::error::{Error, Result};
use replay_wire::Role;

use crate::config::ServerConfig;

/// Age from which a handshake makes room for a new one. A client's takes three round trips.
const DISPLACED_AFTER: Duration = Duration::from_millis(250);

/// Shortest time between two handshakes that make room, so that a server which is slow with thousands of clients still finishes most of
/// their handshakes.
const DISPLACED_EVERY: Duration = Duration::from_millis(50);

/// Connections of operators beyond `max_connections`, on a server with tokens for other roles.
pub const OPERATORS: u32 = 4;

/// Limit of connections that are refused with an error reply at the same time; further ones are closed without a reply.
pub const MAX_REFUSALS: usize = 16;

/// The limits, and the connections counted under them.
pub struct Admission {
    max_handshakes: usize,
    max_handshakes_per_address: usize,
    max_connections: usize,
    max_operators: usize,
    admitted: Mutex<Admitted>,
    /// Notified at the end of a connection.
    ended: Event,
}

#[derive(Default)]
struct Admitted {
    /// Handshakes in progress, by number: the oldest is the first.
    handshakes: BTreeMap<u64, Handshake>,
    next: u64,
    /// Time of the last handshake that made room.
    displaced: Option<Instant>,
    connections: usize,
    operators: usize,
    refusals: usize,
}

struct Handshake {
    /// `None` for a local process.
    address: Option<IpAddr>,
    since: Instant,
    displaced: Arc<Notify>,
}

/// The limit under which a connection is counted until its end.
pub struct Permit {
    admission: Arc<Admission>,
    held: Cell<Held>,
    /// Notified when the handshake has made room for another.
    displaced: Arc<Notify>,
}

#[derive(Clone, Copy)]
enum Held {
    /// A handshake, by number.
    Handshake(u64),
    /// Refused with an error reply, because of this setting.
    Refusal(&'static str),
    Connection,
    /// An operator's connection beyond the others.
    Operator,
}

impl Admission {
    /// The limits of a configuration with as many `roles` as have a token.
    pub fn new(config: &ServerConfig, roles: usize) -> Arc<Self> {
        Arc::new(Admission {
            max_handshakes: config.max_handshakes as usize,
            max_handshakes_per_address: config.max_handshakes_per_address as usize,
            max_connections: config.max_connections as usize,
            max_operators: if roles > 1 { OPERATORS as usize } else { 0 },
            admitted: Mutex::default(),
            ended: Event::new(),
        })
    }

    /// Permit for an accepted connection's handshake or refusal; `None` to close the connection without a reply. `peer` is an IP address and
    /// port, or the name of a local process, for which only the total limit applies.
    pub fn accept(self: &Arc<Self>, peer: &str, now: Instant) -> Option<Permit> {
        let displaced = Arc::new(Notify::new());
        let address = peer.parse::<SocketAddr>().ok().map(|peer| peer.ip());
        let mut admitted = lock(&self.admitted);
        let held = match admitted.make_room(self, address, now) {
            None => {
                let number = admitted.next;
                admitted.next += 1;
                let handshake = Handshake { address, since: now, displaced: Arc::clone(&displaced) };
                admitted.handshakes.insert(number, handshake);
                Held::Handshake(number)
            }
            Some(_) if admitted.refusals >= MAX_REFUSALS => return None,
            Some(limit) => {
                admitted.refusals += 1;
                Held::Refusal(limit)
            }
        };
        drop(admitted);
        Some(Permit { admission: Arc::clone(self), held: Cell::new(held), displaced })
    }

    /// Waits until no connection is open, authenticated or not.
    pub async fn all_ended(&self) {
        loop {
            let ended = self.ended.listen();
            if self.open() == 0 {
                return;
            }
            ended.await;
        }
    }

    /// Number of open connections, authenticated or not.
    pub fn open(&self) -> usize {
        let admitted = lock(&self.admitted);
        admitted.handshakes.len() + admitted.connections + admitted.operators
    }
}

impl Admitted {
    /// Ends the oldest handshake where a new one of `address` is over a limit. Returns the limit if none is old enough.
    fn make_room(&mut self, limits: &Admission, address: Option<IpAddr>, now: Instant) -> Option<&'static str> {
        let same = |handshake: &Handshake| address.is_some() && handshake.address == address;
        let of_address = self.handshakes.values().filter(|handshake| same(handshake)).count();
        let (limit, oldest) = if of_address >= limits.max_handshakes_per_address {
            let mut handshakes = self.handshakes.iter();
            ("max_handshakes_per_address", handshakes.find(|(_, handshake)| same(handshake)))
        } else if self.handshakes.len() >= limits.max_handshakes {
            ("max_handshakes", self.handshakes.iter().next())
        } else {
            return None;
        };
        let over = |since: Instant, time| now.saturating_duration_since(since) >= time;
        let number = oldest.filter(|(_, handshake)| over(handshake.since, DISPLACED_AFTER)).map(|(number, _)| *number);
        let Some(number) = number.filter(|_| self.displaced.is_none_or(|since| over(since, DISPLACED_EVERY))) else {
            return Some(limit);
        };
        self.displaced = Some(now);
        if let Some(handshake) = self.handshakes.remove(&number) {
            handshake.displaced.notify_one();
        }
        None
    }
}

impl Held {
    fn end(self, admitted: &mut Admitted) {
        match self {
            Held::Handshake(number) => drop(admitted.handshakes.remove(&number)),
            Held::Refusal(_) => admitted.refusals -= 1,
            Held::Connection => admitted.connections -= 1,
            Held::Operator => admitted.operators -= 1,
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.held.get().end(&mut lock(&self.admission.admitted));
        self.admission.ended.notify(usize::MAX);
    }
}

impl Permit {
    /// Error for a refused connection.
    pub fn refusal(&self) -> Option<Error> {
        match self.held.get() {
            Held::Refusal(limit) => Some(Error::Busy(format!("too many clients connect at the same time ({limit})"))),
            _ => None,
        }
    }

    /// Whether the connection is authenticated: see [`Permit::welcome`].
    pub fn is_welcome(&self) -> bool {
        matches!(self.held.get(), Held::Connection | Held::Operator)
    }

    /// Completes when the handshake has made room for another, never once the connection is welcome.
    pub async fn displaced(&self) {
        self.displaced.notified().await;
        if self.is_welcome() {
            pending().await
        }
    }

    /// Counts the connection as authenticated from now on.
    ///
    /// # Errors
    /// [`Error::Busy`] at the limit.
    pub fn welcome(&self, role: Role) -> Result<()> {
        let limits = &*self.admission;
        let mut admitted = lock(&limits.admitted);
        let held = if admitted.connections < limits.max_connections {
            admitted.connections += 1;
            Held::Connection
        } else if role == Role::Operator && admitted.operators < limits.max_operators {
            admitted.operators += 1;
            Held::Operator
        } else {
            return Err(Error::Busy(format!(
                "{} connections are open; close some, or start the server with a larger --max-connections",
                limits.max_connections
            )));
        };
        self.held.replace(held).end(&mut admitted);
        Ok(())
    }
}

/// Shortest time between two lines of one kind, so that unauthenticated clients cannot fill the log.
const INTERVAL: Duration = Duration::from_secs(1);

/// Kind of a line. Each has a limit of its own, so that none hides the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StrangerEvent {
    /// A missing or wrong token, or TLS that failed.
    FailedLogin,
    /// A limit of connections.
    Refused,
    /// An invalid frame, or a handshake that took too long.
    Dropped,
    /// A connection that ended during its handshake.
    Left,
    /// A failed accept.
    NotAccepted,
    /// A broken connection of statistics over HTTP.
    Http,
}

/// Time of the last line of each kind, and the events since.
#[derive(Default)]
pub struct StrangerLog([Mutex<Since>; 6]);

#[derive(Default)]
struct Since {
    logged: Option<Instant>,
    unreported: u64,
}

impl StrangerLog {
    /// Logs an event of `peer` at `now`, or counts it for the next line of its kind. Returns whether it was logged.
    pub fn report(&self, event: StrangerEvent, peer: &str, error: &dyn Display, now: Instant) -> bool {
        let since = &self.0[event as usize];
        let mut since = lock(since);
        let recent = |logged: Instant| now.saturating_duration_since(logged) < INTERVAL;
        if since.logged.is_some_and(recent) {
            since.unreported += 1;
            return false;
        }
        let unreported = std::mem::take(&mut since.unreported);
        since.logged = Some(now);
        drop(since);
        match event {
            StrangerEvent::FailedLogin => tracing::warn!(peer, %error, unreported, "a client failed to log in"),
            StrangerEvent::Refused => tracing::warn!(peer, %error, unreported, "connection refused"),
            StrangerEvent::Dropped => {
                tracing::warn!(peer, %error, unreported, "connection dropped before its handshake")
            }
            StrangerEvent::Left => tracing::info!(peer, %error, unreported, "connection ended before its handshake"),
            StrangerEvent::NotAccepted => tracing::warn!(peer, %error, unreported, "accepting a connection failed"),
            StrangerEvent::Http => tracing::debug!(peer, %error, unreported, "HTTP connection broken"),
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admission() -> Arc<Admission> {
        let limits = ServerConfig {
            max_handshakes: 5,
            max_handshakes_per_address: 2,
            max_connections: 3,
            ..ServerConfig::default()
        };
        Admission::new(&limits, 3)
    }

    fn is_handshake(permit: Option<&Permit>) -> bool {
        permit.is_some_and(|permit| permit.refusal().is_none())
    }

    fn is_displaced(permit: &Permit) -> bool {
        use futures_util::FutureExt;
        permit.displaced().now_or_never().is_some()
    }

    #[test]
    fn an_address_has_a_part_of_the_handshakes_until_it_is_welcome() {
        let (admission, now) = (admission(), Instant::now());
        let first = admission.accept("10.0.0.1:1", now).unwrap();
        let second = admission.accept("10.0.0.1:2", now);
        assert!(is_handshake(second.as_ref()));
        let third = admission.accept("10.0.0.1:3", now).unwrap();
        let reason = third.refusal().unwrap();
        assert!(reason.to_string().contains("max_handshakes_per_address"));
        assert!(is_handshake(admission.accept("[::1]:1", now).as_ref()));
        first.welcome(Role::Actor).unwrap();
        assert!(is_handshake(admission.accept("10.0.0.1:4", now).as_ref()));
        assert_eq!(admission.open(), 2);
        drop((first, second));
        assert!(lock(&admission.admitted).handshakes.is_empty());
        assert_eq!(admission.open(), 0);
    }

    #[test]
    fn the_oldest_handshake_makes_room_for_one_more() {
        let (admission, now) = (admission(), Instant::now());
        let later = now + DISPLACED_AFTER;
        let elsewhere = admission.accept("10.0.0.2:1", now).unwrap();
        let silent = ["10.0.0.1:1", "10.0.0.1:2"].map(|peer| admission.accept(peer, now).unwrap());
        let young = admission.accept("10.0.0.1:3", later - Duration::from_millis(1)).unwrap();
        assert!(young.refusal().is_some(), "none is old enough");
        let one_more = admission.accept("10.0.0.1:3", later).unwrap();
        assert!(one_more.refusal().is_none());
        assert_eq!([&silent[0], &silent[1], &elsewhere].map(is_displaced), [true, false, false]);
        assert!(admission.accept("10.0.0.1:4", later).unwrap().refusal().is_some(), "one at a time");
        // Over the limit of all addresses it is the oldest of all.
        let others: Vec<_> = (0..2).map(|_| admission.accept("process 1", later).unwrap()).collect();
        assert!(is_handshake(admission.accept("process 1", later + DISPLACED_EVERY).as_ref()));
        assert!(is_displaced(&elsewhere) && !others.iter().any(is_displaced));
        // A handshake that ended at the same time stays.
        one_more.welcome(Role::Actor).unwrap();
        one_more.displaced.notify_one();
        assert!(!is_displaced(&one_more));
    }

    #[test]
    fn strangers_occupy_no_connection_and_welcome_ones_no_handshake() {
        let (admission, now) = (admission(), Instant::now());
        let local = || admission.accept("process 1", now);
        let welcome: Vec<Permit> = (0..3).map(|_| local().unwrap()).collect();
        assert!(welcome.iter().all(|permit| permit.welcome(Role::Actor).is_ok()));
        let strangers: Vec<_> = (0..5).map(|_| local()).collect();
        assert!(strangers.iter().all(|permit| is_handshake(permit.as_ref())));
        let stranger = strangers[0].as_ref().unwrap();
        let error = stranger.welcome(Role::Learner).unwrap_err();
        assert!(error.to_string().contains("--max-connections"), "{error}");
        let refused: Vec<_> = (0..MAX_REFUSALS).map(|_| local().unwrap()).collect();
        assert!(refused.iter().all(|permit| permit.refusal().is_some()));
        assert!(local().is_none(), "closed without a reply");
        strangers[1].as_ref().unwrap().welcome(Role::Operator).unwrap();
        assert_eq!(admission.open(), 3 + 1 + 4);
        drop(welcome);
        stranger.welcome(Role::Actor).unwrap();
    }

    #[test]
    fn one_event_of_a_kind_is_logged_in_a_second_and_the_others_are_counted() {
        let log = StrangerLog::default();
        let start = Instant::now();
        let report = |event, after| log.report(event, "10.0.0.1:1", &"a guess", start + after);
        let unreported = |event| log.0[event as usize].lock().unwrap().unreported;
        assert!(report(StrangerEvent::FailedLogin, Duration::ZERO));
        for _ in 0..3 {
            assert!(!report(StrangerEvent::FailedLogin, INTERVAL / 2));
        }
        assert!(report(StrangerEvent::Http, INTERVAL / 2), "another kind");
        assert_eq!(unreported(StrangerEvent::FailedLogin), 3);
        assert!(report(StrangerEvent::FailedLogin, INTERVAL));
        assert_eq!(unreported(StrangerEvent::FailedLogin), 0);
    }
}
