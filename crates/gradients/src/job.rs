//! One job: its workers, the threshold, and the segments under way.

mod contribution;
mod control;
mod deadline;
mod parent;

use std::net::SocketAddr;
use std::time::Instant;

use super::counters::Counters;
use super::packet::{Ack, Cookie, Header, Key, Kind, Status};
use super::slots::{Place, Slots, State, Tag};
use super::terms::{Terms, who};
use super::{Transmit, Upstream};
use replay_core::error::{Error, Result};

/// A worker's place in the membership table.
pub enum Seat {
    /// Nobody has come.
    Empty,
    /// A worker.
    Joined(Member),
    /// Its worker has gone; this was its name.
    Left(String),
}

impl Seat {
    fn member(&self) -> Option<&Member> {
        match self {
            Seat::Joined(member) => Some(member),
            _ => None,
        }
    }
}

/// A worker that has joined.
pub struct Member {
    /// For people.
    pub name: String,
    /// In each of its datagrams.
    pub session: u32,
    /// In its controls.
    pub key: Key,
    /// Workers whose sum it sends: 1, or those of a rack.
    pub workers: u32,
    /// Where it is, once it has shown that it receives there.
    pub path: Option<SocketAddr>,
    /// What was sent to an address that has not been shown to be its own.
    pub offered: Option<(SocketAddr, Cookie)>,
    /// When it was last heard.
    pub heard: Instant,
}

/// A job's state. Its methods are given counters, as `counters`, and what to send through, as `out`.
pub struct Job {
    /// Its name.
    pub name: String,
    /// Of the first who joined; the others say the same.
    pub terms: Terms,
    /// The membership table, by the worker's number.
    pub seats: Vec<Seat>,
    /// When anybody was last heard.
    pub heard: Instant,
    /// The aggregator above this one.
    pub upstream: Option<Upstream>,
    /// Workers that sums from here are of.
    pub below: u32,
    /// Segments that may be under way.
    pub window: u32,
    threshold: u32,
    slots: Slots,
    /// The newest round that a contribution came for.
    newest: u64,
    /// No round before it is counted any more.
    floor: u64,
    /// The newest round each worker has contributed to, 0 for none.
    contributed: Vec<u64>,
    /// Why nothing is added up until a reset.
    halted: Option<Ack>,
}

/// A job as it is, for people.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct JobStatus {
    /// Its name.
    #[serde(skip)]
    pub name: String,
    /// Places for workers here.
    pub workers: u16,
    /// Workers in all.
    pub world: u32,
    /// Workers that are here now.
    pub joined: usize,
    /// Contributions that make a sum.
    pub threshold: u32,
    /// The newest round that a contribution came for.
    pub round: u64,
    /// Why nothing is added up, empty where something is.
    pub halted: String,
}

impl Job {
    /// A job without workers, whose first round is `first`, with `window` segments under way where they wait for each other.
    pub fn new(name: &str, terms: Terms, window: u32, first: u64, now: Instant) -> Self {
        let (places, depth) = terms.places(window);
        let threshold = terms.asynchronous.map_or(terms.workers, |a| a.threshold);
        Job {
            name: name.to_owned(),
            terms,
            seats: (0..terms.workers).map(|_| Seat::Empty).collect(),
            heard: now,
            upstream: None,
            below: terms.world,
            window,
            threshold: threshold.into(),
            slots: Slots::new(places, depth, terms.stride(), now),
            newest: first - 1,
            floor: first,
            contributed: vec![0; terms.workers.into()],
            halted: None,
        }
    }

    /// As it is, for people.
    pub fn status(&self) -> JobStatus {
        let halted = self.halted.as_ref().map(|ack| ack.text.clone());
        JobStatus {
            name: self.name.clone(),
            workers: self.terms.workers,
            world: self.terms.world,
            joined: self.joined(),
            threshold: self.threshold,
            round: self.newest,
            halted: halted.unwrap_or_default(),
        }
    }

    /// The worker's member, if it has joined.
    pub fn member(&mut self, worker: u16) -> Option<&mut Member> {
        match self.seats.get_mut(usize::from(worker)) {
            Some(Seat::Joined(member)) => Some(member),
            _ => None,
        }
    }

    fn members(&self) -> impl Iterator<Item = &Member> {
        self.seats.iter().filter_map(Seat::member)
    }

    /// Workers that have joined and not left.
    pub fn joined(&self) -> usize {
        self.members().count()
    }

    /// Refuses a rack whose workers, with those of the others, cannot be as many as there are: each sum would be of others than it says.
    ///
    /// # Errors
    /// [`Error::Config`], with the workers of each rack.
    pub fn count_workers(&self, rack: u16, member: &Member) -> Result<()> {
        if !self.terms.racks {
            return Ok(());
        }
        let seats = self.seats.iter().zip(0..);
        let others = seats.filter(|&(_, number)| number != rack);
        let mut known: Vec<(u16, u32)> = others
            .filter_map(|(seat, number)| Some((number, seat.member()?.workers)))
            .collect();
        known.push((rack, member.workers));
        let total: u64 = known.iter().map(|(_, workers)| u64::from(*workers)).sum();
        // Each of these will have at least one.
        let absent = self.seats.len() - known.len();
        let below = u64::from(self.below);
        let fits = match absent {
            0 => total == below,
            _ => total + absent as u64 <= below,
        };
        if fits {
            return Ok(());
        }
        known.sort_unstable();
        let each = known
            .iter()
            .map(|(rack, workers)| format!("rack {rack} has {workers}"));
        Err(Error::Config(format!(
            "the gradient job {:?} is to have {below} workers here, but {}, of {} racks: give each server a --rack of its own and the same \
             --racks, and each worker the number of those at its server and in all",
            self.name,
            each.collect::<Vec<_>>().join(", "),
            self.seats.len(),
        )))
    }

    /// Gives a seat to a new member, and returns the session of the one that had it and the round to begin with. What that one
    /// contributed must not be taken for the new one's: the job is reset, but where the others do not wait for it.
    pub fn seat<T: Transmit>(
        &mut self,
        worker: u16,
        member: Member,
        counters: &mut Counters,
        out: &mut T,
    ) -> (Option<u32>, u64) {
        let seat = &mut self.seats[usize::from(worker)];
        let name = member.name.clone();
        let before = match std::mem::replace(seat, Seat::Joined(member)) {
            Seat::Joined(before) => Some(before.session),
            _ => None,
        };
        let waited_for = self.terms.asynchronous.is_none();
        if waited_for && self.contributed[usize::from(worker)] >= self.floor {
            let who = who(self.terms.racks);
            let text = format!("{who} {worker} came back as another process ({name})");
            match self.upstream {
                None => self.reset(self.newest + control::APART, &text, out),
                // The parent says what comes next.
                Some(_) => {
                    let text = format!("{text}; reset the job");
                    let halted = Ack {
                        text,
                        ..Ack::new(Status::Halted, Kind::Join)
                    };
                    self.fail(halted, counters, out);
                }
            }
        }
        (before, self.floor.max(self.newest))
    }

    /// Says what became of a segment, or sends it.
    pub fn help<T: Transmit>(
        &mut self,
        worker: u16,
        header: Header,
        counters: &mut Counters,
        out: &mut T,
    ) {
        counters.helped += 1;
        let Some(tag) = self.tag(worker, header, counters, out) else {
            return;
        };
        let index = match self.slots.find(tag) {
            Place::Found(index) => index,
            Place::Gone => {
                return self.answer(worker, header, Ack::new(Status::Gone, Kind::Help), out);
            }
            Place::Free(_) | Place::Ahead => return self.want(worker, tag, out),
        };
        let slot = self.slots.slot(index);
        let counted = slot.counted;
        match slot.state {
            State::Done => self.send_sum(worker..worker + 1, index, out),
            _ if counted & 1 << worker == 0 => self.want(worker, tag, out),
            State::Raised => {
                self.ask_parent(index, out);
                let waiting = Ack {
                    text: self.parent_waits_for(tag.round),
                    ..Ack::new(Status::Waiting, Kind::Help)
                };
                self.answer(worker, header, waiting, out);
            }
            _ => {
                let missing = self.everybody() & !counted;
                let waiting = Ack {
                    missing,
                    // Whoever asks has just been heard.
                    text: self.describe(missing, self.heard),
                    ..Ack::new(Status::Waiting, Kind::Help)
                };
                self.answer(worker, header, waiting, out);
            }
        }
    }

    /// Asks a worker for a contribution that has not come.
    fn want<T: Transmit>(&mut self, worker: u16, tag: Tag, out: &mut T) {
        let Some(Member {
            path: Some(path),
            session,
            ..
        }) = self.member(worker)
        else {
            return;
        };
        let header = Header::new(Kind::Help, *session, tag.round, tag.segment);
        out.send(*path, &header.encode(), &[]);
    }

    fn answer<T: Transmit>(&self, worker: u16, header: Header, ack: Ack, out: &mut T) {
        let round = header.round_near(self.newest).unwrap_or(self.newest);
        self.tell(worker, round, header.segment, &ack, out);
    }

    fn tell_all<T: Transmit>(&self, round: u64, segment: u32, ack: &Ack, out: &mut T) {
        for worker in 0..self.terms.workers {
            self.tell(worker, round, segment, ack, out);
        }
    }

    /// Sends an answer to a worker that has shown where it is.
    pub fn tell<T: Transmit>(&self, worker: u16, round: u64, segment: u32, ack: &Ack, out: &mut T) {
        if let Seat::Joined(Member {
            path: Some(path),
            session,
            ..
        }) = &self.seats[usize::from(worker)]
        {
            let header = Header::new(Kind::Ack, *session, round, segment);
            out.send(*path, &header.encode(), &ack.encode());
        }
    }

    /// The round that a worker begins with.
    pub fn next_round(&self) -> u64 {
        self.floor.max(self.newest)
    }
}
