//! The aggregator above this one.

use std::net::SocketAddr;

use super::packet::{Cookie, Header, Key, Kind};
use super::{Ticket, Transmit};

/// The aggregator above this one, as a job of this one has joined it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upstream {
    /// Where it is.
    pub address: SocketAddr,
    /// Of the ticket it gave.
    pub session: u32,
    /// Of the ticket it gave.
    pub key: Key,
    /// Of the ticket it gave.
    pub round: u64,
    /// Workers below this aggregator, in all: what it was joined with.
    pub below: u32,
    pub(super) cookie: Cookie,
    pub(super) proved: bool,
    /// Nothing comes from it any more.
    pub(super) lost: bool,
}

impl Upstream {
    /// The parent at `address` that gave `ticket` to this aggregator, which has sums of `below` workers for it.
    pub fn new(address: SocketAddr, ticket: &Ticket, below: u32) -> Self {
        Upstream {
            address,
            session: ticket.session,
            key: ticket.key,
            round: ticket.round,
            below,
            cookie: Cookie::default(),
            proved: false,
            lost: false,
        }
    }

    /// Shows the parent that this aggregator receives where it sends from.
    pub(super) fn prove<T: Transmit>(&self, out: &mut T) {
        let header = Header::new(Kind::Join, self.session, 0, 0);
        let body = [self.key.as_slice(), &self.cookie].concat();
        out.send(self.address, &header.encode(), &body);
    }
}
