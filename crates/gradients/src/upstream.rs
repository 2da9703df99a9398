//! The aggregator above this one, as a job has joined it: the proof that this one receives where it sends from, and failures. Both are sent
//! again until the parent has answered.

use std::net::SocketAddr;
use std::time::Instant;

use super::packet::{Ack, Cookie, Header, Key, Kind};
use super::worker::patience;
use super::{Ticket, Transmit};

/// The aggregator above this one.
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
    /// Of the ticket it gave.
    pub window: u32,
    /// Workers below this aggregator, in all: what it was joined with.
    pub below: u32,
    /// It knows where this aggregator is, and takes what is sent.
    pub(super) proved: bool,
    /// Nothing comes from it any more.
    pub(super) lost: bool,
    cookie: Cookie,
    /// A failure that it has not answered: the round and why.
    halt: Option<(u64, Ack)>,
    /// The round that it last had no sum of, and who it waited for.
    pub(super) waits_for: Option<(u64, String)>,
    /// When to send again what it has not answered.
    ask: Option<Instant>,
    tries: u32,
}

impl Upstream {
    /// The parent at `address` that gave `ticket` to this aggregator, which has sums of `below` workers for it.
    pub fn new(address: SocketAddr, ticket: &Ticket, below: u32) -> Self {
        Upstream {
            address,
            session: ticket.session,
            key: ticket.key,
            round: ticket.round,
            window: ticket.window,
            below,
            proved: false,
            lost: false,
            cookie: Cookie::default(),
            halt: None,
            waits_for: None,
            ask: None,
            tries: 0,
        }
    }

    /// For people: it, and who it waits for in this round.
    pub(super) fn describe(&self, round: u64) -> String {
        let it = format!("the aggregator at {}", self.address);
        match &self.waits_for {
            _ if !self.proved => format!("{it}, which has not answered"),
            Some((of, whom)) if *of == round => format!("{it}, which waits for {whom}"),
            _ => it,
        }
    }

    fn is_unanswered(&self) -> bool {
        !self.lost && (!self.proved || self.halt.is_some())
    }

    /// When something is to be sent again.
    pub(super) fn wake(&self) -> Option<Instant> {
        self.ask.filter(|_| self.is_unanswered())
    }

    /// Sends what has not been answered for some time; the first time, at once.
    pub(super) fn repeat<T: Transmit>(&mut self, now: Instant, out: &mut T) {
        if self.is_unanswered() && self.ask.is_none_or(|ask| ask <= now) {
            self.ask = Some(now + patience(self.tries));
            self.tries += 1;
            self.send_unanswered(out);
        }
    }

    fn send_unanswered<T: Transmit>(&self, out: &mut T) {
        if !self.proved {
            let body = [self.key.as_slice(), &self.cookie].concat();
            self.send(Kind::Join, 0, 0, &body, out);
        } else if let Some((round, reason)) = &self.halt {
            let body = [self.key.as_slice(), &reason.encode()].concat();
            self.send(Kind::Halt, *round, 0, &body, out);
        }
    }

    /// Takes what is to come back from here.
    pub(super) fn take_cookie<T: Transmit>(&mut self, cookie: Cookie, out: &mut T) {
        if !self.proved {
            self.cookie = cookie;
            self.send_unanswered(out);
        }
    }

    /// The parent knows where this aggregator is; whether that is news.
    pub(super) fn prove<T: Transmit>(&mut self, now: Instant, out: &mut T) -> bool {
        let is_news = !std::mem::replace(&mut self.proved, true);
        if is_news {
            self.begin(now, out);
        }
        is_news
    }

    /// Suspends the job there, for `reason`.
    pub(super) fn halt<T: Transmit>(
        &mut self,
        now: Instant,
        round: u64,
        reason: &Ack,
        out: &mut T,
    ) {
        self.halt = Some((round, reason.clone()));
        if self.proved {
            self.begin(now, out);
        }
    }

    /// The parent has heard of the failure, or the job goes on.
    pub(super) fn settle(&mut self) {
        self.halt = None;
    }

    fn begin<T: Transmit>(&mut self, now: Instant, out: &mut T) {
        (self.ask, self.tries) = (None, 0);
        self.repeat(now, out);
    }

    /// Sends one datagram.
    pub(super) fn send<T: Transmit>(
        &self,
        kind: Kind,
        round: u64,
        segment: u32,
        body: &[u8],
        out: &mut T,
    ) {
        let header = Header::new(kind, self.session, round, segment);
        out.send(self.address, &header.encode(), body);
    }
}
