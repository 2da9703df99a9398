//! Limits on connections: handshakes in progress, in total and per address, and authenticated connections. Unauthenticated clients occupy
//! only the limit of handshakes.

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::config::ServerConfig;
use crate::error::{Error, Result};
use base::sync::lock;

/// Limit of connections that are refused with an error reply at the same time; further ones are closed without a reply.
const MAX_REFUSALS: usize = 16;

/// The limits, and the connections counted under them.
pub struct Admission {
    handshakes: Arc<Semaphore>,
    connections: Arc<Semaphore>,
    refusals: Arc<Semaphore>,
    max_handshakes: u32,
    max_handshakes_per_address: u32,
    max_connections: u32,
    /// Handshakes in progress, by address.
    addresses: Mutex<HashMap<IpAddr, u32>>,
}

/// The limit under which a connection is counted until its end.
pub struct Slot {
    admission: Arc<Admission>,
    held: RefCell<Held>,
}

enum Held {
    Handshake {
        _permit: OwnedSemaphorePermit,
        _share: Option<AddressShare>,
    },
    /// Refused with an error reply, because of the setting `limit`.
    Refusal {
        limit: &'static str,
        _permit: OwnedSemaphorePermit,
    },
    Connection {
        _permit: OwnedSemaphorePermit,
    },
}

/// Counts a handshake of an address until dropped.
struct AddressShare {
    admission: Arc<Admission>,
    address: IpAddr,
}

impl Admission {
    /// The limits of a configuration.
    pub fn new(config: &ServerConfig) -> Arc<Self> {
        Arc::new(Admission {
            handshakes: Arc::new(Semaphore::new(config.max_handshakes as usize)),
            connections: Arc::new(Semaphore::new(config.max_connections as usize)),
            refusals: Arc::new(Semaphore::new(MAX_REFUSALS)),
            max_handshakes: config.max_handshakes,
            max_handshakes_per_address: config.max_handshakes_per_address,
            max_connections: config.max_connections,
            addresses: Mutex::default(),
        })
    }

    /// Slot for an accepted connection's handshake or refusal; `None` to close the connection without a reply. `peer` is an IP address and
    /// port, or the name of a local process, for which only the total limit applies.
    pub fn accept(self: &Arc<Self>, peer: &str) -> Option<Slot> {
        let slot = |held| Some(Slot { admission: Arc::clone(self), held: RefCell::new(held) });
        let refuse = |limit| {
            let permit = Arc::clone(&self.refusals).try_acquire_owned().ok()?;
            slot(Held::Refusal { limit, _permit: permit })
        };
        let share = match peer.parse::<SocketAddr>() {
            Err(_) => None,
            Ok(peer) => match self.share(peer.ip()) {
                None => return refuse("max_handshakes_per_address"),
                share => share,
            },
        };
        match Arc::clone(&self.handshakes).try_acquire_owned() {
            Err(_) => refuse("max_handshakes"),
            Ok(permit) => slot(Held::Handshake { _permit: permit, _share: share }),
        }
    }

    /// Waits until no connection is open, authenticated or not.
    pub async fn all_ended(&self) {
        // An error means that a semaphore is closed, which never happens.
        let _ = self.handshakes.acquire_many(self.max_handshakes).await;
        let _ = self.connections.acquire_many(self.max_connections).await;
    }

    /// Number of open connections, authenticated or not.
    pub fn open(&self) -> usize {
        let limits = self.max_handshakes as usize + self.max_connections as usize;
        limits - self.handshakes.available_permits() - self.connections.available_permits()
    }

    fn share(self: &Arc<Self>, address: IpAddr) -> Option<AddressShare> {
        let mut addresses = lock(&self.addresses);
        let handshakes = addresses.entry(address).or_default();
        if *handshakes >= self.max_handshakes_per_address {
            return None;
        }
        *handshakes += 1;
        Some(AddressShare { admission: Arc::clone(self), address })
    }
}

impl Drop for AddressShare {
    fn drop(&mut self) {
        let mut addresses = lock(&self.admission.addresses);
        if let Some(handshakes) = addresses.get_mut(&self.address) {
            *handshakes -= 1;
            if *handshakes == 0 {
                addresses.remove(&self.address);
            }
        }
    }
}

impl Slot {
    /// Error for a refused connection.
    pub fn refusal(&self) -> Option<Error> {
        match *self.held.borrow() {
            Held::Refusal { limit, .. } => {
                Some(Error::Busy(format!("too many clients connect at the same time ({limit})")))
            }
            _ => None,
        }
    }

    /// Whether the connection is authenticated: see [`Slot::welcome`].
    pub fn is_welcome(&self) -> bool {
        matches!(*self.held.borrow(), Held::Connection { .. })
    }

    /// Counts the connection as authenticated from now on.
    ///
    /// # Errors
    /// [`Error::Busy`] at the limit.
    pub fn welcome(&self) -> Result<()> {
        let connections = Arc::clone(&self.admission.connections);
        let Ok(permit) = connections.try_acquire_owned() else {
            return Err(Error::Busy(format!(
                "{} connections are open; close some, or start the server with a larger --max-connections",
                self.admission.max_connections
            )));
        };
        *self.held.borrow_mut() = Held::Connection { _permit: permit };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admission() -> Arc<Admission> {
        Admission::new(&ServerConfig {
            max_handshakes: 5,
            max_handshakes_per_address: 2,
            max_connections: 3,
            ..ServerConfig::default()
        })
    }

    fn is_handshake(slot: Option<&Slot>) -> bool {
        slot.is_some_and(|slot| slot.refusal().is_none())
    }

    #[test]
    fn an_address_has_a_part_of_the_handshakes_until_it_is_welcome() {
        let admission = admission();
        let first = admission.accept("10.0.0.1:1").unwrap();
        let second = admission.accept("10.0.0.1:2");
        assert!(is_handshake(second.as_ref()));
        let third = admission.accept("10.0.0.1:3").unwrap();
        let reason = third.refusal().unwrap();
        assert!(reason.to_string().contains("max_handshakes_per_address"));
        assert!(is_handshake(admission.accept("[::1]:1").as_ref()));
        first.welcome().unwrap();
        assert!(is_handshake(admission.accept("10.0.0.1:4").as_ref()));
        assert_eq!(admission.open(), 2);
        drop((first, second));
        assert!(admission.addresses.lock().unwrap().is_empty());
        assert_eq!(admission.open(), 0);
    }

    #[test]
    fn strangers_occupy_no_connection_and_welcome_ones_no_handshake() {
        let admission = admission();
        let local = || admission.accept("process 1");
        let welcome: Vec<Slot> = (0..3).map(|_| local().unwrap()).collect();
        assert!(welcome.iter().all(|slot| slot.welcome().is_ok()));
        let strangers: Vec<_> = (0..5).map(|_| local()).collect();
        assert!(strangers.iter().all(|slot| is_handshake(slot.as_ref())));
        let error = strangers[0].as_ref().unwrap().welcome().unwrap_err();
        assert!(error.to_string().contains("--max-connections"), "{error}");
        let refused: Vec<_> = (0..MAX_REFUSALS).map(|_| local().unwrap()).collect();
        assert!(refused.iter().all(|slot| slot.refusal().is_some()));
        assert!(local().is_none(), "closed without a reply");
        drop(welcome);
        strangers[0].as_ref().unwrap().welcome().unwrap();
    }
}
